// What the kernels of the backward pass share: tile constants, geometry of one key block, layouts.
//
// Owns which query blocks a key block meets, in which order, and where the workspaces keep what.
// Read a family's backward.cuh for the kernels and the constants of the generated header. Those
// that jax_flash/_gpu/backward_schedule.py decides for all families, with the reasons:
//   bool kShowsWords          a block mask alone says of 32 query blocks in a word which a unit
//   sees;
//                             kShowsLayout: a block that is seen is seen whole
//   bool kTurnsShown          in the deterministic mode these words say whose turn it is
//   bool kSkipsMasked         blocks that mask or positions hide are left out of a walk
//   int kDirection            of a walk: -1 from the last block of queries to the first, else 1
//   int kPrepareUnroll        rows that a thread of the preparing kernel reads at once
//   int kMaskResident         CTAs of mask_plan on a multiprocessor; 0: as ptxas has it
//   bool kSumBeginsAhead      of a bias's gradient the next part's products run beside the
//                             arithmetic of one; kSumHoldsBias: the bias stays in registers
#pragma once

#include "element.cuh"
#include "fragment.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "terms.cuh"
#include "tile.cuh"
#include "walk.cuh"

namespace backward {

inline constexpr int kQueries = kBlockQ;
inline constexpr int kKeys = kBlockKV;
inline constexpr int kHead = round_up(kHeadDim, 16);    // columns past kHeadDim read as zero
inline constexpr int kValue = round_up(kValueDim, 16);  // likewise
inline constexpr int kHeadBoxes = ceil_div(kHead, kBoxColumns);
inline constexpr int kValueBoxes = ceil_div(kValue, kBoxColumns);

// Do all rows start at multiples of 16 bytes?
inline constexpr bool kWholePieces =
    kRowAlignment<kHeadDim> == 16 && kRowAlignment<kValueDim> == 16;

template <class Params>
__device__ __forceinline__ int query_blocks(const Params& p) {
  return ceil_div(p.query_len, kQueries);
}
template <class Params>
__device__ __forceinline__ int key_blocks(const Params& p) {
  return ceil_div(p.kv_len, kKeys);
}
// Rows of lse_log2 and minus_delta, of a head, and where those of a query block start. With
// kCompact a block that is the only one has no more of them than fill pieces of 16 bytes.
template <class Params>
__device__ __forceinline__ int stored_rows(const Params& p) {
  if (kCompact && p.query_len <= kQueries) return round_up(p.query_len, 4);
  return query_blocks(p) * kQueries;
}
template <class Params>
__device__ __forceinline__ int64 numbers_of(const Params& p, int block) {
  return static_cast<int64>(block) * (kCompact ? min(stored_rows(p), kQueries) : kQueries);
}

// With dropout P^T dO, dS and the delta that enters it lack the factor 1 / (1 - rate), which dq, dk
// and dv get when they are stored; so they get, with kCarried, what P and dO were multiplied by.
template <class Params>
__device__ __forceinline__ float value_scale(const Params& p) {
  return dropout_scale(p) * result_scale(p);
}
template <class Params>
__device__ __forceinline__ float query_key_scale(const Params& p) {
  return p.scale * value_scale(p);
}
// P of a logit less lse, in units of log2. In a row whose lse has no bits left for its weights'
// sum, beyond 2^24, float32 has no weight above 1 either.
__device__ __forceinline__ float probability_of(float exponent) {
  if constexpr (kFloat32) exponent = exponent > 0.f ? 0.f : exponent;  // NaN stays
  return ptx::exp2_approx(exponent);
}
// dS of one pair, the slope of the logit aside. Dropped ones have a P with a sign (terms.cuh).
__device__ __forceinline__ float score_gradient(float probability, float dp, float minus_delta) {
  if constexpr (kHasDropout && kScoreHasSlope) {
    return probability * ((__float_as_uint(probability) & 1 ? 0.f : dp) + minus_delta);
  } else if constexpr (kHasDropout) {
    return fmaf(fmaxf(probability, 0.f), dp, fabsf(probability) * minus_delta);
  }
  return probability * (dp + minus_delta);
}

// Query heads of one key/value head.
template <class Params>
__device__ __forceinline__ int group_size(const Params& p) {
  return p.query_heads / p.kv_heads;
}

// Query heads that a unit walks: all of its key/value head, or kUnitHeads, a part of them. Then the
// units of a block of keys add to float32 sums of dk and dv, of which flash_backward_finish makes
// the results.
inline constexpr bool kSharesKeys = kUnitHeads > 0;
static_assert(!kSharesKeys || (!kCompact && !kCarried && !kHalves && !kDbiasByRows &&
                               !kDbiasByHeads && kWholePieces));
template <class Params>
__device__ __forceinline__ int unit_heads(const Params& p) {
  return kSharesKeys ? kUnitHeads : group_size(p);
}
// Parts of the query heads of a batch row.
template <class Params>
__device__ __forceinline__ int head_parts(const Params& p) {
  return kSharesKeys ? p.query_heads / max(kUnitHeads, 1) : p.kv_heads;
}

// With kDbiasByHeads: where dS of a query is kept, of a head that the launch takes.
template <class Params>
__device__ __forceinline__ uint16* stored_scores(const Params& p, int batch, int head, int query) {
  const int heads = p.launched_kv_heads * group_size(p);
  const int first = p.first_kv_head * group_size(p);
  const int64 row = (static_cast<int64>(batch) * heads + head - first) * p.query_len + query;
  return reinterpret_cast<uint16*>(p.dbias_sum) + row * p.kv_len;
}
// With kStoresDbias: dS of a warp's 16 keys, from `first_key` on, is the gradient of a bias that
// nothing shares, or with kDbiasByHeads waits for its sum over the batch rows, or with kDbiasByRows
// is added to that of the rows before. `gradient`: dS^T, packed as an operand of products by rows.
template <class Params, int kCount>
__device__ __forceinline__ void store_dbias(const Params& p, int batch, int head, int first_query,
                                            int first_key, const uint32 (&gradient)[kCount]) {
  const int lane = ptx::opaque(threadIdx.x) % 32;
  const int key = first_key + bias::first_of_four(lane);
  const int query = first_query + lane / 4;
  uint16* to;
  if constexpr (kDbiasByHeads) {
    to = stored_scores(p, batch, head, query) + key;
  } else {
    const int64 own = kDbiasByRows ? head : static_cast<int64>(batch) * p.query_heads + head;
    to = static_cast<uint16*>(p.dbias) + (own * p.query_len + query) * p.kv_len + key;
  }
  // Of the batch rows before, stored by this thread.
  uint2 before[kDbiasByRows ? kCount / 2 : 1] = {};
  if constexpr (kDbiasByRows) {
    const bool adds = kDbiasCleared || batch > 0;
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      if (adds && query + 8 * j < p.query_len && key < p.kv_len) {
        before[j] = *reinterpret_cast<const uint2*>(to + 8 * j * static_cast<int64>(p.kv_len));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    uint2 four = bias::gather(ptx::transpose_matrix(gradient[2 * j]),
                              ptx::transpose_matrix(gradient[2 * j + 1]));
    if constexpr (kDbiasByRows) {
      four = {bias::add_pairs(four.x, before[j].x), bias::add_pairs(four.y, before[j].y)};
    }
    // Rows are of whole fours.
    if (query + 8 * j < p.query_len && key < p.kv_len) *reinterpret_cast<uint2*>(to) = four;
    to += 8 * static_cast<int64>(p.kv_len);
  }
}

// The float32 sum of dq is kept in the order in which a warpgroup's threads hold 64 x 64 tiles, as
// eight pieces of 16 bytes a thread. dq_sum has them as [B, N, query block, tile, 8, thread, 4],
// the tiles of a block by rows, then columns. With kDqRowBytes, which needs whole tiles, dq_sum is
// half as large: the 128 bytes that each row of a tile will have in dq hold the even pieces until
// flash_backward_finish has read them, and dq_sum, with the shape of dq, holds the odd ones.
//
// Where no instruction adds 16 bytes (kAddsFour = false), the 2 KB that the 128 threads have of a
// piece hold its first elements, then the second ones: what a warp adds at once is one line of 128
// bytes, not four bytes of every 16.
//
// A dq of float32 holds all of its sum: the odd pieces in the next 128 bytes of a row of a tile.
//
// With kRing the sums of p.ring_heads heads take turns in dq_sum, and what a warp has of a tile
// lies side by side: [tile, 4, 8, lane, 4]. See sm90/backward_ring.cuh.
//
// With kCompact dq_sum is [B, N, T, H], or dq itself where that is float32: of few rows or columns
// tiles would take many times the memory of the queries. Each element is added alone.
inline constexpr bool kSumsInDq = kDqRowBytes > 0;
static_assert(kSumsInDq + kRing + kCompact <= 1);

// Where the sum of the query block from m0 on starts: an index of the rows of dq, or of blocks.
template <class Params>
__device__ __forceinline__ int sum_index(const Params& p, int batch, int head, int m0) {
  if constexpr (kSumsInDq) return (batch * p.query_len + m0) * p.query_heads + head;
  int of = batch * p.query_heads + head;
  if constexpr (kRing) of %= p.ring_heads;
  return of * query_blocks(p) + m0 / kQueries;
}

// A thread's pieces of one tile of the block at `index`.
class TiledSum {
 public:
  template <class Params>
  __device__ __forceinline__ TiledSum(const Params& p, int index, int tile,
                                      uint32 thread = threadIdx.x % 128) {
    char* sum = reinterpret_cast<char*>(p.dq_sum);
    if constexpr (kSumsInDq) {
      constexpr int kElement = sizeof(ResultElement::Bits);
      const uint32 row = static_cast<uint32>(tile) / kHeadBoxes * 64 + thread / kThreadsOnRow;
      const uint32 column = static_cast<uint32>(tile) % kHeadBoxes * (64 * kElement) +
                            thread % kThreadsOnRow * kBytes;
      const int64 at =
          static_cast<int64>(index) * (kHeadDim * kElement) + (row * kDqRowBytes + column);
      even_ = static_cast<char*>(p.dquery) + at;
      odd_ = kElement == 4 ? even_ + 128 : sum + at;
    } else if constexpr (kRing) {
      even_ = odd_ = sum +
                     (static_cast<int64>(index) * (kQueries / 64 * kHeadBoxes) + tile) * 16384 +
                     thread / 32 * 4096 + thread % 32 * 16;
    } else {
      constexpr int64 kTileBytes = 64 * 64 * 4;
      even_ = sum + (static_cast<int64>(index) * (kQueries / 64 * kHeadBoxes) + tile) * kTileBytes +
              thread * kBytes;
      odd_ = even_ + 2048;
    }
  }
  __device__ __forceinline__ float4 load(int i) const {
    if constexpr (kAddsFour) return __ldcs(reinterpret_cast<const float4*>(at(i)));
    return {__ldcs(at(i, 0)), __ldcs(at(i, 1)), __ldcs(at(i, 2)), __ldcs(at(i, 3))};
  }
  __device__ __forceinline__ void store(int i, const float4& x) const {
    if constexpr (kAddsFour) {
      *reinterpret_cast<float4*>(at(i)) = x;
    } else {
      *at(i, 0) = x.x;
      *at(i, 1) = x.y;
      *at(i, 2) = x.z;
      *at(i, 3) = x.w;
    }
  }
  __device__ __forceinline__ void add(int i, const float4& x) const {
    if constexpr (kAddsFour) {
      ptx::reduce_add_x4(at(i), x.x, x.y, x.z, x.w);
    } else {
      ptx::reduce_add(at(i, 0), x.x);
      ptx::reduce_add(at(i, 1), x.y);
      ptx::reduce_add(at(i, 2), x.z);
      ptx::reduce_add(at(i, 3), x.w);
    }
  }

 private:
  static constexpr int kBytes = kAddsFour ? 16 : 4;  // of a thread in a row of 128
  static constexpr int kThreadsOnRow = 128 / kBytes;

  // Element e of piece i.
  __device__ __forceinline__ float* at(int i, int e = 0) const {
    constexpr int kStep = kSumsInDq ? 16 * kDqRowBytes : 4096;
    if constexpr (kRing) return reinterpret_cast<float*>(even_ + i * 512 + e * 4);
    constexpr int kElementStep = kSumsInDq ? 4 * kDqRowBytes : 512;
    return reinterpret_cast<float*>((i % 2 == 0 ? even_ : odd_) + i / 2 * kStep + e * kElementStep);
  }

  char *even_, *odd_;
};

// The same with kCompact: rows past the last query and columns past kHeadDim are not there.
class CompactSum {
 public:
  template <class Params>
  __device__ __forceinline__ CompactSum(const Params& p, int index, int tile,
                                        uint32 thread = ptx::opaque(threadIdx.x) % 128) {
    const int head_index = index / query_blocks(p);
    const int row = (index - head_index * query_blocks(p)) * kQueries + tile / kHeadBoxes * 64 +
                    fragment::first_row(thread);
    rows_ = p.query_len - row;
    column_ = tile % kHeadBoxes * 64 + fragment::first_column(thread);
    int64 at;
    if constexpr (kSumsAreDq) {
      const int batch = head_index / p.query_heads;
      at = query_row(p, batch, row, head_index - batch * p.query_heads);
      pitch_ = p.query_heads * kHeadDim;
    } else {
      at = static_cast<int64>(head_index) * p.query_len + row;
      pitch_ = kHeadDim;
    }
    first_ = p.dq_sum + at * kHeadDim + column_;
  }
  __device__ __forceinline__ float4 load(int i) const {
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    for_each(i, [&](float* at, int e) { x[e] = __ldcs(at); });
    return {x[0], x[1], x[2], x[3]};
  }
  __device__ __forceinline__ void store(int i, const float4& of) const {
    const float x[4] = {of.x, of.y, of.z, of.w};
    for_each(i, [&](float* at, int e) { *at = x[e]; });
  }
  __device__ __forceinline__ void add(int i, const float4& of) const {
    const float x[4] = {of.x, of.y, of.z, of.w};
    for_each(i, [&](float* at, int e) { ptx::reduce_add(at, x[e]); });
  }

 private:
  // dq is float32, and its sum.
  static constexpr bool kSumsAreDq = sizeof(ResultElement::Bits) == 4;

  // What is there of the elements of piece i.
  template <class Do>
  __device__ __forceinline__ void for_each(int i, Do act) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = fragment::row(e) * fragment::kRowStep, column = 8 * i + fragment::column(e);
      if (row < rows_ && (kHeadDim % 64 == 0 || column_ + column < kHeadDim)) {
        act(first_ + (kSumsAreDq ? static_cast<int64>(row) * pitch_ : row * kHeadDim) + column, e);
      }
    }
  }

  float* first_;
  int pitch_, rows_, column_;
};

template <bool kIsCompact>
struct SumOf {
  using Tile = TiledSum;
};
template <>
struct SumOf<true> {
  using Tile = CompactSum;
};
using SumTile = SumOf<kCompact>::Tile;

// The same of the tile with row `row0`.
template <class Params>
__device__ __forceinline__ SumTile sum_tile(const Params& p, int batch, int head, int row0,
                                            int box) {
  const int within = row0 % kQueries;
  return {p, sum_index(p, batch, head, row0 - within), within / 64 * kHeadBoxes + box};
}

// A thread's pieces of one of the tiles that hold, with kSharesKeys, the sums of dk and then of dv
// of 64 keys, as [B, K, key block, 64 keys, tile, 8, thread, 4].
class KeySumTile {
 public:
  static constexpr int kTiles = kHeadBoxes + kValueBoxes;  // of 64 columns

  // `slab`: of the 64 keys, of all key/value heads.
  template <class Params>
  __device__ __forceinline__ KeySumTile(const Params& p, int slab, int tile)
      : sum_(p.key_sums + (static_cast<int64>(slab) * kTiles + tile) * (64 * 64) +
             threadIdx.x % 128 * 4) {}
  __device__ __forceinline__ float4 load(int i) const {
    return __ldcs(reinterpret_cast<const float4*>(sum_ + i * 512));
  }
  __device__ __forceinline__ void store(int i, const float4& x) const {
    *reinterpret_cast<float4*>(sum_ + i * 512) = x;
  }
  __device__ __forceinline__ void add(int i, const float4& x) const {
    ptx::reduce_add_x4(sum_ + i * 512, x.x, x.y, x.z, x.w);
  }

 private:
  float* sum_;
};

template <class Params>
__device__ __forceinline__ int unit_count(const Params& p) {
  return key_blocks(p) * p.batch * head_parts(p);
}
// Of one launch of the main kernel: with kDbiasByHeads it takes some key/value heads alone.
template <class Params>
__device__ __forceinline__ int launched_units(const Params& p) {
  if constexpr (kDbiasByHeads) return key_blocks(p) * p.batch * p.launched_kv_heads;
  return unit_count(p);
}

// The smallest and largest segment id of a block.
template <class Params>
__device__ __forceinline__ int2 query_segment_range(const Params& p, int batch, int m) {
  return reinterpret_cast<const int2*>(p.query_segment_ranges)[batch * query_blocks(p) + m];
}
template <class Params>
__device__ __forceinline__ int2 key_segment_range(const Params& p, int batch, int n) {
  return reinterpret_cast<const int2*>(p.key_segment_ranges)[batch * key_blocks(p) + n];
}

// The smallest and largest position of a block.
template <class Params>
__device__ __forceinline__ int2 query_position_range(const Params& p, int batch, int m) {
  return reinterpret_cast<const int2*>(p.query_position_ranges)[batch * query_blocks(p) + m];
}
template <class Params>
__device__ __forceinline__ int2 key_position_range(const Params& p, int batch, int n) {
  return reinterpret_cast<const int2*>(p.key_position_ranges)[batch * key_blocks(p) + n];
}

// One block of keys of one key/value head, and the query blocks that see any of them.
struct Unit {
  int batch, kv_head, key0;
  int head;  // first query head
  Visibility sight;
  Range blocks;
};

// Drops query blocks at both ends whose segment ids cannot meet the key block's. Whole warps call.
template <class Params>
__device__ __forceinline__ Range narrow_by_segments(const Params& p, int batch, int key0,
                                                    Range blocks) {
  const int2 range = key_segment_range(p, batch, key0 / kKeys);
  const SegmentRange keys{range.x, range.y};
  Range met{blocks.end, 0};
#pragma unroll kDeterministic ? 1 : 4  // few registers are left beside the turns
  for (int base = blocks.begin; base < blocks.end; base += 32) {
    const int m = min(base + static_cast<int>(threadIdx.x) % 32, blocks.end - 1);
    const uint32 hits = __ballot_sync(0xffffffffu, keys.meets(query_segment_range(p, batch, m)));
    if (hits != 0) {
      met.begin = min(met.begin, base + __ffs(hits) - 1);
      met.end = min(base + 32 - __clz(hits), blocks.end);
    }
  }
  return met.empty() ? Range{0, 0} : met;
}

// Of query blocks 32 * group and on, which does the block mask let any of the heads see?
template <class Params>
__device__ __forceinline__ uint32 shown_word(const Params& p, int batch, int head, int heads,
                                             int key_block, int group) {
  uint32 shown = 0;
  const int end = mask::varies_by_head(p) ? head + heads : head + 1;
#pragma unroll 1
  for (; head < end; ++head) {
    shown |=
        p.block_mask.flags[mask::flags_by_key<kQueries, kKeys>(p, batch, head, key_block, group)];
  }
  return shown;
}
// With kTurnsShown: the last block of keys from `first` on and before `block` that sees query block
// m, plus one; 0 if none does. Whole warps call.
template <class Params>
__device__ __forceinline__ int shown_before(const Params& p, int batch, int head, int heads,
                                            int block, int first, int m) {
#pragma unroll 1
  for (int end = block - 1; end >= first; end -= 32) {
    const int n = end - static_cast<int>(threadIdx.x) % 32;
    uint32 word = 0;
    if (n >= first) word = shown_word(p, batch, head, heads, n, m / 32);
    const uint32 hits = __ballot_sync(0xffffffffu, word >> m % 32 & 1);
    if (hits != 0) return end + 2 - __ffs(hits);
  }
  return 0;
}

// Of the query blocks base..base + 31, which do mask and positions let any head of the unit see, a
// bit each? Whole warps call.
template <class Params>
__device__ __forceinline__ uint32 shown_blocks(const Params& p, int batch, int kv_head, int key0,
                                               int base) {
  if constexpr (kShowsWords) {
    // Of two words where `base` is no multiple of 32.
    const int group = base / 32, last = ceil_div(query_blocks(p), 32) - 1;
    const int heads = group_size(p), head = kv_head * heads, block = key0 / kKeys;
    const uint32 low = shown_word(p, batch, head, heads, block, group);
    const uint32 high =
        base % 32 == 0 || group == last ? 0 : shown_word(p, batch, head, heads, block, group + 1);
    return __funnelshift_r(low, high, base);
  }
  const int m = base + static_cast<int>(threadIdx.x) % 32;
  int shown = m < query_blocks(p);
  if constexpr (kHasMask) {
    const int first = kv_head * group_size(p), heads = mask::varies_by_head(p) ? group_size(p) : 1;
    shown = 0;
#pragma unroll 1
    for (int i = 0; m < query_blocks(p) && i < heads; ++i) {
      shown |= mask::flag_by_key<kQueries, kKeys>(p, batch, first + i, m, key0 / kKeys);
    }
  }
  if constexpr (kHasPositions) {
    shown = shown && positions_meet(p, query_position_range(p, batch, m),
                                    key_position_range(p, batch, key0 / kKeys));
  }
  return __ballot_sync(0xffffffffu, shown != 0);
}

// Units in the order of work: heads in groups whose queries stay in L2; within a group the key
// blocks, in ascending order (longest first when causal), its heads innermost.
template <class Params>
__device__ __forceinline__ Unit unit_at(const Params& p, int index) {
  Unit u;
  HeadBlock at;
  if constexpr (kDbiasByRows) {  // one after the other, by one CTA
    const int block = index / p.batch;
    u.batch = index - block * p.batch;
    at = head_block(block, key_blocks(p), p.kv_heads, p.l2_heads);
    u.kv_head = at.head;
  } else if constexpr (kDbiasByHeads) {  // side by side: they share a bias
    at = head_block(index, key_blocks(p), p.batch * p.launched_kv_heads, p.l2_heads);
    u.kv_head = at.head / p.batch;
    u.batch = at.head - u.kv_head * p.batch;
    u.kv_head += p.first_kv_head;
  } else {
    at = head_block(index, key_blocks(p), p.batch * head_parts(p), p.l2_heads);
    const int heads = kPartsApart ? p.kv_heads : head_parts(p);
    const int part = kPartsApart ? at.head / (p.batch * heads) : 0;
    if constexpr (kPartsApart) at.head -= part * p.batch * heads;
    u.batch = at.head / heads;
    u.kv_head = at.head - u.batch * heads;
    if constexpr (kSharesKeys && !kPartsApart) {
      u.head = u.kv_head * unit_heads(p);
      u.kv_head = u.head / group_size(p);
    } else {
      u.head = u.kv_head * group_size(p) + part * unit_heads(p);
    }
  }
  if constexpr (kDbiasByRows || kDbiasByHeads) u.head = u.kv_head * group_size(p);
  u.key0 = at.block * kKeys;
  u.sight = visibility(p, u.batch);
  u.blocks = blocks_of<kQueries>(visible_queries(u.sight, u.key0, u.key0 + kKeys - 1));
  return u;
}

__device__ __forceinline__ int first_block(const Range& blocks) {
  return kDirection < 0 ? blocks.end - 1 : blocks.begin;
}

}  // namespace backward
