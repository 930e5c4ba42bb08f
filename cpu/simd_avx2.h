// Owns the vector operations of the kernels on AVX2, FMA and F16C.
// Same names as simd_avx512.h and simd_portable.h.
#ifndef JAX_FLASH_CPU_SIMD_AVX2_H_
#define JAX_FLASH_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include "cpu/numeric.h"

namespace jax_flash::cpu {
namespace {

using F = __m256;
using M = __m256;  // all ones or all zeros in each lane
constexpr int kLanes = 8;
constexpr int kTileVectors = 2;  // micro-kernel: 6 x 16, 12 of 16 registers accumulate
constexpr int kTileRows = 6;

inline F Load(const float* p) { return _mm256_loadu_ps(p); }
inline void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F Set1(float x) { return _mm256_set1_ps(x); }
inline F Zero() { return _mm256_setzero_ps(); }
inline F Add(F a, F b) { return _mm256_add_ps(a, b); }
inline F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm256_div_ps(a, b); }
inline F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// The first factor of many Fma or DotPairs.
inline F LoadFactor(const float* p) { return Set1(*p); }
inline F Max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is nan
inline F Min(F a, F b) { return _mm256_min_ps(a, b); }  // b where either is nan
inline F Round(F x) { return _mm256_round_ps(x, 8); }
// x * 2^n for integral n <= 127; 0 below the normal range.
inline F TimesPowerOf2(F x, F n) {
  const __m256i e = _mm256_cvtps_epi32(Max(Set1(-127.0f), n));
  return Mul(
      x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23)));
}
// Returns x - floor(x), 0 for -inf, and leaves floor(x) in x.
inline F SplitExponent(F& x) {
  const F y = Max(Set1(-150.0f), x);
  x = _mm256_floor_ps(y);
  return Sub(y, x);
}
inline float ReduceMax(F x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float ReduceAdd(F x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline __m256i LaneIndex() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i Clamped(int64_t n) {
  return _mm256_set1_epi32(n >= kLanes ? kLanes : n <= 0 ? 0 : static_cast<int>(n));
}
inline M FirstLanes(int64_t n) {
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(Clamped(n), LaneIndex()));
}
inline M LanesBetween(int64_t lo, int64_t hi) {
  return _mm256_andnot_ps(FirstLanes(lo), FirstLanes(hi));
}
inline M And(M a, M b) { return _mm256_and_ps(a, b); }
inline M Equal(const int32_t* ids, int32_t id) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(x, _mm256_set1_epi32(id)));
}
inline M Between(const int32_t* ids, int32_t first, int32_t last) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids));
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), x);
  const __m256i above = _mm256_cmpgt_epi32(x, _mm256_set1_epi32(last));
  const __m256i outside = _mm256_or_si256(below, above);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(outside, _mm256_setzero_si256()));
}
inline M NonZero(const uint8_t* bytes) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(x), _mm256_setzero_si256()));
}
inline M EqualTo(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline M Unordered(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
inline bool Any(M m) { return _mm256_movemask_ps(m) != 0; }
inline F Select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }

inline __m128i LoadHalvesPartial(const void* p, int64_t n) {
  if (n >= kLanes) return _mm_loadu_si128(static_cast<const __m128i*>(p));
  alignas(16) uint16_t x[kLanes] = {};
  if (n > 0) std::memcpy(x, p, static_cast<size_t>(n) * 2);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(x));
}
inline void StoreHalvesPartial(void* p, __m128i x, int64_t n) {
  if (n >= kLanes) {
    _mm_storeu_si128(static_cast<__m128i*>(p), x);
  } else if (n > 0) {
    alignas(16) uint16_t y[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(y), x);
    std::memcpy(p, y, static_cast<size_t>(n) * 2);
  }
}

inline F LoadPartial(const float* p, int64_t n) {
  if (n >= kLanes) return Load(p);
  return _mm256_maskload_ps(p, _mm256_castps_si256(FirstLanes(n)));
}
inline F LoadPartial(const BFloat16* p, int64_t n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(LoadHalvesPartial(p, n)), 16));
}
inline F LoadPartial(const Float16* p, int64_t n) {
  return _mm256_cvtph_ps(LoadHalvesPartial(p, n));
}
// As LoadTwo and PlaceOfTwo of math-inl.h, for bfloat16: the even elements apart from the odd ones,
// an instruction for each.
inline void LoadTwo(const BFloat16* p, F& even, F& odd) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)));
}
inline int64_t PlaceOfTwo(BFloat16, int64_t i) { return i % 2 * kLanes + i / 2; }

inline void StorePartial(float* p, F x, int64_t n) {
  if (n >= kLanes) return Store(p, x);
  _mm256_maskstore_ps(p, _mm256_castps_si256(FirstLanes(n)), x);
}
inline void StorePartial(BFloat16* p, F x, int64_t n) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i y =
      _mm256_srli_epi32(_mm256_blendv_epi8(r, quiet, _mm256_castps_si256(Unordered(x, x))), 16);
  StoreHalvesPartial(p, _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)),
                     n);
}
inline void StorePartial(Float16* p, F x, int64_t n) {
  StoreHalvesPartial(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), n);
}

// 8 x 8 words: rows become columns.
inline void Transpose(F (&r)[kLanes]) {
  F t[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < kLanes; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const F lo = r[i], hi = r[i + 4];
    r[i] = _mm256_permute2f128_ps(lo, hi, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(lo, hi, 0x31);
  }
}

// Lane i: the sum of the lanes of x[i].
inline F SumEach(F (&x)[kLanes]) {
  F t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) t[i] = _mm256_hadd_ps(x[2 * i], x[2 * i + 1]);
  const F low = _mm256_hadd_ps(t[0], t[1]), high = _mm256_hadd_ps(t[2], t[3]);
  return Add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace
}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_SIMD_AVX2_H_
