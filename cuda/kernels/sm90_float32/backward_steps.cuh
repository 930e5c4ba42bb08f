// What the roles of the wide backward kernel do in a step, with float32 in two halves.
// sm90/backward_wide_steps.cuh has it for 16 bits.
#pragma once

#include "sm90_float32/backward_products.cuh"
#include "sm90_float32/backward_range.cuh"

namespace backward {

// A step whose scores the factors of its queries and keys bring back.
struct ScaledStep : Step {
  float scale;
  __device__ __forceinline__ float scale_of(const BackwardParams&) const { return scale; }
};

struct ProbabilitySteps {
  const BackwardParams& p;
  LeftRows<kHead> keys;

  struct Factors {
    float key;
    StepFactors of_step;
    __device__ __forceinline__ Factors(const BackwardParams& p, const volatile UnitRecord& u,
                                       const Walk& walk)
        : key(factor_of_keys(p, u, p.key_factors)), of_step(p, u, walk) {}
  };

  __device__ __forceinline__ void load_keys() { keys.load(at(&Shared::key)); }
  __device__ __forceinline__ void issue_scores(const volatile UnitRecord& u, float (&x)[kScores],
                                               uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::query_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kProbabilityBarrier);
    ptx::wgmma_fence();
    keys.times_queries(x, at(&Shared::key), q_tile(slot));
  }

  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration,
                                       const Walk& walk, const Walk& next, Factors& factors,
                                       float (&x)[kScores], const StepDropped& none,
                                       Sums<kValue>& dv) {
    const uint32 slot = stage_of<kStages>(iteration);
    StepFactors& of_step = factors.of_step;
    const ScaledStep known{{p, u, u.head + walk.head, walk.m0, 0},
                           p.scale_log2 * factors.key * of_step.query};
    uint32 packed[kScores / 2];  // of a slope
    const RowNumbers minus_lse(at(&Shared::minus_lse) + slot * kNumberBytes);
    score_to_probability(p, u, x, packed, minus_lse, 0, {}, known, none);
    send_probability(x, iteration);

    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), walk.m0, kProbabilityBarrier);
    uint32 parts[2][kScores / 2];
    const float of_tile = of_step.dout * (1 / kProbabilityRange);
    float factor[2] = {of_tile, of_tile};
    // Ahead of the branch, which what is behind it would have to wait for.
    split_scores(x, kProbabilityRange, parts);
    if (is_by_rows(of_step)) {
      times_rows(p, u, walk.head, walk.m0, x);
      fit_keys(x, factor);
      split_scores(x, 1.f, parts);
    }
    dv.template accumulate<!kLast>(parts, dout_tile(slot), factor, [&] {
      issue_scores(u, x, iteration + 1, next.m0);
      of_step = {p, u, next};
    });
    release(at(&Shared::dout_empty, slot));
    if constexpr (!kLast) {
      release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
      ptx::pin(x);
    }
  }
};

struct GradientSteps {
  const BackwardParams& p;
  LeftRows<kValue> values;

  struct Factors {
    float key, value;
    StepFactors of_step;
    __device__ __forceinline__ Factors(const BackwardParams& p, const volatile UnitRecord& u,
                                       const Walk& walk)
        : key(factor_of_keys(p, u, p.key_factors)),
          value(factor_of_keys(p, u, p.value_factors)),
          of_step(p, u, walk) {}
  };

  __device__ __forceinline__ void load_values() { values.load(at(&Shared::value)); }
  __device__ __forceinline__ void issue_dp(const volatile UnitRecord& u, float (&dp)[kScores],
                                           uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), m0, kGradientBarrier);
    ptx::wgmma_fence();
    values.times_queries(dp, at(&Shared::value), dout_tile(slot));
  }

  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration,
                                       const Walk& walk, const Walk& next, Factors& factors,
                                       float (&dp)[kScores], Sums<kHead>& dk) {
    const uint32 slot = stage_of<kStages>(iteration);
    const uint32 minus_delta = at(&Shared::minus_delta) + slot * kNumberBytes + threadIdx.x % 4 * 8;
    StepFactors& of_step = factors.of_step;
    const bool by_rows = is_by_rows(of_step);
    const float factor = by_rows ? factors.value : factors.value * of_step.dout;
    if (by_rows) times_rows(p, u, walk.head, walk.m0, dp);
    ptx::barrier_wait(at(&Shared::probability_full), parity_of<1>(iteration));
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const Received of(j, minus_delta);
      const float4& x = of.probability;
      const float2& d = of.minus_delta;
      dp[4 * j] = x.x * fmaf(dp[4 * j], factor, d.x);
      dp[4 * j + 1] = x.y * fmaf(dp[4 * j + 1], factor, d.y);
      dp[4 * j + 2] = x.z * fmaf(dp[4 * j + 2], factor, d.x);
      dp[4 * j + 3] = x.w * fmaf(dp[4 * j + 3], factor, d.y);
    }
    release(at(&Shared::probability_empty));
    release(at(&Shared::dout_empty, slot));

    const uint32 buffer = stage_of<kScoreStages>(iteration);
    const uint32 empty = at(&Shared::gradient_empty, buffer);
    const uint32 parity = parity_of<kScoreStages>(iteration) ^ 1;
    uint32 parts[2][kScores / 2];
    const float range = GradientRange::fit(dp, iteration), of_tile = inverse(range);
    float back[2] = {of_tile, of_tile};
    split_scores(dp, range, parts);
    ptx::barrier_wait(empty, parity);
    if (by_rows) GradientRange::split_by_rows(dp, buffer, parts);
    const uint32 to = at(&Shared::gradient) + buffer * kGradientBytes;
    store_gradient(parts[0], to, 0);
    store_gradient(parts[1], to + kGradientPlane, 0);
    GradientRange::store(buffer, by_rows ? -factors.key : back[0] * factors.key);
    release(at(&Shared::gradient_full, buffer));
    if (by_rows) {
      fit_keys(dp, back);
      split_scores(dp, 1.f, parts);
    }
    for (float& x : back) x *= of_step.query;
    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), walk.m0, kGradientBarrier);
    dk.template accumulate<!kLast>(parts, q_tile(slot), back, [&] {
      issue_dp(u, dp, iteration + 1, next.m0);
      of_step = {p, u, next};
    });
    release(at(&Shared::query_empty, slot));
    if constexpr (!kLast) ptx::pin(dp);
  }
};

struct QuerySteps {
  float factor[2];  // what brings a thread's two rows of dQ back

  __device__ __forceinline__ void begin(uint32 buffer) { GradientRange::load(buffer, factor); }
  __device__ __forceinline__ void issue(float (&dq)[32], ptx::Descriptor gradient,
                                        ptx::Descriptor key, int box) const {
    constexpr int kSteps = kKeys / 16;
#pragma unroll
    for (int i = 0; i < kProducts * kSteps; ++i) {
      const Planes planes = planes_of(i / kSteps);
      const uint32 keys = i % kSteps * 2048;
      ptx::wgmma_ss<Float16, 1, 1>(dq, gradient.at(planes.left * kGradientPlane + keys),
                                   key.at((planes.right * kHeadBoxes + box) * kBoxK + keys), i > 0);
    }
  }
  __device__ __forceinline__ void finish(float (&dq)[32]) const {
    ptx::pin(dq);
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] *= factor[fragment::row(i)];
  }
};

}  // namespace backward
