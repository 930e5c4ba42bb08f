// Which query blocks a key block meets, by lengths, window, segments, masks and positions; what a
// unit of the backward pass is, how many there are, and their order.
#pragma once

#include "backward_common.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "terms.cuh"
#include "walk.cuh"

namespace backward {

inline constexpr int kPair = kPairs ? 2 : 1;  // units that walk the same query blocks

// Units of a head: with kPairs one more than blocks of keys where their number is odd.
template <class Params>
__device__ __forceinline__ int head_units(const Params& p) {
  return ceil_div(key_blocks(p), kPair) * kPair;
}
template <class Params>
__device__ __forceinline__ int unit_count(const Params& p) {
  return head_units(p) * p.batch * head_parts(p);
}
// The units of one launch of the main kernel, which with kDbiasByHeads takes some key/value heads.
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
  int step;  // from block to block of its walk, 1 or -1
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

// Which of the query blocks 32 * group and on does the block mask let any of the heads see?
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

// Which of the query blocks base..base + 31 do mask and positions let any head of the unit see, a
// bit each? Whole warps call.
template <class Params>
__device__ __forceinline__ uint32 shown_blocks(const Params& p, int batch, int kv_head, int key0,
                                               int base) {
  if constexpr (kShowsWords) {
    // Two words meet where `base` is no multiple of 32.
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

// With kFromDiagonals: the head and the block of keys of a unit, and the direction of its walk. The
// last blocks of keys come first, whose walks begin at their diagonals and rise. The last heads
// have their longest units first, so that all CTAs end together, and their walks fall.
template <class Params>
__device__ __forceinline__ HeadBlock diagonal_block(const Params& p, int index, int blocks,
                                                    int heads, int& step) {
  const int rising = heads - p.falling_heads, after = index - blocks * rising;
  step = after < 0 ? 1 : -1;
  if (after < 0) {
    const HeadBlock at = head_block(index, blocks, rising, p.l2_heads);
    return {blocks - 1 - at.block, at.head};
  }
  const HeadBlock at = head_block(after, blocks, p.falling_heads, p.falling_heads);
  return {at.block, rising + at.head};
}

// Units in the order of work: heads in groups whose queries stay in L2; within a group the key
// blocks, in ascending order (longest first when causal), its heads innermost.
template <class Params>
__device__ __forceinline__ Unit unit_at(const Params& p, int index) {
  Unit u;
  u.step = kDirection;
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
    // With kPairs units of neighbouring keys have numbers that follow each other.
    const int blocks = head_units(p) / kPair, all_heads = p.batch * head_parts(p);
    if constexpr (kFromDiagonals) {
      at = diagonal_block(p, index / kPair, blocks, all_heads, u.step);
    } else {
      at = head_block(index / kPair, blocks, all_heads, p.l2_heads);
    }
    at.block = at.block * kPair + index % kPair;
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
  const int first = u.key0 - at.block % kPair * kKeys;
  u.blocks = blocks_of<kQueries>(visible_queries(u.sight, first, first + kPair * kKeys - 1));
  return u;
}

__device__ __forceinline__ int first_block(const Range& blocks) {
  return kDirection < 0 ? blocks.end - 1 : blocks.begin;
}

}  // namespace backward
