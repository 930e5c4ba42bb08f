// The roles of the wide backward kernel, a warpgroup each, and the kernel: what they do in a step
// is a program's ProbabilitySteps, GradientSteps and QuerySteps (backward_wide_steps.cuh).
#pragma once

#include "sm90/backward_pairs.cuh"

namespace backward {

// ---- probability --------------------------------------------------------------------------------

struct Probability : ProbabilitySteps {
  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      Sums<kValue> dv;
      dv.clear();
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kHeadTile>(u, at(&Shared::key), 0);
          ptx::named_barrier_sync(kProbabilityBarrier, 128);
        }
        if constexpr (kPairs) hide_unseen_keys_of_other(u);
        load_keys();
        float x[kScores];
        Walk walk(p, u);
        StepDropped dropped;
        Factors factors(p, u, walk);
        issue_scores(u, x, iteration, walk.m0);
        draw_dropped(p, u, 0, walk, dropped);
        ptx::wgmma_wait<0>();
        release(at(&Shared::query_empty, stage_of<kStages>(iteration)));
        ptx::pin(x);
        while (walk.left > 1) {
          const Walk now = walk;
          walk.next(p, u);
          prefetch_bias(p, u, walk, 0);
          step<false>(u, iteration, now, walk, factors, x, dropped, dv);
          ++iteration;
        }
        release(at(&Shared::key_empty));
        step<true>(u, iteration, walk, walk, factors, x, dropped, dv);
        ++iteration;
      } else {
        release(at(&Shared::key_empty));
      }
      if constexpr (!kSharesKeys) {
        mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 1, dv.is_finite(),
                  is_share(p, u));
      }
      store_rows<kValueDim>(p, p.dvalue_data, kHeadBoxes, dv, value_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- gradient -----------------------------------------------------------------------------------

struct Gradient : GradientSteps {
  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      Sums<kHead> dk;
      dk.clear();
      ptx::barrier_wait(at(&Shared::value_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kValueTile>(u, at(&Shared::value), 0);
          ptx::named_barrier_sync(kGradientBarrier, 128);
        }
        load_values();
        float dp[kScores];
        Walk walk(p, u);
        Factors factors(p, u, walk);
        issue_dp(u, dp, iteration, walk.m0);
        ptx::wgmma_wait<0>();
        ptx::pin(dp);
        while (walk.left > 1) {
          const Walk now = walk;
          walk.next(p, u);
          step<false>(u, iteration, now, walk, factors, dp, dk);
          ++iteration;
        }
        release(at(&Shared::value_empty));
        step<true>(u, iteration, walk, walk, factors, dp, dk);
        ++iteration;
      } else {
        release(at(&Shared::value_empty));
      }
      if constexpr (!kSharesKeys) {
        mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 0, dk.is_finite(),
                  is_share(p, u));
      }
      store_rows<kHeadDim>(p, p.dkey_data, 0, dk, query_key_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- query --------------------------------------------------------------------------------------

struct Query : QuerySteps {
  const BackwardParams& p;

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        const uint32 buffer = stage_of<kScoreStages>(iteration);
        const ptx::Descriptor a =
            descriptor(at(&Shared::gradient) + buffer * kGradientBytes, kGradientBytes);
        const ptx::Descriptor b = descriptor(at(&Shared::key), kBoxK);
        const bool first = adds_first(p, u, walk.m0);
        Turn turn = Turn::first();
        ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
        begin(buffer);
#pragma unroll
        for (int box = 0; box < kHeadBoxes; ++box) {
          float dq[32];
          ptx::wgmma_fence();
          issue(dq, a, b, box);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          finish(dq);
          if (box + 1 == kHeadBoxes) release(at(&Shared::gradient_empty, buffer));
          if constexpr (kStoresDq) {
            store_dq(p, u, walk.sum(), box, 0, dq);
            continue;
          }
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
  ptx::wait_for_the_kernel_ahead();
  ptx::let_the_next_kernel_start();
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
    if constexpr (kPairs) {
      PairedQuery{p}.run();
    } else {
      Query{{}, p}.run();
    }
  } else if (role == 2) {
    ptx::register_increase<kScoreRegisters>();
    Probability{p}.run();
  } else {
    ptx::register_increase<kScoreRegisters>();
    Gradient{p}.run();
  }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::kThreads, 1)
    flash_backward(const __grid_constant__ BackwardParams p) {
  if (is_left_to_other(p)) return;
  backward::main_kernel(p);
}
