// What the roles of backward_wide.cuh share: shared memory, barriers, the rows of dK and dV in
// registers, the left operands of scores and dP.
#pragma once

#include "sm90/backward_load.cuh"
#include "sm90/backward_products.cuh"

namespace backward {

static_assert(kKeys == 64 && kQueries == 64 && !kReadsAhead && !kSharesKeys);
static_assert(kHead <= 256 && kValue <= 256);
static_assert(!kHalves || (kHead <= 128 && kValue <= 128 && kTmaLoads), "registers");

inline constexpr int kThreads = 512;

struct WideShared : Shared {
  float4 probability[kScores / 4 * 128];  // in the order of fragments
};

// Named barriers, one per role.
inline constexpr int kProbabilityBarrier = 1;
inline constexpr int kGradientBarrier = 2;

__device__ __forceinline__ void set_up() {
  if constexpr (kCompact && !kFillsBeside) fill_numbers(blockDim.x);
  if (threadIdx.x == 0) {
    set_up_load(12, 8, 4);
    for (int i = 0; i < kScoreStages; ++i) {
      ptx::barrier_init(at(&Shared::gradient_full, i), 4);
      ptx::barrier_init(at(&Shared::gradient_empty, i), 4);
    }
    ptx::barrier_init(at(&Shared::probability_full), 4);
    ptx::barrier_init(at(&Shared::probability_empty), 4);
    ptx::barrier_init_fence();
  }
  __syncthreads();
}

// A warpgroup's 64 rows of dK or dV, in two parts if there are more than kRowColumns columns.
template <int kColumns>
struct Rows {
  static constexpr bool kSplit = kColumns > kRowColumns;
  float low[kSplit ? kRowColumns / 2 : kColumns / 2];
  float high[kSplit ? (kColumns - kRowColumns) / 2 : 1];

  __device__ __forceinline__ void clear() {
    for (float& x : low) x = 0.f;
    for (float& x : high) x = 0.f;
    pin();  // in place before the fence of the first product
  }
  // += a b; one commit group.
  __device__ __forceinline__ void accumulate(const uint32 (&a)[kScores / 2], uint32 b) {
    ptx::wgmma_fence();
    issue_accumulate(low, a, b);
    if constexpr (kSplit) issue_accumulate(high, a, b + 2 * kBoxQ);
    ptx::wgmma_commit();
  }
  // += a b of halves times the factors of a thread's two rows, with all done that has been issued;
  // with kBeside `beside` issues another group behind the first columns'.
  template <bool kBeside, class Beside>
  __device__ __forceinline__ void accumulate(const uint32 (&a)[2][kScores / 2], uint32 b,
                                             const float (&factor)[2], Beside beside) {
    constexpr uint32 kPlane = ceil_div(kColumns, kBoxColumns) * kBoxQ;
    add_product(low, a, b, kPlane, factor, [&] {
      if constexpr (kBeside) beside();
      ptx::wgmma_wait<kBeside ? 1 : 0>();
    });
    if constexpr (kSplit) {
      add_product(high, a, b + kBoxQ, kPlane, factor, [] { ptx::wgmma_wait<0>(); });
    } else if constexpr (kBeside) {
      ptx::wgmma_wait<0>();
    }
  }
  __device__ __forceinline__ void pin() {
    ptx::pin(low);
    if constexpr (kSplit) ptx::pin(high);
  }
  __device__ __forceinline__ bool is_finite() const { return all_finite(low) && all_finite(high); }

 private:
  template <int kCount, class Wait>
  static __device__ __forceinline__ void add_product(float (&to)[kCount],
                                                     const uint32 (&a)[2][kScores / 2], uint32 b,
                                                     uint32 plane, const float (&factor)[2],
                                                     Wait wait) {
    float sum[kCount];
    ptx::wgmma_fence();
    issue_product(sum, a, b, plane);
    ptx::wgmma_commit();
    wait();
    ptx::pin(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = fmaf(sum[i], factor[fragment::row(i)], to[i]);
  }
};

// Columns of dK and dV: of halves with 48 behind the first 64, 232 to 324 bytes were spilled. Tiles
// are whole boxes, zero behind the last column.
template <int kColumns>
using Sums = Rows<kHalves && kColumns == 112 ? 128 : kColumns>;

// 64 keys or values of a unit, the left operand of its scores or dP. Halves are in registers: a
// product of 64 by 64 from shared memory reads 128 bytes a cycle, which is all there is. With more
// than 64 columns the second halves, of one product in three, stay in shared memory.
template <int kColumns, bool kHeld>
struct LeftRows {
  __device__ __forceinline__ void load(uint32) {}
  __device__ __forceinline__ void times_queries(float (&d)[kScores], uint32 tile,
                                                uint32 queries) const {
    keys_times_queries<kColumns>(d, tile, queries);
  }
};
template <int kColumns>
struct LeftRows<kColumns, true> {
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
    for (int i = 0; i < kProducts<2> * kSteps; ++i) {
      const Planes planes = planes_of<2>(i / kSteps);
      const int step = i % kSteps, inner = step % 4 * 32;
      const uint64 right = b.at((planes.right * kBoxes + step / 4) * kBoxQ + inner);
      if (planes.left < kPlanes) {
        const uint32(&left)[4] = rows[planes.left < kPlanes ? planes.left : 0][step];
        ptx::wgmma_rs<Element, 0>(d, left[0], left[1], left[2], left[3], right, i > 0);
      } else {
        ptx::wgmma_ss<Element, 0, 0>(d, a.at((kBoxes + step / 4) * kBoxK + inner), right, i > 0);
      }
    }
    ptx::wgmma_commit();
  }
};

// Shared memory is free for the next unit's keys while dK and dV are written.
template <int kDim, int kColumns>
__device__ __forceinline__ void store_rows(const BackwardParams& p, void* array,
                                           const Rows<kColumns>& rows, float scale,
                                           const volatile UnitRecord& u) {
  store_columns<kDim>(p, array, rows.low, 0, scale, u, 0);
  if constexpr (Rows<kColumns>::kSplit) {
    store_columns<kDim>(p, array, rows.high, kRowColumns, scale, u, 0);
  }
}

__device__ __forceinline__ uint32 q_tile(uint32 slot) {
  return at(&Shared::query) + slot * kQueryBytes;
}
__device__ __forceinline__ uint32 dout_tile(uint32 slot) {
  return at(&Shared::dout) + slot * kDoutBytes;
}

}  // namespace backward
