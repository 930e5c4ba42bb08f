// Which pairs of query and key there are, by window, lengths, segments, positions and masks: a pair
// by itself, the keys of one query, the queries of one key. Fragments: sees_fragments.cuh.
//
// Key j is visible to query t iff -left <= j - (t + offset) <= right and j < kv_length (and the
// segment ids agree, and the mask has it); offset = 0 (top-left) or kv_length - query_length
// (bottom-right). With positions, -left <= key's - query's <= right in place of the first: then
// kWindowLeft and kWindowRight are off, and kReachLeft and kReachRight tell which sides there are.
#pragma once

#include "bias.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "params.cuh"
#include "ptx.cuh"

// Window and lengths of one batch row.
struct Visibility {
  int offset;        // key aligned with query 0
  int left, right;   // window, read only where bounded
  int query_length;  // rows from here on see nothing
  int kv_length;     // keys from here on are seen by nobody
};

// Index of the element of a pair.
__device__ __forceinline__ int64 broadcast_at(const Broadcast& array, int batch, int head,
                                              int query, int key) {
  return batch * array.batch + head * array.head + query * array.query + key * array.key;
}

// From either pass's parameters, by the constants of the generated header.
template <class Params>
__device__ __forceinline__ Visibility visibility(const Params& p, int batch) {
  Visibility v{0, p.window_left, p.window_right, p.query_len, p.kv_len};
  if constexpr (kHasQueryLengths) v.query_length = min(p.query_len, p.query_lengths[batch]);
  if constexpr (kHasKeyValueLengths) v.kv_length = min(p.kv_len, p.key_value_lengths[batch]);
  if constexpr (kBottomRight) v.offset = v.kv_length - v.query_length;
  return v;
}

// A position less or plus a distance, the end of int32 where that lies beyond.
__device__ __forceinline__ int position_before(int position, uint32 distance) {
  const uint32 at = position, room = at ^ 0x80000000u;
  return static_cast<int>(at - (distance < room ? distance : room));
}
__device__ __forceinline__ int position_after(int position, uint32 distance) {
  const uint32 at = position, room = 0x7fffffffu - at;
  return static_cast<int>(at + (distance < room ? distance : room));
}

// Positions from `first` to `last`.
struct Positions {
  int first, last;
  __device__ __forceinline__ bool hold(int position) const {
    return position >= first && position <= last;
  }
};
inline constexpr int kFirstPosition = -0x7fffffff - 1, kLastPosition = 0x7fffffff;

// The positions of the keys that a query at `position` sees, and of the queries that see a key
// there. The sides of the window are uint32 in the parameters.
template <class Params>
__device__ __forceinline__ Positions positions_seen(const Params& p, int position) {
  return {kReachLeft ? position_before(position, p.window_left) : kFirstPosition,
          kReachRight ? position_after(position, p.window_right) : kLastPosition};
}
template <class Params>
__device__ __forceinline__ Positions positions_seeing(const Params& p, int position) {
  return {kReachRight ? position_before(position, p.window_right) : kFirstPosition,
          kReachLeft ? position_after(position, p.window_left) : kLastPosition};
}
template <class Params>
__device__ __forceinline__ int query_position(const Params& p, int batch, int query) {
  return p.query_positions[static_cast<int64>(batch) * p.query_len + query];
}
template <class Params>
__device__ __forceinline__ int key_position(const Params& p, int batch, int key) {
  return p.key_value_positions[static_cast<int64>(batch) * p.kv_len + key];
}

// Does the query see the key, window and lengths aside? Window and lengths are a range of keys
// (row_columns), and what a function of the scores hides by -inf is the function's matter.
template <class Params>
__device__ __forceinline__ bool sees(const Params& p, int batch, int head, int query, int key) {
  bool seen = true;
  if constexpr (kHasSegments) {
    seen = p.query_segments[static_cast<int64>(batch) * p.query_len + query] ==
           p.key_value_segments[static_cast<int64>(batch) * p.kv_len + key];
  }
  if constexpr (kHasPositions) {
    // Opaque: addresses kept from pair to pair take registers that exact rows lack with a bias.
    const int row = ptx::opaque(batch);
    const Positions reach = positions_seen(p, query_position(p, row, query));
    seen = seen && reach.hold(key_position(p, row, key));
  }
  if constexpr (kHasMaskBytes) {
    const int64 at = broadcast_at(p.mask.bytes, batch, head, query, key);
    seen = seen && static_cast<const unsigned char*>(p.mask.bytes.data)[at] != 0;
  }
  if constexpr (kMaskBlock != 0) {
    seen = seen && mask::block_shows(p, ptx::opaque(batch), head, query, key);
  }
  // A logit of -inf hides the key's value.
  if constexpr (kHasBias && !kSoftcap && !kHasScoreFunction) {
    seen = seen && bias::at(p, batch, head, query, key) != kNegativeInfinity;
  }
  return seen;
}

// Keys of one row, relative to `first_key`: element column c is visible iff begin <= c < end.
__device__ __forceinline__ Range row_columns(const Visibility& v, int query, int first_key) {
  Range columns{Range::all().begin, v.kv_length - first_key};
  const int aligned = query + v.offset - first_key;
  if constexpr (kWindowLeft) columns.begin = aligned - v.left;
  if constexpr (kWindowRight) columns.end = min(columns.end, aligned + v.right + 1);
  return columns;
}

// Queries of one key, relative to `first_query`: element column c sees it iff begin <= c < end.
__device__ __forceinline__ Range key_columns(const Visibility& v, int key, int first_query) {
  Range columns = Range::all();
  const int aligned = key - v.offset - first_query;
  if constexpr (kWindowLeft) columns.end = aligned + v.left + 1;
  if constexpr (kWindowRight) columns.begin = aligned - v.right;
  if (key >= v.kv_length) {
    if constexpr (kSoftcap && !kWindowLeft) {  // the end is a constant: two registers fewer
      columns.begin = columns.end;
    } else {
      columns.end = columns.begin;
    }
  }
  return columns;
}
