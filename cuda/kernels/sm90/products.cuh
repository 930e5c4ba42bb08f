// What wgmma reads: tiles that threads fill, and the product of rows in registers with one.
#pragma once

#include "sm90/ptx_sm90.cuh"
#include "tile.cuh"

// copy_rows for wgmma: ready once the calling warps' arrivals have been seen.
template <int kDim, int kRows, int kWarps, int kHeads = 1>
__device__ __forceinline__ void fill_tile(uint32 tile, const uint16* source, int64 pitch,
                                          int count) {
  copy_rows<kDim, kRows, kWarps, kHeads>(tile, source, pitch, count);
  ptx::fence_async_proxy();
}

// output[64, N] (+)= weights[64, kKeyRows] v[kKeyRows, N], weights in registers; does not wait.
// Rows lie in groups of eight.
template <int kKeyRows, int kGroupBytes = 8 * kBoxRowBytes, int kCount, int kWeights>
__device__ __forceinline__ void multiply_rows(float (&output)[kCount],
                                              const uint32 (&weights)[kWeights],
                                              ptx::Descriptor value, int accumulate) {
#pragma unroll
  for (int step = 0; step < kKeyRows / 16; ++step) {
    ptx::wgmma_rs<Element, 1>(output, weights[4 * step], weights[4 * step + 1],
                              weights[4 * step + 2], weights[4 * step + 3],
                              value.at(step * 2 * kGroupBytes), step > 0 ? 1 : accumulate);
  }
}
