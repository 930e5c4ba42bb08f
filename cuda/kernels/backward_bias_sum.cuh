// The gradient of the bias: dS, summed over what the bias is broadcast along. What the kernels of
// every family share but for the products.
//
// A CTA has a block of the bias, all along the dims that the bias does not have, and computes the
// dS of one pair of blocks, batch row and head after the other once more: S and dP, two products of
// five. Sums stay in registers, their order is fixed, and nothing of the size of the scores is
// stored unless the bias is of that size. Where a bias has few blocks its sums are split over
// dbias_ctas CTAs, and a last kernel adds their results.
//
// With kDbiasByHeads, for a bias [1, N, T, S], nothing is computed again: each launch of the main
// kernel stores dS of some heads, and `sum_batch` follows it.
#pragma once

#include "backward_exact.cuh"

namespace backward::bias_sum {

inline constexpr int kWarps = kKeys / 16;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kSums = kQueries / 2;  // elements of dS of a thread

// When all is summed, the block in shared memory.
inline constexpr int kPitch = kKeys + 1;
using SharedSum = float[kQueries * kPitch];

// The part of the bias that a CTA sums, and along what.
struct Block {
  int part;         // of dbias_ctas
  int batch, head;  // own, of those that the bias has
  int query_block, key_block;
  int batches, heads, query_blocks, key_blocks;  // to sum over

  template <class Params>
  __device__ __forceinline__ explicit Block(const Params& p) {
    const int own_keys = kBiasKeys ? backward::key_blocks(p) : 1;
    const int own_queries = kBiasQueries ? backward::query_blocks(p) : 1;
    int index = blockIdx.x;
    const auto take = [&](int size) {
      const int digit = index % size;
      index /= size;
      return digit;
    };
    part = take(p.dbias_ctas);
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

// A block of queries and one of keys, of a batch row and head; number `index` of those to sum over.
struct BlockPair {
  int64 index;
  int batch, head, m0, key0;
};
// Does any query of the pair see a key? All threads have the same pair.
template <class Params>
__device__ __forceinline__ bool meets(const Params& p, const BlockPair& at) {
  const Visibility sight = visibility(p, at.batch);
  const Range keys = visible_keys(sight, at.m0, at.m0 + kQueries - 1);
  if (keys.empty() || keys.end <= at.key0 || keys.begin >= at.key0 + kKeys) return false;
  if constexpr (kHasMask) {
    return mask::flag_by_key<kQueries, kKeys>(p, at.batch, at.head, at.m0 / kQueries,
                                              at.key0 / kKeys) != 0;
  }
  return true;
}

// The bias of the CTA's block: with kSumHoldsBias the same for all that it sums, in registers, in
// the order of fragments.
template <int kParts>
struct BlockBias {
  static constexpr int kCount = kQueries / kParts;
  bias::StagedColumns<kCount> staged[kSumHoldsBias ? kParts : 1];

  template <class Params>
  __device__ __forceinline__ void load(const Params& p, const BlockPair& at) {
    if constexpr (kSumHoldsBias) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        bias::ColumnTile<kCount> tile;
        tile.load(p, at.batch, at.head, at.m0 + part * kCount, first_key(at));
        staged[part].take(tile);
      }
    }
  }
  // apply(i, what belongs to element i of the part).
  template <class Params, class Apply>
  __device__ __forceinline__ void visit(const Params& p, const BlockPair& at, int part,
                                        Apply apply) const {
    if constexpr (kSumHoldsBias) {
      staged[part].visit(apply);
    } else {
      bias::ColumnTile<kCount> tile;
      tile.load(p, at.batch, at.head, ptx::opaque(at.m0) + part * kCount, first_key(at));
      tile.visit(apply);
    }
  }

 private:
  // The first of the warp's 16 keys.
  static __device__ __forceinline__ int first_key(const BlockPair& at) {
    return at.key0 + threadIdx.x / 128 * 64 + ptx::warp_index() % 4 * 16;
  }
};

// Adds the dS of one pair of blocks to the sum; all threads call. `loaded` are a family's tiles:
// begin(part, x, dp) starts S^T and dP^T of one of kParts parts of the
// queries, finish(part, others, x, dp) waits for them, others having begun after them or not.
// `numbers` are of the queries: -lse, -delta.
template <int kParts, class Loaded, class Params>
__device__ __forceinline__ void add_scores(const Params& p, const Loaded& loaded,
                                           const BlockPair& pair, const BlockBias<kParts>& biases,
                                           const float (&numbers)[2][kQueries],
                                           float (&sum)[kSums]) {
  const int batch = pair.batch, head = pair.head, m0 = pair.m0, key0 = pair.key0;
  const Visibility sight = visibility(p, batch);
  ScoreFunctionAndSlope<Params> function;
  function.read(p, batch, head);
  const int slab = threadIdx.x / 128 * 64;
  Dropped<kSums> dropped;
  if constexpr (kHasDropout) {
    dropped.draw(p, Draws(p, batch, head), m0, key0 + slab + ptx::warp_index() % 4 * 16);
  }
  float xs[2][kSums / kParts], dps[2][kSums / kParts];  // a part's products, and the next one's
  loaded.begin(0, xs[0], dps[0]);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int begun = kSumBeginsAhead ? part + 1 : part;
    if (begun > 0 && begun < kParts) loaded.begin(begun, xs[begun % 2], dps[begun % 2]);
    float (&x)[kSums / kParts] = xs[part % 2], (&dp)[kSums / kParts] = dps[part % 2];
    loaded.finish(part, begun > part && begun < kParts, x, dp);
    biases.visit(p, pair, part, [&](int i, float bias) { x[i] = with_bias(p, x[i], bias); });
    score_function(p, x);
    // Opaque: kept from part to part, they would be spilled.
    const int thread = ptx::opaque(threadIdx.x), query0 = kHasSegments ? ptx::opaque(m0) : m0;
    const SeenPairs<kQueries> pairs(p, batch, head, sight,
                                    key0 + slab + fragment::first_row(thread), query0);
    const int column = fragment::first_column(thread);
    constexpr int kCount = kSums / kParts;
    const auto apply = [&](float score, int i, float& slope) {
      if constexpr (!kHasScoreFunction) return score;
      const int at_query = m0 + column + fragment::column(part * kCount + i);
      const int at_key =
          key0 + slab + fragment::first_row(thread) + fragment::kRowStep * fragment::row(i);
      return function.value(p, score, place(at_query), place(at_key), slope);
    };
    FunctionOfScores<decltype(function)::kTogether, kCount> made;
    made.begin(x, apply);
#pragma unroll
    for (int k = 0; k < kQueries / kParts / 8; ++k) {
      const int j = part * (kQueries / kParts / 8) + k;
      const float2 lse = *reinterpret_cast<const float2*>(numbers[0] + column + 8 * j);
      const float2 delta = *reinterpret_cast<const float2*>(numbers[1] + column + 8 * j);
      bool seen[4];
      pairs.see(j, seen);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float y = x[4 * k + i], slope = score_slope(y);
        const float shift = i % 2 == 0 ? lse.x : lse.y;
        if constexpr (kHasScoreFunction) y = made.value(y, 4 * k + i, slope, apply);
        const float probability = probability_of(fmaf(y, p.scale_log2, shift));
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

template <class Params>
__device__ __forceinline__ void store(const Params& p, int64 index, int part, float value) {
  if (p.dbias_ctas > 1) {
    p.dbias_sum[part * p.bias_elements + index] = value;
  } else {
    bias::store(p.dbias, index, value);
  }
}

// `memory`: of a SharedSum, free when `tiles` are. `Tiles` are a family's: load(now, next,
// has_next) gives the tiles of a pair of blocks, and with several kStages starts those of the next
// one.
template <class Tiles, class Params>
__device__ __forceinline__ void sum(const Params& p, Tiles tiles, void* memory) {
  const Block block(p);
  float sum[kSums];
#pragma unroll
  for (float& x : sum) x = 0.f;
  const int64 count = block.count();
  const int64 begin = count * block.part / p.dbias_ctas;
  const int64 end = count * (block.part + 1) / p.dbias_ctas;
  const auto pair_at = [&](int64 i) -> BlockPair {
    const int64 heads = i / (block.query_blocks * block.key_blocks);
    const int within = static_cast<int>(i - heads * (block.query_blocks * block.key_blocks));
    return {i, block.batch + static_cast<int>(heads / block.heads),
            block.head + static_cast<int>(heads % block.heads),
            (block.query_block + within / block.key_blocks) * kQueries,
            (block.key_block + within % block.key_blocks) * kKeys};
  };
  // The first pair from i on that counts; past the end there is none.
  const auto pair_from = [&](int64 i) {
    BlockPair pair = pair_at(i);
#pragma unroll 1
    while (pair.index < end && !meets(p, pair)) pair = pair_at(pair.index + 1);
    return pair;
  };
  __shared__ float numbers[2][kQueries];
  constexpr int kHeld = ceil_div(2 * kQueries, kThreads);  // by a thread
  BlockBias<Tiles::kParts> biases;
  BlockPair now = pair_from(begin);
  if (now.index < end) biases.load(p, now);
#pragma unroll 1
  while (now.index < end) {
    BlockPair next = now;
    if (Tiles::kStages > 1) next = pair_from(now.index + 1);
    const int64 first = padded_row(p, now.batch, now.head, now.m0);
    float held[kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = threadIdx.x + i * kThreads;
      const float* source = at < kQueries ? p.lse_log2 : p.minus_delta;
      if (kCompact && now.m0 + at % kQueries >= stored_rows(p)) {
        held[i] = at < kQueries ? kNegativeInfinity : 0.f;
      } else if (at < 2 * kQueries) {
        held[i] = source[first + at % kQueries];
      }
    }
    const auto& loaded = tiles.load(now, next, Tiles::kStages > 1 && next.index < end);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = threadIdx.x + i * kThreads;
      if (at < 2 * kQueries) numbers[at / kQueries][at % kQueries] = held[i];
    }
    __syncthreads();
    add_scores<Tiles::kParts>(p, loaded, now, biases, numbers, sum);
    now = Tiles::kStages > 1 ? next : pair_from(now.index + 1);
  }

  __syncthreads();
  float (&tile)[kQueries * kPitch] = *static_cast<SharedSum*>(memory);
  const int slab = threadIdx.x / 128 * 64;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int key = slab + fragment::first_row(threadIdx.x) + fragment::kRowStep * fragment::row(i);
    const int query = fragment::first_column(threadIdx.x) + fragment::column(i);
    tile[query * kPitch + key] = sum[i] * value_scale(p);
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
    for (int row = thread; row < kQueries; row += kThreads) {
      float total = 0.f;
      for (int key = 0; key < kKeys; ++key) total += tile[row * kPitch + key];
      if (kBiasQueries && m0 + row < p.query_len) {
        store(p, own * p.query_len + m0 + row, block.part, total);
      }
      tile[row * kPitch + kKeys] = total;
    }
    __syncthreads();
    if (!kBiasQueries && thread == 0) {
      float total = 0.f;
      for (int query = 0; query < kQueries; ++query) total += tile[query * kPitch + kKeys];
      store(p, own, block.part, total);
    }
  }
}

// With kDbiasByHeads: CTAs for the heads of a launch of the main kernel, one for every two queries
// and 64 keys. With one for a block of queries, 1024 batch rows of 64 by 64 had eight CTAs.
inline constexpr int kBatchKeys = 64, kBatchRows = 2;

// Has the main kernel stored dS of these keys and the block of queries? What it has left out is 0.
template <class Params>
__device__ __forceinline__ bool is_stored(const Params& p, int batch, int head, int m0, int key0) {
  const Range queries = visible_queries(visibility(p, batch), key0, key0 + kBatchKeys - 1);
  bool stored = !queries.empty() && m0 + kQueries > queries.begin && m0 < queries.end;
  const int m = m0 / kQueries, n = key0 / kKeys;
  if constexpr (kHasSegments) {
    const int2 keys = key_segment_range(p, batch, n);
    stored = stored && SegmentRange{keys.x, keys.y}.meets(query_segment_range(p, batch, m));
  }
  if constexpr (kHasPositions) {
    stored = stored &&
             positions_meet(p, query_position_range(p, batch, m), key_position_range(p, batch, n));
  }
  if constexpr (kHasMask) {
    stored = stored & (mask::flag_by_key<kQueries, kKeys>(p, batch, head, m, n) != 0);
  }
  return stored;
}

template <class Params>
__device__ __forceinline__ void sum_batch(const Params& p) {
  static_assert(!kDbiasByHeads || (kKeys % kBatchKeys == 0 && kQueries % kBatchRows == 0),
                "of one block");
  constexpr int kFours = kBatchKeys / 4;                       // of a row, one of a thread
  constexpr int kBatchParts = kThreads / kFours / kBatchRows;  // that a CTA adds at the end
  constexpr int kAtOnce = 8;                                   // batch rows loaded together
  __shared__ float4 parts[kBatchParts][kBatchRows][kFours];
  const int thread = threadIdx.x, four = thread % kFours, row = thread / kFours % kBatchRows;
  const int part = thread / (kFours * kBatchRows);
  const int key_pieces = ceil_div(p.kv_len, kBatchKeys);
  const int row_pieces = ceil_div(p.query_len, kBatchRows);
  const int rows = blockIdx.x / key_pieces;
  const int key0 = (blockIdx.x - rows * key_pieces) * kBatchKeys, key = key0 + 4 * four;
  const int of_launch = rows / row_pieces;
  const int query = (rows - of_launch * row_pieces) * kBatchRows + row;
  const int head = p.first_kv_head * group_size(p) + of_launch;
  const int m0 = query / kQueries * kQueries;
  const bool exists = query < p.query_len && key < p.kv_len;
  if (blockIdx.x == 0 && thread == 0) *p.next_unit = 0;  // the next launch counts again

  float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int base = part; base < p.batch; base += kAtOnce * kBatchParts) {
    // What is stored is asked for all of them first: each load would wait for its own answer.
    bool stored[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int batch = base + i * kBatchParts;
      stored[i] = is_stored(p, min(batch, p.batch - 1), head, m0, key0) & (batch < p.batch);
    }
    uint2 loaded[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int batch = base + i * kBatchParts;
      if (exists & stored[i]) {
        const uint16* from = stored_scores(p, batch, head, query) + key;
        loaded[i] = __ldcs(reinterpret_cast<const uint2*>(from));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum.x += bias::Narrow::unpack_low(loaded[i].x);
      sum.y += bias::Narrow::unpack_high(loaded[i].x);
      sum.z += bias::Narrow::unpack_low(loaded[i].y);
      sum.w += bias::Narrow::unpack_high(loaded[i].y);
    }
  }
  parts[part][row][four] = sum;
  __syncthreads();
  if (part != 0 || !exists) return;
#pragma unroll
  for (int i = 1; i < kBatchParts; ++i) {
    const float4 other = parts[i][row][four];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  const int64 at = (static_cast<int64>(head) * p.query_len + query) * p.kv_len + key;
  *reinterpret_cast<uint2*>(static_cast<uint16*>(p.dbias) + at) = {
      bias::Narrow::pack(sum.x, sum.y), bias::Narrow::pack(sum.z, sum.w)};
}

// The sum of the parts, by CTAs of 256 threads for 32 elements. One thread for all 264 parts of an
// element took 6.6 us where this takes 3.0 (H200).
inline constexpr int kPartElements = 32, kPartShares = 256 / kPartElements;

template <class Params>
__device__ __forceinline__ void sum_parts(const Params& p) {
  __shared__ float shares[kPartShares][kPartElements];
  const int element = threadIdx.x % kPartElements, share = threadIdx.x / kPartElements;
  const int64 index = static_cast<int64>(blockIdx.x) * kPartElements + element;
  float total = 0.f;
  if (index < p.bias_elements) {
#pragma unroll 8
    for (int part = share; part < p.dbias_ctas; part += kPartShares) {
      total += p.dbias_sum[part * p.bias_elements + index];
    }
  }
  shares[share][element] = total;
  __syncthreads();
  if (share != 0 || index >= p.bias_elements) return;
#pragma unroll
  for (int i = 1; i < kPartShares; ++i) total += shares[i][element];
  bias::store(p.dbias, index, total);
}

}  // namespace backward::bias_sum
