// Heads whose rows begin inside of 16 bytes, loaded by TMA all the same (kEarly): where 8 does not
// divide a head dim, but a row of all heads.
//
// The map then has rows of all heads, and a head's boxes begin at the multiple of 16 bytes at or
// before its first column. So a tile has columns of the heads beside it, before the head's own and
// behind them. Those of one factor of a product are zeroed; NaN in the others' gives NaN, and such
// rows are computed again.
#pragma once

#include "ptx.cuh"
#include "tile.cuh"

// The most columns that a tile has before a head's own.
template <int kDim>
inline constexpr int kEarlyColumns = kEarly ? (8 - common_divisor(kDim, 8)) % 8 : 0;
// Columns of a tile that holds a head wherever its columns begin.
template <int kDim>
inline constexpr int kTileColumns = kDim + kEarlyColumns<kDim>;

// The columns before those of the head.
template <int kDim>
__device__ __forceinline__ int columns_before(int head) {
  return kEarlyColumns<kDim> == 0 ? 0 : head * kDim % 8;
}
// Coordinates of the head's first box.
template <int kDim>
__device__ __forceinline__ int box_column(int head) {
  return kEarly ? head * kDim / 8 * 8 : 0;
}
__device__ __forceinline__ int box_head(int head) { return kEarly ? 0 : head; }

// Stores eight columns of a tile from `column` on, a multiple of 8, to a row of results that the
// head's begin in: those of them that are the head's, which has `before` before it.
template <int kDim>
__device__ __forceinline__ void store_early(uint16* row, int column, int before,
                                            const uint4& whole) {
  uint16* tile = row - before;  // at a multiple of 16 bytes
  const int end = before + kDim;
  if (column >= before && column + 8 <= end) {
    *reinterpret_cast<uint4*>(tile + column) = whole;
    return;
  }
  constexpr int kBytes = kRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    uint4 whole;
    Part parts[16 / kBytes];
  } piece{whole};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 2;
    if (at >= before && at < end) *reinterpret_cast<Part*>(tile + at) = piece.parts[i];
  }
}

// Zeroes what is not the head's in a tile of kRows rows, by kThreads threads of which `thread` is
// one; products of the tile read multiples of 16 columns.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void clear_others(uint32 tile, int before, int thread) {
  constexpr int kFirst = kDim / 8, kChunks = round_up(kTileColumns<kDim>, 16) / 8;
#pragma unroll 1
  for (int i = thread; i < kRows * (kChunks - kFirst + 1); i += kThreads) {
    const int row = i % kRows;
    const int chunk = i < kRows ? 0 : kFirst - 1 + i / kRows;
    const uint32 at = chunk_address<kRows>(tile, row, chunk);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int column = 8 * chunk + 2 * word - before;
      const uint32 own = (column >= 0 && column < kDim ? 0xffffu : 0u) |
                         (column >= -1 && column < kDim - 1 ? 0xffff0000u : 0u);
      if (own != ~0u) {
        ptx::store_shared(at + 4 * word, own == 0 ? 0 : own & ptx::load_shared(at + 4 * word));
      }
    }
  }
}
