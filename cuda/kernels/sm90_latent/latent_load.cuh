// Latent decoding: the warp that loads queries and blocks of keys by TMA, box by box.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

// Blocks of a window, see WindowPages.
inline constexpr int kWindow = kPieces < 32 ? 32 / kPieces : 1;

// Numbers of pages as the table has them, of the pieces of the next kWindow blocks and as many
// behind: with a lane for each piece a load brings those of several blocks, long before one of them
// is asked for. Whole warps call.
struct WindowPages {
  const DecodeParams& p;
  const Unit& unit;
  int begin, end;  // blocks of the part; `begin` moves with the window
  int now[kPiecesOfLane], next[kPiecesOfLane];

  __device__ __forceinline__ WindowPages(const DecodeParams& p, const Unit& unit,
                                         const Range& range)
      : p(p), unit(unit), begin(range.begin), end(range.end) {
    read(begin, now);
    read(begin + kWindow, next);
  }
  // `block` is the first that is asked for from here on.
  __device__ __forceinline__ void move(int block) {
    if (block != begin + kWindow) return;
    begin = block;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) now[i] = next[i];
    read(begin + kWindow, next);
  }
  // The page of this lane's piece i of a block in the two windows, kNotNeeded or kNone.
  __device__ __forceinline__ int page(int block, int i) const {
    const int piece = i * 32 + threadIdx.x % 32;
    const int first = block * kBlockKV + piece * kBoxRows;
    int of = unit.batch;
    if constexpr (kPaged) {
      const int at = block - begin, from = (at % kWindow * kPieces + piece) % 32;
      const int near = __shfl_sync(0xffffffffu, now[i], from);
      const int far = __shfl_sync(0xffffffffu, next[i], from);
      of = at < kWindow ? near : far;
      if (of < 0 || of >= p.pages) of = kNone;
    }
    const Range seen = positions_of(p, unit.length);
    const bool is_needed =
        piece < kPieces && first < seen.end && first + kBoxRows > seen.begin && block < end;
    return is_needed ? of : kNotNeeded;
  }

 private:
  __device__ __forceinline__ void read(int first, int (&of)[kPiecesOfLane]) const {
    if constexpr (!kPaged) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int block = first + lane / kPieces, piece = i * 32 + lane % kPieces;
      const int position = block * kBlockKV + piece * kBoxRows;
      of[i] = kNone;
      if (block < end && position < unit.length) {
        of[i] = p.page_table[static_cast<int64>(unit.batch) * p.columns + position / p.page_size];
      }
    }
  }
};

// A lane's pieces of a block.
struct Boxes {
  int page[kPiecesOfLane], row[kPiecesOfLane];

  __device__ __forceinline__ Boxes(const DecodeParams& p, const WindowPages& pages, int block) {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      page[i] = pages.page(block, i);
      const int piece = kPieces == 1 ? 0 : i * 32 + threadIdx.x % 32;
      row[i] = block * kBlockKV + piece * kBoxRows;
      if constexpr (kPaged) row[i] %= p.page_size;
    }
  }
  // Calls visit(piece, page, its row) for those that are to be loaded.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      if (page[i] >= 0) visit(kPieces == 1 ? 0 : i * 32 + threadIdx.x % 32, page[i], row[i]);
    }
  }
  __device__ __forceinline__ int count() const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) own += page[i] >= 0 ? 1 : 0;
    return own;
  }
  // A needed one has no page.
  __device__ __forceinline__ bool lack() const {
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) lacks = lacks || page[i] == kNone;
    return lacks;
  }
};

struct LatentLoader {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  uint32 blocks = 0, units = 0;  // that were loaded

  __device__ __forceinline__ void run(const Line& line) {
    line.walk(share, [&](const Unit& unit, const Range& range) {
      WindowPages pages(p, unit, range);
      load_queries(unit);
#pragma unroll 1
      for (int block = range.begin; block < range.end; ++block) {
        pages.move(block);
        load(block, pages);
        ++blocks;
      }
    });
  }

  __device__ __forceinline__ void load_queries(const Unit& unit) {
    if (threadIdx.x % 32 == 0) {
      const uint32 full = ptx::shared_address(&shared.queries_full);
      ptx::barrier_wait(ptx::shared_address(&shared.queries_empty), units % 2 ^ 1);
      ptx::barrier_arrive_expect(full, kKeyBytes);
#pragma unroll 1
      for (int box = 0; box < kKeyBoxes; ++box) {
        ptx::tma_load(ptx::shared_address(shared.queries) + box * kBoxBytes, &p.query_rows, full,
                      ptx::kEvictNormal, box * kBoxColumns, 0, share.first_row(), unit.batch);
      }
    }
    __syncwarp();
    ++units;
  }

  __device__ __forceinline__ void load(int block, const WindowPages& pages) {
    const int lane = threadIdx.x % 32;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const Boxes boxes(p, pages, block);
    const int count = kPieces == 1 ? boxes.count() : __reduce_add_sync(0xffffffffu, boxes.count());
    const bool lacks = kPieces == 1 ? boxes.lack() : __any_sync(0xffffffffu, boxes.lack());
    if (kPieces == 1 && lane != 0) return;  // a block in one page: one lane asks for it
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage][half]), parity ^ 1);
      if constexpr (kPieces > 1) __syncwarp();  // all have seen it free before it may be full
      if (half == 0 && lane == 0) shared.spoiled[stage] = lacks;
      const int end = half == 0 ? kHalfBoxes : kKeyBoxes;
#pragma unroll 1
      for (int box = half * kHalfBoxes; box < end; ++box) {
        const uint32 full = ptx::shared_address(&shared.full[stage][box]);
        if (lane == 0) ptx::barrier_arrive_expect(full, count * (kBoxBytes / kPieces));
        if constexpr (kPieces > 1) __syncwarp();
        fetch(keys + box * kBoxBytes, full, box, boxes);
      }
    }
    if constexpr (kPieces > 1) __syncwarp();
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
