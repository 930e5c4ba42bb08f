// Rows that the copy engine cannot move: their pitch is no multiple of 16 bytes, because 8 does not
// divide a head dim. Used where the generated header says kTmaLoads = false.
//
// Warps fill the same swizzled tiles that TMA would have filled, zeros included, by cp.async in
// words as wide as the alignment of all rows allows: 16, 8 or 4 bytes. Of an odd head dim every
// other row starts in the middle of a 4-byte word, and cp.async knows no smaller ones: such a row
// is copied from one element before it and shifted in shared memory.
#pragma once

#include "sm90/ptx.cuh"
#include "sm90/tile.cuh"

// Every row of kDim 16-bit elements starts at a multiple of so many bytes.
template <int kDim>
inline constexpr int kRowAlignment = kDim % 8 == 0   ? 16
                                     : kDim % 4 == 0 ? 8
                                     : kDim % 2 == 0 ? 4
                                                     : 2;

// ---- tiles --------------------------------------------------------------------------------------

// Moves kCount rows of a tile, one in kStep, down by `bits` of each: 16, or 0 for rows in place,
// which are written back as they are because a branch would cost more registers. A warp holds a
// row's 32-bit words, one per lane and box.
template <int kBoxes, int kRows, int kCount, int kStep>
__device__ __forceinline__ void shift_rows(ptx::uint32 tile, ptx::uint32 first_row,
                                           const ptx::uint32 (&bits)[kCount]) {
  const ptx::uint32 lane = threadIdx.x % 32;
  const auto word_at = [&](int i, int box) {
    const ptx::uint32 row = first_row + i * kStep;
    return tile + (box * kRows + row) * kBoxRowBytes + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
  };
  ptx::uint32 words[kCount][kBoxes];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) words[i][box] = ptx::load_shared(word_at(i, box));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    ptx::uint32 next[kBoxes + 1];  // of the next lane; in the last lane the first one's
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      next[box] = __shfl_sync(0xffffffffu, words[i][box], lane + 1);
    }
    next[kBoxes] = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const ptx::uint32 high = lane == 31 ? next[box + 1] : next[box];
      ptx::store_shared(word_at(i, box), __funnelshift_r(words[i][box], high, bits[i]));
    }
  }
}

// Fills a tile of kRows rows of kDim elements, ready for wgmma once the calling warps' arrivals
// have been seen. Called by the first kWarps warps of the block. Row 0 starts at `source`, row r
// r / kHeads * pitch + r % kHeads * kDim elements after it; rows from `count` on read as zero.
template <int kDim, int kRows, int kWarps, int kHeads = 1>
__device__ __forceinline__ void copy_rows(ptx::uint32 tile, const ptx::uint16* source,
                                          ptx::int64 pitch, int count) {
  constexpr bool kOdd = kRowAlignment<kDim> == 2;
  constexpr int kBytes = kOdd ? 4 : kRowAlignment<kDim>;
  constexpr int kLanes = kBoxRowBytes / kBytes;  // on a row of a box
  constexpr int kStep = kWarps * 32 / kLanes;    // rows at a time
  constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  static_assert(kRows % kStep == 0);
  // Opaque: addresses would be computed ahead of the caller's loop, for registers it does not have.
  const ptx::uint32 thread = ptx::opaque(threadIdx.x);
  const ptx::uint32 first_row = thread / kLanes;
  const ptx::uint32 column = thread % kLanes * kBytes;  // in bytes
  const auto row_at = [&](ptx::uint32 row) {
    return source + row / kHeads * pitch + row % kHeads * kDim;
  };
  const ptx::uint16* from = row_at(first_row);
#pragma unroll 2
  for (int i = 0; i < kRows / kStep; ++i) {
    const ptx::uint32 row = first_row + i * kStep;
    const ptx::uint32 to =
        tile + row * kBoxRowBytes + ((column / 16) ^ (row % 8)) * 16 + column % 16;
    if constexpr (kHeads > 1) from = row_at(row);
    const ptx::uint64 start = reinterpret_cast<ptx::uint64>(from);
    const int bytes = static_cast<int>(row) < count ? 2 * kDim : 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const ptx::uint32 target = to + box * kRows * kBoxRowBytes;
      const int at = box * kBoxRowBytes + static_cast<int>(column);
      if (kOdd && box + 1 == kBoxes) {  // the row may end inside of a word
        const int size = bytes == 0 ? 0 : bytes + static_cast<int>(start & 2) - at;
        ptx::copy_async<kBytes>(target, (start & ~2ull) + at, min(max(size, 0), kBytes));
      } else {
        ptx::copy_async<kBytes>(target, (kOdd ? start & ~2ull : start) + at, at < bytes);
      }
    }
    from += kStep * pitch;
  }
  ptx::copy_async_wait();
  if constexpr (kOdd) {  // each lane wrote the words that it reads here
    // As many as registers allow; the backward's roles have 32.
    constexpr int kCount = kWarps == 4 && kBoxes <= 2 ? 4 : kWarps == 4 || kBoxes <= 3 ? 2 : 1;
#pragma unroll 1
    for (int i = 0; i < kRows / kStep; i += kCount) {
      ptx::uint32 bits[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        bits[j] = static_cast<ptx::uint32>(
                      reinterpret_cast<ptx::uint64>(row_at(first_row + (i + j) * kStep))) %
                  4 * 8;
      }
      shift_rows<kBoxes, kRows, kCount, kStep>(tile, first_row + i * kStep, bits);
    }
  }
  ptx::fence_async_proxy();
}

// ---- rows in global memory ----------------------------------------------------------------------

template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = ptx::uint16;
};
template <>
struct Word<4> {
  using Type = ptx::uint32;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// Eight elements of a row of kDim from `column` on, a multiple of 8; zeros past the row's end.
template <int kDim>
__device__ __forceinline__ uint4 load_piece(const ptx::uint16* row, int column) {
  constexpr int kBytes = kRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    Part parts[16 / kBytes];
    uint4 whole;
  } piece;
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 2;
    piece.parts[i] = at < kDim ? *reinterpret_cast<const Part*>(row + at) : Part{};
  }
  return piece.whole;
}

// Stores them, `column` below kDim; what lies past the row's end is dropped.
template <int kDim>
__device__ __forceinline__ void store_piece(ptx::uint16* row, int column, const uint4& whole) {
  constexpr int kBytes = kRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    uint4 whole;
    Part parts[16 / kBytes];
  } piece{whole};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 2;
    if (kBytes == 16 || at < kDim) *reinterpret_cast<Part*>(row + at) = piece.parts[i];
  }
}
