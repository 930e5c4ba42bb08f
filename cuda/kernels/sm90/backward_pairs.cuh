// With kPairs: two CTAs of a cluster have neighbouring blocks of keys, walk the same query blocks,
// and add their two parts of dq before the sum sees them.
//
// L2 adds what a CTA of 64 keys sends it at 0.9 of a sector a clock and slice, which is what limits
// the wide kernel. Each CTA keeps half of a box of dq, has the other one's part of it sent to its
// shared memory, and adds both: half the bytes.
#pragma once

#include "sm90/backward_wide_shared.cuh"

namespace backward {

static_assert(!kPairs || (kTmaLoads && !kDeterministic && !kCompact && !kRing && kParts == 1));

// The box of dq that both CTAs have computed, the `count`-th of this one. One warpgroup calls.
struct PairSum {
  static __device__ __forceinline__ int rank() { return blockIdx.x % 2; }
  static __device__ __forceinline__ uint32 of_other(uint32 address) {
    return ptx::address_in_cluster(address, rank() ^ 1);
  }
  __device__ __forceinline__ void add(const SumTile& sum, const float (&dq)[32], uint32 count) {
    const uint32 slot = stage_of<kPairSlots>(count), parity = parity_of<kPairSlots>(count);
    const uint32 full = at(&Shared::pair_full, slot), empty = at(&Shared::pair_empty, slot);
    const uint32 place =
        at(&WideShared::half_boxes) + slot * kHalfBoxBytes + threadIdx.x % 128 * 16;
    const bool upper = rank() != 0;  // which half is kept
    ptx::barrier_wait(empty, parity ^ 1);  // the other CTA has read what the slot held
    const uint32 there = of_other(place), full_there = of_other(full);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* low = dq + 4 * j;
      const float* high = dq + 16 + 4 * j;
      ptx::send(there + j * 2048,
                float4{upper ? low[0] : high[0], upper ? low[1] : high[1],
                       upper ? low[2] : high[2], upper ? low[3] : high[3]},
                full_there);
    }
    ptx::barrier_wait(full, parity);
    // The next use of the slot is expected before the other CTA hears that it is free.
    if (threadIdx.x % 128 == 0) ptx::barrier_arrive_expect(full, kHalfBoxBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* low = dq + 4 * j;
      const float* high = dq + 16 + 4 * j;
      const float4 other = ptx::load_shared_f4(place + j * 2048);
      sum.add(upper ? 4 + j : j, float4{(upper ? high[0] : low[0]) + other.x,
                                        (upper ? high[1] : low[1]) + other.y,
                                        (upper ? high[2] : low[2]) + other.z,
                                        (upper ? high[3] : low[3]) + other.w});
    }
    __syncwarp();
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::arrive_in_cluster(of_other(empty));
  }
  // A CTA's shared memory stays until the other one has sent to it for the last time.
  static __device__ __forceinline__ void end() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
};

}  // namespace backward
