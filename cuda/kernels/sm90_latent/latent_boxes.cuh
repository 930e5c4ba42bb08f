// Latent decoding: where the rows of a block lie, one block after another.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

// A lane's pieces of the block that is to be loaded, one block after another. What is computed
// between two blocks can make the second late, so rows of pages go on without a division.
struct Boxes {
  // Page numbers are read for so many blocks at once, a lane for each piece, and as many ahead.
  static constexpr int kWindow = kPieces < 32 ? 32 / kPieces : 1;

  const DecodeParams& p;
  const Unit& unit;
  Range seen;
  int block, end, window;  // `window`: the first block of `now`
  int step;                // from a row of a page to that a block further
  int now[kPiecesOfLane], coming[kPiecesOfLane];
  int page[kPiecesOfLane], row[kPiecesOfLane];  // a page, kNotNeeded or kNone

  __device__ __forceinline__ Boxes(const DecodeParams& p, const Unit& unit, const Range& range)
      : p(p),
        unit(unit),
        seen(positions_of(p, unit.length)),
        block(range.begin),
        end(range.end),
        window(block),
        step(kBlockKV) {
    read(block, now);
    read(block + kWindow, coming);
    if constexpr (kPaged) step %= p.page_size;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      row[i] = block * kBlockKV + piece(i) * kBoxRows;
      if constexpr (kPaged) row[i] %= p.page_size;
    }
  }
  __device__ __forceinline__ void move() {
    ++block;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      row[i] += step;
      if (kPaged && row[i] >= p.page_size) row[i] -= p.page_size;
    }
    if (block != window + kWindow) return;
    window = block;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) now[i] = coming[i];
    read(block + kWindow, coming);
  }
  // Whole warps call.
  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      int of = unit.batch;
      if constexpr (kPaged) {
        const int from = ((block - window) * kPieces + piece(i)) % 32;
        of = __shfl_sync(0xffffffffu, now[i], from);
        if ((of < 0 && !(kTakesPlaces && of == kNotNeeded)) || of >= p.pages) of = kNone;
      }
      const int first = block * kBlockKV + piece(i) * kBoxRows;
      const bool is_needed =
          piece(i) < kPieces && first < seen.end && first + kBoxRows > seen.begin;
      page[i] = is_needed ? of : kNotNeeded;
    }
  }

  // Calls visit(piece, page, its row) for those that are to be loaded.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      if (page[i] >= 0) visit(piece(i), page[i], row[i]);
    }
  }
  // Where row `at` of the block lies, which other lanes may know. Whole warps call.
  __device__ __forceinline__ void find_row(int at, int& of_page, int& of_row) const {
    const int asked = at / kBoxRows;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int its_page = __shfl_sync(0xffffffffu, page[i], asked % 32);
      const int its_row = __shfl_sync(0xffffffffu, row[i], asked % 32);
      if (i > 0 && asked / 32 != i) continue;
      of_page = its_page;
      of_row = its_row + at % kBoxRows;
    }
  }
  // Those of all lanes.
  __device__ __forceinline__ int count() const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) own += page[i] >= 0 ? 1 : 0;
    return kPieces == 1 ? own : __reduce_add_sync(0xffffffffu, own);
  }
  // Bits of those rows of a loading warp that are not read.
  __device__ __forceinline__ uint32 unread(int warp) const {
    static_assert(!kTakesPlaces || (kLoaders == 4 && kBlockKV == 64));
    const uint32 low = __ballot_sync(0xffffffffu, page[0] < 0),
                 high = __ballot_sync(0xffffffffu, page[kPiecesOfLane - 1] < 0);
    return (warp < 2 ? low : high) >> warp % 2 * 16;
  }
  // A needed one has no page.
  __device__ __forceinline__ bool lack() const {
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) lacks = lacks || page[i] == kNone;
    return kPieces == 1 ? lacks : __any_sync(0xffffffffu, lacks);
  }

 private:
  // A block in one page has one piece, in every lane.
  static __device__ __forceinline__ int piece(int i) {
    return kPieces == 1 ? 0 : i * 32 + threadIdx.x % 32;
  }
  __device__ __forceinline__ void read(int first, int (&of)[kPiecesOfLane]) const {
    if constexpr (!kPaged) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int at = first + lane / kPieces;
      const int position = at * kBlockKV + (i * 32 + lane % kPieces) * kBoxRows;
      of[i] = kNone;
      if (at < end && position < unit.length) {
        of[i] = p.page_table[static_cast<int64>(unit.batch) * p.columns + position / p.page_size];
      }
    }
  }
};

}  // namespace decode
