// The PTX of mbarriers that every architecture from sm_80 on has. How a thread waits for one is
// the architecture's: sm90/ptx_sm90.cuh, sm80/ptx_sm80.cuh.
#pragma once

#include "arrivals.cuh"
#include "numbers.cuh"

namespace ptx {

// `arrivals` counts single threads.
__device__ __forceinline__ void barrier_init_lanes(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// `arrivals` counts warps.
__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  barrier_init_lanes(barrier, kEveryLaneArrives ? 32 * arrivals : arrivals);
}
// The calling thread's own arrival.
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  if constexpr (kEveryLaneArrives) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 32;" ::"r"(barrier) : "memory");
  } else {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
}
// The same for its warp, whose lanes are together and done: lane 0, or all if kEveryLaneArrives.
__device__ __forceinline__ void lane_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Whether the phase of this parity has completed. (try_wait, of sm_90, would suspend
// the thread for a while.)
__device__ __forceinline__ bool barrier_test(uint32 barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace ptx
