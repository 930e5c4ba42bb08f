// Owns the vector operations of the kernels on AVX-512 (F, BW, DQ, VL), and the bfloat16 dot
// product where the file is compiled for AVX512-BF16. Same names as simd_avx2.h, simd_portable.h.
#ifndef JAX_FLASH_CPU_SIMD_AVX512_H_
#define JAX_FLASH_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include "cpu/numeric.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 warns of its own intrinsics (gcc bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace jax_flash::cpu {
namespace {

using F = __m512;
using M = __mmask16;  // one flag per lane
constexpr int kLanes = 16;
constexpr int kTileVectors = 4;  // micro-kernel: kTileRows x (kTileVectors * kLanes), 24 of 32
constexpr int kTileRows = 6;     // registers accumulate

inline F Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F Set1(float x) { return _mm512_set1_ps(x); }
inline F Zero() { return _mm512_setzero_ps(); }
inline F Add(F a, F b) { return _mm512_add_ps(a, b); }
inline F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
inline F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// The first factor of many Fma or DotPairs.
inline F LoadFactor(const float* p) { return Set1(*p); }
inline F Max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is nan
inline F Min(F a, F b) { return _mm512_min_ps(a, b); }  // b where either is nan
inline F Round(F x) { return _mm512_roundscale_ps(x, 8); }
inline F TimesPowerOf2(F x, F n) { return _mm512_scalef_ps(x, n); }
// Returns x - floor(x), 0 for -inf, and leaves in x what TimesPowerOf2 takes as floor(x): x, since
// that instruction rounds down by itself.
inline F SplitExponent(F& x) { return _mm512_reduce_ps(x, 0x09); }
inline float ReduceMax(F x) { return _mm512_reduce_max_ps(x); }
inline float ReduceAdd(F x) { return _mm512_reduce_add_ps(x); }

inline M FirstLanes(int64_t n) {
  return n >= kLanes ? M(0xffff) : n <= 0 ? M(0) : M((1u << n) - 1);
}
inline M LanesBetween(int64_t lo, int64_t hi) { return FirstLanes(hi) & ~FirstLanes(lo); }
inline M And(M a, M b) { return a & b; }
inline M Equal(const int32_t* ids, int32_t id) {
  return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(ids), _mm512_set1_epi32(id));
}
inline M Between(const int32_t* ids, int32_t first, int32_t last) {
  const __m512i x = _mm512_loadu_si512(ids);
  const __mmask16 from = _mm512_cmpge_epi32_mask(x, _mm512_set1_epi32(first));
  return _mm512_mask_cmple_epi32_mask(from, x, _mm512_set1_epi32(last));
}
inline M NonZero(const uint8_t* bytes) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return _mm_test_epi8_mask(x, x);
}
inline M EqualTo(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline M Unordered(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline bool Any(M m) { return m != 0; }
inline F Select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }

inline F LoadPartial(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
inline F LoadPartial(const BFloat16* p, int64_t n) {
  const __m256i x = _mm256_maskz_loadu_epi16(FirstLanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline F LoadPartial(const Float16* p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(FirstLanes(n), p));
}
// As LoadTwo and PlaceOfTwo of math-inl.h, for bfloat16: the even elements apart from the odd ones,
// an instruction for each.
inline void LoadTwo(const BFloat16* p, F& even, F& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
}
inline int64_t PlaceOfTwo(BFloat16, int64_t i) { return i % 2 * kLanes + i / 2; }

inline void StorePartial(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, FirstLanes(n), x); }
inline void StorePartial(BFloat16* p, F x, int64_t n) {
#if defined(__AVX512BF16__)
  const __m256i y = (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  r = _mm512_mask_or_epi32(r, Unordered(x, x), u, _mm512_set1_epi32(0x400000));  // quiet nan
  const __m256i y = _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
  _mm256_mask_storeu_epi16(p, FirstLanes(n), y);
}
inline void StorePartial(Float16* p, F x, int64_t n) {
  _mm256_mask_storeu_epi16(p, FirstLanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// The first n 16-bit elements of p as kLanes words of two.
inline F LoadPairsPartial(const uint16_t* p, int64_t n) {
  const __mmask32 m = n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1;
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, p));
}

// 16 x 16 words: rows become columns.
inline void Transpose(F (&r)[kLanes]) {
  F t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Lane i: the sum of the lanes of x[i]. 30 shuffles and 15 additions.
inline F SumEach(F (&x)[kLanes]) {
  F t[8], u[4], w[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[i] =
        Add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    u[i] = Add(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44),
               _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
  }
  for (int i = 0; i < 2; ++i) {
    w[i] = Add(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),
               _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  }
  return Add(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xdd));
}

#if defined(__AVX512BF16__)
#define JAX_FLASH_BF16_DOT 1
// c + a0 * b0 + a1 * b1 for the two bfloat16 in each word.
inline F DotPairs(F a, F b, F c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
// Words {even_i, odd_i} from the first n of 16 bfloat16 each; zeros stand for null.
inline F InterleavePairs(const uint16_t* even, const uint16_t* odd, int64_t n) {
  const __mmask16 m = FirstLanes(n);
  const __m512i lo = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(even ? m : 0, even));
  const __m512i hi = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(odd ? m : 0, odd));
  return _mm512_castsi512_ps(_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
}
// Interleaves 2 * kLanes bfloat16 each, in the order of PlaceOfPairs (math-inl.h).
inline void InterleaveTwo(const BFloat16* even, const BFloat16* odd, F& first, F& second) {
  const __m512i lo = even ? _mm512_loadu_si512(even) : _mm512_setzero_si512();
  const __m512i hi = _mm512_loadu_si512(odd);
  first = _mm512_castsi512_ps(_mm512_unpacklo_epi16(lo, hi));
  second = _mm512_castsi512_ps(_mm512_unpackhi_epi16(lo, hi));
}
// The same from float32, rounded.
inline F InterleavePairs(F even, F odd) {
  const __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  const __m512i hi = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
  return _mm512_castsi512_ps(_mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
}
// 2 * kLanes values in order, rounded: kLanes words.
inline F PackPairs(F first, F second) {
  return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#endif

}  // namespace
}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_SIMD_AVX512_H_
