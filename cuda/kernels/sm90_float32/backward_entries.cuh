// The kernels beside sm90_float32/backward.cuh: those of any backward pass, and one that goes
// ahead.
#pragma once

#include "halves.cuh"
#include "sm90/backward_entries.cuh"

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

// In the place of flash_backward_prepare; the last CTAs clear a unit each that is shared.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ BackwardParams p) {
  backward::split_and_prepare<true>(p, halves::kOneSum, halves::kWideOfGradients, [&](int i) {
    backward::clear_shared(p, backward::whole_units(p) + i);
  });
}
