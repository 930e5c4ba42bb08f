// The logit: what happens to a score between Q.K^T and the softmax, and its slope. Scale, bias and
// softcap are here, a user's function in score_functions.cuh.
#pragma once

#include "numbers.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

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
// tanh(x), far or near. The near one is written in other words: what both branches of a caller have
// in common would be kept through both, and 32 bytes spilled.
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
// Are all of a warp's scores near? Logits within half the cap are, such as models have most of the
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
    const float inner = kAddsToScores ? 1.0f : p.softcap_inner;
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
  } else if constexpr (kScaleFirst && !kAddsToScores && !kHasScoreFunction) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= p.scale;
  }
}
// The factor of what score_function has made: one number, and for hidden elements an infinity, not
// 0 times it.
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
