// Rotary position embedding of queries and new keys, as jax_flash/_rotary.py has it: features h and
// h + H / 2 turn by position * frequency of h. Su et al., RoFormer (arXiv:2104.09864).
#pragma once

#include "element.cuh"
#include "numbers.cuh"

namespace rotary {

// Turns features 8 * piece on and those H / 2 further on; rounded to the element type.
__device__ __forceinline__ void turn(const float* frequencies, int piece, int position,
                                     uint4& first, uint4& second) {
  uint32* low = reinterpret_cast<uint32*>(&first);
  uint32* high = reinterpret_cast<uint32*>(&second);
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sine, cosine;
      sincosf(static_cast<float>(position) * frequencies[8 * piece + 2 * word + i], &sine, &cosine);
      const float x = i == 0 ? Element::unpack_low(low[word]) : Element::unpack_high(low[word]);
      const float y = i == 0 ? Element::unpack_low(high[word]) : Element::unpack_high(high[word]);
      a[i] = x * cosine - y * sine;
      b[i] = y * cosine + x * sine;
    }
    low[word] = Element::pack(a[0], a[1]);
    high[word] = Element::pack(b[0], b[1]);
  }
}

}  // namespace rotary
