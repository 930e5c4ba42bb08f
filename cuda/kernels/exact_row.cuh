// One query row of attention by one warp, without tensor cores and without touching a masked value.
//
// The tiled kernels multiply every value of a block, those of masked keys by a weight of zero, and
// 0 * NaN is NaN; their exponentials overflow when a score rises by more than 2^127. Rows whose
// result is not finite come here and are computed again, exactly as the definition has it.
#pragma once

#include "mask.cuh"
#include "softmax.cuh"

template <class Element>
__device__ __forceinline__ float load_element(const void* array, long long index) {
  return ptx::unpack<Element>(static_cast<const unsigned short*>(array)[index]);
}

// Softmax of the visible keys of one row times their values; the whole warp takes part.
// visible(key) tells whether the row sees a key of the half-open range `keys`; score(logit) is the
// score function, natural-log units. Lane l holds output columns l, l + 32, ... in out.
template <class Element, int kHeadDim, int kValueDim, class Visible, class Score, int kColumns>
__device__ __forceinline__ void exact_row(const void* query, long long query_index, const void* key,
                                          long long key_index, long long key_stride,
                                          const void* value, long long value_index,
                                          long long value_stride, Range keys, Visible visible,
                                          Score score, float (&out)[kColumns], float& largest,
                                          float& sum) {
  const int lane = threadIdx.x % 32;
  largest = kNegativeInfinity;
  sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = 0.0f;
#pragma unroll 1
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int mine = first + lane;
    const bool seen = mine < keys.end && visible(mine);
    float logit = kNegativeInfinity;
    if (seen) {
      float dot = 0.0f;
#pragma unroll 1
      for (int d = 0; d < kHeadDim; ++d) {
        dot = fmaf(load_element<Element>(query, query_index + d),
                   load_element<Element>(key, key_index + mine * key_stride + d), dot);
      }
      logit = score(dot) * kLog2E;
    }
    float now = logit;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, distance));
    }
    now = fmaxf(now, largest);
    const float correction = now == largest ? 1.0f : ptx::exp2_approx(largest - now);
    largest = now;
    sum *= correction;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= correction;
    const float weight = ptx::exp2_approx(logit - largest);
    unsigned int left = __ballot_sync(0xffffffffu, seen);
    while (left != 0) {
      const int owner = __ffs(left) - 1;
      left &= left - 1;
      const float w = __shfl_sync(0xffffffffu, weight, owner);
      sum += w;
      const long long row = value_index + (first + owner) * value_stride;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = lane + 32 * c;
        if (column < kValueDim)
          out[c] = fmaf(w, load_element<Element>(value, row + column), out[c]);
      }
    }
  }
}
