// The kernels beside the main one of the backward pass, a program of their own: NVRTC compiles both
// at once. What goes ahead, what makes dq of its sum, and the gradient of a bias. The constants are
// those of backward.cuh.
#pragma once

#include "backward_finish.cuh"
#include "backward_prepare.cuh"
#include "cuda/runtime/families/sm90_params.h"
#include "sm90/backward_bias.cuh"

// With a mask a kernel goes ahead of all, see mask.cuh.
extern "C" __global__ void __launch_bounds__(mask::kThreads, mask::kBackwardResident)
    mask_plan(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasMask) mask::plan_by_key<backward::kQueries, backward::kKeys>(p);
}

// With kHalves in the place of the next one.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ BackwardParams p) {
  if constexpr (kHalves) {
    backward::split_and_prepare<true>(p, halves::kOneSum, halves::kWideOfGradients);
  }
}

extern "C" __global__ void __launch_bounds__(backward::kPrepareThreads)
    flash_backward_prepare(const __grid_constant__ BackwardParams p) {
  backward::prepare_alone(p);
}

// Six blocks on a multiprocessor: 80 registers, which the recomputation needs.
extern "C" __global__ void __launch_bounds__(backward::kFinishThreads, 6)
    flash_backward_finish(const __grid_constant__ BackwardParams p) {
  backward::finish(p);
}
