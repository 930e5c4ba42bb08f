// Products of tiles by mma.sync, of a warp's rows: of elements, or of their kParts parts.
//
// A warp has kTiles tiles of 16 rows: what it reads of the other operand serves all of them.
#pragma once

#include "element.cuh"
#include "ptx.cuh"
#include "split.cuh"
#include "tile.cuh"

// The lane, anew at each use, as a number that the compiler knows to be small and not negative:
// kept addresses take registers, and with a sign every chunk would take instructions.
__device__ __forceinline__ uint32 opaque_lane() {
  return static_cast<uint32>(ptx::opaque(threadIdx.x)) % 32;
}

// Where a lane reads matrices of a tile of kRows rows: the address of its row and chunk (0 or 1) of
// the first ones. Columns in units of 16: two chunks, whose swizzle is an exclusive or.
template <int kRows>
struct LaneOfTile {
  uint32 first;

  __device__ __forceinline__ LaneOfTile(uint32 tile, uint32 row, uint32 chunk)
      : first(tile + row * kBoxRowBytes + swizzled(chunk, row)) {}
  // `rows` on, a multiple of 8.
  __device__ __forceinline__ uint32 at(uint32 unit, uint32 rows) const {
    return (first ^ unit % 4 * 32) + (unit / 4 * kRows + rows) * kBoxRowBytes;
  }
};

// Steps of 16 columns at once; of elements in parts more would be spilled.
template <int kDim, int kTiles = 1>
inline constexpr int kAllSteps = kParts == 1   ? ceil_div(kDim, 16)
                                 : kTiles == 2 ? 1
                                               : 2;

// d[16 x 2 kCount] += a[16 x kDim] b[2 kCount x kDim]^T of each of the warp's tiles: b are rows of
// a tile of kRowsB rows, from row_b on, a multiple of 16. left_of(step, registers) gives the parts
// of 16 columns of a; products of halves are multiplied with `factor`.
template <int kDim, int kRowsB, int kAtOnce = 0, int kTiles, int kCount, class LeftOf>
__device__ __forceinline__ void add_rows_of(float (&d)[kTiles][kCount], LeftOf left_of, uint32 b,
                                            uint32 row_b, float factor = 1.f) {
  const uint32 lane = opaque_lane();  // in the order of matrices
  const LaneOfTile<kRowsB> right_at(b, row_b + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  constexpr int kSteps = ceil_div(kDim, 16);
  if constexpr (kHalves && kSteps % 2 == 0) {
#pragma unroll 1
    for (int step = 0; step < kSteps; step += 2) {
      uint32 left[2][kTiles][kParts][4];
      left_of(step, left[0]);
      left_of(step + 1, left[1]);
#pragma unroll
      for (int j = 0; j < kCount / 8; ++j) {
        if (kTiles == 2) __syncwarp();
        uint32 right[2][kParts][4];
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
          ptx::load_matrix_x4(
              right_at.at(step + i / kParts, 16 * j) + i % kParts * kPlaneBytes<kDim, kRowsB>,
              right[i / kParts][i % kParts]);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_halves(d[tile], 8 * j, left[0][tile], left[1][tile], right, factor);
        }
      }
    }
    return;
  }
  constexpr int kUnrolled = kAtOnce != 0 ? kAtOnce : kAllSteps<kDim, kTiles>;
#pragma unroll kUnrolled
  for (int step = 0; step < ceil_div(kDim, 16); ++step) {
    uint32 left[kTiles][kParts][4];
    left_of(step, left);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      if (kParts > 1 && kTiles == 2) __syncwarp();
      uint32 right[kParts][4];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        ptx::load_matrix_x4(right_at.at(step, 16 * j) + i * kPlaneBytes<kDim, kRowsB>, right[i]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply_parts<Element>(d[tile], 8 * j, left[tile], right, factor);
      }
    }
  }
}
// A warp's rows of a tile of kRows, from `row` on, a multiple of 16, as left_of.
template <int kDim, int kRows>
struct LeftRows {
  LaneOfTile<kRows> from;

  __device__ __forceinline__ LeftRows(uint32 tile, uint32 row, uint32 lane)
      : from(tile, row + lane % 16, lane / 16) {}
  template <int kTiles>
  __device__ __forceinline__ void operator()(int step, uint32 (&left)[kTiles][kParts][4]) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        ptx::load_matrix_x4(from.at(step, 16 * tile) + i * kPlaneBytes<kDim, kRows>, left[tile][i]);
      }
    }
  }
};
// Adds the products of 16 rows of `a`, from row_a on. With 256 columns at once ptxas loads so many
// ahead that the caller's sums are spilled, 928 bytes.
template <int kDim, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void add_rows(float (&d)[kCount], uint32 a, uint32 row_a, uint32 b,
                                         uint32 row_b, float factor = 1.f) {
  add_rows_of<kDim, kRowsB, kParts == 1 && kDim <= 128 ? kAllSteps<kDim> : 2>(
      reinterpret_cast<float (&)[1][kCount]>(d), LeftRows<kDim, kRowsA>(a, row_a, opaque_lane()), b,
      row_b, factor);
}
// The same from zero.
template <int kDim, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], uint32 a, uint32 row_a, uint32 b,
                                              uint32 row_b) {
#pragma unroll
  for (float& x : d) x = 0.f;
  add_rows<kDim, kRowsA, kRowsB>(d, a, row_a, b, row_b);
}

// d[16 x 2 kCount] += a[16 x 16 kSteps] b[16 kSteps x 2 kCount] of each tile: b are rows of a tile
// of kRows rows of kDim, from row_b on; the columns are units of 16 from first_unit on, as far as
// there are `units`. left_of(step, registers) gives the parts of 16 columns of a. With kAligned
// first_unit is a multiple of 4, or of how many units there are: its part of addresses is then that
// of all. Products of halves are multiplied with factor_of(step, tile).
inline constexpr uint32 kAllUnits = 0xffffffffu;  // none is absent
struct NoFactor {
  __device__ __forceinline__ float operator()(int, int) const { return 1.f; }
};
template <int kSteps, int kDim, int kRows, bool kAligned = false, int kUnrolled = kSteps,
          int kTiles, int kCount, class LeftOf, class FactorOf = NoFactor>
__device__ __forceinline__ void multiply_columns(float (&d)[kTiles][kCount], LeftOf left_of,
                                                 uint32 b, uint32 row_b, uint32 first_unit,
                                                 uint32 units, FactorOf factor_of = {}) {
  const uint32 lane = opaque_lane();
  LaneOfTile<kRows> right_at(b, row_b + lane % 16, lane / 16);
  const uint32 origin = kAligned ? 0 : first_unit;
  if (kAligned) right_at.first = right_at.at(first_unit, 0);
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    uint32 left[kTiles][kParts][4];
    left_of(step, left);
    float factors[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) factors[tile] = factor_of(step, tile);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      if (!(kAligned && units == kAllUnits) && first_unit + i >= units) continue;
      // Else loads and sums of many columns are under way, and numbers kept for the end spilled.
      if (kParts > 1 && i % (kTiles == 2 ? 1 : 4) == 0) __syncwarp();
      uint32 right[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::load_transposed_x4(
            right_at.at(origin + i, 16 * step) + part * kPlaneBytes<kDim, kRows>, right[part]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply_parts<Element>(d[tile], 8 * i, left[tile], right, factors[tile]);
      }
    }
  }
}
