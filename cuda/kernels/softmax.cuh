// Online softmax over accumulator fragments (mma.sync m16n8 and wgmma m64nN share them).
//
// A thread holds two rows: elements i with bit 1 clear belong to row 0, the others to row 1. The
// four threads of a quad share the rows; `sum` stays a per-thread partial until finish().
// Milakov & Gimelshein 2018 (arXiv:1805.02867); the thresholded rescale follows FlashAttention-4.
#pragma once

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kNegativeInfinity = __builtin_bit_cast(float, 0xff800000u);

// 2^x by a cubic on the FMA units, relative error 9e-5 (bf16 weights round at 2e-3, fp16 at 2.4e-4):
// relieves the 16 exp2 per cycle of the special-function units. NaN stays NaN; below -127 gives 0.
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

struct SoftmaxState {
  float max[2];  // of the raw scores so far; may lag behind by kRescaleThreshold, see update()
  float sum[2];  // of this thread's exponentials, relative to max

  __device__ __forceinline__ void reset() {
    max[0] = max[1] = kNegativeInfinity;
    sum[0] = sum[1] = 0.0f;
  }

  // Replaces raw scores by 2^((score - max) * scale_log2) and adds them to the sum. Returns true
  // if earlier results have to be multiplied by `correction` (in some lane of the warp).
  // The maximum is left alone while it grows by less than `threshold` (log2): weights then reach
  // 2^threshold instead of 1, and the final division makes the result exact all the same.
  template <bool kFirst, int kPolynomial, int kCount>
  __device__ __forceinline__ bool update(float (&scores)[kCount], float (&correction)[2],
                                         float scale_log2, float threshold) {
    bool rescale = false;
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
      correction[row] = 1.0f;
      if constexpr (kFirst) {
        max[row] = now;
      } else {
        now = fmaxf(now, max[row]);
        // -inf - -inf is NaN and compares false: a row without visible keys stays at -inf.
        if ((now - max[row]) * scale_log2 > threshold) {
          correction[row] = ptx::exp2_approx((max[row] - now) * scale_log2);
          max[row] = now;
          rescale = true;
        }
      }
      const float base = max[row] == kNegativeInfinity ? 0.0f : max[row] * scale_log2;
      float partial[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[i + 2 * row + j];
          const float x = fmaf(score, scale_log2, -base);
          if (kPolynomial > 0 && (i / 4) % kPolynomial == kPolynomial - 1) {
            score = exp2_polynomial(x);
          } else {
            score = ptx::exp2_approx(x);
          }
          partial[j] += score;
        }
      }
      sum[row] = kFirst ? partial[0] + partial[1]
                        : fmaf(sum[row], correction[row], partial[0] + partial[1]);
    }
    return kFirst ? false : __any_sync(0xffffffffu, rescale);
  }

  // Sums over the quad. Returns the factor of the output and writes the natural-log lse; a row
  // without visible keys gives 0 and -inf, with or without `sink` (an extra logit, log2 units).
  template <bool kHasSink>
  __device__ __forceinline__ float finish(int row, float scale_log2, float sink, float& lse) {
    float total = sum[row];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (max[row] == kNegativeInfinity) {
      lse = kNegativeInfinity;
      return 0.0f;
    }
    float largest = max[row] * scale_log2;
    float factor = 1.0f;
    if constexpr (kHasSink) {
      const float with_sink = fmaxf(largest, sink);
      factor = ptx::exp2_approx(largest - with_sink);
      total = fmaf(total, factor, ptx::exp2_approx(sink - with_sink));
      largest = with_sink;
    }
    lse = (largest + ptx::log2_approx(total)) * kLn2;
    return factor / total;
  }
};
