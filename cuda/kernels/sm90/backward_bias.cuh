// The gradient of the bias: dS, summed over what the bias is broadcast along. Two kernels after the
// others (two CTAs on a multiprocessor; one without TMA or with a mask: registers):
//   kernel                    grid                              block             dynamic shared
//   flash_backward_bias       blocks of the bias * dbias_parts  bias_sum::kThreads   sizeof(Shared)
//   flash_backward_bias_sum   elements of the bias / 256        256                  0
//
// A CTA has a block of the bias, all along the dims that the bias does not have, and computes the
// dS of one pair of blocks, batch row and head after the other once more: S and dP, two products of
// five. Sums stay in registers, their order is fixed, and nothing of the size of the scores is
// stored unless the bias is of that size. Where a bias has few blocks its sums are split over
// dbias_parts CTAs, and the second kernel adds their results.
#pragma once

#include "backward_exact.cuh"
#include "sm90/backward_scores.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/products.cuh"

namespace backward::bias_sum {

inline constexpr int kWarps = kKeys / 16;
inline constexpr int kThreads = 32 * kWarps;
// Parts of the queries of a block, so that two CTAs have 128 registers each.
inline constexpr int kParts = 4;
using Tile = bias::ColumnTile<kQueries / kParts>;

// Rows that wgmma reads; when all is summed, the block: float[kQueries][kPitch].
inline constexpr int kPitch = kKeys + 1;
struct alignas(1024) Shared {
  unsigned char key[backward::kHeadBoxes * kBoxK];
  unsigned char value[backward::kValueBoxes * kBoxK];
  unsigned char query[backward::kHeadBoxes * kBoxQ];
  unsigned char dout[backward::kValueBoxes * kBoxQ];
};
using SharedSum = float[kQueries * kPitch];
static_assert(!kHasDbias || sizeof(SharedSum) <= sizeof(Shared));

// The part of the bias that a CTA sums, and along what.
struct Block {
  int part;         // of dbias_parts
  int batch, head;  // own, of those that the bias has
  int query_block, key_block;
  int batches, heads, query_blocks, key_blocks;  // to sum over

  __device__ __forceinline__ explicit Block(const BackwardParams& p) {
    const int own_keys = kBiasKeys ? backward::key_blocks(p) : 1;
    const int own_queries = kBiasQueries ? backward::query_blocks(p) : 1;
    int index = blockIdx.x;
    const auto take = [&](int size) {
      const int digit = index % size;
      index /= size;
      return digit;
    };
    part = take(p.dbias_parts);
    key_block = take(own_keys);
    query_block = take(own_queries);
    head = take(p.bias_heads);
    batch = index;
    batches = p.bias_batches == 1 ? p.batch : 1;
    heads = p.bias_heads == 1 ? p.query_heads : 1;
    key_blocks = kBiasKeys ? 1 : backward::key_blocks(p);
    query_blocks = kBiasQueries ? 1 : backward::query_blocks(p);
  }
  __device__ __forceinline__ int64 count() const {
    return static_cast<int64>(batches) * heads * query_blocks * key_blocks;
  }
};

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

// Adds the dS of one pair of blocks to the sum; all threads call.
__device__ __forceinline__ void add_scores(const BackwardParams& p, int batch, int head, int m0,
                                           int key0, float (&sum)[kScores]) {
  const Visibility sight = visibility(p, batch);
  const Range keys = visible_keys(sight, m0, m0 + kQueries - 1);
  if (keys.empty() || keys.end <= key0 || keys.begin >= key0 + kKeys) return;
  if constexpr (kHasMask) {
    if (mask::flag_by_key<kQueries, kKeys>(p, batch, head, m0 / kQueries, key0 / kKeys) == 0) {
      return;
    }
  }
  const int64 key = key_row(p, batch, key0, kv_head_of(p, head));
  const int64 query = query_row(p, batch, m0, head);
  const KeyRows<kHeadDim> key_rows(p, key);
  const KeyRows<kValueDim> value_rows(p, key);
  __syncthreads();  // the tiles are free
  const int key_count = p.kv_len - key0, query_count = p.query_len - m0;
  copy_key_block<kKeys, kWarps>(key_rows, p.key_data, at(&Shared::key), key_count);
  copy_key_block<kKeys, kWarps>(value_rows, p.value_data, at(&Shared::value), key_count);
  fill_tile<kHeadDim, kQueries, kWarps>(at(&Shared::query),
                                        static_cast<const uint16*>(p.query_data) + query * kHeadDim,
                                        static_cast<int64>(p.query_heads) * kHeadDim, query_count);
  fill_tile<kValueDim, kQueries, kWarps>(
      at(&Shared::dout), static_cast<const uint16*>(p.dout_data) + query * kValueDim,
      static_cast<int64>(p.query_heads) * kValueDim, query_count);
  __syncthreads();

  const int slab = threadIdx.x / 128 * 64;
  Dropped<kScores> dropped;
  if constexpr (kHasDropout) {
    dropped.draw(p, Draws(p, batch, head), m0, key0 + slab + ptx::warp_index() % 4 * 16);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float x[kScores / kParts], dp[kScores / kParts];
    const uint32 first_row = part * (kQueries / kParts) * kBoxRowBytes;
    ptx::wgmma_fence();
    keys_times_part<kHead>(x, at(&Shared::key) + slab * kBoxRowBytes,
                           at(&Shared::query) + first_row);
    keys_times_part<kValue>(dp, at(&Shared::value) + slab * kBoxRowBytes,
                            at(&Shared::dout) + first_row);
    ptx::wgmma_wait<0>();
    ptx::pin(x);
    ptx::pin(dp);
    Tile tile;
    tile.load(p, batch, head, ptx::opaque(m0) + part * (kQueries / kParts),
              key0 + slab + ptx::warp_index() % 4 * 16);
    tile.visit([&](int i, float bias) { x[i] = with_bias(p, x[i], bias); });
    score_function(p, x);
    // Opaque: kept from part to part, it would be spilled.
    const int thread = ptx::opaque(threadIdx.x);
    const SeenPairs<kQueries> pairs(p, batch, head, sight,
                                    key0 + slab + fragment::first_row(thread), m0);
    const int64 row = padded_row(p, batch, head, m0) + fragment::first_column(thread);
#pragma unroll
    for (int k = 0; k < kQueries / kParts / 8; ++k) {
      const int j = part * (kQueries / kParts / 8) + k;
      const float2 lse = *reinterpret_cast<const float2*>(p.lse_log2 + row + 8 * j);
      const float2 delta = *reinterpret_cast<const float2*>(p.minus_delta + row + 8 * j);
      bool seen[4];
      pairs.see(j, seen);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float y = x[4 * k + i], slope = score_slope(y);
        const float shift = i % 2 == 0 ? lse.x : lse.y;
        if constexpr (kHasScoreFunction) {
          const int at_query = m0 + fragment::first_column(thread) + fragment::column(4 * j + i);
          const int at_key = key0 + slab + fragment::first_row(thread) +
                             fragment::kRowStep * fragment::row(4 * j + i);
          y = ScoreFunction(p, batch, head)
                  .value_and_slope(p, y, at_query, at_key, at_query, at_key, slope);
        }
        const float probability = ptx::exp2_approx(fmaf(y, p.scale_log2, shift));
        float given = dp[4 * k + i];
        if constexpr (kHasDropout) given = dropped.drops(4 * j + i) ? 0.f : given;
        const float gradient = probability * (given + (i % 2 == 0 ? delta.x : delta.y));
        // What is hidden may hold NaN: keys, also by a bias of -inf, and rows past the length.
        const bool counts = seen[i] && shift != kNegativeInfinity && probability != 0.f;
        if (counts) sum[4 * j + i] += gradient * slope;
      }
    }
  }
}

__device__ __forceinline__ void store(const BackwardParams& p, int64 index, int part, float value) {
  if (p.dbias_parts > 1) {
    p.dbias_sum[part * p.bias_elements + index] = value;
  } else {
    bias::store(p.dbias, index, value);
  }
}

__device__ __forceinline__ void sum(const BackwardParams& p) {
  const Block block(p);
  float sum[kScores];
#pragma unroll
  for (float& x : sum) x = 0.f;
  const int64 count = block.count();
  const int64 begin = count * block.part / p.dbias_parts;
  const int64 end = count * (block.part + 1) / p.dbias_parts;
#pragma unroll 1
  for (int64 i = begin; i < end; ++i) {
    const int64 heads = i / (block.query_blocks * block.key_blocks);
    const int within = static_cast<int>(i - heads * (block.query_blocks * block.key_blocks));
    const int batch = block.batch + static_cast<int>(heads / block.heads);
    const int head = block.head + static_cast<int>(heads % block.heads);
    const int m0 = (block.query_block + within / block.key_blocks) * kQueries;
    const int key0 = (block.key_block + within % block.key_blocks) * kKeys;
    add_scores(p, batch, head, m0, key0, sum);
  }

  __syncthreads();
  float (&tile)[kQueries * kPitch] = *reinterpret_cast<SharedSum*>(shared_memory);
  const int slab = threadIdx.x / 128 * 64;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int key = slab + fragment::first_row(threadIdx.x) + fragment::kRowStep * fragment::row(i);
    const int query = fragment::first_column(threadIdx.x) + fragment::column(i);
    tile[query * kPitch + key] = sum[i] * dropout_scale(p);
  }
  __syncthreads();
  const int64 own = static_cast<int64>(block.batch) * p.bias_heads + block.head;
  const int m0 = block.query_block * kQueries, key0 = block.key_block * kKeys;
  const int thread = threadIdx.x;
  if constexpr (bias::kIsMatrix) {
    for (int i = thread; i < kQueries * kKeys; i += kThreads) {
      const int query = m0 + i / kKeys, key = key0 + i % kKeys;
      if (query < p.query_len && key < p.kv_len) {
        store(p, (own * p.query_len + query) * p.kv_len + key, block.part,
              tile[i / kKeys * kPitch + i % kKeys]);
      }
    }
  } else if constexpr (kBiasKeys) {
    if (thread < kKeys && key0 + thread < p.kv_len) {
      float total = 0.f;
      for (int query = 0; query < kQueries; ++query) total += tile[query * kPitch + thread];
      store(p, own * p.kv_len + key0 + thread, block.part, total);
    }
  } else {
    float total = 0.f;
    if (thread < kQueries) {
      for (int key = 0; key < kKeys; ++key) total += tile[thread * kPitch + key];
      if (kBiasQueries && m0 + thread < p.query_len) {
        store(p, own * p.query_len + m0 + thread, block.part, total);
      }
      tile[thread * kPitch + kKeys] = total;
    }
    __syncthreads();
    if (!kBiasQueries && thread == 0) {
      total = 0.f;
      for (int query = 0; query < kQueries; ++query) total += tile[query * kPitch + kKeys];
      store(p, own, block.part, total);
    }
  }
}

}  // namespace backward::bias_sum

extern "C" __global__ void __launch_bounds__(backward::bias_sum::kThreads,
                                             kTmaLoads && !kHasMask ? 2 : 1)
    flash_backward_bias(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasDbias && !kStoresDbias) backward::bias_sum::sum(p);
}

extern "C" __global__ void __launch_bounds__(256)
    flash_backward_bias_sum(const __grid_constant__ BackwardParams p) {
  if constexpr (kHasDbias) {
    const int64 index = static_cast<int64>(blockIdx.x) * 256 + threadIdx.x;
    if (index >= p.bias_elements) return;
    float total = 0.f;
    for (int part = 0; part < p.dbias_parts; ++part) {
      total += p.dbias_sum[part * p.bias_elements + index];
    }
    bias::store(p.dbias, index, total);
  }
}
