// Decoding for sm_80 and later: cp.async brings what is attended to. Read decode_cta.cuh next,
// which lists the constants.
#pragma once

#include "decode_cta.cuh"
#include "decode_merge.cuh"
#include "sm80/decode_load.cuh"

extern "C" __global__ void __launch_bounds__(decode::kThreads, kResident)
    flash_decode(const __grid_constant__ DecodeParams p) {
  decode::attend<decode::Loader>(p);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads)
    flash_decode_merge(const __grid_constant__ DecodeParams p) {
  decode::merge(p);
}
