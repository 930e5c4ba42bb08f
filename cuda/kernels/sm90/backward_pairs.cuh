// With kPairs: two CTAs of a cluster have neighbouring blocks of keys and walk the same query
// blocks. Each makes half of the columns of dq for the keys of both, so that the sum of dq in
// memory is added to half as often.
//
// L2 adds what CTAs of 64 keys send it at 0.9 of a sector a clock and slice, which limits the wide
// kernel without pairs. Each CTA copies its dS to the other one, and loads, beside its own keys,
// half of the columns of the other one's.
#pragma once

#include "sm90/backward_wide_shared.cuh"

namespace backward {

// The query role: dq of the columns of this CTA.
struct PairedQuery {
  static_assert(!kPairs || kHeadBoxes > 1);
  // Boxes of 64 columns that a CTA has whole; of an odd number each has half of the middle one.
  static constexpr int kWhole = kHeadBoxes / 2;
  static constexpr bool kHasHalf = kHeadBoxes % 2 != 0;

  __device__ __forceinline__ explicit PairedQuery(const BackwardParams& p) : p(p) {}

  const BackwardParams& p;

  static __device__ __forceinline__ uint32 gradient_of_other(uint32 buffer) {
    return at(&Shared::gradient) + (kScoreStages + buffer) * kGradientBytes;
  }

  // dq (+)= dS[64 queries x 64 keys] K[64 keys x columns]; `keys` is where these columns start. One
  // commit group.
  template <int kCount>
  static __device__ __forceinline__ void issue(float (&dq)[kCount], uint32 gradient, uint32 keys,
                                               bool accumulate) {
    const ptx::Descriptor a = descriptor(gradient, kGradientBytes), b = descriptor(keys, kBoxK);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::wgmma_ss<Element, 1, 1>(dq, a.at(i * 2048), b.at(i * 2048), accumulate || i > 0);
    }
    ptx::wgmma_commit();
  }

  // Copies dS to the other CTA.
  __device__ __forceinline__ void send(uint32 buffer) {
    const uint32 full = at(&Shared::other_full, buffer);
    ptx::barrier_arrive_expect(full, kGradientBytes);
    ptx::bulk_send(in_other(gradient_of_other(buffer)),
                   at(&Shared::gradient) + buffer * kGradientBytes, kGradientBytes, in_other(full));
  }

  // Columns of dq: `offset` bytes behind the first of the boxes that this CTA reads of both keys.
  template <int kCount>
  __device__ __forceinline__ void make(float (&dq)[kCount], uint32 iteration, uint32 offset) {
    const uint32 buffer = stage_of<kScoreStages>(iteration);
    const uint32 own_keys = at(&Shared::key) + pair_rank() * (kHeadBoxes / 2) * kBoxK;
    issue(dq, at(&Shared::gradient) + buffer * kGradientBytes, own_keys + offset, false);
    ptx::barrier_wait(at(&Shared::other_full, buffer), parity_of<kScoreStages>(iteration));
    issue(dq, gradient_of_other(buffer), at(&Shared::key) + kHeadBoxes * kBoxK + offset, true);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
  }
  // The other CTA's dS has been read, and so has what it was copied from.
  static __device__ __forceinline__ void release_gradient(uint32 iteration) {
    const uint32 empty = at(&Shared::gradient_empty, stage_of<kScoreStages>(iteration));
    release(empty);
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::arrive_in_cluster(in_other(empty));
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        const uint32 buffer = stage_of<kScoreStages>(iteration);
        ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
        if (threadIdx.x % 128 == 0) send(buffer);
        __syncwarp();
        const bool upper = pair_rank() != 0;
        if constexpr (kHasHalf) {
          float dq[16];
          make(dq, iteration, upper ? kBoxRowBytes / 2 : kWhole * kBoxK);
          add_fragments(SumTile(p, walk.sum(), kWhole), upper ? 4 : 0, dq, Turn::later());
        }
#pragma unroll
        for (int i = 0; i < kWhole; ++i) {
          float dq[32];
          make(dq, iteration, (kHasHalf && upper ? kBoxK : 0) + i * kBoxK);
          if (i + 1 == kWhole) release_gradient(iteration);
          add_fragments(SumTile(p, walk.sum(), upper ? kHeadBoxes - kWhole + i : i), 0, dq,
                        Turn::later());
        }
        ++iteration;
      }
      release(at(&Shared::key_empty));
      return_unit(received);
      ++received;
    }
    // A CTA's shared memory stays until the other one has arrived there for the last time.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
};

}  // namespace backward
