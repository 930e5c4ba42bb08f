// The gradient of the bias by wgmma. Two kernels after the others (two CTAs on a multiprocessor;
// one without TMA or with a mask: registers):
//   kernel                    grid                              block             dynamic shared
//   flash_backward_bias       blocks of the bias * dbias_parts  bias_sum::kThreads   sizeof(Shared)
//   flash_backward_bias_sum   elements of the bias / 256        256                  0
#pragma once

#include "backward_bias_sum.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/products.cuh"

namespace backward::bias_sum {

// Rows that wgmma reads; when all is summed, a SharedSum.
struct alignas(1024) Shared {
  unsigned char key[backward::kHeadBoxes * kBoxK];
  unsigned char value[backward::kValueBoxes * kBoxK];
  unsigned char query[backward::kHeadBoxes * kBoxQ];
  unsigned char dout[backward::kValueBoxes * kBoxQ];
};
static_assert(!kHasDbias || sizeof(SharedSum) <= sizeof(Shared));

// As keys_times_queries, with some of a block's queries.
template <int kDepth, int kCount>
__device__ __forceinline__ void keys_times_part(float (&d)[kCount], uint32 keys, uint32 queries) {
  const ptx::Descriptor a = ptx::descriptor(keys, 0, 0, 1024),
                        b = ptx::descriptor(queries, 0, 0, 1024);
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    ptx::wgmma_ss<Element, 0, 0>(d, a.at(i / 4 * kBoxK + i % 4 * 32),
                                 b.at(i / 4 * kBoxQ + i % 4 * 32), i > 0);
  }
  ptx::wgmma_commit();
}

struct Tiles {
  // Of the queries of a block, so that two CTAs have 128 registers each.
  static constexpr int kParts = 4;
  const BackwardParams& p;

  __device__ __forceinline__ const auto& load(int batch, int head, int m0, int key0) const {
    const int64 key = key_row(p, batch, key0, kv_head_of(p, head));
    const int64 query = query_row(p, batch, m0, head);
    const KeyRows<kHeadDim> key_rows(p, key);
    const KeyRows<kValueDim> value_rows(p, key);
    __syncthreads();  // the tiles are free
    const int key_count = p.kv_len - key0, query_count = p.query_len - m0;
    copy_key_block<kKeys, kWarps>(key_rows, p.key_data, at(&Shared::key), key_count);
    copy_key_block<kKeys, kWarps>(value_rows, p.value_data, at(&Shared::value), key_count);
    fill_tile<kHeadDim, kQueries, kWarps>(
        at(&Shared::query), static_cast<const uint16*>(p.query_data) + query * kHeadDim,
        static_cast<int64>(p.query_heads) * kHeadDim, query_count);
    fill_tile<kValueDim, kQueries, kWarps>(
        at(&Shared::dout), static_cast<const uint16*>(p.dout_data) + query * kValueDim,
        static_cast<int64>(p.query_heads) * kValueDim, query_count);
    __syncthreads();
    return *this;
  }
  __device__ __forceinline__ void multiply(int part, float (&x)[kSums / kParts],
                                           float (&dp)[kSums / kParts]) const {
    const int slab = threadIdx.x / 128 * 64;
    const uint32 first_row = part * (kQueries / kParts) * kBoxRowBytes;
    ptx::wgmma_fence();
    keys_times_part<kHead>(x, at(&Shared::key) + slab * kBoxRowBytes,
                           at(&Shared::query) + first_row);
    keys_times_part<kValue>(dp, at(&Shared::value) + slab * kBoxRowBytes,
                            at(&Shared::dout) + first_row);
    ptx::wgmma_wait<0>();
    ptx::pin(x);
    ptx::pin(dp);
  }
};

}  // namespace backward::bias_sum

extern "C" __global__ void __launch_bounds__(backward::bias_sum::kThreads,
                                             kTmaLoads && !kHasMask ? 2 : 1)
    flash_backward_bias(const __grid_constant__ BackwardParams p) {
  using namespace backward;
  if constexpr (kHasDbias && !kStoresDbias) bias_sum::sum(p, bias_sum::Tiles{p}, shared_memory);
}

extern "C" __global__ void __launch_bounds__(256)
    flash_backward_bias_sum(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasDbias) backward::bias_sum::sum_parts(p);
}
