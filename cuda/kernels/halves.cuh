// float32 as two float16: a kernel that goes ahead of either pass writes them to workspaces.
//
// All numbers of 64 rows of a head (a tile) are multiplied by one power of two, which brings the
// largest to 2^14. A number is then hi + 2^-11 lo, each the nearest float16, to 2^-22 of the number
// or 2^-51 of the largest. A row is written as two rows of 16 bits, hi, then lo, each of the head
// dim padded to pieces of 16 bytes: kernels copy each to a plane of a tile (split.cuh).
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
// Where the three products of halves have one sum, lo is not multiplied (kOneSum). Then a number
// below 2^-16 of the largest has fewer than 22 bits, and one below 2^-18 fewer than 20.
inline constexpr float kOneSum = 1.0f, kWideOfOneSum = 0x1p-16f, kWideOfGradients = 0x1p-18f;

// A row as kernels copy it: of one plane or two, of so many elements each.
inline constexpr int kPlanes = kHalves ? 2 : 1;
template <int kDim>
inline constexpr int kCopied = kHalves ? round_up(kDim, 8) : kDim;
using Copied = ElementType<kBFloat16, kFloat32 && !kHalves>::Type;

// What the numbers of a tile are multiplied with to be what they were: the tile that has row
// `first` of the batch row and head `row`, of [B, heads].
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
// The factor of a tile by its number among those of all heads.
__device__ __forceinline__ float factor_of(const float* factors, int tile) {
  return known_factor(factors[ptx::opaque(tile)]);
}

// A thread has four numbers side by side, kDown rows by kAcross times; a row is kLanes lanes'.
template <int kDim>
struct Spread {
  static constexpr int kColumns = round_up(kDim, kBoxColumns);
  static constexpr int kLanes = kColumns % 128 == 0 ? 32 : 16, kRowStep = kThreads / kLanes;
  static constexpr int kDown = kRows / kRowStep, kAcross = kColumns / (4 * kLanes);
  static constexpr bool kHeld = kDown * kAcross <= 16;  // in 64 registers, else they are read twice
};

struct alignas(16) Tile {
  unsigned largest[kThreads / 32], least[kThreads / 32];  // rows of a warp, bits of float32
  unsigned columns[kThreads / 32][round_up(larger(kHeadDim, kValueDim), kBoxColumns)];
};

struct Place {
  int batch, head, first;  // row
};

// Where the rows of an array are.
struct Source {
  const void* array;  // [B, length, heads, kDim]
  void* halves;       // [B, length, heads, kPlanes, kCopied<kDim>]
  float* factors;     // [B, heads, tiles]
  int length, heads;
  float second = kSecondHalf;  // times what the first half leaves
  float wide = kWide;
  float* rows = nullptr;  // [B, heads, tiles, kRows], of split_tile by rows
  int stored = kRows;     // of these, where there is one tile: backward::stored_rows

  __device__ __forceinline__ int tiles() const { return ceil_div(length, kRows); }  // of a head
  // All heads' tiles of rows side by side in memory follow one another: who reads at once does so
  // in the same places.
  __device__ __forceinline__ Place place(int index) const {
    const int row = index / heads, batch = row / tiles();
    return {batch, index - row * heads, (row - batch * tiles()) * kRows};
  }
};

__device__ __forceinline__ unsigned magnitude(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;  // what is not finite does not count
}
__device__ __forceinline__ unsigned larger_of(unsigned x, unsigned y) { return x > y ? x : y; }
__device__ __forceinline__ unsigned smaller_of(unsigned x, unsigned y) { return x < y ? x : y; }

struct Four {
  float x[4];
};
template <int kDim>
__device__ __forceinline__ Four load_four(const float* row, int column) {
  constexpr int kBytes = kFloatRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    Part parts[16 / kBytes];
    Four whole;
  } piece;
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 4;
    piece.parts[i] = at < kDim ? *reinterpret_cast<const Part*>(row + at) : Part{};
  }
  return piece.whole;
}

// The exponent that brings a magnitude, bits of float32, to 2^14.
__device__ __forceinline__ int exponent_of(unsigned largest) {
  return largest == 0 ? 0 : min(14 + 127 - static_cast<int>(largest >> 23), 126);
}

// Rows from the batch row's `length` on do not count. With kByRows, if there is a place for them, a
// tile of which a row is small has no factor, which 0 says, but each row one of its own, 0 where it
// is 0; with kFewRows there is a place for `stored` rows of a tile.
template <int kDim, bool kByRows = false, bool kFewRows = false>
__device__ __forceinline__ void split_tile(const Source& from, const Place& place, int length,
                                           Tile& tile) {
  using At = Spread<kDim>;
  constexpr int kDown = At::kDown, kAcross = At::kAcross, kLanes = At::kLanes;
  const int batch = place.batch, head = place.head, first = place.first;
  const int count = min(length - first, kRows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes;
  const auto row_of = [&](int i) {
    return static_cast<int>(threadIdx.x) / kLanes + i * At::kRowStep;
  };
  const auto row_at = [&](int i) {
    return (static_cast<int64>(batch) * from.length + first + row_of(i)) * from.heads + head;
  };
  const auto load = [&](int i, int j) {
    const int column = 4 * (lane + j * kLanes);
    if (row_of(i) >= count || column >= kDim) return Four{};
    return load_four<kDim>(static_cast<const float*>(from.array) + row_at(i) * kDim, column);
  };
  Four held[At::kHeld ? kDown : 1][At::kHeld ? kAcross : 1];
  if constexpr (At::kHeld) {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) held[i][j] = load(i, j);
    }
  }
  const auto numbers = [&](int i, int j) {
    if constexpr (At::kHeld) return held[i][j];
    return load(i, j);
  };

  unsigned rows[kDown], largest = 0, least = ~0u;  // `least` of rows other than 0
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    unsigned row = 0;
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      const Four four = numbers(i, j);
#pragma unroll
      for (float x : four.x) row = larger_of(row, magnitude(x));
    }
    if constexpr (kLanes == 32) {
      row = __reduce_max_sync(0xffffffffu, row);
    } else {
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        row = larger_of(row, __shfl_xor_sync(0xffffffffu, row, distance));
      }
    }
    rows[i] = row;
    largest = larger_of(largest, row);
    least = smaller_of(least, row - 1);  // what is 0 becomes the largest
  }
  if constexpr (kLanes == 16) {
    largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    least = smaller_of(least, __shfl_xor_sync(0xffffffffu, least, 16));
  }
  if (threadIdx.x % 32 == 0) {
    tile.largest[warp] = largest;
    tile.least[warp] = least;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    largest = larger_of(largest, tile.largest[i]);
    least = smaller_of(least, tile.least[i]);
  }
  const int exponent = exponent_of(largest);
  const bool is_small =
      least != ~0u && __uint_as_float(least + 1) < __uint_as_float(largest) * from.wide;
  const bool by_rows = kByRows && is_small && from.rows != nullptr;
  const int64 tile_at =
      (static_cast<int64>(batch) * from.heads + head) * from.tiles() + first / kRows;

  unsigned columns[kAcross][4] = {};
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    const int own = by_rows ? exponent_of(rows[i]) : exponent;
    const float factor = ptx::power_of_two(own);
    if (by_rows && lane == 0 && (!kFewRows || row_of(i) < from.stored)) {
      from.rows[tile_at * (kFewRows ? from.stored : kRows) + row_of(i)] =
          rows[i] == 0 ? 0.f : ptx::power_of_two(-own);
    }
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      Four four = numbers(i, j);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        four.x[k] *= factor;
        columns[j][k] = larger_of(columns[j][k], magnitude(four.x[k]));
      }
      const int column = 4 * (lane + j * kLanes);
      if (row_of(i) >= count || column >= kCopied<kDim>) continue;
      uint32 low[2], high[2];
      split_pair(four.x[0], four.x[1], low, from.second);
      split_pair(four.x[2], four.x[3], high, from.second);
      auto* to = static_cast<uint16*>(from.halves) + row_at(i) * (2 * kCopied<kDim>)+column;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        *reinterpret_cast<uint2*>(to + part * kCopied<kDim>) = make_uint2(low[part], high[part]);
      }
    }
  }

#pragma unroll
  for (int j = 0; j < kAcross; ++j) {
    if constexpr (kLanes == 16) {
#pragma unroll
      for (unsigned& x : columns[j]) x = larger_of(x, __shfl_xor_sync(0xffffffffu, x, 16));
    }
    if (threadIdx.x % 32 < kLanes) {
      *reinterpret_cast<uint4*>(&tile.columns[warp][4 * (lane + j * kLanes)]) =
          make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
    }
  }
  __syncthreads();
  const float most = by_rows ? 0x1p14f : __uint_as_float(largest) * ptx::power_of_two(exponent);
  bool wide = is_small && !by_rows;
  for (int column = threadIdx.x; column < At::kColumns; column += kThreads) {
    unsigned x = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) x = larger_of(x, tile.columns[i][column]);
    wide = wide || (x != 0 && __uint_as_float(x) < most * from.wide);
  }
  wide = __syncthreads_or(wide);
  if (threadIdx.x == 0) {
    from.factors[tile_at] = wide ? -1.f : by_rows ? 0.f : ptx::power_of_two(-exponent);
  }
}

// The tile of a CTA, `index` of those of all arrays, which are offered one after the other. One
// piece of code splits it whatever it is of: of four the compiler takes a second more.
struct Choice {
  int index;
  Source from;
  Place place;
  int length;
  bool of_values = false;  // rows of kValueDim numbers

  __device__ __forceinline__ explicit Choice(int index) : index(index) {}

  template <class LengthOf>
  __device__ __forceinline__ bool offer(const Source& source, bool values, int batch,
                                        LengthOf length_of) {
    const int all = batch * source.heads * source.tiles();
    if (index >= all) {
      index -= all;
      return false;
    }
    from = source;
    place = source.place(index);
    length = length_of(place.batch);
    of_values = values;
    return true;
  }

  template <bool kByRows = false, bool kFewRows = false>
  __device__ __forceinline__ void split() const {
    __shared__ Tile tile;
    if (kHeadDim == kValueDim || !of_values) {
      split_tile<kHeadDim, kByRows, kFewRows>(from, place, length, tile);
    } else {
      split_tile<kValueDim, kByRows, kFewRows>(from, place, length, tile);
    }
  }
};

// Offers queries, keys and values.
template <class Params>
__device__ __forceinline__ bool offer_inputs(const Params& p, Choice& choice,
                                             float second = kSecondHalf, float wide_values = kWide,
                                             float wide = kWide) {
  const auto of_queries = [&](int batch) { return visibility(p, batch).query_length; };
  const auto of_keys = [&](int batch) { return visibility(p, batch).kv_length; };
  const Source query{
      p.query_data, p.query_halves, p.query_factors, p.query_len, p.query_heads, second, wide};
  const Source key{p.key_data, p.key_halves, p.key_factors, p.kv_len, p.kv_heads, second, wide};
  const Source value{p.value_data, p.value_halves, p.value_factors, p.kv_len,
                     p.kv_heads,   second,         wide_values};
  return choice.offer(query, false, p.batch, of_queries) ||
         choice.offer(key, false, p.batch, of_keys) || choice.offer(value, true, p.batch, of_keys);
}

}  // namespace halves
