// Products of numbers in two halves with S^T tiles. Tensor cores cut off the last bits of a sum:
// each starts at zero, and is added to the others by `fma`, which rounds.
#pragma once

#include "sm90/backward_wide_shared.cuh"
#include "sm90_float32/products.cuh"

namespace backward {

static_assert(kHead <= 128 && kValue <= 128 && kTmaLoads, "registers");

// d[64 keys x n] = a[64 keys x kQueries] b[kQueries x n], a's in registers, the second ones of b
// `plane` bytes on; no commit.
template <int kHalfN>
__device__ __forceinline__ void issue_product(float (&d)[kHalfN], const uint32 (&a)[2][kScores / 2],
                                              uint32 rows, uint32 plane) {
  const ptx::Descriptor b = ptx::descriptor(rows, 0, kBoxQ, 1024);
  constexpr int kSteps = kQueries / 16;
#pragma unroll
  for (int i = 0; i < kProducts * kSteps; ++i) {
    const Planes planes = planes_of(i / kSteps);
    const int step = i % kSteps;
    const uint32(&left)[kScores / 2] = a[planes.left];
    ptx::wgmma_rs<Float16, 1>(d, left[4 * step], left[4 * step + 1], left[4 * step + 2],
                              left[4 * step + 3], b.at(planes.right * plane + step * 2048), i > 0);
  }
}

// A warpgroup's 64 rows of dK or dV. With 48 columns behind the first 64, 232 to 324 bytes were
// spilled; tiles are whole boxes, zero behind the last column.
template <int kColumns>
struct Sums : Rows<kColumns == 112 ? 128 : kColumns> {
  using Of = Rows<kColumns == 112 ? 128 : kColumns>;

  // += a b times the factors of a thread's two rows, with all done that has been issued; with
  // kBeside `beside` issues another group behind the first columns'.
  template <bool kBeside, class Beside>
  __device__ __forceinline__ void accumulate(const uint32 (&a)[2][kScores / 2], uint32 b,
                                             const float (&factor)[2], Beside beside) {
    add_product(Of::low, a, b, factor, [&] {
      if constexpr (kBeside) beside();
      ptx::wgmma_wait<kBeside ? 1 : 0>();
    });
    if constexpr (Of::kSplit) {
      add_product(Of::high, a, b + kBoxQ, factor, [] { ptx::wgmma_wait<0>(); });
    } else if constexpr (kBeside) {
      ptx::wgmma_wait<0>();
    }
  }

 private:
  template <int kCount, class Wait>
  static __device__ __forceinline__ void add_product(float (&to)[kCount],
                                                     const uint32 (&a)[2][kScores / 2], uint32 b,
                                                     const float (&factor)[2], Wait wait) {
    constexpr uint32 kPlane = ceil_div(kColumns, kBoxColumns) * kBoxQ;
    float sum[kCount];
    ptx::wgmma_fence();
    issue_product(sum, a, b, kPlane);
    ptx::wgmma_commit();
    wait();
    ptx::pin(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = fmaf(sum[i], factor[fragment::row(i)], to[i]);
  }
};

// 64 keys or values of a unit, the left operand of its scores or dP, in registers: a product of 64
// by 64 from shared memory reads 128 bytes a cycle, which is all there is. With more than 64
// columns the second halves, of one product in three, stay in shared memory.
template <int kColumns>
struct LeftRows {
  static constexpr int kSteps = kColumns / 16, kBoxes = ceil_div(kColumns, kBoxColumns);
  static constexpr int kPlanes = kColumns > 64 ? 1 : 2;
  uint32 rows[kPlanes][kSteps][4];

  __device__ __forceinline__ void load(uint32 tile) {
    const uint32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kPlanes * kSteps; ++i) {
      const int plane = i / kSteps, step = i % kSteps;
      const uint32 box = tile + (plane * kBoxes + step / 4) * kBoxK + row * kBoxRowBytes;
      ptx::load_matrix_x4(box + swizzled(step % 4 * 2 + threadIdx.x % 32 / 16, row),
                          rows[plane][step]);
    }
  }
  // As keys_times_queries.
  __device__ __forceinline__ void times_queries(float (&d)[kScores], uint32 tile,
                                                uint32 queries) const {
    const ptx::Descriptor a = ptx::descriptor(tile, 0, 0, 1024),
                          b = ptx::descriptor(queries, 0, 0, 1024);
#pragma unroll
    for (int i = 0; i < kProducts * kSteps; ++i) {
      const Planes planes = planes_of(i / kSteps);
      const int step = i % kSteps, inner = step % 4 * 32;
      const uint64 right = b.at((planes.right * kBoxes + step / 4) * kBoxQ + inner);
      if (planes.left < kPlanes) {
        const uint32(&left)[4] = rows[planes.left < kPlanes ? planes.left : 0][step];
        ptx::wgmma_rs<Float16, 0>(d, left[0], left[1], left[2], left[3], right, i > 0);
      } else {
        ptx::wgmma_ss<Float16, 0, 0>(d, a.at((kBoxes + step / 4) * kBoxK + inner), right, i > 0);
      }
    }
    ptx::wgmma_commit();
  }
};

}  // namespace backward
