// What happens to a score between Q.K^T and the mask.
#pragma once

// softcap(x) = cap * tanh(x / cap) of the scaled scores, in place.
template <int kCount>
__device__ __forceinline__ void apply_softcap(float (&scores)[kCount], float scale, float cap) {
  const float inner = scale / cap;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // tanh(x) = 1 - 2 / (1 + e^2x): relative error 1e-6, where tanh.approx has 5e-4.
    const float e = ptx::exp2_approx(scores[i] * (inner * 2.8853900817779268f));
    scores[i] = cap - 2.0f * cap * ptx::reciprocal_approx(1.0f + e);
  }
}

template <int kCount>
__device__ __forceinline__ void apply_scale(float (&scores)[kCount], float scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] *= scale;
}

// tanh(inner * x) in place, inner = scale / cap: the softcapped score is cap times that, and its
// derivative by the scaled score 1 - tanh^2.
template <int kCount>
__device__ __forceinline__ void apply_tanh(float (&scores)[kCount], float inner) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float e = ptx::exp2_approx(scores[i] * (inner * 2.8853900817779268f));
    scores[i] = 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + e);
  }
}
