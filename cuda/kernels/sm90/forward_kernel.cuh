// The main kernel of the forward pass: barriers, and who has which role.
#pragma once

#include "sm90/forward_load.cuh"
#include "sm90/forward_tails.cuh"
#include "sm90/forward_units.cuh"

extern "C" __global__ void __launch_bounds__(forward::kThreads, 1)
    flash_forward(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if (is_left_to_other(p)) return;
  extern __shared__ unsigned char dynamic_shared[];
  const int warp = ptx::warp_index();
  const int team = kTeams == 1 ? 0 : warp < 4 ? warp : (warp / 4 - 1) / kConsumers;
  Shared& shared = reinterpret_cast<Shared*>(dynamic_shared)[team];

  if (kTeams == 1 ? threadIdx.x == 0 : warp < kTeams && threadIdx.x % 32 == 0) {
    if constexpr (kTmaLoads) {
      ptx::prefetch_tensor_map(&p.query);
      if (!kFromPages || p.pages > 0) {  // else there are no maps
        ptx::prefetch_tensor_map(&p.key);
        ptx::prefetch_tensor_map(&p.value);
      }
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
        ptx::barrier_init(ptx::shared_address(&shared.query_full[stage][warpgroup]), kLoadWarps);
        ptx::barrier_init(ptx::shared_address(&shared.query_empty[stage][warpgroup]), 4);
      }
    }
    ptx::barrier_init(ptx::shared_address(&shared.asked), kWarpsOfConsumers);
    ptx::barrier_init(ptx::shared_address(&shared.finished), kWarpsOfConsumers);
    for (int& slot : shared.repeats) slot = 0;
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(ptx::shared_address(&shared.key_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.key_empty[stage]), kWarpsOfConsumers);
      ptx::barrier_init(ptx::shared_address(&shared.value_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.value_empty[stage]), kWarpsOfConsumers);
    }
    if constexpr (kTails) init_barriers(shared.tails);
    ptx::barrier_init_fence();
  }
  if constexpr (kSumsByProduct) shared.write_sum_columns();
  __syncthreads();

  if (warp < 4) {
    ptx::register_decrease<kProducerRegisters>();
    if (warp < (kTeams == 1 ? kLoadWarps : kTeams)) {
      Producer producer{p, shared};
      producer.run();
    } else if constexpr (kTails) {
      if (warp == 1) TailLoader<TailBuffers<kTails>>{p, shared.tails}.run();
    }
  } else if (kTails && warp / 4 > kConsumers) {
    if constexpr (kTails) {
      ptx::register_decrease<kTailRegisters>();
      TailWarpgroup<Element, TailBuffers<kTails>>{p, shared.tails}.run();
    }
  } else {
    ptx::register_increase<kConsumerRegisters>();
    // A brace for each base down to WarpgroupState.
    const int warpgroup = warp / 4 - 1 - kConsumers * team;
    Consumer consumer{{{{{{}, {}, {}, {}, {}, {}, {}, p, shared, warpgroup}}}}};
    consumer.run();
  }
}
