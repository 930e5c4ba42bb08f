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

// Moves the 32-bit words of a row of a tile, one per lane and box, down by so many bits.
template <int kBoxes, int kRows>
__device__ __forceinline__ void shift_row(ptx::uint32 tile, ptx::uint32 row, ptx::uint32 bits) {
  const ptx::uint32 lane = threadIdx.x % 32;
  const ptx::uint32 at = tile + row * kBoxRowBytes + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
  ptx::uint32 words[kBoxes];
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    words[box] = ptx::load_shared(at + box * kRows * kBoxRowBytes);
  }
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    ptx::uint32 next = __shfl_down_sync(0xffffffffu, words[box], 1);
    if (box + 1 < kBoxes) {
      const ptx::uint32 carry = __shfl_sync(0xffffffffu, words[box + 1 < kBoxes ? box + 1 : 0], 0);
      next = lane == 31 ? carry : next;
    } else {
      next = lane == 31 ? 0 : next;
    }
    ptx::store_shared(at + box * kRows * kBoxRowBytes, __funnelshift_r(words[box], next, bits));
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
  const auto starts_inside_word = [](const ptx::uint16* row) {
    return kOdd && (reinterpret_cast<ptx::uint64>(row) & 2) != 0;
  };
#pragma unroll 1
  for (int i = 0; i < kRows / kStep; ++i) {
    const ptx::uint32 row = first_row + i * kStep;
    const ptx::uint16* from = row_at(row);
    int bytes = 2 * kDim;
    if (starts_inside_word(from)) {
      --from;
      bytes += 2;
    }
    if (static_cast<int>(row) >= count) bytes = 0;
    const ptx::uint32 to =
        tile + row * kBoxRowBytes + ((column / 16) ^ (row % 8)) * 16 + column % 16;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int at = box * kBoxRowBytes + column;
      ptx::copy_async<kBytes>(to + box * kRows * kBoxRowBytes,
                              reinterpret_cast<const char*>(from) + at,
                              min(max(bytes - at, 0), kBytes));
    }
  }
  ptx::copy_async_wait();
  if constexpr (kOdd) {  // each lane wrote the words that it reads here
#pragma unroll 1
    for (int i = 0; i < kRows / kStep; ++i) {
      const ptx::uint32 row = first_row + i * kStep;
      // Rows in place are written back as they are: a branch would cost more registers.
      shift_row<kBoxes, kRows>(tile, row, starts_inside_word(row_at(row)) ? 16 : 0);
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
