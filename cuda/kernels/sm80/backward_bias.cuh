// The gradient of the bias by mma.sync. Two kernels after the others:
//   kernel                    grid                              block             dynamic shared
//   flash_backward_bias       blocks of the bias * dbias_parts  bias_sum::kThreads   sizeof(Shared)
//   flash_backward_bias_sum   elements of the bias / 256        256                  0
#pragma once

#include "backward_bias_sum.cuh"
#include "cuda/runtime/families/sm80_params.h"
#include "sm80/products.cuh"
#include "tile.cuh"

namespace backward::bias_sum {

// When all is summed, a SharedSum.
struct alignas(128) Shared {
  unsigned char key[kHeadBoxes * kKeys * kBoxRowBytes];
  unsigned char value[kValueBoxes * kKeys * kBoxRowBytes];
  unsigned char query[kHeadBoxes * kQueries * kBoxRowBytes];
  unsigned char dout[kValueBoxes * kQueries * kBoxRowBytes];
};
static_assert(!kHasDbias || sizeof(SharedSum) <= sizeof(Shared));

struct Tiles {
  static constexpr int kParts = 2;  // of the queries of a block
  const Sm80BackwardParams& p;
  Shared& shared;

  __device__ __forceinline__ void load(int batch, int head, int m0, int key0) const {
    const int64 key = key_row(p, batch, key0, kv_head_of(p, head));
    const int64 query = query_row(p, batch, m0, head);
    const KeyRows<kHeadDim> keys(p, key);
    const KeyRows<kValueDim> values(p, key);
    const int64 heads = p.query_heads;
    const int key_count = p.kv_len - key0, query_count = p.query_len - m0;
    __syncthreads();  // the tiles are free
    copy<kHeadDim, kKeys>(shared.key, p.key_data, keys.first, keys.step, key_count);
    copy<kValueDim, kKeys>(shared.value, p.value_data, values.first, values.step, key_count);
    copy<kHeadDim, kQueries>(shared.query, p.query_data, query * kHeadDim, heads * kHeadDim,
                             query_count);
    copy<kValueDim, kQueries>(shared.dout, p.dout_data, query * kValueDim, heads * kValueDim,
                              query_count);
    __syncthreads();
  }
  __device__ __forceinline__ void multiply(int part, float (&x)[kSums / kParts],
                                           float (&dp)[kSums / kParts]) const {
    const uint32 key = ptx::warp_index() * 16, query = part * (kQueries / kParts);
    multiply_rows<kHeadDim, kKeys, kQueries>(x, ptx::shared_address(shared.key), key,
                                             ptx::shared_address(shared.query), query);
    multiply_rows<kValueDim, kKeys, kQueries>(dp, ptx::shared_address(shared.value), key,
                                              ptx::shared_address(shared.dout), query);
  }

 private:
  template <int kDim, int kRows>
  static __device__ __forceinline__ void copy(const unsigned char* tile, const void* array,
                                              int64 first, int64 step, int count) {
    copy_rows<kDim, kRows, bias_sum::kWarps>(
        ptx::shared_address(tile), static_cast<const uint16*>(array) + first, step, count);
  }
};

}  // namespace backward::bias_sum

extern "C" __global__ void __launch_bounds__(backward::bias_sum::kThreads, 1)
    flash_backward_bias(const __grid_constant__ Sm80BackwardParams p) {
  using namespace backward;
  extern __shared__ unsigned char dynamic_shared[];
  if constexpr (kHasDbias && !kStoresDbias) {
    auto& shared = *reinterpret_cast<bias_sum::Shared*>(dynamic_shared);
    bias_sum::sum(p, bias_sum::Tiles{p, shared}, &shared);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    flash_backward_bias_sum(const __grid_constant__ Sm80BackwardParams p) {
  if constexpr (kHasDbias) backward::bias_sum::sum_parts(p);
}
