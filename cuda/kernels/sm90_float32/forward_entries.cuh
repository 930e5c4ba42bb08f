// The kernels beside sm90_float32/forward.cuh: those of any forward pass, and one that goes ahead.
#pragma once

#include "halves.cuh"
#include "sm90/forward_entries.cuh"

// A CTA for 64 rows of a head of queries, keys or values.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ ForwardParams p) {
  halves::Choice choice(blockIdx.x);
  // Products of wgmma have one sum. The second half of what is below 2^-16 of the largest has few
  // bits: of queries and keys that is lost in their logits, of values it would be the result's.
  halves::offer_inputs(p, choice, halves::kOneSum, halves::kWideOfOneSum);
  choice.split();
}
