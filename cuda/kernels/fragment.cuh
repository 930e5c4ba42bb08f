// Fragments: which element of a product a thread holds.
//
// A warp has 16 rows. In every 8 columns of them a thread has two rows, 8 apart, and two columns
// side by side. mma.sync m16n8 and wgmma m64nN share this order; a warpgroup's four warps have 16
// rows each. Rows are queries in the forward pass (S = Q K^T) and keys in the backward pass
// (S^T = K Q^T). The four threads of a quad share their rows.
#pragma once

#include "element.cuh"
#include "numbers.cuh"

namespace fragment {

// A thread's first row among the 64 of its warpgroup, and its first column. `thread` is
// threadIdx.x, or what hides it from the compiler.
__device__ __forceinline__ int first_row(uint32 thread) {
  return thread / 32 % 4 * 16 + thread % 32 / 4;
}
__device__ __forceinline__ int first_column(uint32 thread) { return 2 * (thread % 4); }
inline constexpr int kRowStep = 8;  // to the thread's second row

// Element i lies in the thread's row row(i), 0 or 1, and column(i) columns after its first column.
__host__ __device__ constexpr int row(int i) { return i / 2 % 2; }
__host__ __device__ constexpr int column(int i) { return i / 4 * 8 + i % 2; }
// The inverse: of the j-th 8 columns, row 0 or 1, column 0 or 1.
__host__ __device__ constexpr int element(int j, int row, int column) {
  return 4 * j + 2 * row + column;
}

// Over the four threads of a quad.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The largest of a row's first kUsed scores or weights, over its four threads.
template <int kUsed, int kCount>
__device__ __forceinline__ float row_maximum(const float (&scores)[kCount], int row) {
  // Four chains: one would wait for its own latency at every step.
  float m[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) m[i] = scores[element(i / 2 % (kUsed / 4), row, i % 2)];
#pragma unroll
  for (int j = 2; j < kUsed / 4; ++j) {
    const int chain = j % 2 * 2;
    m[chain] = fmaxf(m[chain], scores[element(j, row, 0)]);
    m[chain + 1] = fmaxf(m[chain + 1], scores[element(j, row, 1)]);
  }
  return quad_maximum(fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3])));
}
// The largest of a row's four threads' sums.
template <int kCount>
__device__ __forceinline__ float heaviest_sum(const float (&weights)[kCount], int row) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (fragment::row(i) == row) sum += weights[i];
  }
  return quad_maximum(sum);
}

// Turns one row's accumulators into 16-byte pieces: after it, piece g of lane c of a quad holds
// the eight elements of columns 8 * (4g + c). Two exchanges across the quad per four registers.
template <int kCount, int kPieces, class To = Element>
__device__ __forceinline__ void gather_row(const float (&fragment)[kCount], int row, float factor,
                                           uint32 (&pieces)[kPieces]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kPieces / 4; ++g) {
    uint32 a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = element(4 * g + j, row, 0);
      a[j] = i < kCount ? To::pack(fragment[i < kCount ? i : 0] * factor,
                                   fragment[i < kCount ? i + 1 : 0] * factor)
                        : 0;
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32 other = __shfl_xor_sync(0xffffffffu, c & 1 ? a[j] : a[j + 1], 1);
      if (c & 1) {
        a[j] = other;
      } else {
        a[j + 1] = other;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32 other = __shfl_xor_sync(0xffffffffu, c & 2 ? a[j] : a[j + 2], 2);
      if (c & 2) {
        a[j] = other;
      } else {
        a[j + 2] = other;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) pieces[4 * g + j] = a[j];
  }
}

}  // namespace fragment
