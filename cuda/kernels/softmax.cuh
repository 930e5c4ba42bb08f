// Online softmax over accumulator fragments (fragment.cuh), whose rows are queries.
//
// A thread's part of a row's sum stays with it until finish(). Milakov & Gimelshein 2018
// (arXiv:1805.02867). The maximum here may lag behind: any number near it keeps the exponentials in
// range, and the final division makes the result exact all the same.
#pragma once

#include "fragment.cuh"
#include "numbers.cuh"
#include "ptx.cuh"

// The base of a row that has seen no key: the lowest number, so masked scores have the weight 0.
inline constexpr float kNoBase = -0x1.fffffep127f;
// A row's base rises to a block's maximum if one weight decides the row: the rounding of that
// weight would be the result's. A thread suspects such a weight where its sums over even and over
// odd columns of the block differ by more than a threshold, which many weights side by side seldom
// do. The threshold is `of_sum` of the thread's sum, this block's weights included, plus `of_base`
// of the weight that a first block's maximum has, 2^-kHeadroom. The weight is decisive if the
// difference passes the second threshold too, which takes the sum of the whole row.
struct Threshold {
  float of_sum, of_base;
  __device__ __forceinline__ float operator()(float sum, float base) const {
    return fmaf(of_sum, sum, of_base * base);
  }
};
inline constexpr Threshold kSuspect{0.4f, 0.1f}, kDecisive{0.2f, 0.2f};
inline constexpr Threshold kDecisiveOfThread{0.5f, 0.5f};  // without asking the row's other threads

// Nothing beside the exponentials.
struct Alone {
  __device__ __forceinline__ void operator()(int) const {}
};

// What comes after all of them; the compiler may begin it among them.
template <class Draw>
struct After {
  Draw draw;
  __device__ __forceinline__ void operator()(int) const {}
};
template <class Beside>
__device__ __forceinline__ void finish_beside(const Beside&) {}
template <class Draw>
__device__ __forceinline__ void finish_beside(const After<Draw>& after) {
  after.draw();
}

// Scores to logits in log2 units less a base; row and column of a fragment.
struct OneFactor {  // score * factor
  float factor;
  __device__ __forceinline__ float exponent(float score, int, int, float base) const {
    return fmaf(score, factor, -base);
  }
};
struct RowFactor {  // another of each row
  float factor[2];
  __device__ __forceinline__ float exponent(float score, int row, int, float base) const {
    return fmaf(score, factor[row], -base);
  }
};
// One to the fifth power: factor + cubic * score^2 + quintic * score^4.
struct OddFactor {
  float factor, cubic, quintic;
  __device__ __forceinline__ float exponent(float score, int, int, float base) const {
    const float square = score * score;
    return fmaf(score, fmaf(square, fmaf(square, quintic, cubic), factor), -base);
  }
};
// The same and a line along each row: score * factor + start + step * column.
template <bool kIsLevel>
struct LineFactor {
  float factor, step, start[2];
  __device__ __forceinline__ void set_start(int row, float to) { start[row] = to; }
  __device__ __forceinline__ float first_start() const { return start[0]; }
  __device__ __forceinline__ float exponent(float score, int row, int column, float base) const {
    return fmaf(score, factor, fmaf(step, static_cast<float>(column), start[row] - base));
  }
};
// The same of two rows whose starts and bases are as far apart: start is less that base.
struct CommonLine {
  float factor, step, start;
  __device__ __forceinline__ float exponent(float score, int, int column, float) const {
    return fmaf(score, factor, fmaf(step, static_cast<float>(column), start));
  }
};
// A line without a slope: of both rows it is the same.
template <>
struct LineFactor<true> {
  float factor, step, start;
  __device__ __forceinline__ void set_start(int, float to) { start = to; }
  __device__ __forceinline__ float first_start() const { return start; }
  __device__ __forceinline__ float exponent(float score, int, int, float base) const {
    return fmaf(score, factor, start - base);
  }
};

// `Element` is the type of the weights.
template <class Element>
struct SoftmaxState {
  static constexpr auto kHeadroom = Element::kHeadroom;

  float base[2];  // log2 units; exponentials are relative to it
  float sum[2];   // of this thread's exponentials

  // Replaces raw scores by 2^(score * factor - base); `added`: a thread's part of the row sums,
  // in even and odd columns. `beside(i)` is for the 16 columns from 16 * i on: its instructions go
  // among the exponentials, of which the special function units take one in eight cycles.
  template <int kUsed, int kCount, class Factor, class Beside>
  __device__ __forceinline__ void exponentials(float (&scores)[kCount], const Factor& factor,
                                               float (&added)[2][2], const Beside& beside) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) added[i / 2][i % 2] = 0.0f;
    // In units of 8 columns: all columns at once, or 16 where something goes among them. A common
    // line has 16 too: what its two rows share of more columns would stay in registers.
    constexpr int kPart = kSame<Beside, Alone> && !kSame<Factor, CommonLine> ? kUsed / 4 : 2;
#pragma unroll
    for (int first = 0; first < kUsed / 4; first += kPart) {
      beside(first / 2);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int j = first; j < first + kPart && j < kUsed / 4; ++j) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const int i = fragment::element(j, row, column);
            float& score = scores[i];
            score = ptx::exp2_approx(factor.exponent(score, row, fragment::column(i), base[row]));
            added[row][column] += score;
          }
        }
      }
    }
    finish_beside(beside);
  }

  // The first block of a unit: bases become the maxima of the scores (plus the headroom). Scores
  // beyond the first kUsed are hidden.
  template <int kUsed, int kCount, class Beside>
  __device__ __forceinline__ void start(float (&scores)[kCount], float scale_log2,
                                        const Beside& beside) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      base[row] =
          fmaxf(fmaf(fragment::row_maximum<kUsed>(scores, row), scale_log2, kHeadroom), kNoBase);
    }
    float added[2][2];
    exponentials<kUsed>(scores, OneFactor{scale_log2}, added, beside);
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] = added[row][0] + added[row][1];
#pragma unroll
    for (int i = kUsed; i < kCount; ++i) scores[i] = 0.0f;
  }
  // True if every row of the warp has a base.
  __device__ __forceinline__ bool is_started() const {
    return __all_sync(0xffffffffu, base[0] > kNoBase && base[1] > kNoBase);
  }

  // Every other block. Returns true if earlier results have to be multiplied by `correction`: with
  // `searches`, which is for blocks where a row of the warp has no base, and for second walks, the
  // bases rise to the maxima of the scores. Without, there is no maximum, which saves a quarter of
  // the softmax's instructions, unless a weight decides a row or a thread's part of the block
  // passes kSumLimit: then the bases of the warp's rows rise to their maxima, and the weights that
  // are largest by far are exact again. A score more than 128 above the base overflows, the sum
  // stays infinite, and the unit is walked again.
  // With a factor that is not one number, scores that are searched have that of `scale_log2`.
  // kAsksRow: whether a weight decides is asked of all threads of its row, which takes registers.
  template <bool kAsksRow = true, int kCount, class Beside>
  __device__ __forceinline__ bool extend(float (&scores)[kCount], float scale_log2, bool searches,
                                         float (&correction)[2], const Beside& beside) {
    return extend<kAsksRow>(scores, scale_log2, OneFactor{scale_log2}, searches, correction,
                            beside);
  }
  template <bool kAsksRow = true, int kCount, class Factor, class Beside>
  __device__ __forceinline__ bool extend(float (&scores)[kCount], float scale_log2,
                                         const Factor& factor, bool searches,
                                         float (&correction)[2], const Beside& beside) {
    if (searches) search<kSame<Element, Float16>>(scores, scale_log2, correction);
    // After a search the bases are maxima, and `correction` is taken: beyond 2^27 their rounding
    // alone may look like a rise.
    float apart[2];
    const Threshold threshold = kAsksRow ? kSuspect : kDecisiveOfThread;
    const bool suspect = weigh(scores, factor, threshold, apart, beside) && !searches;
    if (!__any_sync(0xffffffffu, suspect)) return searches;
    if (kAsksRow && !__any_sync(0xffffffffu, rises(apart))) return searches;
    raise(scores, correction);
    return true;
  }
  // The parts of it. Bases rise to the maxima of the scores. A base in the thousands is rounded by
  // 2^-12, so the largest weight is not 1, but the product has it as 1: with kOneInSum the sum does
  // too, by a quarter of the difference from each thread of the quad.
  template <bool kOneInSum, int kCount>
  __device__ __forceinline__ void search(const float (&scores)[kCount], float scale_log2,
                                         float (&correction)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = fragment::row_maximum<kCount>(scores, row);
      const float before = base[row];
      rise(row, fmaxf(fmaf(largest, scale_log2, kHeadroom), before), correction[row]);
      if constexpr (kOneInSum) {
        const float weight = ptx::exp2_approx(fmaf(largest, scale_log2, -base[row]));
        // No NaN, where a base beyond 2^31 is rounded by so much that the weight is infinite.
        const float added = fminf(Element::unpack(Element::round(weight)) - weight, 1.0f);
        if (base[row] > before) sum[row] = fmaf(added, 0.25f, sum[row]);
      }
    }
  }
  // Scores become weights. Do even and odd columns differ by more than `threshold`? Then `apart`,
  // by how much they do, is for rises().
  template <int kCount, class Factor, class Beside>
  __device__ __forceinline__ bool weigh(float (&scores)[kCount], const Factor& factor,
                                        const Threshold& threshold, float (&apart)[2],
                                        const Beside& beside) {
    float added[2][2];
    exponentials<kCount>(scores, factor, added, beside);
    bool differs = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float both = added[row][0] + added[row][1];
      apart[row] = fabsf(added[row][0] - added[row][1]);
      sum[row] += both;
      const float least = threshold(sum[row], ptx::power_of_two(-kHeadroom));
      // Where each half limits its weights: both pass the limit too often (float8).
      const float most = kHeadroom < 0 ? fmaxf(added[row][0], added[row][1]) : both;
      differs = differs || most > Element::kSumLimit || apart[row] > least;
    }
    return differs;
  }
  // Scores become weights, which a product adds up: add_block().
  template <int kCount>
  __device__ __forceinline__ void weigh_unsummed(float (&scores)[kCount], float factor) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ptx::exp2_approx(fmaf(scores[i], factor, -base[fragment::row(i)]));
    }
  }
  // A quarter of each row's sum, of weights as they are rounded. The first block's sum is without
  // rounding, which is marked by its sign: what comes of it then is left out.
  __device__ __forceinline__ void hold_first_block() {
    sum[0] = -sum[0];
    sum[1] = -sum[1];
  }
  __device__ __forceinline__ void add_block(const float (&sums)[4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] = fabsf(sum[row]) + (__float_as_int(sum[row]) < 0 ? 0.0f : sums[2 * row]);
    }
  }
  // Has a base of the thread's rows to rise?
  __device__ __forceinline__ bool rises(const float (&apart)[2]) const {
    bool decisive = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float total = fragment::quad_sum(sum[row]);
      const float least = kDecisive(total, ptx::power_of_two(-kHeadroom));
      decisive = decisive || sum[row] > Element::kSumLimit || apart[row] > least;
    }
    return decisive;
  }
  // Bases rise to the maxima of the weights, which are of these then. kByProduct: sums are.
  template <bool kByProduct = false, int kCount>
  __device__ __forceinline__ void raise(float (&weights)[kCount], float (&correction)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // What is infinite stays so, and what would have a correction below 2^-126: a base beyond
      // 2^26 may round up.
      const float largest = fragment::row_maximum<kCount>(weights, row);
      float needed = ptx::log2_approx(largest) + kHeadroom;
      if constexpr (kHeadroom < 0 && !kByProduct) {  // a sum of many, none of which is large, too
        needed = fmaxf(needed, ptx::log2_approx(fragment::heaviest_sum(weights, row) / kCalmSum));
      }
      const float lift = fminf(fmaxf(needed, 0.0f), 125.0f);
      const float now = base[row] + lift;
      const bool holds = largest < kInfinity && base[row] - now >= -126.0f;
      rise(row, holds ? now : base[row], correction[row]);
      // The product has 448 in the place of an infinite weight.
      if (kByProduct && !holds && largest > 1.0f) sum[row] = kInfinity;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment::row(i) == row) weights[i] *= correction[row];
      }
    }
  }
  // A thread's sum of a block comes to this where bases rise: the next would pass the limit itself.
  static constexpr float kCalmSum = Element::kSumLimit / 2;
  // For CommonLine, with `step` by column: lowers one base, so that the bases of the thread's two
  // rows are as far apart as the line's starts. `lowered` says by how much: the first row's base
  // where it is positive, the second one's where it is negative. Raising the other base instead
  // could hide a weight that decides its row from weigh(). Returns false, and lowers nothing, where
  // a sum would pass kMostLowered, 2^32 times a first block's largest weight, or a base 2^14, from
  // where on its rounding, 2^-10, would change weights beside those of earlier blocks.
  static constexpr float kMostLowered = 0x1p-48f;
  __device__ __forceinline__ bool lower_along(float step, float& lowered) {
    constexpr float kRowStep = fragment::kRowStep;
    const float apart = fmaf(-kRowStep, step, base[0]) - base[1];
    if (!__any_sync(0xffffffffu, apart != 0.0f)) return true;
    const float total = fragment::quad_sum(apart > 0.0f ? sum[0] : sum[1]);
    const bool small =
        total * ptx::exp2_approx(fabsf(apart)) < kMostLowered && fabsf(base[0]) < 0x1p14f;
    if (!__all_sync(0xffffffffu, small)) return false;
    lowered = apart;
    sum[0] *= ptx::exp2_approx(fmaxf(apart, 0.0f));
    sum[1] *= ptx::exp2_approx(fmaxf(-apart, 0.0f));
    base[0] -= fmaxf(apart, 0.0f);
    base[1] = fmaf(-kRowStep, step, base[0]);  // as the next call computes it
    return true;
  }
  __device__ __forceinline__ void rise(int row, float now, float& correction) {
    correction = ptx::exp2_approx(base[row] - now);
    base[row] = now;
    // What overflowed stays infinite or goes, and is no NaN: only a visible score makes one.
    sum[row] = sum[row] == kInfinity && correction == 0.0f ? 0.0f : sum[row] * correction;
  }

  // Sums over the quad. Returns the factor of the output and writes the natural-log lse; a row
  // without visible keys gives 0 and -inf, also with `sink` (an extra logit, log2 units), which its
  // lse is without being rounded: the caller's to write. An lse of +inf: the weights left the range
  // of float32.
  template <bool kHasSink>
  __device__ __forceinline__ float finish(int row, float sink, float& lse) const {
    float total = fragment::quad_sum(sum[row]);
    if (base[row] == kNoBase && total == 0.0f) {  // NaN scores give no base either
      lse = kNegativeInfinity;
      return 0.0f;
    }
    float largest = base[row];
    float factor = 1.0f;
    // Before a sink, which could make it NaN. Beyond 2^125 the reciprocal goes. The largest weight
    // is 2^-kHeadroom or more, unless a base beyond 2^24 was rounded up: then weights may have
    // gone.
    constexpr int kRoundedUp = kHeadroom > 0 ? static_cast<int>(kHeadroom) / 4 : 0;
    const bool lost = total > 0x1p125f || total < ptx::power_of_two(-kHeadroom - kRoundedUp - 1);
    if constexpr (kHasSink) {
      const float with_sink = fmaxf(largest, sink);
      factor = ptx::exp2_approx(largest - with_sink);
      const float sink_weight = ptx::exp2_approx(sink - with_sink);
      total = fmaf(total, factor, sink_weight);
      largest = with_sink;
    }
    // Headroom away first, which is exact: the logarithm of 2^-80 would cost four bits.
    const int away = total > 1.0f ? 0 : static_cast<int>(kHeadroom);
    lse = (largest - away + ptx::log2_approx(total * ptx::power_of_two(away))) * kLn2;
    if (lost) lse = kInfinity;
    return factor * ptx::reciprocal_approx(total);
  }
};
