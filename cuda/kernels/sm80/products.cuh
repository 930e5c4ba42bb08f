// Products of tiles by mma.sync, of a warp's 16 rows.
#pragma once

#include "element.cuh"
#include "ptx.cuh"
#include "tile.cuh"

// d[16 x 2 kCount] = a[16 x kDim] b[2 kCount x kDim]^T: rows of two tiles of kRowsA and kRowsB
// rows, from row_a and row_b on.
template <int kDim, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], uint32 a, int row_a, uint32 b,
                                              int row_b) {
#pragma unroll
  for (float& x : d) x = 0.f;
  // Lanes in the order of matrices. Opaque: addresses would be computed ahead of the caller's loop,
  // for registers that are not there.
  const int lane = ptx::opaque(threadIdx.x) % 32;
  row_a += lane % 16;
  row_b += lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int step = 0; step < ceil_div(kDim, 16); ++step) {
    uint32 left[4];
    ptx::load_matrix_x4(chunk_address<kRowsA>(a, row_a, 2 * step + lane / 16), left);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      uint32 right[4];
      ptx::load_matrix_x4(chunk_address<kRowsB>(b, row_b + 16 * j, 2 * step + lane / 8 % 2), right);
      ptx::multiply_add<kBFloat16>(d, 8 * j, left, right[0], right[1]);
      ptx::multiply_add<kBFloat16>(d, 8 * j + 4, left, right[2], right[3]);
    }
  }
}

// d[16 x 2 kCount] += a[16 x 16 kSteps] b[16 kSteps x 2 kCount]: b are rows of a tile of kRows, from
// row_b on; the i-th 16 columns are number unit_at(i) of `units`, beyond which there are none.
// left_of(step, registers) gives the operand of 16 columns of a.
template <int kSteps, int kRows, int kCount, class LeftOf, class UnitAt>
__device__ __forceinline__ void multiply_columns(float (&d)[kCount], LeftOf left_of, uint32 b,
                                                 int row_b, UnitAt unit_at, int units) {
  const int lane = ptx::opaque(threadIdx.x) % 32;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32 left[4];
    left_of(step, left);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const int unit = unit_at(i);
      if (unit >= units) continue;
      uint32 right[4];
      ptx::load_transposed_x4(
          chunk_address<kRows>(b, row_b + 16 * step + lane % 16, 2 * unit + lane / 16), right);
      ptx::multiply_add<kBFloat16>(d, 8 * i, left, right[0], right[1]);
      ptx::multiply_add<kBFloat16>(d, 8 * i + 4, left, right[2], right[3]);
    }
  }
}
