// The kernels beside the main one of the backward pass, a program of their own: NVRTC compiles both
// at once. What goes ahead, what makes dq of its sum, and the gradient of a bias. The constants are
// those of backward.cuh.
#pragma once

#include "backward_finish.cuh"
#include "backward_prepare.cuh"
#include "mask_plan.cuh"
#include "sm90/backward_bias.cuh"
#include "sm90/backward_walk.cuh"

// With a mask a kernel goes ahead of all, see mask_plan.cuh.
extern "C" __global__ void __launch_bounds__(mask::kThreads, kMaskResident)
    mask_plan(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasMask) mask::plan_by_key<backward::kQueries, backward::kKeys>(p);
}

extern "C" __global__ void __launch_bounds__(backward::kPrepareThreads)
    flash_backward_prepare(const __grid_constant__ BackwardParams p) {
  ptx::let_the_next_kernel_start();
  backward::prepare_alone(p);
}

extern "C" __global__ void __launch_bounds__(backward::kFinishThreads, kFinishResident)
    flash_backward_finish(const __grid_constant__ BackwardParams p) {
  ptx::wait_for_the_kernel_ahead();
  backward::finish(p);
}
