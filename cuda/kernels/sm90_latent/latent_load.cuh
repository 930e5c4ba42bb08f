// Latent decoding: the warps that load queries and blocks of keys by TMA. Each has every fourth
// box: one that loads all takes some 60 cycles for each box, and for each piece of one. Where a
// piece is one row each has a quarter of all rows, by cp.async: see kByThreads.
#pragma once

#include "sm80/ptx_sm80.cuh"  // copy_async_past_l1
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
        if (of < 0 || of >= p.pages) of = kNone;
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

struct LatentLoader {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  int warp;                      // of kLoaders
  uint32 blocks = 0, units = 0;  // that were loaded
  bool is_coming = false;        // the last block, by cp.async, of which nobody has been told

  __device__ __forceinline__ void run(const Line& line) {
    line.walk(share, [&](const Unit& unit, const Range& range) {
      Boxes boxes(p, unit, range);
      load_queries(unit);
#pragma unroll 1
      for (boxes.find_pages(); boxes.block < range.end; boxes.find_pages()) {
        if constexpr (kByThreads) {
          load_rows(boxes);
        } else {
          load(boxes);
        }
        ++blocks;
        boxes.move();
      }
      if constexpr (kByThreads) tell_of_last();
    });
  }

  __device__ __forceinline__ void load_queries(const Unit& unit) {
    if (threadIdx.x % 32 == 0) {
      const uint32 full = ptx::shared_address(&shared.queries_full);
      ptx::barrier_wait(ptx::shared_address(&shared.queries_empty), units % 2 ^ 1);
      ptx::barrier_arrive_expect(full, ceil_div(kKeyBoxes - warp, kLoaders) * kBoxBytes);
#pragma unroll 1
      for (int box = warp; box < kKeyBoxes; box += kLoaders) {
        ptx::tma_load(ptx::shared_address(shared.queries) + box * kBoxBytes, &p.query_rows, full,
                      ptx::kEvictNormal, box * kBoxColumns, 0, share.first_row(), unit.batch);
      }
    }
    __syncwarp();
    ++units;
  }

  __device__ __forceinline__ void load(const Boxes& boxes) {
    const int lane = threadIdx.x % 32;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const int count = boxes.count();
    const bool lacks = boxes.lack();
    if (kPieces > 1 || lane == 0) {  // a block in one page: one lane asks for it
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        ptx::barrier_wait(ptx::shared_address(&shared.empty[stage][half]), parity ^ 1);
        if constexpr (kPieces > 1) __syncwarp();  // all have seen it free before it may be full
        if (half == 0 && warp == 0 && lane == 0) shared.spoiled[stage] = lacks;
        const int end = half == 0 ? kHalfBoxes : kKeyBoxes;
#pragma unroll 1
        for (int box = half * kHalfBoxes + warp; box < end; box += kLoaders) {
          const uint32 full = ptx::shared_address(&shared.full[stage][box]);
          if (lane == 0) ptx::barrier_arrive_expect(full, count * (kBoxBytes / kPieces));
          if constexpr (kPieces > 1) __syncwarp();
          fetch(keys + box * kBoxBytes, full, box, boxes);
        }
      }
    }
    __syncwarp();
  }

  // A warp copies 16 of the rows: eight lanes the 128 bytes that one has of a box.
  __device__ __forceinline__ void load_rows(const Boxes& boxes) {
    constexpr int kRowsAtOnce = 32 / 8, kTurns = kBlockKV / kLoaders / kRowsAtOnce;
    const int lane = threadIdx.x % 32, first = warp * (kBlockKV / kLoaders) + lane / 8;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const bool lacks = boxes.lack();
    uint64 from[kTurns];
    bool is_needed[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int at = first + i * kRowsAtOnce;
      int page, row;
      boxes.find_row(at, page, row);
      is_needed[i] = page >= 0;
      const int64 slot = is_needed[i] ? static_cast<int64>(page) * p.page_size + row : 0;
      from[i] = reinterpret_cast<uint64>(static_cast<const Bits*>(p.key_data) + slot * kHeadDim) +
                lane % 8 * 16;
    }
    const uint32 left = ptx::shared_address(&shared.empty[stage][0]), right = left + 8;
    const bool is_free =
        ptx::barrier_test(left, parity ^ 1) && ptx::barrier_test(right, parity ^ 1);
    if (!__all_sync(0xffffffffu, is_free)) {
      tell_of_last();  // what it waits for may wait for that block
      ptx::barrier_wait(left, parity ^ 1);
      ptx::barrier_wait(right, parity ^ 1);
      __syncwarp();
    }
    if (warp == 0 && lane == 0) shared.spoiled[stage] = lacks;
#pragma unroll 1
    for (int box = 0; box < kKeyBoxes; ++box) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int at = first + i * kRowsAtOnce;
        ptx::copy_async_past_l1(chunk_address<kBlockKV>(keys + box * kBoxBytes, at, lane % 8),
                                from[i] + box * kBoxRowBytes, is_needed[i]);
      }
    }
    ptx::copy_async_commit();
    if (is_coming) {
      ptx::copy_async_wait_but<1>();
      tell(blocks - 1);
    }
    is_coming = true;
  }
  __device__ __forceinline__ void tell_of_last() {
    if (!is_coming) return;
    ptx::copy_async_wait();
    tell(blocks - 1);
    is_coming = false;
  }
  // This warp's rows of a block are there.
  __device__ __forceinline__ void tell(uint32 number) const {
    const int lane = threadIdx.x % 32;
    ptx::fence_async_proxy();
    __syncwarp();
    const uint32 full = ptx::shared_address(shared.full[stage_of_block(number)]);
    if (lane < kKeyBoxes) ptx::barrier_arrive(full + 8 * lane);
  }

  // A lane's pieces of a box.
  __device__ __forceinline__ void fetch(uint32 to, uint32 full, int box, const Boxes& boxes) const {
    const uint64 policy = p.row_groups == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
    boxes.each([&](int piece, int page, int row) {
      ptx::tma_load(to + piece * kBoxRows * kBoxRowBytes, &p.key, full, policy, box * kBoxColumns,
                    0, row, page);
    });
  }
};

}  // namespace decode
