// Online softmax over accumulator fragments (mma.sync m16n8 and wgmma m64nN share them).
//
// A thread holds two rows: elements i with bit 1 clear belong to row 0, the others to row 1. The
// four threads of a quad share the rows; `sum` stays a per-thread partial until finish().
// Milakov & Gimelshein 2018 (arXiv:1805.02867). The maximum here may lag behind: any number near
// it keeps the exponentials in range, and the final division makes the result exact all the same.
#pragma once

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNegativeInfinity = -kInfinity;
// A block whose weights are this many times the sum before it counts as one that may decide a row.
inline constexpr float kDecisive = 4.0f;

// 2^x by a cubic on the FMA units, relative error 9e-5 (bf16 weights round at 2e-3, fp16
// at 2.4e-4): relieves the 16 exp2 per cycle of the special-function units. NaN stays NaN; below
// -127 gives 0.
__device__ __forceinline__ float exp2_polynomial(float x) {
  float clamped;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(-127.0f));
  const float shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the integer part in the low bits
  const float fraction = clamped - (shifted - 12582912.0f);
  float y = fmaf(fraction, 0.05550410866f, 0.2402265069f);
  y = fmaf(y, fraction, 0.6931471806f);
  y = fmaf(y, fraction, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

struct SoftmaxState {
  float base[2];  // log2 units; exponentials are relative to it; -inf: no key seen yet
  float sum[2];   // of this thread's exponentials
  // What rounding to the element type added to the weights of decisive blocks. The largest weight
  // of a row is exact in the first block, 2^-kHeadroom, and rounded in any other. If it is most of
  // the row's sum, dividing by the sum of what was rounded takes its error out again.
  float rounding[2];

  // Replaces raw scores by 2^(score * scale_log2 - base); `added`: a thread's part of the row sums.
  template <int kPolynomial, int kCount>
  __device__ __forceinline__ void exponentials(float (&scores)[kCount], float scale_log2,
                                               float (&added)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float subtract = base[row] == kNegativeInfinity ? 0.0f : base[row];
      float partial[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[i + 2 * row + j];
          const float x = fmaf(score, scale_log2, -subtract);
          if (kPolynomial > 0 && (i / 4) % kPolynomial == kPolynomial - 1) {
            score = exp2_polynomial(x);
          } else {
            score = ptx::exp2_approx(x);
          }
          partial[j] += score;
        }
      }
      added[row] = partial[0] + partial[1];
    }
  }

  // The first block of a tile, or any block while a row of the warp has no base: bases become the
  // maxima of the scores (plus kHeadroom). Earlier results, unless kFirst, have to be multiplied by
  // `correction`.
  template <bool kFirst, int kPolynomial, int kCount>
  __device__ __forceinline__ void start(float (&scores)[kCount], float scale_log2, float headroom,
                                        float (&correction)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Four chains: one would wait for its own latency at every step.
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = scores[4 * (i / 2) + 2 * row + i % 2];
#pragma unroll
      for (int i = 8; i < kCount; i += 4) {
        const int chain = (i / 4) % 2 * 2;
        m[chain] = fmaxf(m[chain], scores[i + 2 * row]);
        m[chain + 1] = fmaxf(m[chain + 1], scores[i + 2 * row + 1]);
      }
      float now = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      now = fmaf(now, scale_log2, headroom);
      if constexpr (kFirst) {
        base[row] = now;
      } else {
        now = fmaxf(now, base[row]);
        correction[row] = now == base[row] ? 1.0f  // both may be -inf
                                           : ptx::exp2_approx(base[row] - now);
        base[row] = now;
      }
    }
    float added[2];
    exponentials<kPolynomial>(scores, scale_log2, added);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if constexpr (kFirst) {
        sum[row] = added[row];
        rounding[row] = 0.0f;
      } else {
        // What overflowed stays infinite or goes, and is no NaN: only a visible score makes one.
        if (sum[row] == kInfinity && correction[row] == 0.0f) sum[row] = 0.0f;
        sum[row] = fmaf(sum[row], correction[row], added[row]);
        rounding[row] *= correction[row];
      }
    }
  }
  // True if every row of the warp has a base, and unless each block is to be searched for a
  // maximum.
  __device__ __forceinline__ bool is_started(bool searches) const {
    const bool started = base[0] != kNegativeInfinity && base[1] != kNegativeInfinity;
    return __all_sync(0xffffffffu, started && !searches);
  }

  // Every other block: no maximum, which saves a quarter of the softmax's instructions. If a
  // thread's sum passes `limit`, its rows' bases rise by a whole number and the exponentials are
  // scaled down by that power of two. Returns true if results have to be multiplied by
  // `correction`. A score more than 128 above the base overflows, the sum stays infinite, and the
  // tile is walked again.
  template <class Element, int kPolynomial, int kCount>
  __device__ __forceinline__ bool extend(float (&scores)[kCount], float scale_log2, int headroom,
                                         float limit, float (&correction)[2]) {
    float added[2];
    exponentials<kPolynomial>(scores, scale_log2, added);
    // A block decides a row if it adds much to the row's sum, and by the measure of its base.
    const float least = ptx::power_of_two(-headroom - 1);
    bool decides[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      decides[row] = added[row] > fminf(limit, fmaxf(least, kDecisive * sum[row]));
    }
    bool passes = false;
    if (__any_sync(0xffffffffu, decides[0] || decides[1])) {
      passes = __any_sync(0xffffffffu, fmaxf(added[0], added[1]) > limit);
      if (passes) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float total = quad_sum(added[row]);
          const int exponent = (__float_as_int(total) >> 23) - 127;
          // Infinity (exponent 128) stays; 126: the factor is a normal number.
          const bool rises = total > limit && exponent < 128;
          const int rise = rises ? min(exponent + headroom, 126) : 0;
          // What overflowed only across the quad stays so: the output may have overflowed with it.
          if (exponent == 128) added[row] = total;
          correction[row] = ptx::power_of_two(-rise);
          base[row] += rise;
          added[row] *= correction[row];
          sum[row] *= correction[row];
          rounding[row] *= correction[row];
#pragma unroll
          for (int i = 2 * row; i < kCount; i += 4) {
            scores[i] *= correction[row];
            scores[i + 1] *= correction[row];
          }
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (__any_sync(0xffffffffu, decides[row])) {
          rounding[row] += rounded_sum<Element>(scores, row) - added[row];
        }
      }
    }
    sum[0] += added[0];
    sum[1] += added[1];
    return passes;
  }
  // The sum of one row's weights as the tensor cores will see them.
  template <class Element, int kCount>
  static __device__ __forceinline__ float rounded_sum(const float (&weights)[kCount], int row) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // chains
#pragma unroll
    for (int i = 2 * row; i < kCount; i += 4) {
      const ptx::uint32 pair = ptx::pack<Element>(weights[i], weights[i + 1]);
      const int chain = i / 4 % 2 * 2;
      sum[chain] += ptx::unpack<Element>(static_cast<ptx::uint16>(pair));
      sum[chain + 1] += ptx::unpack<Element>(static_cast<ptx::uint16>(pair >> 16));
    }
    return sum[0] + sum[1] + (sum[2] + sum[3]);
  }

  // Sums over the quad. Returns the factor of the output and writes the natural-log lse; a row
  // without visible keys gives 0 and -inf, with or without `sink` (an extra logit, log2 units). An
  // lse of +inf: the weights overflowed.
  template <bool kHasSink>
  __device__ __forceinline__ float finish(int row, float sink, int headroom, float& lse) const {
    float total = quad_sum(sum[row]);
    float divisor = quad_sum(sum[row] + rounding[row]);
    if (base[row] == kNegativeInfinity && total == 0.0f) {  // NaN scores give no base either
      lse = kNegativeInfinity;
      return 0.0f;
    }
    float largest = base[row];
    float factor = 1.0f;
    const bool overflowed = total == kInfinity;  // with a sink it could become NaN
    if constexpr (kHasSink) {
      const float with_sink = fmaxf(largest, sink);
      factor = ptx::exp2_approx(largest - with_sink);
      const float sink_weight = ptx::exp2_approx(sink - with_sink);
      total = fmaf(total, factor, sink_weight);
      divisor = fmaf(divisor, factor, sink_weight);
      largest = with_sink;
    }
    // Headroom away first, which is exact: the logarithm of 2^-80 would cost four bits.
    lse = (largest - headroom + ptx::log2_approx(total * ptx::power_of_two(headroom))) * kLn2;
    if (overflowed) lse = kInfinity;
    return factor * ptx::reciprocal_approx(divisor);
  }
};
