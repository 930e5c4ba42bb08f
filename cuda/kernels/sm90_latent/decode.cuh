// Latent decoding for sm_90a: many query rows, one kv head of 576 features, the first 512 of which
// are the values. What it computes is what sm90/decode.cuh does; here tensor cores are what it
// waits for, so products are wgmma. cuda/decode.md draws the schedule. Specialised by constants as
// sm90/decode.cuh is (decode_cta.cuh). Read latent_attend.cuh next.
#pragma once

#include "sm90_latent/latent_attend.cuh"
#include "sm90_latent/latent_load.cuh"
#include "sm90_latent/latent_merge.cuh"

extern "C" __global__ void __launch_bounds__(decode::kLatentThreads, 1)
    flash_decode(const __grid_constant__ DecodeParams p) {
  using namespace decode;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  LatentShared& shared = *reinterpret_cast<LatentShared*>(dynamic_shared);
  const int warp = ptx::warp_index();
  // Lengths come while barriers are made.
  if (const int at = threadIdx.x % 32 * 32; !kFollows && !kTakesPlaces && at < p.batch) {
    ptx::prefetch(p.lengths + at);
  }
  if (threadIdx.x == 0) {
    if (!kPackedRows && p.pages > 0 && p.page_size > 0) ptx::prefetch_tensor_map(&p.key);
    ptx::prefetch_tensor_map(&p.query_rows);
    for (int stage = 0; stage < 2; ++stage) {
      for (Barrier& box : shared.full[stage]) {
        ptx::barrier_init(ptx::shared_address(&box), kByThreads ? kLoaders : 1);
      }
      for (Barrier& half : shared.empty[stage]) ptx::barrier_init(ptx::shared_address(&half), 4);
    }
    ptx::barrier_init(ptx::shared_address(&shared.queries_full), kLoaders);
    ptx::barrier_init(ptx::shared_address(&shared.queries_empty), 8);
    if constexpr (kCluster > 1) ptx::barrier_init(ptx::shared_address(&shared.gathered), 1);
    ptx::barrier_init_fence();
  }
  const Share share(p);
  if constexpr (kFollows) ptx::wait_for_the_kernel_ahead();  // which finds lengths and pages
  const OwnLine line(p, share);
  __syncthreads();
  if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
  if (warp < 4) {
    ptx::register_decrease<kLoaderRegisters>();
    LatentLoader loader{p, share, shared, warp};
    loader.run(line);
    if (kCluster == 1 && warp == kLoaders - 1) leave_units(p);
  } else if (warp < 8) {
    ptx::register_increase<kConsumerRegisters>();
    LatentConsumer<0> consumer{p, share, shared};
    consumer.run(line);
  } else {
    ptx::register_increase<kConsumerRegisters>();
    LatentConsumer<1> consumer{p, share, shared};
    consumer.run(line);
  }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    flash_decode_merge(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  decode::merge_latent(p, *reinterpret_cast<decode::MergeShared*>(dynamic_shared));
}
