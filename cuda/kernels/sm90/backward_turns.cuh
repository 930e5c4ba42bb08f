// Sums of dq: how accumulators are added, and in which order in deterministic mode.
#pragma once

#include "sm90/backward_units.cuh"

namespace backward {

// Deterministic sums: the units of a head add to a query block in ascending order of keys, and the
// first stores. Two warps keep the order beside the warpgroups that add: this one waits until the
// units before have added,
__device__ __forceinline__ int turn_of(const BackwardParams& p, const volatile UnitRecord& u,
                                       int m0) {
  // The first block of keys that these queries see.
  const int first = kWindowLeft ? max(m0 + u.offset - p.window_left, 0) / kKeys : 0;
  return u.key0 / kKeys - first;
}
__device__ __forceinline__ void wait_turns(const BackwardParams& p) {
  const int part = threadIdx.x % 32;
  uint32 received = 0, turn = part;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    for (Walk walk(u); walk.left > 0; walk.next(p, u)) {
      const int rank = turn_of(p, u, walk.m0);
      bool waits = part < kTurnParts;
      if (waits) {
        barrier_wait(barrier_at(kTurnEmpty + slot_of<kTurns>(turn)), parity_of<kTurns>(turn) ^ 1);
      }
      while (__any_sync(0xffffffffu, waits)) {
        if (waits && load_acquire(p.turns + walk.block * kTurnParts + part) == rank) {
          barrier_arrive(barrier_at(kTurnFull + slot_of<kTurns>(turn)));
          waits = false;
        }
      }
      turn += kTurnParts;
    }
    return_unit(received);
    ++received;
  }
}

// and this one tells the next unit when this unit's additions are visible to it.
__device__ __forceinline__ void pass_turns(const BackwardParams& p) {
  const bool leader = threadIdx.x % 32 == 0;
  uint32 received = 0, turn = 0;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    for (Walk walk(u); walk.left > 0; walk.next(p, u)) {
      int* counters = p.turns + walk.block * kTurnParts;
      for (int part = 0; part < kTurnParts;) {
        const auto taken = [&](int i) {
          return barrier_at(kTurnTaken + slot_of<kTurns>(turn + i));
        };
        const auto parity = [&](int i) { return parity_of<kTurns>(turn + i); };
        barrier_wait(taken(part), parity(part));
        int end = part + 1;  // of those that one fence serves
        while (end < kTurnParts && uniform(barrier_test(taken(end), parity(end)))) ++end;
        if (leader) fence_gpu();
        for (; part < end; ++part) {
          if (leader) {
            add_relaxed(counters + part, 1);
            barrier_arrive(barrier_at(kTurnEmpty + slot_of<kTurns>(turn + part)));
          }
        }
      }
      turn += kTurnParts;
    }
    return_unit(received);
    ++received;
  }
}

// Adds a warpgroup's accumulators to the sum, in their own order; `first`: nothing is there yet.
template <int kCount>
__device__ __forceinline__ void add_fragments(float* sum, const float (&values)[kCount],
                                              bool first) {
  float* mine = sum + threadIdx.x % 128 * 4;
  if (kDeterministic && first) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      *reinterpret_cast<float4*>(mine + j * 512) =
          float4{values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]};
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      reduce_add_x4(mine + j * 512, values[4 * j], values[4 * j + 1], values[4 * j + 2],
                    values[4 * j + 3]);
    }
  }
}
__device__ __forceinline__ void take_turn(uint32 iteration, int part) {
  if constexpr (kDeterministic) {
    const uint32 turn = iteration * kTurnParts + part;
    barrier_wait(barrier_at(kTurnFull + slot_of<kTurns>(turn)), parity_of<kTurns>(turn));
  }
}
__device__ __forceinline__ void end_turn(uint32 iteration, int part) {
  if constexpr (kDeterministic) {
    warp_arrive(barrier_at(kTurnTaken + slot_of<kTurns>(iteration * kTurnParts + part)));
  }
}

}  // namespace backward
