// What the roles of the wide kernel share: shared memory, barriers, the rows of dK and dV in
// registers, how P crosses.
#pragma once

#include "sm90/backward_dq.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_scores.cuh"

namespace backward {

static_assert(kKeys == 64 && kQueries == 64 && !kReadsAhead);
static_assert(!kSharesKeys || !kDeterministic);
static_assert(kHead <= 256 && kValue <= 256);

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
      ptx::barrier_init(at(&Shared::gradient_empty, i), 4 * kPair);  // warps that read dS
      if constexpr (kPairs) ptx::barrier_init(at(&Shared::other_full, i), 1);
    }
    ptx::barrier_init(at(&Shared::probability_full), 4);
    ptx::barrier_init(at(&Shared::probability_empty), 4);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kPairs) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
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
  __device__ __forceinline__ void pin() {
    ptx::pin(low);
    if constexpr (kSplit) ptx::pin(high);
  }
  __device__ __forceinline__ bool is_finite() const { return all_finite(low) && all_finite(high); }
};

// With kSharesKeys: adds the columns from `first` on, of which `values` are a thread's, to the sums
// of the unit's keys that begin at `tile`.
template <int kValues>
__device__ __forceinline__ void add_columns(const BackwardParams& p, const volatile UnitRecord& u,
                                            int tile, int first, const float (&values)[kValues]) {
  if (kPairs && u.key0 >= p.kv_len) return;  // the last pair may have one block of keys
  const int slab = (u.batch * p.kv_heads + u.kv_head) * key_blocks(p) + u.key0 / kKeys;
#pragma unroll
  for (int j = 0; j < kValues; j += 4) {
    const int piece = first / 8 + j / 4;  // of 8 columns
    KeySumTile(p, slab, tile + piece / 8)
        .add(piece % 8, {values[j], values[j + 1], values[j + 2], values[j + 3]});
  }
}

// Shared memory is free for the next unit's keys while dK and dV are written. `tile`: the first of
// their sums with kSharesKeys.
template <int kDim, int kColumns>
__device__ __forceinline__ void store_rows(const BackwardParams& p, void* array, int tile,
                                           const Rows<kColumns>& rows, float scale,
                                           const volatile UnitRecord& u) {
  if constexpr (kSharesKeys) {
    add_columns(p, u, tile, 0, rows.low);
    if constexpr (Rows<kColumns>::kSplit) add_columns(p, u, tile, kRowColumns, rows.high);
    return;
  }
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

// P goes to the gradient role.
__device__ __forceinline__ void send_probability(const float (&x)[kScores], uint32 iteration) {
  ptx::barrier_wait(at(&Shared::probability_empty), parity_of<1>(iteration) ^ 1);
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    ptx::store_shared_x4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16,
                         __float_as_uint(x[4 * j]), __float_as_uint(x[4 * j + 1]),
                         __float_as_uint(x[4 * j + 2]), __float_as_uint(x[4 * j + 3]));
  }
  release(at(&Shared::probability_full));
}
// With kPairs: dS of a warp's keys goes to the other CTA, which reads it from here on.
__device__ __forceinline__ uint32 gradient_of_other(uint32 buffer) {
  return at(&Shared::gradient) + (kScoreStages + buffer) * kGradientBytes;
}
__device__ __forceinline__ void send_gradient(uint32 buffer) {
  constexpr int kBytes = kGradientBytes / 4;
  const uint32 rows = threadIdx.x % 128 / 32 * kBytes;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::bulk_send(in_other(gradient_of_other(buffer)) + rows,
                   at(&Shared::gradient) + buffer * kGradientBytes + rows, kBytes,
                   in_other(at(&Shared::other_full, buffer)));
  }
}
// P of a thread's elements 4j to 4j + 3, and -delta of their two queries.
struct Received {
  float4 probability;
  float2 minus_delta;
  __device__ __forceinline__ Received(int j, uint32 first_delta)
      : probability(
            ptx::load_shared_f4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16)),
        minus_delta(ptx::load_shared_f2(first_delta + 8 * j * 4)) {}
};

}  // namespace backward
