// What a kernel's text takes from CUDA, for a C++ compiler: qualifiers, built-in variables, types
// and functions. translate.py puts it in front of the text; machine.cc and ptx.cc do the work.
#pragma once

#include "api.h"

// The library's own copy of shared memory: each CTA that runs has a library.
#define EMULATOR_SHARED_VARIABLE __attribute__((section("emulator_static")))
extern "C" {
alignas(1024) unsigned char emulator_shared[emulator::kSharedBytes];
extern unsigned char __start_emulator_static[] __attribute__((weak));
extern unsigned char __stop_emulator_static[] __attribute__((weak));
unsigned char* emulator_statics_begin = __start_emulator_static;
unsigned char* emulator_statics_end = __stop_emulator_static;
}

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define threadIdx (emulator::place->thread)
#define blockIdx (emulator::place->block)
#define blockDim (emulator::place->block_dim)
#define gridDim (emulator::place->grid_dim)

// ---- vectors -----------------------------------------------------------------------------------

#define EMULATOR_VECTORS(Type, name, bytes)                                   \
  struct alignas(2 * bytes) name##2 { Type x, y; };                           \
  struct name##3 { Type x, y, z; };                                           \
  struct alignas(4 * bytes) name##4 { Type x, y, z, w; };                     \
  inline name##2 make_##name##2(Type x, Type y) { return {x, y}; }            \
  inline name##3 make_##name##3(Type x, Type y, Type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(Type x, Type y, Type z, Type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(int, int, 4)
EMULATOR_VECTORS(unsigned, uint, 4)
EMULATOR_VECTORS(float, float, 4)
EMULATOR_VECTORS(short, short, 2)
EMULATOR_VECTORS(unsigned short, ushort, 2)
EMULATOR_VECTORS(unsigned char, uchar, 1)

// ---- arithmetic --------------------------------------------------------------------------------

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline int abs(int a) { return a < 0 ? -a : a; }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float fabsf(float a) { return __builtin_fabsf(a); }
#define EMULATOR_MATH(name) \
  inline float name(float x) { return __builtin_##name(x); }
EMULATOR_MATH(expf)
EMULATOR_MATH(exp2f)
EMULATOR_MATH(expm1f)
EMULATOR_MATH(logf)
EMULATOR_MATH(log1pf)
EMULATOR_MATH(sqrtf)
EMULATOR_MATH(cbrtf)
EMULATOR_MATH(sinf)
EMULATOR_MATH(cosf)
EMULATOR_MATH(tanf)
EMULATOR_MATH(asinf)
EMULATOR_MATH(acosf)
EMULATOR_MATH(atanf)
EMULATOR_MATH(sinhf)
EMULATOR_MATH(coshf)
EMULATOR_MATH(tanhf)
EMULATOR_MATH(asinhf)
EMULATOR_MATH(acoshf)
EMULATOR_MATH(atanhf)
EMULATOR_MATH(erff)
EMULATOR_MATH(erfcf)
EMULATOR_MATH(floorf)
EMULATOR_MATH(ceilf)
EMULATOR_MATH(roundf)
EMULATOR_MATH(rintf)
inline float __expf(float x) { return __builtin_expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float copysignf(float x, float sign) { return __builtin_copysignf(x, sign); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
inline float atan2f(float y, float x) { return __builtin_atan2f(y, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline void sincosf(float x, float* sine, float* cosine) {
  *sine = __builtin_sinf(x);
  *cosine = __builtin_cosf(x);
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = both >> 8 * (selector >> 4 * i & 7) & 0xff;
    result |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}

// ---- memory ------------------------------------------------------------------------------------

template <class Value>
inline Value __ldg(const Value* pointer) {
  return *pointer;
}
template <class Value>
inline Value __ldcs(const Value* pointer) {
  return *pointer;
}
template <class Value>
inline Value __ldca(const Value* pointer) {
  return *pointer;
}
template <class Value>
inline void __stcs(Value* pointer, Value value) {
  *pointer = value;
}
inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}
template <class Value, class Change>
inline Value emulator_atomic(Value* pointer, const Change& change) {
  emulator::touch(pointer, sizeof(Value));
  const Value old = *pointer;
  *pointer = change(old);
  return old;
}
template <class Value>
inline Value atomicAdd(Value* pointer, std::common_type_t<Value> value) {
  return emulator_atomic(pointer, [=](Value old) { return old + value; });
}
template <class Value>
inline Value atomicMin(Value* pointer, std::common_type_t<Value> value) {
  return emulator_atomic(pointer, [=](Value old) { return old < value ? old : value; });
}
template <class Value>
inline Value atomicMax(Value* pointer, std::common_type_t<Value> value) {
  return emulator_atomic(pointer, [=](Value old) { return old > value ? old : value; });
}
template <class Value>
inline Value atomicExch(Value* pointer, std::common_type_t<Value> value) {
  return emulator_atomic(pointer, [=](Value) { return value; });
}
template <class Value>
inline Value atomicCAS(Value* pointer, std::common_type_t<Value> expected,
                       std::common_type_t<Value> value) {
  return emulator_atomic(pointer, [=](Value old) { return old == expected ? value : old; });
}

// ---- warps and CTAs ----------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::sync_warp(mask); }
inline void __syncthreads() { emulator::sync_threads(false); }
inline int __syncthreads_or(int mine) { return emulator::sync_threads(mine != 0).yes > 0; }
inline int __syncthreads_count(int mine) { return emulator::sync_threads(mine != 0).yes; }
inline int __syncthreads_and(int mine) {
  const emulator::Count count = emulator::sync_threads(mine != 0);
  return count.yes == count.all;
}
inline int __any_sync(unsigned mask, int mine) {
  return emulator::vote(mask, mine != 0, emulator::Vote::kAny);
}
inline int __all_sync(unsigned mask, int mine) {
  return emulator::vote(mask, mine != 0, emulator::Vote::kAll);
}
inline unsigned __ballot_sync(unsigned mask, int mine) {
  return emulator::vote(mask, mine != 0, emulator::Vote::kBallot);
}
#define EMULATOR_EXCHANGE(function, kind, Value)                                                  \
  inline Value function(unsigned mask, Value mine, unsigned by, int width = 32) {                 \
    return __builtin_bit_cast(Value, emulator::exchange(mask, __builtin_bit_cast(unsigned, mine), \
                                                        by, width, emulator::Exchange::kind));    \
  }
#define EMULATOR_EXCHANGES(function, kind)    \
  EMULATOR_EXCHANGE(function, kind, int)      \
  EMULATOR_EXCHANGE(function, kind, unsigned) \
  EMULATOR_EXCHANGE(function, kind, float)
EMULATOR_EXCHANGES(__shfl_sync, kIndex)
EMULATOR_EXCHANGES(__shfl_xor_sync, kXor)
EMULATOR_EXCHANGES(__shfl_up_sync, kUp)
EMULATOR_EXCHANGES(__shfl_down_sync, kDown)
inline int __reduce_add_sync(unsigned mask, int mine) {
  return static_cast<int>(
      emulator::reduce(mask, static_cast<unsigned>(mine), emulator::Reduction::kAdd));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned mine) {
  return emulator::reduce(mask, mine, emulator::Reduction::kAdd);
}
inline int __reduce_min_sync(unsigned mask, int mine) {
  return static_cast<int>(
      emulator::reduce(mask, static_cast<unsigned>(mine), emulator::Reduction::kMinSigned));
}
inline int __reduce_max_sync(unsigned mask, int mine) {
  return static_cast<int>(
      emulator::reduce(mask, static_cast<unsigned>(mine), emulator::Reduction::kMaxSigned));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned mine) {
  return emulator::reduce(mask, mine, emulator::Reduction::kMin);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned mine) {
  return emulator::reduce(mask, mine, emulator::Reduction::kMax);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned mine) {
  return emulator::reduce(mask, mine, emulator::Reduction::kOr);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned mine) {
  return emulator::reduce(mask, mine, emulator::Reduction::kAnd);
}
