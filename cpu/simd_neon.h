// Owns the vector operations of the kernels on AArch64's NEON, and the bfloat16 dot product where
// the file is compiled for it (FEAT_BF16). float16 is converted by the base instruction set and
// computed in float32. Same names as simd_avx512.h, simd_avx2.h and simd_portable.h.
#ifndef JAX_FLASH_CPU_SIMD_NEON_H_
#define JAX_FLASH_CPU_SIMD_NEON_H_

#include <arm_neon.h>

#include "cpu/numeric.h"

namespace jax_flash::cpu {
namespace {

using F = float32x4_t;
using M = uint32x4_t;  // all ones or all zeros in each lane
constexpr int kLanes = 4;
constexpr int kTileVectors = 4;  // micro-kernel: 6 x 16, 24 of 32 registers accumulate
constexpr int kTileRows = 6;

inline F Load(const float* p) { return vld1q_f32(p); }
inline void Store(float* p, F x) { vst1q_f32(p, x); }
inline F Set1(float x) { return vdupq_n_f32(x); }
inline F Zero() { return vdupq_n_f32(0.0f); }
inline F Add(F a, F b) { return vaddq_f32(a, b); }
inline F Sub(F a, F b) { return vsubq_f32(a, b); }
inline F Mul(F a, F b) { return vmulq_f32(a, b); }
inline F Div(F a, F b) { return vdivq_f32(a, b); }
inline F Fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
// A word in lane 0: products take it from there, without a copy to the other lanes.
struct Factor {
  float32x2_t word;
};
inline Factor LoadFactor(const float* p) { return {vset_lane_f32(*p, vdup_n_f32(0.0f), 0)}; }
inline F Fma(Factor a, F b, F c) { return vfmaq_lane_f32(c, b, a.word, 0); }
inline F Select(M m, F a, F b) { return vbslq_f32(m, a, b); }
inline F Max(F a, F b) { return Select(vcgtq_f32(a, b), a, b); }  // b where either is nan
inline F Min(F a, F b) { return Select(vcltq_f32(a, b), a, b); }  // b where either is nan
inline F Round(F x) { return vrndnq_f32(x); }
// x * 2^n for integral n <= 127; 0 below the normal range.
inline F TimesPowerOf2(F x, F n) {
  const int32x4_t e = vcvtq_s32_f32(Max(Set1(-127.0f), n));
  return Mul(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)));
}
// Returns x - floor(x), 0 for -inf, and leaves floor(x) in x.
inline F SplitExponent(F& x) {
  const F y = Max(Set1(-150.0f), x);
  x = vrndmq_f32(y);
  return Sub(y, x);
}
inline float ReduceMax(F x) { return vmaxnmvq_f32(x); }
inline float ReduceAdd(F x) { return vaddvq_f32(x); }

inline M FirstLanes(int64_t n) {
  const int32_t index[kLanes] = {0, 1, 2, 3};
  const int32_t count = n >= kLanes ? kLanes : n <= 0 ? 0 : static_cast<int32_t>(n);
  return vcgtq_s32(vdupq_n_s32(count), vld1q_s32(index));
}
inline M LanesBetween(int64_t lo, int64_t hi) { return vbicq_u32(FirstLanes(hi), FirstLanes(lo)); }
inline M And(M a, M b) { return vandq_u32(a, b); }
inline M Equal(const int32_t* ids, int32_t id) {
  return vceqq_s32(vld1q_s32(ids), vdupq_n_s32(id));
}
inline M Between(const int32_t* ids, int32_t first, int32_t last) {
  const int32x4_t x = vld1q_s32(ids);
  return vandq_u32(vcgeq_s32(x, vdupq_n_s32(first)), vcleq_s32(x, vdupq_n_s32(last)));
}
inline M NonZero(const uint8_t* bytes) {
  const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes))));  // 8 may be read
  return vtstq_u32(x, x);
}
inline M EqualTo(F a, F b) { return vceqq_f32(a, b); }
inline M Unordered(F a, F b) { return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))); }
inline bool Any(M m) { return vmaxvq_u32(m) != 0; }

// The first n 16-bit elements of p, zeros behind them.
inline uint16x4_t LoadHalvesPartial(const void* p, int64_t n) {
  if (n >= kLanes) return vld1_u16(static_cast<const uint16_t*>(p));
  uint16_t x[kLanes] = {};
  if (n > 0) std::memcpy(x, p, static_cast<size_t>(n) * 2);
  return vld1_u16(x);
}
inline void StoreHalvesPartial(void* p, uint16x4_t x, int64_t n) {
  if (n >= kLanes) {
    vst1_u16(static_cast<uint16_t*>(p), x);
  } else if (n > 0) {
    uint16_t y[kLanes];
    vst1_u16(y, x);
    std::memcpy(p, y, static_cast<size_t>(n) * 2);
  }
}

inline F LoadPartial(const float* p, int64_t n) {
  if (n >= kLanes) return Load(p);
  float x[kLanes] = {};
  if (n > 0) std::memcpy(x, p, static_cast<size_t>(n) * 4);
  return Load(x);
}
inline F LoadPartial(const BFloat16* p, int64_t n) {
  return vreinterpretq_f32_u32(vshll_n_u16(LoadHalvesPartial(p, n), 16));
}
inline F LoadPartial(const Float16* p, int64_t n) {
  return vcvt_f32_f16(vreinterpret_f16_u16(LoadHalvesPartial(p, n)));
}
// As LoadTwo and PlaceOfTwo of math-inl.h, for bfloat16: the even elements apart from the odd ones,
// an instruction for each.
inline void LoadTwo(const BFloat16* p, F& even, F& odd) {
  const uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  even = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
}
inline int64_t PlaceOfTwo(BFloat16, int64_t i) { return i % 2 * kLanes + i / 2; }

inline void StorePartial(float* p, F x, int64_t n) {
  if (n >= kLanes) return Store(p, x);
  float y[kLanes];
  Store(y, x);
  if (n > 0) std::memcpy(p, y, static_cast<size_t>(n) * 4);
}
// Rounded to the nearest bfloat16, ties to even.
inline uint16x4_t ToBFloat16(F x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t r = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(Unordered(x, x), quiet, r), 16);
#endif
}
inline void StorePartial(BFloat16* p, F x, int64_t n) { StoreHalvesPartial(p, ToBFloat16(x), n); }
inline void StorePartial(Float16* p, F x, int64_t n) {
  StoreHalvesPartial(p, vreinterpret_u16_f16(vcvt_f16_f32(x)), n);
}

// 4 x 4 words: rows become columns.
inline void Transpose(F (&r)[kLanes]) {
  const F a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
  const F c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
  auto low = [](F x, F y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); };
  auto high = [](F x, F y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); };
  r[0] = low(a, c);
  r[1] = low(b, d);
  r[2] = high(a, c);
  r[3] = high(b, d);
}

// Lane i: the sum of the lanes of x[i].
inline F SumEach(F (&x)[kLanes]) {
  return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define JAX_FLASH_BF16_DOT 1
// c + a0 * b0 + a1 * b1 for the two bfloat16 in each word. BFMMLA does twice the products in an
// instruction, of pairs of rows with pairs of columns: another layout than the other paths have.
inline F DotPairs(F a, F b, F c) {
  return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
inline F DotPairs(Factor a, F b, F c) {
  return vbfdotq_lane_f32(c, vreinterpretq_bf16_f32(b), vreinterpret_bf16_f32(a.word), 0);
}
// The first n 16-bit elements of p as kLanes words of two.
inline F LoadPairsPartial(const uint16_t* p, int64_t n) {
  if (n >= 2 * kLanes) return vreinterpretq_f32_u16(vld1q_u16(p));
  uint16_t x[2 * kLanes] = {};
  if (n > 0) std::memcpy(x, p, static_cast<size_t>(n) * 2);
  return vreinterpretq_f32_u16(vld1q_u16(x));
}
inline F PairWords(uint16x4_t even, uint16x4_t odd) {
  return vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd)));
}
// Words {even_i, odd_i} from the first n of 4 bfloat16 each; zeros stand for null.
inline F InterleavePairs(const uint16_t* even, const uint16_t* odd, int64_t n) {
  return PairWords(LoadHalvesPartial(even, even ? n : 0), LoadHalvesPartial(odd, odd ? n : 0));
}
// Interleaves 2 * kLanes bfloat16 each, in the order of PlaceOfPairs (math-inl.h).
inline void InterleaveTwo(const BFloat16* even, const BFloat16* odd, F& first, F& second) {
  auto load = [](const BFloat16* p) { return vld1q_u16(reinterpret_cast<const uint16_t*>(p)); };
  const uint16x8_t lo = even ? load(even) : vdupq_n_u16(0), hi = load(odd);
  first = vreinterpretq_f32_u16(vzip1q_u16(lo, hi));
  second = vreinterpretq_f32_u16(vzip2q_u16(lo, hi));
}
// The same from float32, rounded.
inline F InterleavePairs(F even, F odd) { return PairWords(ToBFloat16(even), ToBFloat16(odd)); }
// 2 * kLanes values in order, rounded: kLanes words.
inline F PackPairs(F first, F second) {
  return vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
#endif

}  // namespace
}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_SIMD_NEON_H_
