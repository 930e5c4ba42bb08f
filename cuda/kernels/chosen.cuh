// Chosen keys, ahead of decoding: brings what a row reads to the front of its table, in its order.
#pragma once

#include "numbers.cuh"
#include "ptx.cuh"

namespace chosen {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kLacks = -2;  // LACKS in jax_flash/_chosen.py
inline constexpr int kRounds = 8;  // places that a thread reads at once: 2048 of a CTA

}  // namespace chosen

// A CTA has a row: places [chosen], below 0 where nothing is read. Its length comes out beyond
// `chosen`, which refuses it, if a place is kLacks.
extern "C" __global__ void __launch_bounds__(chosen::kThreads)
    flash_chosen(const __grid_constant__ DecodeParams p) {
  using namespace chosen;
  __shared__ int counts[kRounds * kWarps];  // of what is read, by 32 places
  __shared__ int refused;
  if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
  if (threadIdx.x == 0) refused = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64 first = static_cast<int64>(blockIdx.x) * p.chosen;
  const int* places = p.places + first;
  int* packed = p.packed_table + first;
  int ahead = 0;
  bool lacks = false;
  for (int at = threadIdx.x; at - threadIdx.x < p.chosen; at += kRounds * kThreads) {
    int place[kRounds];
    uint32 read[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int own = at + i * kThreads;
      place[i] = own < p.chosen ? places[own] : -1;
      lacks = lacks || place[i] == kLacks;
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      read[i] = __ballot_sync(0xffffffffu, place[i] >= 0);
      if (lane == 0) counts[i * kWarps + warp] = __popc(read[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
#pragma unroll
      for (int j = 0; j < kWarps; ++j) {
        const int count = counts[i * kWarps + j];
        if (j == warp && place[i] >= 0) {
          packed[ahead + __popc(read[i] & ((1u << lane) - 1))] = place[i];
        }
        ahead += count;
      }
    }
    __syncthreads();  // before the next round's counts
  }
  for (int at = ahead + threadIdx.x; at < p.chosen; at += kThreads) packed[at] = -1;
  __syncthreads();
  if (lacks) refused = 1;
  __syncthreads();
  if (threadIdx.x == 0) p.packed_lengths[blockIdx.x] = refused ? p.chosen + 1 : ahead;
}
