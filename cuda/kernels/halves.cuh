// float32 as two float16: a kernel that goes ahead of either pass writes them to workspaces.
//
// Of 64 rows of a head all numbers are multiplied by one power of two, which brings the largest to
// 2^14; a number is then hi + 2^-11 lo, each the nearest float16, to 2^-22 of it or 2^-51 of the
// largest. A row is that of the head dim padded to whole boxes, hi, then lo: copied as rows of 16
// bits are, it is a tile of two planes (split.cuh).
//
// Rows past the lengths do not count. Where a row or a column of a tile has only numbers below
// 2^-24 of the largest, whose bits could be lost, the tile's factor is negative: what it meets
// becomes NaN, and is computed again in float32 as all results are that visible numbers do not
// explain.
#pragma once

#include "rows.cuh"
#include "split.cuh"
#include "terms.cuh"
#include "tile.cuh"

namespace halves {

inline constexpr int kThreads = 256;
inline constexpr int kRows = 64;  // of a tile
inline constexpr float kWide = 0x1p-24f;
// Of halves whose products have one sum, second ones as they are, a number below 2^-16 of the
// largest has fewer than 22 bits, and at the second of these 20.
inline constexpr float kOneSum = 1.0f, kWideOfOneSum = 0x1p-16f, kWideOfGradients = 0x1p-18f;

// The elements of a row as kernels copy it.
template <int kDim>
inline constexpr int kCopied = kHalves ? 2 * round_up(kDim, kBoxColumns) : kDim;
using Copied = ElementType<kBFloat16, kFloat32 && !kHalves>::Type;

// What brings the numbers back of the tile with row `first`, of a row of [B, heads].
__device__ __forceinline__ float stored_factor(const float* factors, int64 row, int length,
                                               int first) {
  // Opaque: kept addresses take registers.
  const int tile = static_cast<int>(row) * ceil_div(length, kRows) + min(first, length - 1) / kRows;
  return factors[ptx::opaque(tile)];
}
__device__ __forceinline__ float known_factor(float factor) {
  return factor < 0.f ? __uint_as_float(0x7fffffffu) : factor;
}
__device__ __forceinline__ float factor_of(const float* factors, int64 row, int length, int first) {
  if constexpr (!kHalves) return 1.f;
  return known_factor(stored_factor(factors, row, length, first));
}
// Of all heads' tiles one, by its number.
__device__ __forceinline__ float factor_of(const float* factors, int tile) {
  return known_factor(factors[ptx::opaque(tile)]);
}

struct Tile {
  unsigned rows[kRows];  // the largest magnitudes, bits of float32
  unsigned columns[round_up(larger(kHeadDim, kValueDim), kBoxColumns)];
};

// Where the rows of an array are.
struct Source {
  const void* array;  // [B, length, heads, kDim]
  void* halves;       // [B, length, heads, kCopied<kDim>]
  float* factors;     // [B, heads, tiles]
  int length, heads;
  float second = kSecondHalf;  // times what the first half leaves
  float wide = kWide;

  __device__ __forceinline__ int tiles(int batch) const {
    return batch * heads * ceil_div(length, kRows);
  }
};

__device__ __forceinline__ unsigned magnitude(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;  // what is not finite does not count
}

template <int kDim>
__device__ __forceinline__ void split_tile(const Source& from, int batch, int head, int first,
                                           int count, Tile& tile) {
  constexpr int kColumns = round_up(kDim, kBoxColumns);
  const int chunk = threadIdx.x % 8, lane = threadIdx.x % 32;
  const auto row_at = [&](int row) {
    return (static_cast<int64>(batch) * from.length + first + row) * from.heads + head;
  };
  // What is read twice, but for the first boxes, which stay in registers.
  const auto load = [&](int row, int column) {
    Eight piece{};
    if (row < count && column < kDim) {
      piece = load_piece<kDim>(static_cast<const float*>(from.array) + row_at(row) * kDim, column);
    }
    return piece;
  };
  for (int i = threadIdx.x; i < kRows; i += kThreads) tile.rows[i] = 0;
  for (int i = threadIdx.x; i < kColumns; i += kThreads) tile.columns[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int column = 8 * chunk; column < kColumns; column += kBoxColumns) {
    unsigned columns[8] = {};
#pragma unroll
    for (int row = threadIdx.x / 8; row < kRows; row += kThreads / 8) {
      const Eight piece = load(row, column);
      unsigned largest = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned x = magnitude(piece.x[i]);
        columns[i] = columns[i] > x ? columns[i] : x;
        largest = largest > x ? largest : x;
      }
      atomicMax(&tile.rows[row], largest);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int distance = 8; distance < 32; distance *= 2) {
        const unsigned x = __shfl_xor_sync(0xffffffffu, columns[i], distance);
        columns[i] = columns[i] > x ? columns[i] : x;
      }
      if (lane < 8) atomicMax(&tile.columns[column + i], columns[i]);
    }
  }
  __syncthreads();
  unsigned largest =
      tile.rows[lane] > tile.rows[lane + 32] ? tile.rows[lane] : tile.rows[lane + 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned x = __shfl_xor_sync(0xffffffffu, largest, distance);
    largest = largest > x ? largest : x;
  }
  const float least = __uint_as_float(largest) * from.wide;
  const auto is_small = [&](unsigned x) { return x != 0 && __uint_as_float(x) < least; };
  bool wide = false;
  for (int i = threadIdx.x; i < kRows; i += kThreads) wide = wide || is_small(tile.rows[i]);
  for (int i = threadIdx.x; i < kColumns; i += kThreads) wide = wide || is_small(tile.columns[i]);
  wide = __syncthreads_or(wide);
  const int exponent = largest == 0 ? 0 : min(14 + 127 - static_cast<int>(largest >> 23), 126);
  const float factor = ptx::power_of_two(exponent);
  if (threadIdx.x == 0) {
    const int64 at = static_cast<int64>(batch) * from.heads + head;
    from.factors[at * ceil_div(from.length, kRows) + first / kRows] =
        (wide ? -1.f : 1.f) * ptx::power_of_two(-exponent);
  }
#pragma unroll 1
  for (int column = 8 * chunk; column < kColumns; column += kBoxColumns) {
#pragma unroll
    for (int row = threadIdx.x / 8; row < kRows; row += kThreads / 8) {
      if (row >= count) continue;
      const Eight piece = load(row, column);
      uint32 parts[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        split_pair(piece.x[2 * i] * factor, piece.x[2 * i + 1] * factor, parts[i], from.second);
      }
      auto* to = static_cast<uint16*>(from.halves) + row_at(row) * (2 * kColumns) + column;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(to + i * kColumns) =
            make_uint4(parts[0][i], parts[1][i], parts[2][i], parts[3][i]);
      }
    }
  }
}

// A CTA's tile, of those of all arrays; rows from the batch row's length on do not count. Returns
// whether it was one of this array's, whose tiles come before those of the next.
template <int kDim, class LengthOf>
__device__ __forceinline__ bool split(const Source& from, int batch, int& index, LengthOf length_of,
                                      Tile& tile) {
  const int all = from.tiles(batch);
  if (index >= all) {
    index -= all;
    return false;
  }
  const int tiles = ceil_div(from.length, kRows), row = index / tiles;
  const int of_batch = row / from.heads, first = (index - row * tiles) * kRows;
  split_tile<kDim>(from, of_batch, row - of_batch * from.heads, first,
                   min(length_of(of_batch) - first, kRows), tile);
  return true;
}

// Queries, keys and values.
template <class Params>
__device__ __forceinline__ bool split_inputs(const Params& p, int& index, Tile& tile,
                                             float second = kSecondHalf, float wide_values = kWide,
                                             float wide = kWide) {
  const auto of_queries = [&](int batch) { return visibility(p, batch).query_length; };
  const auto of_keys = [&](int batch) { return visibility(p, batch).kv_length; };
  const Source query{
      p.query_data, p.query_halves, p.query_factors, p.query_len, p.query_heads, second, wide};
  const Source key{p.key_data, p.key_halves, p.key_factors, p.kv_len, p.kv_heads, second, wide};
  const Source value{p.value_data, p.value_halves, p.value_factors, p.kv_len,
                     p.kv_heads,   second,         wide_values};
  return split<kHeadDim>(query, p.batch, index, of_queries, tile) ||
         split<kHeadDim>(key, p.batch, index, of_keys, tile) ||
         split<kValueDim>(value, p.batch, index, of_keys, tile);
}

}  // namespace halves
