// The mask as two questions: which key blocks does a tile of queries need, which elements are seen.
//
// Key j is visible to query t iff -left <= j - (t + offset) <= right and j < kv_length (and the
// segment ids agree); offset = 0 (top-left) or kv_length - query_length (bottom-right). A block is
// skipped, full, or partial, and only partial blocks pay an element test.
#pragma once

// Window and lengths of one batch row.
struct Visibility {
  int offset;        // key aligned with query 0
  int left, right;   // window, read only where bounded
  int query_length;  // rows from here on see nothing
  int kv_length;     // keys from here on are seen by nobody
};

// Of either pass's parameters, by the constants of the generated header.
template <class Params>
__device__ __forceinline__ Visibility visibility(const Params& p, int batch) {
  Visibility v{0, p.window_left, p.window_right, p.query_len, p.kv_len};
  if constexpr (kHasQueryLengths) v.query_length = min(p.query_len, p.query_lengths[batch]);
  if constexpr (kHasKeyValueLengths) v.kv_length = min(p.kv_len, p.key_value_lengths[batch]);
  if constexpr (kBottomRight) v.offset = v.kv_length - v.query_length;
  return v;
}

// Half-open range of keys or key blocks.
struct Range {
  int begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// Keys that any of the queries first..last sees.
template <bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ Range visible_keys(const Visibility& v, int first, int last) {
  last = min(last, v.query_length - 1);
  Range keys{0, v.kv_length};
  if constexpr (kWindowLeft) keys.begin = max(0, first + v.offset - v.left);
  if constexpr (kWindowRight) keys.end = min(keys.end, last + v.offset + v.right + 1);
  if (first > last) keys.end = keys.begin;
  return keys;
}

// Blocks of kTileKV keys that hold any of `keys`; none: {0, 0}.
template <int kTileKV>
__device__ __forceinline__ Range blocks_of(const Range& keys) {
  if (keys.empty()) return {0, 0};
  return {keys.begin / kTileKV, (keys.end + kTileKV - 1) / kTileKV};
}

// Blocks of which every one of the queries first..last sees every key (segments aside).
template <int kTileKV, bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ Range full_blocks(const Visibility& v, int first, int last) {
  Range keys{0, v.kv_length};
  if constexpr (kWindowLeft) keys.begin = max(0, last + v.offset - v.left);
  if constexpr (kWindowRight) keys.end = min(keys.end, first + v.offset + v.right + 1);
  return {(keys.begin + kTileKV - 1) / kTileKV, max(keys.end, 0) / kTileKV};
}

// Keys of one row, relative to `first_key`: element column c is visible iff begin <= c < end.
template <bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ Range row_columns(const Visibility& v, int query, int first_key) {
  Range columns{-0x40000000, v.kv_length - first_key};
  const int aligned = query + v.offset - first_key;
  if constexpr (kWindowLeft) columns.begin = aligned - v.left;
  if constexpr (kWindowRight) columns.end = min(columns.end, aligned + v.right + 1);
  return columns;
}

// The same questions from the side of the keys, for the backward pass.

// Queries that see any of the keys first..last.
template <bool kWindowLeft, bool kWindowRight>
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
template <bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ bool all_visible(const Visibility& v, int first_key, int last_key,
                                            int first_query, int last_query) {
  bool full = last_key < v.kv_length;
  if constexpr (kWindowLeft) full = full && last_query + v.offset - first_key <= v.left;
  if constexpr (kWindowRight) full = full && last_key - first_query - v.offset <= v.right;
  return full;
}

// First queries of the blocks of `count` queries of which every one sees every one of the keys
// first_key..last_key (segments aside). The length of the queries is the caller's.
template <bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ Range full_block_starts(const Visibility& v, int first_key, int last_key,
                                                   int count) {
  Range starts{-0x40000000, 0x40000000};
  if constexpr (kWindowLeft) starts.end = v.left - v.offset + first_key - count + 2;
  if constexpr (kWindowRight) starts.begin = last_key - v.offset - v.right;
  if (last_key >= v.kv_length) starts.end = starts.begin;
  return starts;
}

// Queries of one key, relative to `first_query`: element column c sees it iff begin <= c < end.
template <bool kWindowLeft, bool kWindowRight>
__device__ __forceinline__ Range key_columns(const Visibility& v, int key, int first_query) {
  Range columns{-0x40000000, 0x40000000};
  const int aligned = key - v.offset - first_query;
  if constexpr (kWindowLeft) columns.end = aligned + v.left + 1;
  if constexpr (kWindowRight) columns.begin = aligned - v.right;
  if (key >= v.kv_length) columns.end = columns.begin;
  return columns;
}

// ---- segments -----------------------------------------------------------------------------------

// Smallest and largest segment id of some queries or keys; an int2 in memory.
struct SegmentRange {
  int low = 0x7fffffff, high = -0x7fffffff - 1;
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
