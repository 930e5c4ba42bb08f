// Walks: which blocks of queries and keys meet, which of them need a test of their elements, and in
// what order CTAs take units of work.
//
// A block is skipped, full, or partial, and only partial blocks pay the tests of
// sees_fragments.cuh. Segments narrow what window and lengths leave. Blocks come from here alone,
// for those who load them as for those who compute.
#pragma once

#include "numbers.cuh"
#include "terms.cuh"

// ---- blocks of keys, from the side of the queries -----------------------------------------------

// Keys that any of the queries first..last sees.
__device__ __forceinline__ Range visible_keys(const Visibility& v, int first, int last) {
  last = min(last, v.query_length - 1);
  Range keys{0, v.kv_length};
  if constexpr (kWindowLeft) keys.begin = max(0, first + v.offset - v.left);
  if constexpr (kWindowRight) keys.end = min(keys.end, last + v.offset + v.right + 1);
  if (first > last) keys.end = keys.begin;
  return keys;
}

// Blocks of kBlock keys that hold any of `keys`; none: {0, 0}.
template <int kBlock>
__device__ __forceinline__ Range blocks_of(const Range& keys) {
  if (keys.empty()) return {0, 0};
  return {keys.begin / kBlock, (keys.end + kBlock - 1) / kBlock};
}

// Blocks of which every one of the queries first..last sees every key (segments aside).
template <int kBlock>
__device__ __forceinline__ Range full_blocks(const Visibility& v, int first, int last) {
  Range keys{0, v.kv_length};
  if constexpr (kWindowLeft) keys.begin = max(0, last + v.offset - v.left);
  if constexpr (kWindowRight) keys.end = min(keys.end, first + v.offset + v.right + 1);
  return {(keys.begin + kBlock - 1) / kBlock, max(keys.end, 0) / kBlock};
}

// ---- blocks of queries, from the side of the keys -----------------------------------------------

// Queries that see any of the keys first..last.
__device__ __forceinline__ Range visible_queries(const Visibility& v, int first, int last) {
  last = min(last, v.kv_length - 1);
  Range queries{0, v.query_length};
  if constexpr (kWindowLeft) queries.end = min(queries.end, last - v.offset + v.left + 1);
  if constexpr (kWindowRight) queries.begin = max(0, first - v.offset - v.right);
  if (first > last || queries.empty()) return {0, 0};
  return queries;
}

// Does every one of the queries first_query..last_query see every one of the keys
// first_key..last_key (segments aside)? The length of the queries is the caller's.
__device__ __forceinline__ bool all_visible(const Visibility& v, int first_key, int last_key,
                                            int first_query, int last_query) {
  bool full = last_key < v.kv_length;
  if constexpr (kWindowLeft) full = full && last_query + v.offset - first_key <= v.left;
  if constexpr (kWindowRight) full = full && last_key - first_query - v.offset <= v.right;
  return full;
}

// First queries of the blocks of `count` queries of which every one sees every one of the keys
// first_key..last_key (segments aside). The length of the queries is the caller's.
__device__ __forceinline__ Range full_block_starts(const Visibility& v, int first_key, int last_key,
                                                   int count) {
  Range starts = Range::all();
  if constexpr (kWindowLeft) starts.end = v.left - v.offset + first_key - count + 2;
  if constexpr (kWindowRight) starts.begin = last_key - v.offset - v.right;
  if (last_key >= v.kv_length) starts.end = starts.begin;
  return starts;
}

// ---- segments -----------------------------------------------------------------------------------

// Smallest and largest segment id of some queries or keys; an int2 in memory.
struct SegmentRange {
  int low = kLargest, high = kSmallest;
  __device__ __forceinline__ bool empty() const { return low > high; }
  __device__ __forceinline__ void include(int id) {
    low = min(low, id);
    high = max(high, id);
  }
  __device__ __forceinline__ void reduce_warp() {
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ __forceinline__ bool meets(int2 other) const {
    return other.x <= high && low <= other.y;
  }
  __device__ __forceinline__ bool is_one(int2 other) const {
    return low == high && other.x == low && other.y == low;
  }
};

// The range of ids[begin, end), by one warp.
__device__ __forceinline__ SegmentRange segment_range(const int* ids, int begin, int end) {
  SegmentRange range;
  for (int i = begin + static_cast<int>(threadIdx.x) % 32; i < end; i += 32) range.include(ids[i]);
  range.reduce_warp();
  return range;
}

// ---- positions ----------------------------------------------------------------------------------

// May any of a range of queries' positions and one of keys' (an int2 each, as segment_range finds
// them) see each other,
template <class Params>
__device__ __forceinline__ bool positions_meet(const Params& p, int2 queries, int2 keys) {
  if (queries.x > queries.y || keys.x > keys.y) return false;  // a block past the length
  return keys.y >= positions_seen(p, queries.x).first &&
         keys.x <= positions_seen(p, queries.y).last;
}
// and do all?
template <class Params>
__device__ __forceinline__ bool positions_all_meet(const Params& p, int2 queries, int2 keys) {
  return keys.x >= positions_seen(p, queries.y).first &&
         keys.y <= positions_seen(p, queries.x).last;
}

// ---- units of work ------------------------------------------------------------------------------

// A block of one head, of all heads of the batch.
struct HeadBlock {
  int block, head;
};

// Number `index` of blocks * heads, counted so that CTAs at work at the same time share what they
// load in L2: `l2_heads` heads are walked block by block, all of them at each.
__device__ __forceinline__ HeadBlock head_block(int index, int blocks, int heads, int l2_heads) {
  const int set = index / (blocks * l2_heads);
  const int within = index - set * blocks * l2_heads;
  const int set_heads = min(l2_heads, heads - set * l2_heads);
  const int block = within / set_heads;
  return {block, set * l2_heads + within - block * set_heads};
}
