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

namespace backward {

// Zeros for the shares of a unit.
__device__ __forceinline__ void clear_shared(const BackwardParams& p, int index) {
  const Unit u = unit_at(p, index);
  const int64 row = key_row(p, u.batch, u.key0, u.kv_head);
  const int count = min(kKeys, p.kv_len - u.key0);
  const auto clear = [&](void* array, int dim) {
    for (int i = threadIdx.x; i < count * dim; i += kPrepareThreads) {
      const int64 at = row + static_cast<int64>(i / dim) * p.kv_heads;
      static_cast<float*>(array)[at * dim + i % dim] = 0.f;
    }
  };
  clear(p.dkey_data, kHeadDim);
  clear(p.dvalue_data, kValueDim);
  constexpr int kMarks = kKeys / kMarkedRows * 2;
  const int thread = threadIdx.x;
  if (thread < kMarks && (!kCompact || u.key0 + thread / 2 * kMarkedRows < p.kv_len)) {
    p.marks[first_mark(p, u.batch, u.kv_head, u.key0) * 2 + thread] = 0;
  }
}

}  // namespace backward

// With kHalves in the place of the next one; the last CTAs clear a unit each that is shared.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ BackwardParams p) {
  if constexpr (kHalves) {
    backward::split_and_prepare<true>(p, halves::kOneSum, halves::kWideOfGradients, [&](int i) {
      backward::clear_shared(p, backward::whole_units(p) + i);
    });
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
