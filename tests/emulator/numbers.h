// The half precisions as bits, and what kernels compute with them.
#pragma once

#include <algorithm>
#include <cmath>

#include "machine.h"

namespace emulator {

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float from_bfloat16(uint32 bits) { return __builtin_bit_cast(float, bits << 16); }
inline uint32 to_bfloat16(float x) {
  uint32 bits = __builtin_bit_cast(uint32, x);
  if (std::isnan(x)) return 0x7fff;
  bits += 0x7fff + (bits >> 16 & 1);
  return bits >> 16;
}
inline float compute_float16(uint32 bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  float x;
  if (exponent == 31) {
    x = fraction != 0 ? NAN : INFINITY;
  } else {
    x = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  }
  return bits & 0x8000 ? -x : x;
}
struct Float16Table {
  float values[0x10000];
  Float16Table() {
    for (uint32 bits = 0; bits < 0x10000; ++bits) values[bits] = compute_float16(bits);
  }
};
inline const Float16Table float16_table;
inline float from_float16(uint32 bits) { return float16_table.values[bits & 0xffff]; }
inline uint32 to_float16(double x) {
  const uint32 sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  x = std::fabs(x);
  if (x == 0) return sign;
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent, -13);
  const double steps = std::nearbyint(std::ldexp(x, 11 - exponent));
  if (exponent > 16 || std::ldexp(steps, exponent - 11) > 65504) return sign | 0x7c00;
  return sign | ((exponent + 13) * 0x400 + static_cast<uint32>(steps));
}

// e4m3: no infinity, and one NaN of either sign.
inline float from_float8(uint32 bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float x = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                          : std::ldexp(static_cast<float>(fraction + 8), exponent - 10);
  if ((bits & 0x7f) == 0x7f) x = NAN;
  return bits & 0x80 ? -x : x;
}
// To nearest, ties to even; beyond 448 it is 448.
inline uint32 to_float8(float x) {
  const uint32 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7f;
  x = std::min(std::fabs(x), 448.0f);
  if (x == 0) return sign;
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent, -5);
  const float steps = std::nearbyint(std::ldexp(x, 4 - exponent));
  return sign | ((exponent + 5) * 8 + static_cast<uint32>(steps));
}

}  // namespace emulator
