// The terms of attention on a GPU, the arithmetic of each written here and nowhere else.
//
//   logit  what happens to a score between Q.K^T and the softmax: scale, bias, softcap, and its
//          slope
//   sees   which pairs of query and key there are: window, lengths, segments, positions, mask
//   keep   which weights dropout keeps: dropout.cuh
//
// Three evaluators ask: the forward's fragments, whose rows are queries; the backward's fragments
// of S^T, whose rows are keys; and rows that are computed again element by element. A term that a
// call does not have is constexpr off. Blocks of pairs are the matter of walk.cuh.
//
// The constants of the generated header that say which terms there are, the same for both passes:
//   bool kWindowLeft, kWindowRight   that side of the window is bounded (causal: right, by 0)
//   bool kBottomRight         the last query is aligned with the last key
//   bool kHasPositions        these are read in place of the index; kReachLeft, kReachRight: the
//                             sides of the window then, where kWindowLeft and kWindowRight are off
//   bool kHasQueryLengths, kHasKeyValueLengths, kHasSegments, kHasSinks
//   bool kHasBias, kBiasFloat32, kBiasBFloat16   its type: float32, else bfloat16, else float16
//   bool kBiasTiles           TMA loads it, a family's choice
//   bool kHasMask             of either kind: a boolean one, kHasMaskBytes, or
//   int kMaskBlock            one of blocks of so many queries and keys; 0: there is none
//   bool kBiasQueries, kBiasKeys, kMaskQueries, kMaskKeys   they vary with the query, the key;
//                             kByteQueries, kByteKeys: the boolean mask alone does
//   int kBiasAlignment, kMaskAlignment   of their rows, bytes: 1 to 16
//   bool kHasDropout          kDropsMost: the threshold as a float16 is above the infinity
//   bool kDropsPart           queries and keys are a part of those that the pattern counts
//   bool kSoftcap             tanh softcap
//   bool kHighest             float32 as exact as float32 arithmetic
//   bool kHasScoreFunction    a user's function in its place, whose text follows the constants:
//                             score_value, in the backward pass score_value_and_slope
//   bool kScoreHasSlope       its derivative by the score is not 1
//   bool kScoreIsLine         it is score + slope * (key - query) + constant, by numbers of
//                             score_line_of_head, of keys that stand kScoreReach or more after the
//                             query, and by others of those as much before it; kScoreReach < 0:
//                             there is one line. kScoreIsLevel: it has none
//   bool kHasScoreIds         it is told the batch row and the head
#pragma once

#include "bias.cuh"
#include "params.cuh"
#include "dropout.cuh"
#include "fragment.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

// ---- logit --------------------------------------------------------------------------------------

// A logit has a slope of its own, by the scaled score.
inline constexpr bool kHasSlope = kSoftcap || kScoreHasSlope;

// A score q.k with the bias of its pair: q.k * scale + bias, both by the cap if there is one.
template <class Params>
__device__ __forceinline__ float with_bias(const Params& p, float score, float bias) {
  if constexpr (kSoftcap) return fmaf(score, p.softcap_inner, bias * p.softcap_bias);
  return fmaf(score, p.scale, bias);
}

// tanh(x) for |x| <= kNear, by fused multiplications alone: the least largest relative error of
// degree 7, 6e-7. The function of all x takes two of the sixteen results that an SM's special
// function units have a clock, the softmax a third.
inline constexpr float kNear = 0.5f;
__device__ __forceinline__ float near_tanh(float x) {
  const float square = x * x;
  float y = fmaf(-0.0444022268f, square, 0.131902963f);
  y = fmaf(y, square, -0.333263189f);
  y = fmaf(y, square, 0.999999464f);
  return x * y;
}
// tanh(x) = 1 - 2 / (1 + e^2x): absolute error 1e-7, where tanh.approx has 5e-4. Below
// kNear that is no longer small beside the result, of which a large cap makes a logit.
__device__ __forceinline__ float far_tanh(float x) {
  const float e = ptx::exp2_approx(x * 2.8853900817779268f);
  return 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + e);
}
// Either of them. The near one in other words: what both branches of a caller have in common would
// be kept through them, and 32 bytes spilled.
__device__ __forceinline__ float mixed_tanh(float x) {
  const float far = far_tanh(x), square = x * x;
  float y = -0.0444022268f * square;
  y = fmaf(y + 0.131902963f, square, -0.333263189f);
  y = fmaf(y, square, 0.999999464f);
  return fabsf(x) <= kNear ? x * y : far;
}
// tanh(x) with a relative error of 3e-7 by that where it is large, else of 1.2e-7 by degree 9.
__device__ __forceinline__ float highest_tanh(float x) {
  const float square = x * x;
  float y = fmaf(0.0169732422f, square, -0.0529137179f);
  y = fmaf(y, square, 0.133237883f);
  y = fmaf(y, square, -0.333330274f);
  y = fmaf(y, square, 1.0f);
  return fabsf(x) <= kNear ? x * y : far_tanh(x);
}
// For |x| <= kNearest: kNearestFactor * x + kNearestCubic * x^3 + kNearestQuintic * x^5, relative
// error 1.9e-7. Scores below kNearestScore have squares.
inline constexpr float kNearest = 0.22f, kNearestScore = 0x1p31f;
inline constexpr float kNearestFactor = 0.99999981f, kNearestCubic = -0.33326425f;
inline constexpr float kNearestQuintic = 0.1295011f;
// The largest of a thread's scores, two at a time: numbers that are not negative are in the order
// of their bits, of which Hopper's integer units take the maximum of three.
template <int kCount>
__device__ __forceinline__ float largest_of(const float (&scores)[kCount]) {
  static_assert(kCount % 4 == 0 || kCount == 1);
  if constexpr (kCount == 1) return fabsf(scores[0]);
  int largest[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    int pairs[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      pairs[j] = __float_as_int(fmaxf(fabsf(scores[i + 2 * j]), fabsf(scores[i + 2 * j + 1])));
    }
    largest[i / 4 % 2] = max(max(pairs[0], pairs[1]), largest[i / 4 % 2]);
  }
  return __int_as_float(max(largest[0], largest[1]));
}
// Are all of a warp's scores near? Of logits within half the cap, such as models have most of the
// time. One element by itself, whose warp may be apart, is not asked.
template <int kCount>
__device__ __forceinline__ bool is_near(const float (&scores)[kCount], float inner) {
  if constexpr (kCount < 4) return false;
  return __all_sync(0xffffffffu, largest_of(scores) * fabsf(inner) <= kNear);
}

// Scores x = q.k become y in place; the logit, in log2 units, is y * scale_log2 of the parameters,
// which whoever takes its exponential multiplies in. kScaleFirst: the scale is not positive, so
// that y has to contain it where maxima are looked for.
//   plain    y = x,                        scale_log2 = log2(e) * scale
//   softcap  y = tanh(x * scale / cap),    scale_log2 = log2(e) * cap
//   bias     x of with_bias,               scale_log2 = log2(e), or of the softcap
//   function apply_function has made y of x, scale_log2 = log2(e)
template <bool kScaleFirst = false, class Params, int kCount>
__device__ __forceinline__ void score_function(const Params& p, float (&scores)[kCount]) {
  if constexpr (kSoftcap) {
    const float inner = kHasBias ? 1.0f : p.softcap_inner;
    if constexpr (kHighest) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = highest_tanh(scores[i] * inner);
    } else if (is_near<kCount>(scores, inner)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = near_tanh(scores[i] * inner);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = mixed_tanh(scores[i] * inner);
    }
  } else if constexpr (kScaleFirst && !kHasBias && !kHasScoreFunction) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= p.scale;
  }
}
// Of what score_function has made: one number, and of hidden elements an infinity, not 0 times it.
template <class Params>
__device__ __forceinline__ OddFactor whole_factor(const Params& p) {
  return {p.scale_log2, 0.0f, 0x1p-100f};
}
// The same for a forward fragment without hidden elements. Where all of a warp's scores are
// nearest, the polynomial is left to the exponentials: its last multiplication is theirs.
template <class Params, int kCount>
__device__ __forceinline__ OddFactor score_factor(const Params& p, float (&scores)[kCount]) {
  const float inner = p.softcap_inner, largest = largest_of(scores);
  const bool nearest = largest * fabsf(inner) <= kNearest && largest < kNearestScore;
  if (__all_sync(0xffffffffu, nearest)) {
    const float scale = p.scale_log2 * inner, square = inner * inner;
    const float cubic = square * scale;
    return {kNearestFactor * scale, kNearestCubic * cubic, kNearestQuintic * square * cubic};
  }
  score_function(p, scores);
  return whole_factor(p);
}
// The softcap's slope, the derivative of the logit by the scaled score.
__device__ __forceinline__ float score_slope(float y) { return kSoftcap ? 1.0f - y * y : 1.0f; }

// The index of a query or key; as a float it is real + offset, of which the offset is the constant
// part of the elements of a fragment. What a function does not read is not computed.
struct Place {
  int index;
  float real, offset;
};
__device__ __forceinline__ Place place(int index) {
  return {index, static_cast<float>(index), 0.f};
}
// `offset` places after it.
__device__ __forceinline__ Place place_after(const Place& first, int offset) {
  return {first.index + offset, first.real, first.offset + static_cast<float>(offset)};
}

// A user's function of the scores of a batch row and head: what depends on these alone.
template <class Params, bool kExists = kHasScoreFunction>
struct ScoreFunction {  // none
  __device__ __forceinline__ void read(const Params&, int, int) {}
  __device__ __forceinline__ float value(const Params&, float score, const Place&,
                                         const Place&) const {
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
  return kHasBias ? score : score * p.scale;
}
template <class Params>
struct ScoreFunction<Params, true> {
  decltype(score_value_of_head(*static_cast<const Params*>(nullptr), 0, 0, 0)) of;
  static constexpr int kTogether = decltype(of)::kTogether;
  __device__ __forceinline__ void read(const Params& p, int row, int head) {
    const int2 ids = score_ids(p, row, head);
    of = score_value_of_head(p, row, ids.x, ids.y);
  }
  __device__ __forceinline__ float value(const Params& p, float score, const Place& query,
                                         const Place& key) const {
    return score_value(of, scaled_score(p, score), query, key);
  }
};
// With its slope.
template <class Params, bool kExists = kHasScoreFunction>
struct ScoreFunctionAndSlope {  // none
  static constexpr int kTogether = 0;
  __device__ __forceinline__ void read(const Params&, int, int) {}
  __device__ __forceinline__ float value(const Params&, float score, const Place&, const Place&,
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
  __device__ __forceinline__ float value(const Params& p, float score, const Place& query,
                                         const Place& key, float& slope) const {
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
  // Then: of keys that are `after` the queries, or before them.
  __device__ __forceinline__ Line of_side(bool after) const {
    const auto& line = kScoreReach < 0 || after ? lines.after : lines.before;
    return {kLog2E * line.slope, kLog2E * line.constant};
  }
};
// What a score is multiplied by beside the line, log2 units.
template <class Params>
__device__ __forceinline__ float line_factor(const Params& p) {
  return kHasBias ? p.scale_log2 : p.scale * p.scale_log2;
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

// Of a fragment whose rows are queries: x, with the bias if there is one, becomes y. The function
// is a copy: what one that is called is given lies in local memory, with all that it is a part of.
template <class Params, class QueryOf, int kCount>
__device__ __forceinline__ void apply_function(const Params& p, ScoreFunction<Params> function,
                                               QueryOf query_of, int first_key,
                                               float (&scores)[kCount]) {
  const Place key = place(first_key + fragment::first_column(threadIdx.x));
  const Place first = place(query_of(0));
  // Of a function of the distance 30 of 64 elements have another one's, that of the second row and
  // 8 columns on, if rows are seen to be 8 apart. Beside dropout 28 bytes would be spilled.
  const Place queries[2] = {first, kScoreReach > 0 && !kHasDropout
                                       ? place_after(first, fragment::kRowStep)
                                       : place(query_of(1))};
  const auto apply = [&](float score, int i, float&) {
    return function.value(p, score, fragment::row(i) == 0 ? queries[0] : queries[1],
                          place_after(key, fragment::column(i)));
  };
  FunctionOfScores<ScoreFunction<Params>::kTogether, kCount> made;
  made.begin(scores, apply);
  float slope;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = made.value(scores[i], i, slope, apply);
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

// ---- sees: one pair, one row --------------------------------------------------------------------
//
// Key j is visible to query t iff -left <= j - (t + offset) <= right and j < kv_length (and the
// segment ids agree, and the mask has it); offset = 0 (top-left) or kv_length - query_length
// (bottom-right). With positions, -left <= key's - query's <= right in place of the first: then
// kWindowLeft and kWindowRight are off, and kReachLeft and kReachRight tell which sides there are.

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

// Of either pass's parameters, by the constants of the generated header.
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

// Of the keys that a query at `position` sees, and of the queries that see a key there. The sides
// of the window are uint32 in the parameters.
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

// Does the query see the key, window and lengths aside? Those are a range of keys (walk.cuh). Nor
// does it know keys that a function of the scores hides by -inf.
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

// Do two queries see the same keys, window and lengths aside?
template <class Params>
__device__ __forceinline__ bool see_alike(const Params& p, int batch, int one, int other) {
  if constexpr ((kHasMask && kMaskQueries) || (kHasBias && kBiasQueries)) return one == other;
  bool alike = true;
  if constexpr (kHasSegments) {
    const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
    alike = ids[one] == ids[other];
  }
  if constexpr (kHasPositions) {
    alike = alike && query_position(p, batch, one) == query_position(p, batch, other);
  }
  return alike;
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

// ---- sees: a fragment of S, rows are queries ----------------------------------------------------

// Bit c of word w: key 32 * w + c has the segment `mine` of this lane's row; lane l has the id of
// key 32 * w + l. A round for each segment that the warp's rows have, most often one or two.
template <int kWords>
__device__ __forceinline__ void match_segment(int mine, const int (&ids)[kWords],
                                              uint32 (&words)[kWords]) {
  uint32 left = 0xffffffffu;
  while (left != 0) {
    const int id = __shfl_sync(0xffffffffu, mine, __ffs(left) - 1);
    left &= ~__ballot_sync(0xffffffffu, mine == id);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32 same = __ballot_sync(0xffffffffu, ids[w] == id);
      if (mine == id) words[w] = same;
    }
  }
}

// Hides the scores of the first kCount elements whose keys stand where the rows see none.
template <int kCount, class Params, class QueryOf, int kScores>
__device__ __forceinline__ void hide_positions(const Params& p, int batch, const Visibility& sight,
                                               QueryOf query_of, int first_key,
                                               float (&scores)[kScores]) {
  constexpr int kWords = ceil_div(2 * kScores, 32);
  int keys[kWords];  // of the keys first_key + 32 * w + lane; past the length they are hidden
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int key = first_key + 32 * w + static_cast<int>(threadIdx.x) % 32;
    keys[w] = key < sight.kv_length ? key_position(p, batch, key) : 0;
  }
  Positions reach[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = query_of(row);
    reach[row] =
        positions_seen(p, query < sight.query_length ? query_position(p, batch, query) : 0);
  }
  const int first_column = fragment::first_column(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int key = __shfl_sync(0xffffffffu, keys[j / 4], 8 * (j % 4) + first_column + c);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& score = scores[fragment::element(j, row, c)];
        score = reach[row].hold(key) ? score : kNegativeInfinity;
      }
    }
  }
}

// Masks the first kCount of the scores of a block of keys. query_of(row): of the thread's row 0 or
// 1; `one_segment`: all pairs share theirs; `bits`: what the mask has for row 0 and 1, which are
// one where it does not vary with the query. With kBranches halves that a warp sees whole are left
// out, one of most diagonal blocks; wgmma in flight would be serialised by a branch here.
template <int kCount, bool kBranches, class Params, class QueryOf, class RowBits, int kScores>
__device__ __forceinline__ void hide_scores(const Params& p, int batch, const Visibility& sight,
                                            QueryOf query_of, int first_key, bool one_segment,
                                            const RowBits& bits, float (&scores)[kScores]) {
  if constexpr (kHasPositions) {
    hide_positions<kCount>(p, batch, sight, query_of, first_key, scores);
  }
  constexpr int kKeys = 2 * kScores;
  constexpr int kWords = ceil_div(kKeys, 32);  // a bit for each key
  const int lane = threadIdx.x % 32;
  const int first_column = fragment::first_column(threadIdx.x);
  int ids[kWords];  // of the keys first_key + 32 * w + lane
  if (kHasSegments && !one_segment) {
    const int* all = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int key = first_key + 32 * w + lane;
      ids[w] = key < sight.kv_length ? all[key] : 0;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = query_of(row);
    Range columns = row_columns(sight, query, first_key);
    if constexpr (kHasMaskBytes) {
      uint32 mine = bits.of(row);
      if (kHasSegments && !one_segment) {
        uint32 words[kWords];
        const bool valid = query < sight.query_length;
        match_segment(valid ? p.query_segments[static_cast<int64>(batch) * p.query_len + query] : 0,
                      ids, words);
        mine &= mask::thread_bits(words, first_column);
      }
      if constexpr (kHasKeyValueLengths || kWindowRight || !kByteKeys) {
        mine &= mask::low_thread_bits(columns.end - first_column);
      }
      if constexpr (kWindowLeft) mine &= ~mask::low_thread_bits(columns.begin - first_column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment::row(i) != row) continue;
        scores[i] = mine >> mask::thread_bit(i) & 1 ? scores[i] : kNegativeInfinity;
      }
    } else if constexpr (kHasSegments || kHasMask) {
      uint32 words[kWords];  // the columns that the row sees, a bit each
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = 0xffffffffu;
      if (kHasSegments && !one_segment) {
        const bool valid = query < sight.query_length;
        match_segment(valid ? p.query_segments[static_cast<int64>(batch) * p.query_len + query] : 0,
                      ids, words);
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] &= ptx::low_bits(columns.end - 32 * w);
        if constexpr (kHasMask) words[w] &= bits.word(row, w);
        if constexpr (kWindowLeft) words[w] &= ~ptx::low_bits(columns.begin - 32 * w);
        words[w] >>= first_column;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment::row(i) != row) continue;
        const int column = fragment::column(i);
        scores[i] = words[column / 32] >> column % 32 & 1 ? scores[i] : kNegativeInfinity;
      }
    } else {
      columns.begin -= first_column;
      columns.end -= first_column;
      uint32 mine = 0;  // of both ends at once: an element takes a selection, not two tests with it
      if constexpr (kWindowLeft) {
        static_assert(kKeys <= 128);
        mine = mask::low_thread_bits(columns.end) & ~mask::low_thread_bits(columns.begin);
      }
#pragma unroll
      for (int half = 0; half < kCount; half += kScores / 2) {
        const int first = fragment::column(half);
        const bool whole = columns.begin <= first && columns.end > first + kKeys / 2 - 7;
        if (kBranches && whole) continue;
#pragma unroll
        for (int i = half; i < half + kScores / 2; ++i) {
          if (fragment::row(i) != row) continue;
          const int column = fragment::column(i);
          const bool visible = kWindowLeft ? mine >> mask::thread_bit(i) & 1 : column < columns.end;
          scores[i] = visible ? scores[i] : kNegativeInfinity;
        }
      }
    }
  }
}

// ---- sees: a fragment of S^T, rows are keys -----------------------------------------------------

// The thread's pairs among its warp's 16 keys and kQueries queries from first_query on; `key` is
// its first. The bits of a mask are in blocks of kBlock queries, of which these may be a part.
template <int kQueries, int kBlock = kQueries>
struct SeenPairs {
  int first_column;
  Range columns[2];  // of queries that its keys see, relative to its first query
  mask::QueryBits<kBlock> bits[2];
  int key_segment[2];
  int segments[kQueries / 32];  // of query first_query + 32 i + lane
  Positions seeing[2];          // of the queries that see its keys
  int positions[kQueries / 32];

  template <class Params>
  __device__ __forceinline__ SeenPairs(const Params& p, int batch, int head,
                                       const Visibility& sight, int key, int first_query)
      : first_column(fragment::first_column(threadIdx.x)) {
    if constexpr (kHasSegments) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        const int query =
            min(first_query + 32 * i + static_cast<int>(threadIdx.x) % 32, p.query_len - 1);
        segments[i] = p.query_segments[static_cast<int64>(batch) * p.query_len + query];
      }
    }
    if constexpr (kHasPositions) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        const int query =
            min(first_query + 32 * i + static_cast<int>(threadIdx.x) % 32, p.query_len - 1);
        positions[i] = query_position(p, batch, query);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int mine = key + fragment::kRowStep * row;
      columns[row] = key_columns(sight, mine, first_query + first_column);
      if constexpr (kHasMask) {
        bits[row].load(p, batch, head, mine, first_query / kBlock);
        if constexpr (kBlock > kQueries && kMaskQueries) {
          static_assert(kQueries == 32 && kBlock == 64);
          uint32(&words)[2] = bits[row].words;
          words[0] = (first_query % kBlock < 32 ? words[0] : words[1]) >> first_query % 32;
        }
      }
      if constexpr (kHasSegments) {
        key_segment[row] =
            p.key_value_segments[static_cast<int64>(batch) * p.kv_len + min(mine, p.kv_len - 1)];
      }
      if constexpr (kHasPositions) {
        seeing[row] = positions_seeing(p, key_position(p, batch, min(mine, p.kv_len - 1)));
      }
    }
    if constexpr (kMaskBlock != 0)
      mask::keep_blocks<kQueries>(p, batch, head, key, first_query, bits);
  }
  // Of elements 4j to 4j + 3. Whole warps call.
  __device__ __forceinline__ void see(int j, bool (&seen)[4]) const {
    int query_segment[2];
    if constexpr (kHasSegments) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_segment[c] =
            __shfl_sync(0xffffffffu, segments[j / 4], 8 * (j % 4) + first_column + c);
      }
    }
    int query_at[2];
    if constexpr (kHasPositions) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_at[c] = __shfl_sync(0xffffffffu, positions[j / 4], 8 * (j % 4) + first_column + c);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = fragment::column(4 * j + i);
      const Range& range = columns[fragment::row(i)];
      seen[i] = column >= range.begin && column < range.end;
      if constexpr (kHasSegments) {
        seen[i] = seen[i] && query_segment[i % 2] == key_segment[fragment::row(i)];
      }
      if constexpr (kHasPositions) {
        seen[i] = seen[i] && seeing[fragment::row(i)].hold(query_at[i % 2]);
      }
      if constexpr (kHasMask) {
        const uint32 mine = bits[fragment::row(i)].word(column / 32) >> first_column;
        seen[i] = seen[i] && mine >> column % 32 & 1;
      }
    }
  }
};
