// Tiles: rows in 128-byte-swizzled shared memory, as tensor cores read them.
//
// A tile [rows, dim] is dim/64 boxes side by side, each [rows, 64] elements (128 bytes a row), as
// TMA writes them: the 16-byte chunk c of row r lies at chunk c ^ (r % 8). Columns past the head
// dim are zero in shared memory, not copied.
//
// Where 8 does not divide a head dim TMA cannot move rows, whose pitch must be a multiple of 16
// bytes (kTmaLoads = false). Warps then fill the same tiles by cp.async, in words as wide as the
// alignment of all rows allows: 16, 8 or 4 bytes. With an odd head dim every other row starts in
// the middle of a 4-byte word, and cp.async copies no smaller ones: such a row is copied from one
// element before it and shifted in shared memory.
#pragma once

#include "ptx.cuh"
#include "rows.cuh"

inline constexpr int kBoxColumns = 64;    // elements: 128 bytes, the swizzle width
inline constexpr int kBoxRowBytes = 128;  // bytes

// Where the chunk of 16 bytes lies in a row of a box, in bytes. Row: signed or not, as the caller
// has it; one for all changed where a step of the backward computes its address.
template <class Row>
__device__ __forceinline__ uint32 swizzled(uint32 chunk, Row row) {
  return (chunk ^ (row % 8)) * 16;
}

// The address of lane's row for ptx::load_matrix_x4, of a tile of kRows rows: `row` and `chunk` (of
// 8 columns) of the first matrix's first row are the lane's own already.
template <int kRows>
__device__ __forceinline__ uint32 chunk_address(uint32 tile, int row, int chunk) {
  return tile + (chunk / 8 * kRows + row) * kBoxRowBytes +
         swizzled(static_cast<uint32>(chunk % 8), static_cast<uint32>(row));
}

// Moves kCount rows of a tile, one in kStep, down by `bits` of each: 16, or 0 for rows in place,
// which are written back as they are because a branch would cost more registers. A warp holds a
// row's 32-bit words, one per lane and box.
template <int kBoxes, int kRows, int kCount, int kStep>
__device__ __forceinline__ void shift_rows(uint32 tile, uint32 first_row,
                                           const uint32 (&bits)[kCount]) {
  const uint32 lane = threadIdx.x % 32;
  const auto word_at = [&](int i, int box) {
    const uint32 row = first_row + i * kStep;
    return tile + (box * kRows + row) * kBoxRowBytes + swizzled(lane / 4, row) + lane % 4 * 4;
  };
  uint32 words[kCount][kBoxes];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) words[i][box] = ptx::load_shared(word_at(i, box));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32 next[kBoxes + 1];  // of the next lane; in the last lane the first one's
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      next[box] = __shfl_sync(0xffffffffu, words[i][box], lane + 1);
    }
    next[kBoxes] = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32 high = lane == 31 ? next[box + 1] : next[box];
      ptx::store_shared(word_at(i, box), __funnelshift_r(words[i][box], high, bits[i]));
    }
  }
}

// The rows of a tile that kWarps warps, the first of the CTA, fill by cp.async, each thread a part:
// kRows rows of kDim elements. Row 0 starts at `source`, row r
// r / kHeads * pitch + r % kHeads * kDim elements after it. With kPlanes = 2 each row is followed
// by its row of the tile's second plane.
template <int kDim, int kRows, int kWarps, int kHeads = 1, int kPlanes = 1>
struct CopiedRows {
  static constexpr bool kOdd = kRowAlignment<kDim> == 2;
  static constexpr int kBytes = kOdd ? 4 : kRowAlignment<kDim>;
  static constexpr int kLanes = kBoxRowBytes / kBytes;        // on a row of a box
  static constexpr int kStep = kWarps * 32 / kLanes;          // rows at a time
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);  // of a plane
  static_assert(kRows % kStep == 0);
  static_assert(kPlanes == 1 || (kHeads == 1 && kBytes == 16));

  uint32 tile;
  const uint16* source;
  int64 pitch;
  // Opaque: addresses would be computed ahead of the caller's loop, for registers it does not have.
  uint32 thread = ptx::opaque(threadIdx.x);

  __device__ __forceinline__ const uint16* row_at(uint32 row) const {
    return source + row / kHeads * pitch + row % kHeads * kDim;
  }
  // Starts the copies; rows from `count` on read as zero.
  __device__ __forceinline__ void begin(int count) const {
    const uint32 first_row = thread / kLanes;
    const uint32 column = thread % kLanes * kBytes;  // in bytes
    const uint16* from = row_at(first_row);
#pragma unroll 2
    for (int i = 0; i < kRows / kStep; ++i) {
      const uint32 row = first_row + i * kStep;
      const uint32 to = tile + row * kBoxRowBytes + swizzled(column / 16, row) + column % 16;
      if constexpr (kHeads > 1) from = row_at(row);
      const uint64 start = reinterpret_cast<uint64>(from);
      const int bytes = static_cast<int>(row) < count ? 2 * kDim : 0;
#pragma unroll
      for (int i = 0; i < kPlanes * kBoxes; ++i) {
        const int box = i % kBoxes, plane = i / kBoxes;
        const uint32 target = to + i * kRows * kBoxRowBytes;
        const int at = box * kBoxRowBytes + static_cast<int>(column);
        if (kOdd && box + 1 == kBoxes) {  // the row may end inside of a word
          const int size = bytes == 0 ? 0 : bytes + static_cast<int>(start & 2) - at;
          ptx::copy_async<kBytes>(target, (start & ~2ull) + at, min(max(size, 0), kBytes));
        } else {
          ptx::copy_async<kBytes>(target, (kOdd ? start & ~2ull : start) + plane * (2 * kDim) + at,
                                  at < bytes);
        }
      }
      from += kStep * pitch;
    }
  }
  // When this thread's copies are there.
  __device__ __forceinline__ void finish() const {
    if constexpr (kOdd) {  // each lane wrote the words that it reads here
      // As many as registers allow; the backward's roles have 32.
      constexpr int kCount = kWarps == 4 && kBoxes <= 2 ? 4 : kWarps == 4 || kBoxes <= 3 ? 2 : 1;
      const uint32 first_row = thread / kLanes;
#pragma unroll 1
      for (int i = 0; i < kRows / kStep; i += kCount) {
        uint32 bits[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const auto start = reinterpret_cast<uint64>(row_at(first_row + (i + j) * kStep));
          bits[j] = static_cast<uint32>(start) % 4 * 8;
        }
        shift_rows<kBoxes, kRows, kCount, kStep>(tile, first_row + i * kStep, bits);
      }
    }
  }
};

// Fills a tile so and waits for the thread's own part of it.
template <int kDim, int kRows, int kWarps, int kHeads = 1>
__device__ __forceinline__ void copy_rows(uint32 tile, const uint16* source, int64 pitch,
                                          int count) {
  const CopiedRows<kDim, kRows, kWarps, kHeads> rows{tile, source, pitch};
  rows.begin(count);
  ptx::copy_async_wait();
  rows.finish();
}
