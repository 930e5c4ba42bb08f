// Rotary position embedding of queries and new keys, as jax_flash/_rotary.py has it: features h and
// h + H / 2 turn by position * frequency of h. Su et al., RoFormer (arXiv:2104.09864).
#pragma once

#include "element.cuh"
#include "numbers.cuh"
#include "rows.cuh"

namespace rotary {

// Positions whose angles `sine_and_cosine` takes, as frequencies are at most 1.
inline constexpr int kLargest = 1 << 20;

// For an angle from 0 to kLargest, to 1.2e-7. Beyond some 1e5 sincosf has a branch for each angle,
// which keeps a thread's other angles waiting.
__device__ __forceinline__ void sine_and_cosine(float angle, float& sine, float& cosine) {
  const float quarters = rintf(angle * 0.636619772f);
  // Less the quarter turns, in three parts: the first product leaves no rounding.
  float r = fmaf(-quarters, 1.57079637f, angle);
  r = fmaf(-quarters, -4.37113883e-8f, r);
  r = fmaf(-quarters, -1.71512451e-15f, r);
  const float s = r * r;
  const float of_sine = fmaf(s, fmaf(s, -1.9515296e-4f, 8.3321609e-3f), -1.6666655e-1f);
  const float small = fmaf(r * s, of_sine, r);
  const float of_cosine =
      fmaf(s, fmaf(s, fmaf(s, 2.4433157e-5f, -1.3887316e-3f), 4.1666646e-2f), -0.5f);
  const float large = fmaf(s, of_cosine, 1.0f);
  const int quarter = static_cast<int>(quarters);
  sine = quarter & 1 ? large : small;
  cosine = quarter & 1 ? small : large;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
}

// The angles by which kCount features turn, from `first` on, and those H / 2 further on with them.
template <int kCount>
__device__ __forceinline__ void angles(const float* frequencies, int first, int position,
                                       float (&sines)[kCount], float (&cosines)[kCount]) {
  if (position <= kLargest) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float angle = static_cast<float>(position) * frequencies[first + i];
      sine_and_cosine(angle, sines[i], cosines[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sincosf(static_cast<float>(position) * frequencies[first + i], &sines[i], &cosines[i]);
    }
  }
}

// Turns them, two of 16 bits in a word; rounded to the element type.
template <class Of, int kWords>
__device__ __forceinline__ void turn_words(const float* frequencies, int first, int position,
                                           uint32* low, uint32* high) {
  float sines[2 * kWords], cosines[2 * kWords];
  angles(frequencies, first, position, sines, cosines);
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    float a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sine = sines[2 * word + i], cosine = cosines[2 * word + i];
      const float x = i == 0 ? Of::unpack_low(low[word]) : Of::unpack_high(low[word]);
      const float y = i == 0 ? Of::unpack_low(high[word]) : Of::unpack_high(high[word]);
      a[i] = x * cosine - y * sine;
      b[i] = y * cosine + x * sine;
    }
    low[word] = Of::pack(a[0], a[1]);
    high[word] = Of::pack(b[0], b[1]);
  }
}
template <class Of>
__device__ __forceinline__ void turn(const float* frequencies, int piece, int position,
                                     uint4& first, uint4& second) {
  turn_words<Of, 4>(frequencies, 8 * piece, position, reinterpret_cast<uint32*>(&first),
                    reinterpret_cast<uint32*>(&second));
}
template <class Of>
__device__ __forceinline__ void turn(const float* frequencies, int piece, int position,
                                     Eight& first, Eight& second) {
  float sines[8], cosines[8];
  angles(frequencies, 8 * piece, position, sines, cosines);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = first.x[i], y = second.x[i];
    first.x[i] = x * cosines[i] - y * sines[i];
    second.x[i] = y * cosines[i] + x * sines[i];
  }
}

}  // namespace rotary
