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

// Blocks of kTileKV keys that hold any of `keys`.
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
