// Caches of eight bits: what each of their numbers is, and decoding from them against the same keys
// and values in the dtype of the queries.
#pragma once

#include <cmath>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "cpu/tests/random_case.h"

namespace jax_flash::cpu {

// Stores keys or values of a row of the batch and a kv head over a power of two of their own, so
// that what is stored times it is exact in each dtype, and leaves that in their place.
template <class C>
std::vector<C> Store(const Shapes& s, int64_t dim, Array* x, std::vector<float>* scales) {
  std::vector<C> stored(x->values.size());
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t n = 0; n < s.kv_heads; ++n)
      scales->push_back((b + n) % 2 == 1 ? 0x1p-5f : 0x1p-4f);
    for (int64_t i = 0; i < s.kv_len * s.kv_heads * dim; ++i) {
      const int64_t at = b * s.kv_len * s.kv_heads * dim + i;
      const float scale = (*scales)[b * s.kv_heads + i / dim % s.kv_heads];
      FromFloat(static_cast<float>(x->Get(at)) / scale, &stored[at]);
      x->Set(at, double{ToFloat(stored[at])} * scale);
    }
  }
  return stored;
}

// Decodes from stored keys and values, which in the end are the case's own.
template <class C>
bool DecodeStored(const Kernels& kernels, Case& c, Workers& workers) {
  const Shapes& s = c.s;
  std::vector<float> key_scales, value_scales;
  const std::vector<C> k = Store<C>(s, s.head_dim, &c.k, &key_scales);
  const std::vector<C> v = Store<C>(s, s.value_dim, &c.v, &value_scales);
  const std::vector<int32_t> lengths(s.batch, static_cast<int32_t>(s.kv_len));
  c.out.Poison();
  DecodeCall call;
  call.in = c.View();
  call.in.k = k.data();
  call.in.v = v.data();
  if (c.kv_lengths.empty()) call.in.kv_lengths = lengths.data();
  call.pages = s.batch;
  call.page_size = s.kv_len;
  call.key_scale = key_scales.data();
  call.value_scale = value_scales.data();
  call.key_scale_ld = call.value_scale_ld = s.kv_heads;
  call.is_float8 = std::is_same_v<C, Float8>;
  call.checked = true;
  call.out = c.out.bytes.data();
  call.lse = c.lse.data();
  return kernels.decode(call, workers);
}

// Each number is what its bits say, and the nearest of itself and of what lies less than half way
// to the next.
inline int CheckEightBits() {
  int failures = 0;
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float x = ToFloat(Float8{static_cast<uint8_t>(bits)});
    const float size = exponent == 0 ? std::ldexp(mantissa / 8.0f, -6)
                                     : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
    const bool nan = (bits & 127) == 127;
    failures += nan ? x == x : x != (bits & 128 ? -size : size);
    const float step = std::ldexp(0.124f / 2, (exponent == 0 ? 1 : exponent) - 7);
    for (const float near : {0.0f, step, -step}) {
      Float8 back;
      FromFloat(bits & 128 ? x - near : x + near, &back);
      failures += !nan && mantissa + exponent > 0 && back.bits != bits && near >= 0;
      failures += !nan && mantissa > 0 && back.bits != bits;
    }
    const Int8 whole{static_cast<int8_t>(bits - 128)};
    for (const float near : {0.0f, 0.49f, -0.49f}) {
      Int8 back;
      FromFloat(ToFloat(whole) + near, &back);
      failures += back.value != (bits == 0 ? -127 : whole.value);
    }
  }
  if (failures) std::printf("FAIL 8-bit conversions: %d\n", failures);
  return failures;
}

}  // namespace jax_flash::cpu
