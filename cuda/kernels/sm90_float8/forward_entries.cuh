// The kernels beside sm90_float8/forward.cuh: those of any forward pass, and one that goes ahead.
#pragma once

#include "sm90/forward_join.cuh"
#include "sm90_float8/forward_operands.cuh"

namespace forward {

inline constexpr int kColumnThreads = 256;

}  // namespace forward

// Columns of values, [B, K, Hv, ceil(S / 128) * 128], the keys of each 32 in the order of
// key_of_slot; keys past the length are 0. A CTA for 128 keys of a head. It zeroes the counter of
// units.
extern "C" __global__ void __launch_bounds__(forward::kColumnThreads)
    flash_forward_columns(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  constexpr int kWords = kValueDim / 4, kPitch = column_pitch(kWords);  // of a key
  constexpr int kPieces = kWords / 4, kLoads = ceil_div(kBlockKV * kPieces, kColumnThreads);
  __shared__ uint32 rows[kBlockKV * kPitch];
  ptx::let_the_next_kernel_start();
  if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
  const int blocks = ceil_div(p.kv_len, kBlockKV);
  const int head = blockIdx.x % p.kv_heads, of = blockIdx.x / p.kv_heads;
  const int block = of % blocks, batch = of / blocks;
  const int first = block * kBlockKV;
  const int count = visibility(p, batch).kv_length - first;
  const auto* source =
      static_cast<const uint4*>(p.value_data) + key_row(p, batch, first, head) * kPieces;
  uint4 loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kColumnThreads + threadIdx.x, key = at / kPieces;
    loaded[i] = key < count && key < kBlockKV
                    ? __ldcs(source + static_cast<int64>(key) * p.kv_heads * kPieces + at % kPieces)
                    : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kColumnThreads + threadIdx.x, key = at / kPieces;
    if (key >= kBlockKV) continue;
    uint32* to = rows + key * kPitch + at % kPieces * 4;
    to[0] = loaded[i].x;
    to[1] = loaded[i].y;
    to[2] = loaded[i].z;
    to[3] = loaded[i].w;
  }
  __syncthreads();
  const int64 pitch = static_cast<int64>(blocks) * (kBlockKV / 4);
  const int64 of_head = static_cast<int64>(batch) * p.kv_heads + head;
  auto* columns = reinterpret_cast<uint32*>(p.value_columns) + of_head * kValueDim * pitch;
  write_columns<kWords, kColumnThreads>(rows, columns + block * (kBlockKV / 4), pitch);
}
