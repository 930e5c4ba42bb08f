// The element type of queries, keys, values and results: conversions, and what its range asks of
// the softmax. An architecture multiplies such elements; here they are bits.
#pragma once

#include "numbers.cuh"
#include "ptx.cuh"

struct BFloat16 {
  using Bits = uint16;  // in memory
  // The first block's largest exponential is 2^-kHeadroom, and a thread's sum over a block may not
  // pass kSumLimit. This type has the range of float32.
  static constexpr int kHeadroom = 80;
  static constexpr float kSumLimit = 0x1p-40f;

  // Two elements, `low` in the low half.
  static __device__ __forceinline__ uint32 pack(float low, float high) {
    return ptx::pack_bfloat16(low, high);
  }
  // The same with zeros for what has a sign.
  static __device__ __forceinline__ uint32 pack_positive(float low, float high) {
    return ptx::pack_positive_bfloat16(low, high);
  }
  static __device__ __forceinline__ uint16 round(float value) {
    return static_cast<uint16>(pack(value, 0.0f));
  }
  static __device__ __forceinline__ float unpack(uint16 bits) {
    return __uint_as_float(static_cast<uint32>(bits) << 16);
  }
  // The halves of a pair.
  static __device__ __forceinline__ float unpack_low(uint32 pair) {
    return __uint_as_float(pair << 16);
  }
  static __device__ __forceinline__ float unpack_high(uint32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
  }
  // sum + pair * 0 on both halves: stays zero exactly as long as the pairs are finite.
  static __device__ __forceinline__ uint32 accumulate_nonfinite(uint32 sum, uint32 pair) {
    return ptx::fma_bfloat16(pair, 0, sum);
  }
};

struct Float16 {
  using Bits = uint16;
  static constexpr int kHeadroom = 0;  // weights have to stay below 65504
  static constexpr float kSumLimit = 0x1p15f;

  static __device__ __forceinline__ uint32 pack(float low, float high) {
    return ptx::pack_float16(low, high);
  }
  static __device__ __forceinline__ uint32 pack_positive(float low, float high) {
    return ptx::pack_positive_float16(low, high);
  }
  static __device__ __forceinline__ uint16 round(float value) {
    return static_cast<uint16>(pack(value, 0.0f));
  }
  static __device__ __forceinline__ float unpack(uint16 bits) { return ptx::unpack_float16(bits); }
  static __device__ __forceinline__ float unpack_low(uint32 pair) {
    return unpack(static_cast<uint16>(pair));
  }
  static __device__ __forceinline__ float unpack_high(uint32 pair) {
    return unpack(static_cast<uint16>(pair >> 16));
  }
  static __device__ __forceinline__ uint32 accumulate_nonfinite(uint32 sum, uint32 pair) {
    return ptx::fma_float16(pair, 0, sum);
  }
};

// Tensor cores have no products of it: what splits it (split.cuh) knows of its halves.
struct Float32 {
  using Bits = float;
  // Exponents near 0 have the smallest rounding errors, which are the weights' own.
  static constexpr int kHeadroom = 0;
  static constexpr float kSumLimit = 0x1p15f;

  static __device__ __forceinline__ float round(float value) { return value; }
  static __device__ __forceinline__ float unpack(float value) { return value; }
};

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

// float8_e4m3fn: 4 bits of exponent, 3 behind the point, no infinity. It is multiplied by scales
// (sm90_float8/); results are of another type.
struct Float8 {
  using Bits = unsigned char;

  static __device__ __forceinline__ float unpack(unsigned char bits) {
    const uint32 exponent = bits >> 3 & 15, fraction = bits & 7;
    const float normal = __uint_as_float((exponent + 120) << 23 | fraction << 20);
    const float x = exponent == 0 ? static_cast<float>(fraction) * 0x1p-9f : normal;
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fffffff);
    return bits & 0x80 ? -x : x;
  }
};

// The element type by constants of the generated header.
template <bool kIsBFloat16, bool kIsFloat32 = false>
struct ElementType {
  using Type = Float16;
};
template <>
struct ElementType<true> {
  using Type = BFloat16;
};
template <>
struct ElementType<false, true> {
  using Type = Float32;
};
using Element = ElementType<kBFloat16, kFloat32>::Type;

// Two programs may share a call of float32 (jax_flash/_gpu/carrier.py). One has float16 copies of
// queries, keys, values and output gradients, and float32 results (kCarried); the other one (kRest)
// computes what such copies do not hold.
using ResultElement = ElementType<kBFloat16, kFloat32 || kCarried>::Type;

// What queries, keys and values are in memory.
template <bool kIsFloat8>
struct StoredType {
  using Type = Element;
};
template <>
struct StoredType<true> {
  using Type = Float8;
};
using Stored = StoredType<kFloat8>::Type;

// Does the other program compute this call?
template <class Params>
__device__ __forceinline__ bool is_left_to_other(const Params& p) {
  if constexpr (kCarried) return *p.result_scale == 0.0f;
  if constexpr (kRest) return *p.result_scale != 0.0f;
  return false;
}
// What copies were multiplied by is taken out of the gradients. Read where it is needed: kept from
// the kernel's start it took a register, and 16 bytes were spilled.
template <class Params>
__device__ __forceinline__ float result_scale(const Params& p) {
  if constexpr (kCarried) return *static_cast<const volatile float*>(p.result_scale);
  return 1.0f;
}
