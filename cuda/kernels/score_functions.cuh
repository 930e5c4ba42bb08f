// Users' functions of scores: how fragments and single pairs call the text that jax_flash/_gpu/emit
// writes behind the constants of the generated header, and the lines that some functions are.
#pragma once

#include "bias.cuh"
#include "fragment.cuh"
#include "logit.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "score_places.cuh"

// A user's function of the scores of a batch row and head: what depends on these alone.
template <class Params, bool kExists = kHasScoreFunction>
struct ScoreFunction {  // none
  __device__ __forceinline__ void read(const Params&, int, int) {}
  template <class Query>
  __device__ __forceinline__ int of_query(const Query&) const {
    return 0;
  }
  template <class Query, class Key>
  __device__ __forceinline__ float value(const Params&, float score, const Query&,
                                         const Key&) const {
    return score;
  }
};
// The ids that the function is told.
template <class Params>
__device__ __forceinline__ int2 score_ids(const Params& p, int row, int head) {
  if constexpr (!kHasScoreIds) return {0, 0};
  const int* ids = p.score_ids + 2 * (static_cast<int64>(row) * p.query_heads + head);
  return {__ldg(ids), __ldg(ids + 1)};
}
template <class Params>
__device__ __forceinline__ float scaled_score(const Params& p, float score) {
  return kAddsToScores ? score : score * p.scale;
}
template <class Params>
struct ScoreFunction<Params, true> {
  decltype(score_value_of_head(*static_cast<const Params*>(nullptr), 0, 0, 0)) of;
  static constexpr int kTogether = decltype(of)::kTogether;
  __device__ __forceinline__ void read(const Params& p, int row, int head) {
    const int2 ids = score_ids(p, row, head);
    of = score_value_of_head(p, row, ids.x, ids.y);
  }
  template <class Query, class Key>
  __device__ __forceinline__ float value(const Params&, float score, const Query& query,
                                         const Key& key) const {
    const auto row = of_query(query);
    return row.factor * value_of(row, score, query, key);
  }
  // What a query decides of it beside the head, for value_of(), which is without row.factor.
  template <class Query>
  __device__ __forceinline__ auto of_query(const Query& query) const {
    return score_value_of_query(of, query);
  }
  template <class OfQuery, class Query, class Key>
  __device__ __forceinline__ float value_of(const OfQuery& row, float score, const Query& query,
                                            const Key& key) const {
    return score_value(of, row, score, query, key);
  }
};
// What the two rows of a thread decide of a function, from block to block.
template <class Params, bool kExists = kHasScoreFunction>
struct FunctionOfRows {  // none
  static constexpr bool kHasFactor = false;
  __device__ __forceinline__ float factor(int) const { return 1.0f; }
  __device__ __forceinline__ int row(int) const { return 0; }
  template <class QueryOf>
  __device__ __forceinline__ void read(const ScoreFunction<Params>&, QueryOf) {}
};
template <class Params>
struct FunctionOfRows<Params, true> {
  using Row = decltype(score_value_of_query(ScoreFunction<Params>{}.of, Place{}));
  static constexpr bool kHasFactor = Row::kHasFactor;
  Row rows[2];
  __device__ __forceinline__ const Row& row(int i) const { return rows[i]; }
  __device__ __forceinline__ float factor(int row) const {
    return rows[Row::kFactorVaries ? row : 0].factor;
  }
  template <class QueryOf>
  __device__ __forceinline__ void read(const ScoreFunction<Params>& function, QueryOf query_of) {
#pragma unroll
    for (int row = 0; row < 2; ++row) rows[row] = function.of_query(place(query_of(row)));
  }
};
// With its slope.
template <class Params, bool kExists = kHasScoreFunction>
struct ScoreFunctionAndSlope {  // none
  static constexpr int kTogether = 0;
  __device__ __forceinline__ void read(const Params&, int, int) {}
  template <class Query, class Key>
  __device__ __forceinline__ float value(const Params&, float score, const Query&, const Key&,
                                         float&) const {
    return score;
  }
};
template <class Params>
struct ScoreFunctionAndSlope<Params, true> {
  decltype(score_value_and_slope_of_head(*static_cast<const Params*>(nullptr), 0, 0, 0)) of;
  static constexpr int kTogether = decltype(of)::kTogether;
  __device__ __forceinline__ void read(const Params& p, int row, int head) {
    const int2 ids = score_ids(p, row, head);
    of = score_value_and_slope_of_head(p, row, ids.x, ids.y);
  }
  template <class Query, class Key>
  __device__ __forceinline__ float value(const Params& p, float score, const Query& query,
                                         const Key& key, float& slope) const {
    return score_value_and_slope(of, scaled_score(p, score), query, key, slope);
  }
};
// What a function with kScoreIsLine adds, log2 units, where all keys stand beyond its reach on one
// side of the queries: slope * (key - query) + constant.
struct Line {
  float slope, constant;
  __device__ __forceinline__ float at(int distance) const {
    return kScoreIsLevel ? constant : fmaf(slope, static_cast<float>(distance), constant);
  }
};
template <class Params, bool kExists = kScoreIsLine>
struct ScoreLine {  // none
  __device__ __forceinline__ void read(const Params&, int, int) {}
  static __device__ __forceinline__ bool is_straight(int, int, int, int) { return true; }
  __device__ __forceinline__ Line of_side(bool) const { return {0.0f, 0.0f}; }
};
template <class Params>
struct ScoreLine<Params, true> {
  decltype(score_line_of_head(*static_cast<const Params*>(nullptr), 0, 0, 0)) lines;
  __device__ __forceinline__ void read(const Params& p, int row, int head) {
    const int2 ids = score_ids(p, row, head);
    lines = score_line_of_head(p, row, ids.x, ids.y);
  }
  // Do the keys from first_key to last_key stand beyond the reach on one side of the queries?
  static __device__ __forceinline__ bool is_straight(int first_key, int last_key, int first_query,
                                                     int last_query) {
    return kScoreReach < 0 || first_key >= last_query + kScoreReach ||
           last_key + kScoreReach <= first_query;
  }
  // The line of keys that are so `after` the queries, or before them.
  __device__ __forceinline__ Line of_side(bool after) const {
    const auto& line = kScoreReach < 0 || after ? lines.after : lines.before;
    return {kLog2E * line.slope, kLog2E * line.constant};
  }
};
// What a score is multiplied by beside the line, log2 units.
template <class Params>
__device__ __forceinline__ float line_factor(const Params& p) {
  return kAddsToScores ? p.scale_log2 : p.scale * p.scale_log2;
}

// What a function makes of a fragment's scores: of a short one (kTogether 0) when asked; of a long
// one, which written out for each element would be compiled for minutes, beforehand, by a loop over
// kTogether elements at a time, so that they are in local memory.
template <int kTogether, int kCount>
struct FunctionOfScores {
  float values[kCount], slopes[kCount];
  static_assert(kCount % kTogether == 0);
  // apply(score, i, slope) of element i.
  template <class Apply>
  __device__ __forceinline__ void begin(const float (&scores)[kCount], const Apply& apply) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = scores[i];
#pragma unroll 1
    for (int first = 0; first < kCount; first += kTogether) {
#pragma unroll
      for (int i = first; i < first + kTogether; ++i) values[i] = apply(values[i], i, slopes[i]);
    }
  }
  template <class Apply>
  __device__ __forceinline__ float value(float, int i, float& slope, const Apply&) const {
    slope = slopes[i];
    return values[i];
  }
};
template <int kCount>
struct FunctionOfScores<0, kCount> {
  template <class Apply>
  __device__ __forceinline__ void begin(const float (&)[kCount], const Apply&) {}
  template <class Apply>
  __device__ __forceinline__ float value(float score, int i, float& slope,
                                         const Apply& apply) const {
    return apply(score, i, slope);
  }
};

template <int kCount>
__device__ __forceinline__ void multiply_rows(float first, float second, float (&scores)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] *= fragment::row(i) == 0 ? first : second;
}

// Scores x of a fragment whose rows are queries, with the bias if there is one, become y; row_of
// gives what one of the thread's rows decides, whose factor is left out unless kWhole. The function
// is a copy: what a called one is given lies in local memory, with all that it is a part of.
template <bool kWhole = true, class Params, class RowOf, class QueryOf, int kCount>
__device__ __forceinline__ void apply_function(ScoreFunction<Params> function, const RowOf& row_of,
                                               QueryOf query_of, int first_key,
                                               float (&scores)[kCount]) {
  const Place key = place(first_key + fragment::first_column(threadIdx.x));
  const Place first = place(query_of(0));
  // A function of the distance gives 30 of 64 elements another one's value, that of the second row
  // and 8 columns on, if rows are seen to be 8 apart. Beside dropout 28 bytes would be spilled.
  const Place queries[2] = {first, kScoreReach > 0 && !kHasDropout
                                       ? place_after(first, fragment::kRowStep)
                                       : place(query_of(1))};
  const auto first_row = row_of(queries[0], 0), second_row = row_of(queries[1], 1);
  const auto apply = [&](float score, int i, float&) {
    const bool is_first = fragment::row(i) == 0;
    return function.value_of(is_first ? first_row : second_row, score,
                             is_first ? queries[0] : queries[1],
                             column_after<2 * kCount>(key, fragment::column(i)));
  };
  FunctionOfScores<ScoreFunction<Params>::kTogether, kCount> made;
  made.begin(scores, apply);
  float slope;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = made.value(scores[i], i, slope, apply);
  if constexpr (kWhole && decltype(first_row)::kHasFactor) {
    multiply_rows(first_row.factor, second_row.factor, scores);
  }
}

// A score of one pair by itself.
template <bool kScaleFirst = false, class Params>
__device__ __forceinline__ float score_of_pair(const Params& p, int batch, int head, int query,
                                               int key, float score) {
  float one[1] = {score};
  if constexpr (kHasBias) one[0] = with_bias(p, score, bias::at(p, batch, head, query, key));
  if constexpr (kHasScoreFunction) {
    ScoreFunction<Params> function;
    function.read(p, batch, head);
    one[0] = function.value(p, one[0], place(query), place(key));
  }
  score_function<kScaleFirst>(p, one);
  return one[0];
}
// With its slope.
template <class Params>
__device__ __forceinline__ float score_of_pair(const Params& p, int batch, int head, int query,
                                               int key, float score, float& slope) {
  if constexpr (kHasScoreFunction) {
    if constexpr (kHasBias) score = with_bias(p, score, bias::at(p, batch, head, query, key));
    ScoreFunctionAndSlope<Params> function;
    function.read(p, batch, head);
    return function.value(p, score, place(query), place(key), slope);
  }
  const float y = score_of_pair(p, batch, head, query, key, score);
  slope = score_slope(y);
  return y;
}
