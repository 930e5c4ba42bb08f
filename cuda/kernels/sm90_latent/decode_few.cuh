// Latent decoding for sm_90a, where packed rows meet up to 32 query rows: the kernels of
// sm90_latent/decode.cuh by mma.sync. Read latent_few.cuh next.
#pragma once

#include "sm90_latent/latent_few.cuh"
#include "sm90_latent/latent_merge.cuh"

extern "C" __global__ void __launch_bounds__(decode::kFewThreads, 1)
    flash_decode(const __grid_constant__ DecodeParams p) {
  using namespace decode;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  FewShared& shared = *reinterpret_cast<FewShared*>(dynamic_shared);
  // Lengths come while barriers are made.
  if (const int at = threadIdx.x % 32 * 32; !kFollows && at < p.batch)
    ptx::prefetch(p.lengths + at);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      ptx::barrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), kFewWarps);
    }
    ptx::barrier_init_fence();
  }
  const Share share(p);
  if constexpr (kFollows) ptx::wait_for_the_kernel_ahead();  // which finds lengths and pages
  const OwnLine line(p, share);
  __syncthreads();
  if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
  if (ptx::warp_index() == kFewWarps) {
    FewLoader{p, shared}.run(line, share);
    leave_units(p);
  } else {
    FewConsumer(p, shared).run(line, share);
  }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    flash_decode_merge(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  decode::merge_latent(p, *reinterpret_cast<decode::MergeShared*>(dynamic_shared));
}
