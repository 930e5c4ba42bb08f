// Owns the vector operations of the kernels in plain C++ on arrays of four, which compilers turn
// into SSE2, NEON or scalar code. Same names as simd_avx512.h and simd_avx2.h.
#ifndef JAX_FLASH_CPU_SIMD_PORTABLE_H_
#define JAX_FLASH_CPU_SIMD_PORTABLE_H_

#include <cmath>

#include "cpu/numeric.h"

namespace jax_flash::cpu {
namespace {

typedef float F __attribute__((vector_size(16)));
typedef int32_t M __attribute__((vector_size(16)));  // all ones or all zeros in each lane
constexpr int kLanes = 4;
constexpr int kTileVectors = 2;  // micro-kernel: 6 x 8, 12 of 16 (SSE2) or 32 (NEON) registers
constexpr int kTileRows = 6;

inline F Load(const float* p) {
  F x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void Store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline F Set1(float x) { return F{x, x, x, x}; }
inline F Zero() { return F{}; }
inline F Add(F a, F b) { return a + b; }
inline F Sub(F a, F b) { return a - b; }
inline F Mul(F a, F b) { return a * b; }
inline F Div(F a, F b) { return a / b; }
inline F Fma(F a, F b, F c) { return a * b + c; }
// The first factor of many Fma or DotPairs.
inline F LoadFactor(const float* p) { return Set1(*p); }
inline F Select(M m, F a, F b) { return (F)((m & (M)a) | (~m & (M)b)); }
inline F Max(F a, F b) { return Select(a > b, a, b); }  // b where either is nan
inline F Min(F a, F b) { return Select(a < b, a, b); }  // b where either is nan
// To the nearest integer for |x| < 2^22; the sum leaves no room for a fraction.
inline F Round(F x) { return (x + Set1(12582912.0f)) - Set1(12582912.0f); }
// x * 2^n for integral n <= 127; 0 below the normal range.
inline F TimesPowerOf2(F x, F n) {
  const F e = Max(Set1(-127.0f), n);
  const M power = (M)(e + Set1(12582912.0f + 127.0f)) << 23;
  return x * (F)power;
}
// Returns x - floor(x), 0 for -inf, and leaves floor(x) in x. For x < 2^22.
inline F SplitExponent(F& x) {
  const F y = Max(Set1(-150.0f), x);
  const F near = Round(y);
  x = near + (F)((near > y) & (M)Set1(-1.0f));
  return y - x;
}
inline float ReduceMax(F x) {
  const float a = x[0] > x[1] ? x[0] : x[1];
  const float b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
inline float ReduceAdd(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }

inline M FirstLanes(int64_t n) {
  const int32_t c = n >= kLanes ? kLanes : n <= 0 ? 0 : static_cast<int32_t>(n);
  return M{c, c, c, c} > M{0, 1, 2, 3};
}
inline M LanesBetween(int64_t lo, int64_t hi) { return FirstLanes(hi) & ~FirstLanes(lo); }
inline M And(M a, M b) { return a & b; }
inline M Equal(const int32_t* ids, int32_t id) {
  M x;
  std::memcpy(&x, ids, sizeof x);
  return x == M{id, id, id, id};
}
inline M Between(const int32_t* ids, int32_t first, int32_t last) {
  M x;
  std::memcpy(&x, ids, sizeof x);
  return (x >= M{first, first, first, first}) & (x <= M{last, last, last, last});
}
inline M NonZero(const uint8_t* b) { return M{b[0], b[1], b[2], b[3]} != M{}; }
inline M EqualTo(F a, F b) { return a == b; }
inline M Unordered(F a, F b) { return ~((a == a) & (b == b)); }
inline bool Any(M m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }

template <class T>
inline F LoadPartial(const T* p, int64_t n) {
  F x{};
  for (int i = 0; i < kLanes && i < n; ++i) x[i] = ToFloat(p[i]);
  return x;
}
template <class T>
inline void StorePartial(T* p, F x, int64_t n) {
  for (int i = 0; i < kLanes && i < n; ++i) FromFloat(x[i], &p[i]);
}

inline void Transpose(F (&r)[kLanes]) {
  F t[kLanes];
  for (int i = 0; i < kLanes; ++i) t[i] = F{r[0][i], r[1][i], r[2][i], r[3][i]};
  for (int i = 0; i < kLanes; ++i) r[i] = t[i];
}

// Lane i: the sum of the lanes of x[i].
inline F SumEach(F (&x)[kLanes]) {
  return F{ReduceAdd(x[0]), ReduceAdd(x[1]), ReduceAdd(x[2]), ReduceAdd(x[3])};
}

}  // namespace
}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_SIMD_PORTABLE_H_
