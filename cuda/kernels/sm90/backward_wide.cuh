// The main backward kernel for head or value dims above 128, and for float32 in halves up to there
// (cuda/ampere.md): dk, dv and the float32 sum of dq.
//
// A persistent CTA takes blocks of 64 keys. One warpgroup cannot hold both dK and dV, so the work
// is a pipeline of roles, one warpgroup each:
//   load         one warp fetches units, K, V, and per query block Q, -lse, dO, -delta by TMA
//   probability  S^T = K Q^T, P;            dV += P^T dO, P in registers
//   gradient     dP^T = V dO^T, dS;         dK += dS^T Q, dS in registers
//   query        dQ = dS K from shared memory, added to the float32 sum by red.v4
// P goes to the gradient role in float32 and in fragment order, dS^T to the query role in a ring of
// buffers. Each product of a role is issued beside the first product of its next query block.
#pragma once

#include "backward_exact.cuh"
#include "sm90/backward_halves.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/backward_wide_shared.cuh"

namespace backward {

// ---- probability --------------------------------------------------------------------------------

struct Probability {
  const BackwardParams& p;
  LeftRows<kHead, kHalves> keys;

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
                                       const Walk& walk, const Walk& next, float key_factor,
                                       StepFactors& factors, float (&x)[kScores],
                                       StepDropped& dropped, Sums<kValue>& dv) {
    const uint32 slot = stage_of<kStages>(iteration);
    Step known(p, u, u.head + walk.head, walk.m0, 0);
    if constexpr (kHalves) known.set_scale(p.scale_log2 * key_factor * factors.query);
    uint32 probability[kScores / 2];
    const RowNumbers minus_lse(at(&Shared::minus_lse) + slot * kNumberBytes);
    score_to_probability(p, u, x, probability, minus_lse, 0, {}, known, dropped);
    if constexpr (!kHasSlope && !kHalves) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        probability[i] = pack_probability(x[2 * i], x[2 * i + 1]);
      }
    }
    ptx::barrier_wait(at(&Shared::probability_empty), parity_of<1>(iteration) ^ 1);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      ptx::store_shared_x4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16,
                           __float_as_uint(x[4 * j]), __float_as_uint(x[4 * j + 1]),
                           __float_as_uint(x[4 * j + 2]), __float_as_uint(x[4 * j + 3]));
    }
    release(at(&Shared::probability_full));

    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), walk.m0, kProbabilityBarrier);
    if constexpr (kHalves) {
      uint32 parts[2][kScores / 2];
      const float of_tile = factors.dout * (1 / kProbabilityRange);
      float factor[2] = {of_tile, of_tile};
      // Ahead of the branch, which what is behind it would have to wait for.
      split_scores(x, kProbabilityRange, parts);
      if (is_by_rows(factors)) {
        times_rows(p, u, walk.head, walk.m0, x);
        fit_keys(x, factor);
        split_scores(x, 1.f, parts);
      }
      dv.template accumulate<!kLast>(parts, dout_tile(slot), factor, [&] {
        issue_scores(u, x, iteration + 1, next.m0);
        factors = {p, u, next};
      });
      release(at(&Shared::dout_empty, slot));
      if constexpr (!kLast) {
        release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
        ptx::pin(x);
      }
      return;
    }
    dv.accumulate(probability, dout_tile(slot));
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(at(&Shared::dout_empty, slot));
    } else {
      issue_scores(u, x, iteration + 1, next.m0);
      draw_next(p, u, 0, walk, dropped);
      ptx::wgmma_wait<1>();
      release(at(&Shared::dout_empty, slot));
      ptx::wgmma_wait<0>();
      release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
      ptx::pin(x);
    }
    dv.pin();
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      Sums<kValue> dv;
      dv.clear();
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kHeadTile>(u, at(&Shared::key), 0);
          ptx::named_barrier_sync(kProbabilityBarrier, 128);
        }
        keys.load(at(&Shared::key));
        float x[kScores];
        Walk walk(p, u);
        StepDropped dropped;
        const float key_factor = factor_of_keys(p, u, p.key_factors);
        StepFactors factors(p, u, walk);
        issue_scores(u, x, iteration, walk.m0);
        draw_dropped(p, u, 0, walk, dropped);
        ptx::wgmma_wait<0>();
        release(at(&Shared::query_empty, stage_of<kStages>(iteration)));
        ptx::pin(x);
        while (walk.left > 1) {
          const Walk now = walk;
          walk.next(p, u);
          prefetch_bias(p, u, walk, 0);
          step<false>(u, iteration, now, walk, key_factor, factors, x, dropped, dv);
          ++iteration;
        }
        release(at(&Shared::key_empty));
        step<true>(u, iteration, walk, walk, key_factor, factors, x, dropped, dv);
        ++iteration;
      } else {
        release(at(&Shared::key_empty));
      }
      mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 1, dv.is_finite(),
                is_share(p, u));
      store_rows<kValueDim>(p, p.dvalue_data, dv, value_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- gradient -----------------------------------------------------------------------------------

struct Gradient {
  const BackwardParams& p;
  LeftRows<kValue, kHalves> values;

  struct UnitFactors {
    float key, value;
  };

  __device__ __forceinline__ void issue_dp(const volatile UnitRecord& u, float (&dp)[kScores],
                                           uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), m0, kGradientBarrier);
    ptx::wgmma_fence();
    values.times_queries(dp, at(&Shared::value), dout_tile(slot));
  }

  // Takes dP^T of this query block to dK and, unless it is the unit's last, computes the next dP^T.
  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration, int m0,
                                       int head, const Walk& next, const UnitFactors& unit,
                                       StepFactors& factors, float (&dp)[kScores],
                                       Sums<kHead>& dk) {
    const uint32 slot = stage_of<kStages>(iteration);
    const uint32 minus_delta = at(&Shared::minus_delta) + slot * kNumberBytes + threadIdx.x % 4 * 8;
    const bool by_rows = is_by_rows(factors);
    const float factor = by_rows ? unit.value : unit.value * factors.dout;
    if (by_rows) times_rows(p, u, head, m0, dp);
    uint32 gradient[kScores / 2];
    ptx::barrier_wait(at(&Shared::probability_full), parity_of<1>(iteration));
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float4 x =
          ptx::load_shared_f4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16);
      const float2 d = ptx::load_shared_f2(minus_delta + 8 * j * 4);
      if constexpr (kHalves) {
        dp[4 * j] = x.x * fmaf(dp[4 * j], factor, d.x);
        dp[4 * j + 1] = x.y * fmaf(dp[4 * j + 1], factor, d.y);
        dp[4 * j + 2] = x.z * fmaf(dp[4 * j + 2], factor, d.x);
        dp[4 * j + 3] = x.w * fmaf(dp[4 * j + 3], factor, d.y);
        continue;
      }
      gradient[2 * j] = Multiplied::pack(score_gradient(x.x, dp[4 * j], d.x),
                                         score_gradient(x.y, dp[4 * j + 1], d.y));
      gradient[2 * j + 1] = Multiplied::pack(score_gradient(x.z, dp[4 * j + 2], d.x),
                                             score_gradient(x.w, dp[4 * j + 3], d.y));
    }
    release(at(&Shared::probability_empty));
    release(at(&Shared::dout_empty, slot));

    const uint32 buffer = stage_of<kScoreStages>(iteration);
    if constexpr (kHalves) {
      const uint32 empty = at(&Shared::gradient_empty, buffer);
      const uint32 parity = parity_of<kScoreStages>(iteration) ^ 1;
      uint32 parts[2][kScores / 2];
      const float range = StepRange::fit(dp, iteration), of_tile = inverse(range);
      float back[2] = {of_tile, of_tile};
      split_scores(dp, range, parts);
      ptx::barrier_wait(empty, parity);
      if (by_rows) StepRange::split_by_rows(dp, buffer, parts);
      const uint32 to = at(&Shared::gradient) + buffer * kGradientBytes;
      store_gradient(parts[0], to, 0);
      store_gradient(parts[1], to + kGradientPlane, 0);
      StepRange::store(buffer, by_rows ? -unit.key : back[0] * unit.key);
      release(at(&Shared::gradient_full, buffer));
      if (by_rows) {
        fit_keys(dp, back);
        split_scores(dp, 1.f, parts);
      }
      for (float& x : back) x *= factors.query;
      hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kGradientBarrier);
      dk.template accumulate<!kLast>(parts, q_tile(slot), back, [&] {
        issue_dp(u, dp, iteration + 1, next.m0);
        factors = {p, u, next};
      });
      release(at(&Shared::query_empty, slot));
      if constexpr (!kLast) ptx::pin(dp);
      return;
    }
    ptx::barrier_wait(at(&Shared::gradient_empty, buffer), parity_of<kScoreStages>(iteration) ^ 1);
    store_gradient(gradient, at(&Shared::gradient) + buffer * kGradientBytes, 0);
    release(at(&Shared::gradient_full, buffer));

    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kGradientBarrier);
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

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      Sums<kHead> dk;
      dk.clear();
      ptx::barrier_wait(at(&Shared::value_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kValueTile>(u, at(&Shared::value), 0);
          ptx::named_barrier_sync(kGradientBarrier, 128);
        }
        values.load(at(&Shared::value));
        float dp[kScores];
        Walk walk(p, u);
        const UnitFactors unit{factor_of_keys(p, u, p.key_factors),
                               factor_of_keys(p, u, p.value_factors)};
        StepFactors factors(p, u, walk);
        issue_dp(u, dp, iteration, walk.m0);
        ptx::wgmma_wait<0>();
        ptx::pin(dp);
        while (walk.left > 1) {
          const int m0 = walk.m0, head = walk.head;
          walk.next(p, u);
          step<false>(u, iteration, m0, head, walk, unit, factors, dp, dk);
          ++iteration;
        }
        release(at(&Shared::value_empty));
        step<true>(u, iteration, walk.m0, walk.head, walk, unit, factors, dp, dk);
        ++iteration;
      } else {
        release(at(&Shared::value_empty));
      }
      mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 0, dk.is_finite(),
                is_share(p, u));
      store_rows<kHeadDim>(p, p.dkey_data, dk, query_key_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- query --------------------------------------------------------------------------------------

struct Query {
  const BackwardParams& p;

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        constexpr int kSteps = kKeys / 16;
        const uint32 buffer = stage_of<kScoreStages>(iteration);
        const ptx::Descriptor a = ptx::descriptor(at(&Shared::gradient) + buffer * kGradientBytes,
                                                  0, kGradientBytes, 1024);
        const ptx::Descriptor b = ptx::descriptor(at(&Shared::key), 0, kBoxK, 1024);
        const bool first = adds_first(p, u, walk.m0);
        Turn turn = Turn::first();
        ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
        float factor[2];
        StepRange::load(buffer, factor);
#pragma unroll
        for (int box = 0; box < kHeadBoxes; ++box) {
          float dq[32];
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kProducts<kParts> * kSteps; ++i) {
            const Planes planes = planes_of<kParts>(i / kSteps);
            const uint32 keys = i % kSteps * 2048;
            ptx::wgmma_ss<Element, 1, 1>(dq, a.at(planes.left * kGradientPlane + keys),
                                         b.at((planes.right * kHeadBoxes + box) * kBoxK + keys),
                                         i > 0);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          ptx::pin(dq);
          if constexpr (kHalves) {
#pragma unroll
            for (int i = 0; i < 32; ++i) dq[i] *= factor[fragment::row(i)];
          }
          if (box + 1 == kHeadBoxes) release(at(&Shared::gradient_empty, buffer));
          if (box == 0) turn = take_turn(iteration, 0, first);
          add_fragments(SumTile(p, walk.sum(), box), 0, dq, turn);
        }
        end_turn(iteration, 0);
        ++iteration;
      }
      release(at(&Shared::key_empty));
      return_unit(received);
      ++received;
    }
  }
};

__device__ __forceinline__ void main_kernel(const BackwardParams& p) {
  set_up();
  const int role = ptx::warp_index() / 4;
  if (role == 0) {
    ptx::register_decrease<kLoadRegisters>();
    if (kCompact && kFillsBeside && threadIdx.x < 32) {
      fill_numbers(32);
      __syncwarp();
    }
    feed(p);
  } else if (role == 1) {
    ptx::register_decrease<kQueryRegisters>();
    Query{p}.run();
  } else if (role == 2) {
    ptx::register_increase<kScoreRegisters>();
    Probability{p, {}}.run();
  } else {
    ptx::register_increase<kScoreRegisters>();
    Gradient{p, {}}.run();
  }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::kThreads, 1)
    flash_backward(const __grid_constant__ BackwardParams p) {
  if (is_left_to_other(p)) return;
  backward::main_kernel(p);
}
