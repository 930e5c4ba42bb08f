// What the roles of the wide backward kernel do in a step, with elements of 16 bits.
// sm90_float32/backward_steps.cuh has it for float32. A program includes one of the two, ahead of
// backward_wide_roles.cuh.
#pragma once

#include "sm90/backward_wide_shared.cuh"

namespace backward {

template <int kColumns>
using Sums = Rows<kColumns>;

// What goes with the numbers of a unit and of a step: none.
struct NoFactors {
  __device__ __forceinline__ NoFactors(const BackwardParams&, const volatile UnitRecord&,
                                       const Walk&) {}
};

// The left operand of scores or dP, 64 rows of the unit. Registers hold the first kHeld of its
// pieces of 16 columns, which no product then reads from shared memory: its bandwidth is what
// products of 64 x 64 lack.
template <int kColumns, int kHeld>
struct LeftRows {
  uint32 pieces[kHeld > 0 ? kHeld : 1][4];

  __device__ __forceinline__ void load(uint32 tile) {
    const uint32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32 box = tile + i / 4 * kBoxK + row * kBoxRowBytes;
      ptx::load_matrix_x4(box + swizzled(i % 4 * 2 + threadIdx.x % 32 / 16, row), pieces[i]);
    }
  }
  // As keys_times_queries.
  __device__ __forceinline__ void times_queries(float (&d)[kScores], uint32 tile,
                                                uint32 queries) const {
    const ptx::Descriptor a = descriptor(tile, 0), b = descriptor(queries, 0);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      const uint64 right = b.at(box * kBoxQ + inner);
      if (i < kHeld) {
        const uint32(&left)[4] = pieces[i < kHeld ? i : 0];
        ptx::wgmma_rs<Element, 0>(d, left[0], left[1], left[2], left[3], right, i > 0);
      } else {
        ptx::wgmma_ss<Element, 0, 0>(d, a.at(box * kBoxK + inner), right, i > 0);
      }
    }
    ptx::wgmma_commit();
  }
};

struct ProbabilitySteps {
  using Factors = NoFactors;
  const BackwardParams& p;
  LeftRows<kHead, kKeysHeld> keys;

  __device__ __forceinline__ void load_keys() { keys.load(at(&Shared::key)); }
  __device__ __forceinline__ void issue_scores(const volatile UnitRecord& u, float (&x)[kScores],
                                               uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::query_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kProbabilityBarrier);
    ptx::wgmma_fence();
    keys.times_queries(x, at(&Shared::key), q_tile(slot));
  }

  // Takes S^T of this query block to dV and, unless it is the unit's last, computes the next S^T.
  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration,
                                       const Walk& walk, const Walk& next, Factors&,
                                       float (&x)[kScores], StepDropped& dropped,
                                       Sums<kValue>& dv) {
    const uint32 slot = stage_of<kStages>(iteration);
    Step known(p, u, u.head + walk.head, walk.m0, 0);
    uint32 probability[kScores / 2];
    const RowNumbers minus_lse(at(&Shared::minus_lse) + slot * kNumberBytes);
    score_to_probability(p, u, x, probability, minus_lse, 0, {}, known, dropped);
    if constexpr (!kHasSlope) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        probability[i] = pack_probability(x[2 * i], x[2 * i + 1]);
      }
    }
    send_probability(x, iteration);
    const uint32 dout = stage_of<kDoutStages>(iteration);
    ptx::barrier_wait(at(&Shared::dout_full, dout), parity_of<kDoutStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(dout), walk.m0, kProbabilityBarrier);
    dv.accumulate(probability, dout_tile(dout));
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(at(&Shared::dout_empty, dout));
    } else {
      issue_scores(u, x, iteration + 1, next.m0);
      draw_next(p, u, 0, walk, dropped);
      ptx::wgmma_wait<1>();
      release(at(&Shared::dout_empty, dout));
      ptx::wgmma_wait<0>();
      release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
      ptx::pin(x);
    }
    dv.pin();
  }
};

struct GradientSteps {
  using Factors = NoFactors;
  const BackwardParams& p;
  LeftRows<kValue, kValuesHeld> values;

  __device__ __forceinline__ void load_values() { values.load(at(&Shared::value)); }
  __device__ __forceinline__ void issue_dp(const volatile UnitRecord& u, float (&dp)[kScores],
                                           uint32 iteration, int m0) {
    const uint32 slot = stage_of<kDoutStages>(iteration);
    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kDoutStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), m0, kGradientBarrier);
    ptx::wgmma_fence();
    values.times_queries(dp, at(&Shared::value), dout_tile(slot));
  }

  // Takes dP^T of this query block to dK and, unless it is the unit's last, computes the next dP^T.
  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration,
                                       const Walk& walk, const Walk& next, Factors&,
                                       float (&dp)[kScores], Sums<kHead>& dk) {
    const uint32 slot = stage_of<kStages>(iteration);
    const uint32 dout = stage_of<kDoutStages>(iteration);
    const uint32 minus_delta = at(&Shared::minus_delta) + dout * kNumberBytes + threadIdx.x % 4 * 8;
    uint32 gradient[kScores / 2];
    ptx::barrier_wait(at(&Shared::probability_full), parity_of<1>(iteration));
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const Received of(j, minus_delta);
      const float4& x = of.probability;
      const float2& d = of.minus_delta;
      gradient[2 * j] = Multiplied::pack(score_gradient(x.x, dp[4 * j], d.x),
                                         score_gradient(x.y, dp[4 * j + 1], d.y));
      gradient[2 * j + 1] = Multiplied::pack(score_gradient(x.z, dp[4 * j + 2], d.x),
                                             score_gradient(x.w, dp[4 * j + 3], d.y));
    }
    release(at(&Shared::probability_empty));
    release(at(&Shared::dout_empty, dout));

    const uint32 buffer = stage_of<kScoreStages>(iteration);
    ptx::barrier_wait(at(&Shared::gradient_empty, buffer), parity_of<kScoreStages>(iteration) ^ 1);
    store_gradient(gradient, at(&Shared::gradient) + buffer * kGradientBytes, 0);
    if constexpr (kPairs) send_gradient(buffer);
    release(at(&Shared::gradient_full, buffer));

    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), walk.m0, kGradientBarrier);
    dk.accumulate(gradient, q_tile(slot));
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(at(&Shared::query_empty, slot));
    } else {
      issue_dp(u, dp, iteration + 1, next.m0);
      ptx::wgmma_wait<1>();
      release(at(&Shared::query_empty, slot));
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
    }
    dk.pin();
  }
};

// 64 columns of dQ, `box` times 64 on, of dS in a buffer and K.
struct QuerySteps {
  __device__ __forceinline__ void begin(uint32) {}
  __device__ __forceinline__ void issue(float (&dq)[32], ptx::Descriptor gradient,
                                        ptx::Descriptor key, int box) const {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint32 keys = i * 2048;
      ptx::wgmma_ss<Element, 1, 1>(dq, gradient.at(keys), key.at(box * kBoxK + keys), i > 0);
    }
  }
  __device__ __forceinline__ void finish(float (&dq)[32]) const { ptx::pin(dq); }
};

}  // namespace backward
