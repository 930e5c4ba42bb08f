// The kernels beside the main one of either program of the backward pass, but for those of the
// gradient of a bias: what goes ahead, and what makes dq of its sum.
#pragma once

#include "backward_finish.cuh"
#include "backward_prepare.cuh"
#include "cuda/runtime/families/sm90_params.h"

// With a mask a kernel goes ahead of all, see mask.cuh.
extern "C" __global__ void __launch_bounds__(mask::kThreads, mask::kBackwardResident)
    mask_plan(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasMask) mask::plan_by_key<backward::kQueries, backward::kKeys>(p);
}

extern "C" __global__ void __launch_bounds__(backward::kPrepareThreads)
    flash_backward_prepare(const __grid_constant__ BackwardParams p) {
  backward::prepare(p);
}

// Six blocks on a multiprocessor: 80 registers, which the recomputation needs.
extern "C" __global__ void __launch_bounds__(backward::kFinishThreads, 6)
    flash_backward_finish(const __grid_constant__ BackwardParams p) {
  backward::finish(p);
}
