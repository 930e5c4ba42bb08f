// The PTX by which mbarriers follow cp.async, and how a thread waits for one without the try_wait
// of sm_90. Every architecture from sm_80 on has it.
#pragma once

#include "ptx_barriers.cuh"

namespace ptx {

// Waits until the phase of this parity has completed. A fresh barrier passes parity 1 at once.
__device__ __forceinline__ void barrier_poll(uint32 barrier, uint32 parity) {
  while (!barrier_test(barrier, parity)) {
  }
}

// The calling thread's arrival, when all of its copies so far are in shared memory.
__device__ __forceinline__ void copies_arrive(uint32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies 16 bytes past L1, or zeroes them, without a register for the choice.
__device__ __forceinline__ void copy_async_past_l1(uint32 destination, uint64 source, bool copies) {
  asm volatile(
      "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n}\n" ::"r"(destination),
      "l"(source), "r"(static_cast<uint32>(copies))
      : "memory");
}

}  // namespace ptx
