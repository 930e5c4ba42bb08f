// The gradient of the bias by wgmma. Two kernels after the others (two CTAs on a multiprocessor;
// one without TMA or with a mask: registers):
//   kernel                    grid                              block             dynamic shared
//   flash_backward_bias       blocks of the bias * dbias_ctas   bias_sum::kThreads   sizeof(Shared)
//     with kDbiasByHeads      bias_sum::batch_blocks            bias_sum::kThreads   0
//   flash_backward_bias_sum   elements of the bias / 32         256                  0
#pragma once

#include "backward_bias_sum.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/products.cuh"

namespace backward::bias_sum {

// Rows that wgmma reads; when all is summed, a SharedSum.
struct alignas(1024) PairTiles {
  unsigned char key[backward::kHeadBoxes * kBoxK];
  unsigned char value[backward::kValueBoxes * kBoxK];
  unsigned char query[backward::kHeadBoxes * kBoxQ];
  unsigned char dout[backward::kValueBoxes * kBoxQ];
};
struct Shared {
  PairTiles tiles[kSumStages];  // with two the next pair's come beside the work on this one
  Barrier full[kSumStages];
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
  // Parts of a block's queries: with four, two CTAs have 128 registers a thread each.
  static constexpr int kParts = 4, kStages = kSumStages;
  const BackwardParams& p;
  uint32 loaded = 0;                                  // pairs
  uint32 tiles = ptx::shared_address(shared_memory);  // of the last one

  __device__ __forceinline__ explicit Tiles(const BackwardParams& p) : p(p) {
    if (kTmaLoads && threadIdx.x == 0) {
      for (int i = 0; i < kSumStages; ++i) ptx::barrier_init(at(&Shared::full, i), 1);
      ptx::barrier_init_fence();
    }
  }
  // By one thread, into the stage of the pair number `use`.
  __device__ __forceinline__ void fetch(const BlockPair& pair, uint32 use) const {
    const uint32 stage = stage_of<kSumStages>(use), to = at(&Shared::tiles, stage);
    const uint32 full = at(&Shared::full, stage);
    const int kv_head = kv_head_of(p, pair.head);
    ptx::barrier_arrive_expect(full, sizeof(PairTiles));
    load_tile<backward::kHeadBoxes, kBoxK>(to + offset_of(&PairTiles::key), p.key, full,
                                           ptx::kEvictNormal, kv_head, pair.key0, pair.batch);
    load_tile<backward::kHeadBoxes, kBoxQ>(to + offset_of(&PairTiles::query), p.query, full,
                                           ptx::kEvictNormal, pair.head, pair.m0, pair.batch);
    load_tile<backward::kValueBoxes, kBoxK>(to + offset_of(&PairTiles::value), p.value, full,
                                            ptx::kEvictNormal, kv_head, pair.key0, pair.batch);
    load_tile<backward::kValueBoxes, kBoxQ>(to + offset_of(&PairTiles::dout), p.dout, full,
                                            ptx::kEvictNormal, pair.head, pair.m0, pair.batch);
  }
  __device__ __forceinline__ const auto& load(const BlockPair& now, const BlockPair& next,
                                              bool has_next) {
    if constexpr (!kTmaLoads) return copy(now);
    __syncthreads();  // the tiles of the pair before are free
    if (threadIdx.x == 0) {
      if (kSumStages == 1 || loaded == 0) fetch(now, loaded);
      if (kSumStages > 1 && has_next) fetch(next, loaded + 1);
    }
    const uint32 stage = stage_of<kSumStages>(loaded);
    ptx::barrier_wait(at(&Shared::full, stage), parity_of<kSumStages>(loaded));
    tiles = at(&Shared::tiles, stage);
    ++loaded;
    return *this;
  }
  // Without TMA, by all threads.
  __device__ __forceinline__ const Tiles& copy(const BlockPair& pair) const {
    const auto [index, batch, head, m0, key0] = pair;
    const int64 key = key_row(p, batch, key0, kv_head_of(p, head));
    const int64 query = query_row(p, batch, m0, head);
    const KeyRows<kHeadDim> key_rows(p, key);
    const KeyRows<kValueDim> value_rows(p, key);
    __syncthreads();  // the tiles are free
    const int key_count = p.kv_len - key0, query_count = p.query_len - m0;
    copy_key_block<kKeys, kWarps>(key_rows, p.key_data, tiles + offset_of(&PairTiles::key),
                                  key_count);
    copy_key_block<kKeys, kWarps>(value_rows, p.value_data, tiles + offset_of(&PairTiles::value),
                                  key_count);
    fill_tile<kHeadDim, kQueries, kWarps>(
        tiles + offset_of(&PairTiles::query),
        static_cast<const uint16*>(p.query_data) + query * kHeadDim,
        static_cast<int64>(p.query_heads) * kHeadDim, query_count);
    fill_tile<kValueDim, kQueries, kWarps>(
        tiles + offset_of(&PairTiles::dout),
        static_cast<const uint16*>(p.dout_data) + query * kValueDim,
        static_cast<int64>(p.query_heads) * kValueDim, query_count);
    __syncthreads();
    return *this;
  }
  __device__ __forceinline__ void begin(int part, float (&x)[kSums / kParts],
                                        float (&dp)[kSums / kParts]) const {
    const int slab = threadIdx.x / 128 * 64;
    const uint32 first_row = part * (kQueries / kParts) * kBoxRowBytes;
    ptx::wgmma_fence();
    keys_times_part<kHead>(x, tiles + offset_of(&PairTiles::key) + slab * kBoxRowBytes,
                           tiles + offset_of(&PairTiles::query) + first_row);
    keys_times_part<kValue>(dp, tiles + offset_of(&PairTiles::value) + slab * kBoxRowBytes,
                            tiles + offset_of(&PairTiles::dout) + first_row);
  }
  __device__ __forceinline__ void finish(int, bool others, float (&x)[kSums / kParts],
                                         float (&dp)[kSums / kParts]) const {
    if (others) {
      ptx::wgmma_wait<2>();
    } else {
      ptx::wgmma_wait<0>();
    }
    ptx::pin(x);
    ptx::pin(dp);
  }
};

}  // namespace backward::bias_sum

extern "C" __global__ void __launch_bounds__(backward::bias_sum::kThreads, kSumResident)
    flash_backward_bias(const __grid_constant__ BackwardParams p) {
  using namespace backward;
  if (is_left_to_other(p)) return;
  if constexpr (kHasDbias && kDbiasByHeads) {
    bias_sum::sum_batch(p);
  } else if constexpr (kHasDbias && !kStoresDbias) {
    bias_sum::sum(p, bias_sum::Tiles{p}, shared_memory);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    flash_backward_bias_sum(const __grid_constant__ BackwardParams p) {
  if (is_left_to_other(p)) return;
  if constexpr (kHasDbias) backward::bias_sum::sum_parts(p);
}
