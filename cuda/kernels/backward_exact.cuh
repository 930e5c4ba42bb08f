// Rows of dq, dk and dv once more, by one warp each, without touching what is hidden from them.
//
// The tiled kernel multiplies the rows of a partial block by a dS or P of zero where they do not
// see each other, and 0 * NaN is NaN: a NaN or infinity in one row of a block reaches the results
// of the others. Rows whose result is not finite come here. Those that saw it keep it: their lse or
// delta is not finite either.
#pragma once

#include "backward_blocks.cuh"

namespace backward {

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < kInfinity; }
__device__ __forceinline__ bool row_is_finite(const void* array, int64 at, int count) {
  bool finite = true;
  for (int c = threadIdx.x % 32; c < count; c += 32) {
    finite = finite && is_finite(load_result(array, at + c));
  }
  return __all_sync(0xffffffffu, finite);
}

// The index of a row of lse_log2 and minus_delta.
template <class Params>
__device__ __forceinline__ int64 padded_row(const Params& p, int batch, int head, int query) {
  const int64 row = static_cast<int64>(batch) * p.query_heads + head;
  if constexpr (kCompact) return row * stored_rows(p) + query;
  return row * query_blocks(p) * kQueries + query;
}
// One element of P, dropout applied, and of dS.
struct Weights {
  float probability, gradient;
  bool seen;  // a function of the scores may hide what masks do not
};
template <class Params>
__device__ __forceinline__ Weights weights(const Params& p, int batch, int head, int query, int key,
                                           float lse, float minus_delta) {
  const int kv_head = head / group_size(p);
  const int64 q = query_row(p, batch, query, head) * kHeadDim;
  const int64 k = key_row(p, batch, key, kv_head) * kHeadDim;
  const int64 dout = query_row(p, batch, query, head) * kValueDim;
  const int64 v = key_row(p, batch, key, kv_head) * kValueDim;
  const bool kept = keeps(p, batch, head, query, key);
  float score = 0.f, dp = 0.f;
#pragma unroll 1
  for (int c = 0; c < kHeadDim; ++c) {
    score = fmaf(load_element(p.query_data, q + c), load_element(p.key_data, k + c), score);
  }
#pragma unroll 1
  for (int c = 0; c < kValueDim; ++c) {
    dp = fmaf(load_element(p.dout_data, dout + c), load_element(p.value_data, v + c), dp);
  }
  float slope;
  score = score_of_pair(p, batch, head, query, key, score, slope);
  if (kHasScoreFunction && score == kNegativeInfinity) return {0.f, 0.f, false};
  const float probability = probability_of(fmaf(score, p.scale_log2, lse));
  if (!kept) dp = 0.f;
  return {kept ? probability : 0.f, probability * (dp + minus_delta) * slope, true};
}

// 64 columns of dq of one query.
template <class Params>
__device__ __forceinline__ void exact_dq(const Params& p, int batch, int head, int query,
                                         int column0) {
  const int lane = threadIdx.x % 32, kv_head = head / group_size(p);
  const int64 padded = padded_row(p, batch, head, query);
  const float lse = p.lse_log2[padded], minus_delta = p.minus_delta[padded];
  if (lse != lse || !is_finite(minus_delta)) return;
  const Range keys = visible_keys(visibility(p, batch), query, query);
  float sums[2] = {0.f, 0.f};
#pragma unroll 1
  for (int first = keys.begin; lse > kNegativeInfinity && first < keys.end; first += 32) {
    const int mine = first + lane;
    bool seen = mine < keys.end && sees(p, batch, head, query, mine);
    float gradient = 0.f;
    if (seen) {
      const Weights w = weights(p, batch, head, query, mine, lse, minus_delta);
      gradient = w.gradient;
      if constexpr (kHasScoreFunction) seen = w.seen;
    }
    for (uint32 left = __ballot_sync(0xffffffffu, seen); left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const float ds = __shfl_sync(0xffffffffu, gradient, owner);
      const int64 k = key_row(p, batch, first + owner, kv_head) * kHeadDim;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = column0 + lane + 32 * i;
        if (column < kHeadDim) sums[i] = fmaf(ds, load_element(p.key_data, k + column), sums[i]);
      }
    }
  }
  const int64 at = query_row(p, batch, query, head) * kHeadDim;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = column0 + lane + 32 * i;
    if (column < kHeadDim) store_result(p.dquery, at + column, sums[i] * query_key_scale(p));
  }
}

// dk and dv of one key.
template <class Params>
__device__ __forceinline__ void exact_dkdv(const Params& p, int batch, int kv_head, int key) {
  constexpr int kSumsK = ceil_div(kHeadDim, 32), kSumsV = ceil_div(kValueDim, 32);
  const int lane = threadIdx.x % 32;
  const Range queries = visible_queries(visibility(p, batch), key, key);
  float dk[kSumsK], dv[kSumsV];
#pragma unroll
  for (float& x : dk) x = 0.f;
#pragma unroll
  for (float& x : dv) x = 0.f;
#pragma unroll 1
  for (int i = 0; i < group_size(p); ++i) {
    const int head = kv_head * group_size(p) + i;
#pragma unroll 1
    for (int first = queries.begin; first < queries.end; first += 32) {
      const int mine = first + lane;
      bool seen = mine < queries.end && sees(p, batch, head, mine, key);
      float lse = 0.f, minus_delta = 0.f;
      if (seen) {
        lse = p.lse_log2[padded_row(p, batch, head, mine)];
        minus_delta = p.minus_delta[padded_row(p, batch, head, mine)];
        seen = lse != kNegativeInfinity;
      }
      if (__any_sync(0xffffffffu, lse != lse)) return;  // both are NaN
      Weights w{0.f, 0.f, false};
      if (seen) w = weights(p, batch, head, mine, key, lse, minus_delta);
      if constexpr (kHasScoreFunction) seen = w.seen;
      for (uint32 left = __ballot_sync(0xffffffffu, seen); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const float probability = __shfl_sync(0xffffffffu, w.probability, owner);
        const float gradient = __shfl_sync(0xffffffffu, w.gradient, owner);
        const int query = first + owner;
        const int64 q = query_row(p, batch, query, head) * kHeadDim;
        const int64 dout = query_row(p, batch, query, head) * kValueDim;
#pragma unroll
        for (int c = 0; c < kSumsK; ++c) {
          const int column = lane + 32 * c;
          if (column < kHeadDim)
            dk[c] = fmaf(gradient, load_element(p.query_data, q + column), dk[c]);
        }
#pragma unroll
        for (int c = 0; c < kSumsV; ++c) {
          const int column = lane + 32 * c;
          if (column < kValueDim) {
            dv[c] = fmaf(probability, load_element(p.dout_data, dout + column), dv[c]);
          }
        }
      }
    }
  }
  const int64 at_k = key_row(p, batch, key, kv_head) * kHeadDim;
  const int64 at_v = key_row(p, batch, key, kv_head) * kValueDim;
#pragma unroll
  for (int c = 0; c < kSumsK; ++c) {
    if (lane + 32 * c < kHeadDim)
      store_result(p.dkey_data, at_k + lane + 32 * c, dk[c] * query_key_scale(p));
  }
#pragma unroll
  for (int c = 0; c < kSumsV; ++c) {
    if (lane + 32 * c < kValueDim)
      store_result(p.dvalue_data, at_v + lane + 32 * c, dv[c] * value_scale(p));
  }
}

// ---- which rows -------------------------------------------------------------------------------

// The main kernel leaves a mark for every 16 rows of dk and of dv, the rows of one warp.
inline constexpr int kMarkedRows = 16;
// Pairs of marks of a key/value head: with kCompact there is none past the last key.
template <class Params>
__device__ __forceinline__ int marked_rows(const Params& p) {
  if constexpr (kCompact) return ceil_div(p.kv_len, kMarkedRows);
  return key_blocks(p) * (kKeys / kMarkedRows);
}
template <class Params>
__device__ __forceinline__ int mark_count(const Params& p) {
  if constexpr (kSharesKeys)
    return 0;  // the kernel that makes dk and dv of their sums looks itself
  return p.batch * p.kv_heads * marked_rows(p) * 2;
}
// The first pair of a unit.
template <class Params>
__device__ __forceinline__ int first_mark(const Params& p, int batch, int kv_head, int key0) {
  const int head = batch * p.kv_heads + kv_head;
  if constexpr (kCompact) return head * marked_rows(p) + key0 / kMarkedRows;
  return (head * key_blocks(p) + key0 / kKeys) * (kKeys / kMarkedRows);
}

template <int kCount>
__device__ __forceinline__ bool all_finite(const float (&values)[kCount]) {
  float sums[4] = {0.f, 0.f, 0.f, 0.f};  // stays zero as long as the values are finite
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] = fmaf(values[i], 0.f, sums[i % 4]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]) == 0.f;
}

// Marks the rows of this warp, `row` of the key block on, of dk (which = 0) or dv (1); of rows that
// others add to those alone that are not finite.
template <class Params>
__device__ __forceinline__ void mark_rows(const Params& p, int batch, int kv_head, int key0,
                                          int row, int which, bool finite, bool shares = false) {
  const bool clean = __all_sync(0xffffffffu, finite);
  const int first = first_mark(p, batch, kv_head, key0);
  // With kPairs there may be a unit without keys, which has no marks.
  const bool is_there = !(kCompact || kPairs) || key0 + (kCompact ? row : 0) < p.kv_len;
  if (threadIdx.x % 32 == 0 && is_there && !(shares && clean)) {
    p.marks[(first + row / kMarkedRows) * 2 + which] = clean ? 0 : 1;
  }
}

// The marks that one block of the finishing kernel looks after.
template <class Params>
__device__ __forceinline__ Range own_marks(const Params& p) {
  const int marks = mark_count(p), share = ceil_div(marks, 2 * static_cast<int>(gridDim.x)) * 2;
  const int begin = min(marks, static_cast<int>(blockIdx.x) * share);
  return {begin, min(marks, begin + share)};
}
template <class Params>
__device__ __forceinline__ bool any_marked(const Params& p, Range marks) {
  bool marked = false;
  for (int i = marks.begin + static_cast<int>(threadIdx.x); i < marks.end; i += blockDim.x) {
    marked = marked || p.marks[i] != 0;
  }
  return marked;
}

// Computes the rows of dk and dv behind these marks again, where they are not finite.
template <class Params>
__device__ __forceinline__ void exact_marked(const Params& p, Range marks) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll 1
  for (int i = marks.begin; i < marks.end; i += 2) {
    if (p.marks[i] == 0 && p.marks[i + 1] == 0) continue;
    const int blocks = marked_rows(p);
    const int head = i / 2 / blocks;
    const int key0 = (i / 2 - head * blocks) * kMarkedRows;
    const int batch = head / p.kv_heads, kv_head = head - batch * p.kv_heads;
#pragma unroll 1
    for (int key = key0 + warp; key < min(key0 + kMarkedRows, p.kv_len); key += warps) {
      const int64 k = key_row(p, batch, key, kv_head) * kHeadDim;
      const int64 v = key_row(p, batch, key, kv_head) * kValueDim;
      if (!row_is_finite(p.dkey_data, k, kHeadDim) || !row_is_finite(p.dvalue_data, v, kValueDim)) {
        exact_dkdv(p, batch, kv_head, key);
      }
    }
  }
}

}  // namespace backward
