// Sixteen query rows of attention by one warp, without touching a hidden value.
//
// The tiled kernels multiply every value of a block, those of masked keys by a weight of zero, and
// 0 * NaN is NaN; and a row overflows when a score is more than 128 above its base (log2 units). A
// unit with rows that overflow is walked again first, where TMA loads and a slot is free. Rows
// whose result is not finite even so come here, those of a fragment together. As soon as visible
// values explain the results, they stand; else the rows are computed again, with a maximum in every
// step.
#pragma once

#include "exact_products.cuh"
#include "terms.cuh"

namespace forward {

// Scales of float8: of 64 queries of a head, of 128 keys of one.
inline constexpr int kQueriesOfScale = 64, kKeysOfScale = 128;
template <class Params>
__device__ __forceinline__ int query_scale_at(const Params& p, int batch, int head, int query) {
  const int block = batch * ceil_div(p.query_len, kQueriesOfScale) + query / kQueriesOfScale;
  return block * p.query_heads + head;
}
template <class Params>
__device__ __forceinline__ int key_scale_at(const Params& p, int batch, int kv_head, int key) {
  const int block = batch * ceil_div(p.kv_len, kKeysOfScale) + key / kKeysOfScale;
  return block * p.kv_heads + kv_head;
}
// What a product of the stored numbers of a query and a key has to be multiplied by, and a value.
template <class Params>
__device__ __forceinline__ float score_factor_of(const Params& p, int batch, int head, int query,
                                                 int key) {
  if constexpr (kFloat8) {
    return p.query_scales[query_scale_at(p, batch, head, query)] *
           p.key_scales[key_scale_at(p, batch, kv_head_of(p, head), key)];
  }
  return 1.0f;
}
template <class Params>
__device__ __forceinline__ float value_factor_of(const Params& p, int batch, int head, int key) {
  if constexpr (kFloat8) return p.value_scales[key_scale_at(p, batch, kv_head_of(p, head), key)];
  return 1.0f;
}

// A row of the result.
struct Row {
  int query, head;
  int64 first_key;  // row of its head's first key
  Range keys;       // that it sees, mask, segments and positions aside
};

// A warp's sixteen rows of a batch row and a key/value head in walks over their keys. A walk has
// 128 columns of the values at most.
template <class Params>
struct ExactRows {
  static constexpr int kBoxes = kValueDim <= exact::kBoxColumns ? 1 : 2;

  const Params& p;
  int batch;
  Row own[2];  // the lane's; without keys those that stay as they are
  Range keys;  // that any of the warp's rows may see
  float largest[2], sum[2];
  exact::Sums<Stored, kValueDim, kBoxes> out;

  __device__ __forceinline__ ResultElement::Bits* result_of(const Row& row) const {
    return static_cast<ResultElement::Bits*>(p.out) +
           query_row(p, batch, row.query, row.head) * kValueDim;
  }
  __device__ __forceinline__ float& lse_of(const Row& row) const {
    return p.lse[lse_row(p, batch, row.query, row.head)];
  }
  __device__ __forceinline__ void begin(int first_column) {
    out.begin(first_column);
#pragma unroll
    for (int row = 0; row < 2; ++row) largest[row] = kNegativeInfinity, sum[row] = 0.0f;
  }
  // Takes 16 keys, from `first` on. Returns whether a row has met a value that is not finite.
  __device__ __forceinline__ bool step(int first) {
    const int of = query_batch(p, batch);
    const int64 queries[2] = {query_row(p, of, own[0].query, own[0].head) * kHeadDim,
                              query_row(p, of, own[1].query, own[1].head) * kHeadDim};
    const auto key_of = [&](int i) { return min(first + i, keys.end - 1); };
    const auto next_of = [&](int i) { return key_of(i + exact::kRows); };
    const KeyRows<kHeadDim> key_rows(p, own[0].first_key);
    const KeyRows<kValueDim> value_rows(p, own[0].first_key);
    exact::prefetch_rows<Stored, kHeadDim>(p.key_data,
                                           [&](int i) { return key_rows.at(next_of(i)); });
    exact::prefetch_rows<Stored, kValueDim>(p.value_data,
                                            [&](int i) { return value_rows.at(next_of(i)); });
    exact::Scores scores;
    exact::multiply_rows<Stored, kHeadDim, 4>(scores, p.query_data, queries, p.key_data,
                                              [&](int i) { return key_rows.at(key_of(i)); });
    const auto value_at = [&](int i) { return value_rows.at(key_of(i)); };
    auto values = out.load(p.value_data, value_at);
    const uint32 seen = weigh(first, scores);
    return __any_sync(0xffffffffu, out.add(scores, seen, values, p.value_data, value_at));
  }
  // Scores to weights of values. Returns the lane's elements whose row sees the key, a bit each.
  __device__ __forceinline__ uint32 weigh(int first, exact::Scores& scores) {
    uint32 seen = 0, kept = 0xff;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Without branches, so that what is loaded for these pairs is on its way together.
      const Row& row = own[fragment::row(i)];
      const int key = first + exact::column_of(i), at = min(key, keys.end - 1);
      bool visible = key >= row.keys.begin && key < row.keys.end;
      visible &= sees(p, batch, row.head, row.query, at);
      float score = scores[i];
      if constexpr (kFloat8) score *= score_factor_of(p, batch, row.head, row.query, at);
      score = score_of_pair<kPreScale>(p, batch, row.head, row.query, at, score) * p.scale_log2;
      if constexpr (kHasScoreFunction) visible = visible && score != kNegativeInfinity;
      if constexpr (kHasDropout) {
        if (!keeps(p, batch, row.head, row.query, at)) kept &= ~(1u << i);
      }
      if (visible) seen |= 1u << i;
      scores[i] = visible ? score : kNegativeInfinity;
    }
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float now = largest[row];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (fragment::row(i) == row) now = fmaxf(now, scores[i]);
      }
      now = fragment::quad_maximum(now);
      correction[row] = now == largest[row] ? 1.0f : ptx::exp2_approx(largest[row] - now);
      largest[row] = now;
      sum[row] *= correction[row];
    }
    if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
      out.scale(correction);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Row& row = own[fragment::row(i)];
      const bool none = scores[i] == kNegativeInfinity;
      scores[i] = none ? 0.0f : ptx::exp2_approx(scores[i] - largest[fragment::row(i)]);
      sum[fragment::row(i)] += scores[i];
      if (kHasDropout && !(kept >> i & 1)) scores[i] = 0.0f;
      if (kFloat8 && (seen >> i & 1)) {
        scores[i] *= value_factor_of(p, batch, row.head, first + exact::column_of(i));
      }
    }
    return seen;
  }
  // Do visible values explain whatever is not finite in the lane's columns of a stored row: are
  // they the same infinity, or NaN as well?
  __device__ __forceinline__ bool explains(int row) {
    if (own[row].keys.empty()) return true;
    bool explained = true;
    out.visit(row, [&](int column, const Eight& now) {
      const Eight x = exact::load_eight<ResultElement, kValueDim>(result_of(own[row]), 0, column);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool agrees = now.x[i] == x.x[i] || (now.x[i] != now.x[i] && x.x[i] != x.x[i]);
        explained = explained && (exact::is_finite(x.x[i]) || agrees);
      }
    });
    return explained;
  }
  // Stores a row's columns and its lse.
  __device__ __forceinline__ void store(int row) {
    float total = fragment::quad_sum(sum[row]), base = largest[row], factor = dropout_scale(p);
    const Row& to = own[row];
    if (to.keys.empty()) return;
    if constexpr (kHasSinks) {
      const float sink = p.sinks[batch * p.sinks_batch_stride + to.head] * kLog2E;
      const float with_sink = fmaxf(base, sink), correction = ptx::exp2_approx(base - with_sink);
      factor *= correction;
      total = total * correction + ptx::exp2_approx(sink - with_sink);
      base = with_sink;
    }
    out.template store<ResultElement>(row, result_of(to), factor / total);
    if (exact::lane() % 4 == 0) lse_of(to) = (base + ptx::log2_approx(total)) * kLn2;
  }
};

// Computes those of 16 rows of a batch row again that are marked in `marks`, bit 4 * quad + row of
// the fragment, and whose stored results are not explained; row_of(bit) tells of one. They share a
// key/value head. Whole warps call.
template <class Params, class RowOf>
__device__ __forceinline__ void repair_rows(const Params& p, int batch, uint32 marks,
                                            RowOf row_of) {
  ExactRows<Params> rows{p, batch};
  bool finite = true;  // is the lse: else a row has overflowed, or is NaN
  rows.keys = {kLargest, kSmallest};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bit = exact::lane() / 4 * 4 + i;
    const bool marked = marks >> bit & 1;
    Row& row = rows.own[i];
    row = row_of(marked ? bit : __ffs(marks) - 1);
    if (!marked) row.keys = {0, 0};
    if (!row.keys.empty()) {
      rows.keys.begin = min(rows.keys.begin, row.keys.begin);
      rows.keys.end = max(rows.keys.end, row.keys.end);
    }
    finite = finite && rows.lse_of(row) < kInfinity;
  }
  rows.keys.begin = __reduce_min_sync(0xffffffffu, rows.keys.begin);
  rows.keys.end = __reduce_max_sync(0xffffffffu, rows.keys.end);
  finite = __all_sync(0xffffffffu, finite);
#pragma unroll 1
  for (int column = 0; column < kValueDim; column += exact::kBoxColumns * rows.kBoxes) {
    rows.begin(column);
    bool explained = false;
#pragma unroll 1
    for (int first = rows.keys.begin; !explained && first < rows.keys.end; first += exact::kRows) {
      if (!rows.step(first) || !finite) continue;
      explained = __all_sync(0xffffffffu, rows.explains(0) && rows.explains(1));
    }
    if (explained) continue;
    rows.store(0);
    rows.store(1);
  }
}

}  // namespace forward
