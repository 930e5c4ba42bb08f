// The kernels beside sm90_float8/forward.cuh: those of any forward pass, and one that goes ahead.
#pragma once

#include "sm90/forward_entries.cuh"
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
  constexpr int kWords = kValueDim / 4, kPitch = kWords + 1;  // of a key
  __shared__ uint32 rows[kBlockKV * kPitch];
  ptx::let_the_next_kernel_start();
  if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
  const int blocks = ceil_div(p.kv_len, kBlockKV);
  const int block = blockIdx.x % blocks, of = blockIdx.x / blocks;
  const int batch = of / p.kv_heads, head = of % p.kv_heads;
  const int first = block * kBlockKV;
  const int count = visibility(p, batch).kv_length - first;
  const auto* source =
      static_cast<const uint32*>(p.value_data) + key_row(p, batch, first, head) * kWords;
  for (int i = threadIdx.x; i < kBlockKV * kWords; i += kColumnThreads) {
    const int key = i / kWords, word = i % kWords;
    rows[key * kPitch + word] =
        key < count ? source[static_cast<int64>(key) * p.kv_heads * kWords + word] : 0;
  }
  __syncthreads();
  const int64 pitch = static_cast<int64>(blocks) * (kBlockKV / 4);
  auto* columns =
      reinterpret_cast<uint32*>(p.value_columns) + of * kValueDim * pitch + block * (kBlockKV / 4);
  for (int i = threadIdx.x; i < kBlockKV / 4 * kValueDim; i += kColumnThreads) {
    const int column = i / (kBlockKV / 4), slots = i % (kBlockKV / 4) * 4;
    uint32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = slots / 32 * 32 + key_of_slot(slots % 32 + j);
      word |= (rows[key * kPitch + column / 4] >> column % 4 * 8 & 0xff) << 8 * j;
    }
    columns[column * pitch + slots / 4] = word;
  }
}
