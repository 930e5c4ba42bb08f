// The products of the main kernels with S^T tiles, 64 keys by kQueries, and how dS, dK and dV leave
// a warpgroup's registers. Read backward_scores.cuh next.
#pragma once

#include "fragment.cuh"
#include "rows.cuh"
#include "sm90/backward_units.cuh"
#include "sm90/products.cuh"

namespace backward {

inline constexpr int kScores = kQueries / 2;      // elements of S^T per thread
using Multiplied = ElementType<kBFloat16>::Type;  // what tensor cores multiply: 16 bits

// Stores one row's accumulators, times a factor, to a row of kDim float32, from `first_column` on:
// threads of a quad have 32 bytes side by side.
template <int kDim, int kCount>
__device__ __forceinline__ void store_row(const float (&values)[kCount], int row, float factor,
                                          float* to, int first_column = 0) {
  const int column = first_column + 2 * static_cast<int>(ptx::opaque(threadIdx.x) % 4);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int i = fragment::element(j, row, 0);
    store_pair<kDim>(to, column + 8 * j, values[i] * factor, values[i + 1] * factor);
  }
}

// The same, added to what is there.
template <int kDim, int kCount>
__device__ __forceinline__ void add_row(const float (&values)[kCount], int row, float factor,
                                        float* to, int first_column) {
  const int column = first_column + fragment::first_column(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = column + fragment::column(i);
    if (fragment::row(i) == row && at < kDim) ptx::reduce_add(to + at, values[i] * factor);
  }
}

// Stores dS^T of the keys [slab, slab + 64) for wgmma to read it as dS, MN-major.
__device__ __forceinline__ void store_gradient(const uint32 (&gradient)[kScores / 2], uint32 tile,
                                               int slab) {
  // This thread's row of the 8x8 matrices, and the 16-byte chunk of its first one.
  const int row = slab + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const uint32 at = tile + row * kBoxRowBytes + swizzled(threadIdx.x % 32 / 16, row);
#pragma unroll
  for (int j = 0; j < kQueries / 16; ++j) {
    ptx::store_matrix_x4((at + j / 4 * kBoxK) ^ (j % 4 * 32), gradient[4 * j], gradient[4 * j + 1],
                         gradient[4 * j + 2], gradient[4 * j + 3]);
  }
  ptx::fence_async_proxy();
}

// Writes a warpgroup's 64 rows of accumulators, rounded, into boxes of 64 rows each.
template <int kCount>
__device__ __forceinline__ void stage_rows(const float (&values)[kCount], float scale, uint32 tile,
                                           int box_bytes) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    const float* x = values + 8 * j;
    const int chunk = 2 * (j % 4) + threadIdx.x % 32 / 16;
    ptx::store_matrix_x4(
        tile + j / 4 * box_bytes + row * kBoxRowBytes + swizzled(chunk, row),
        Multiplied::pack(x[0] * scale, x[1] * scale), Multiplied::pack(x[2] * scale, x[3] * scale),
        Multiplied::pack(x[4] * scale, x[5] * scale), Multiplied::pack(x[6] * scale, x[7] * scale));
  }
  ptx::fence_async_proxy();
}

// d = (d if accumulate) + a[64 keys x k] b[kQueries x k]^T with both operands K-major. The fence
// before it is the caller's.
template <int kDepth>
__device__ __forceinline__ void keys_times_queries(float (&d)[kScores], uint32 keys, uint32 queries,
                                                   bool accumulate = false) {
  const ptx::Descriptor a = descriptor(keys, 0), b = descriptor(queries, 0);
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    const int box = i / 4, inner = i % 4 * 32;
    ptx::wgmma_ss<Element, 0, 0>(d, a.at(box * kBoxK + inner), b.at(box * kBoxQ + inner),
                                 accumulate || i > 0);
  }
  ptx::wgmma_commit();
}

// d[64 keys x n] += a[64 keys x kQueries] b[kQueries x n], a in registers; no commit.
template <int kHalfN>
__device__ __forceinline__ void issue_accumulate(float (&d)[kHalfN], const uint32 (&a)[kScores / 2],
                                                 uint32 rows) {
  const ptx::Descriptor b = descriptor(rows, kBoxQ);
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i) {
    ptx::wgmma_rs<Element, 1>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b.at(i * 2048),
                              1);
  }
}

// Stores one row's accumulators, times a factor, to a row of kDim results, if it is there. Whole
// warps call.
template <int kDim, int kCount>
__device__ __forceinline__ void store_result_row(const float (&values)[kCount], int row,
                                                 float factor, bool is_there, void* array, int64 at,
                                                 int first_column) {
  auto* to = static_cast<ResultElement::Bits*>(array) + at;
  if constexpr (kSame<ResultElement, Float32>) {
    if (is_there) store_row<kDim>(values, row, factor, to, first_column);
  } else {
    constexpr int kPieces = ceil_div(2 * kCount, 32);
    uint32 pieces[4 * kPieces];
    fragment::gather_row<kCount, 4 * kPieces, Multiplied>(values, row, factor, pieces);
    if (!is_there) return;
#pragma unroll
    for (int g = 0; g < kPieces; ++g) {
      const int column = first_column + 8 * (4 * g + static_cast<int>(threadIdx.x) % 4);
      if constexpr (kEarlyColumns<kDim> > 0) {  // rows of all heads are of whole pieces
        store_early<kDim>(
            to, column, static_cast<int>(at % 8),
            uint4{pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]});
      } else if (column < kDim) {
        store_piece<kDim>(
            to, column,
            uint4{pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]});
      }
    }
  }
}

// Writes columns of the keys [slab, slab + 64) of dK or dV, rounded, straight from the accumulators
// of a warpgroup: no shared memory is taken.
template <int kDim, int kCount>
__device__ __forceinline__ void store_columns(const BackwardParams& p, void* array,
                                              const float (&values)[kCount], int first_column,
                                              float scale, const volatile UnitRecord& u, int slab) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = u.key0 + slab + fragment::first_row(threadIdx.x) + fragment::kRowStep * r;
    const int64 at = key_row(p, u.batch, row, u.kv_head) * kDim;
    if constexpr (kSame<ResultElement, Float32>) {
      if (is_share(p, u)) {
        if (row < p.kv_len) {
          add_row<kDim>(values, r, scale, static_cast<float*>(array) + at, first_column);
        }
        continue;
      }
    }
    store_result_row<kDim>(values, r, scale, row < p.kv_len, array, at, first_column);
  }
}

}  // namespace backward
