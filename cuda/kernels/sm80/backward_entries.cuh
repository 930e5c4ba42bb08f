// The kernels beside the main one of the backward pass, a program of their own: NVRTC compiles both
// at once. Its constants are those of backward.cuh.
#pragma once

#include "backward_finish.cuh"
#include "backward_prepare.cuh"
#include "mask_plan.cuh"
#include "sm80/backward_bias.cuh"

extern "C" __global__ void __launch_bounds__(mask::kThreads, kMaskResident)
    mask_plan(const __grid_constant__ Sm80BackwardParams p) {
  if constexpr (kHasMask) mask::plan_by_key<backward::kQueries, backward::kKeys>(p);
}

// With kHalves in the place of the next one.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ Sm80BackwardParams p) {
  if constexpr (kHalves)
    backward::split_and_prepare<false>(p, kSecondHalf, halves::kWide, [](int) {});
}

// Eight blocks on a multiprocessor: left to itself ptxas takes 48 registers, and spills 32 bytes
// for rows of odd dims.
extern "C" __global__ void __launch_bounds__(backward::kPrepareThreads, 8)
    flash_backward_prepare(const __grid_constant__ Sm80BackwardParams p) {
  backward::prepare_alone(p);
}

extern "C" __global__ void __launch_bounds__(backward::kFinishThreads, kFinishResident)
    flash_backward_finish(const __grid_constant__ Sm80BackwardParams p) {
  backward::finish(p);
}
