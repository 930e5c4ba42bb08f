// Last kernel of the backward pass: dq = scale * dq_sum, rounded, in the user's layout. One block
// per 64-row tile and 64-column box; the tile turns through shared memory so that rows leave in
// 128-byte pieces.
#pragma once

#include "sm90/backward_common.cuh"
#include "sm90/unaligned.cuh"

namespace backward {

inline constexpr int kFinishThreads = 128;

__device__ __forceinline__ void finish(const BackwardParams& p) {
  constexpr int kPitch = 64 + 8;  // elements; 16 bytes of padding spread the rows over the banks
  __shared__ alignas(16) uint16 tile[64 * kPitch];
  const int tiles = query_blocks(p) * (kQueries / 64);
  // The heads that the main kernel took last are still in L2 and come first.
  const int index = gridDim.x - 1 - blockIdx.x;
  const int box = index % kHeadBoxes;
  const int head_index = index / kHeadBoxes / tiles;
  const int row0 = (index / kHeadBoxes - head_index * tiles) * 64;
  const int batch = head_index / p.query_heads, head = head_index - batch * p.query_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const float4* sum = reinterpret_cast<const float4*>(p.dq_sum) +
                      static_cast<int64>(index) * (kTileFloats / 4) + threadIdx.x;
  float4 values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = __ldcs(sum + j * kFinishThreads);
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32* low = reinterpret_cast<uint32*>(tile + row * kPitch + 8 * j + column);
    uint32* high = reinterpret_cast<uint32*>(tile + (row + 8) * kPitch + 8 * j + column);
    *low = pack<Element>(values[j].x * p.scale, values[j].y * p.scale);
    *high = pack<Element>(values[j].z * p.scale, values[j].w * p.scale);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 16 + threadIdx.x / 8, c = threadIdx.x % 8 * 8;
    if (row0 + r < p.query_len && box * 64 + c < kHeadDim) {
      const int64 at =
          ((static_cast<int64>(batch) * p.query_len + row0 + r) * p.query_heads + head) * kHeadDim +
          box * 64 + c;
      uint16* to = static_cast<uint16*>(p.dquery) + at;
      const uint4 piece = *reinterpret_cast<const uint4*>(tile + r * kPitch + c);
      if constexpr (kTmaLoads) {
        __stcs(reinterpret_cast<uint4*>(to), piece);
      } else {
        store_piece<kHeadDim>(to - box * 64 - c, box * 64 + c, piece);
      }
    }
  }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::kFinishThreads)
    flash_backward_finish(const __grid_constant__ BackwardParams p) {
  backward::finish(p);
}
