// Owns scalar conversions between float32 and the 16-bit formats, and Philox4x32-7.
// Everything is static: each kernel file is compiled for its own instruction set, and a shared
// inline function could be taken from the wrong one.
#ifndef JAX_FLASH_CPU_NUMERIC_H_
#define JAX_FLASH_CPU_NUMERIC_H_

#include <cstdint>
#include <cstring>

namespace jax_flash::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline uint32_t BitsOf(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float FloatOf(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float ToFloat(float x) { return x; }
static inline float ToFloat(BFloat16 x) { return FloatOf(uint32_t{x.bits} << 16); }
static inline float ToFloat(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  if (magnitude >= 0x0f800000u) return FloatOf(sign | magnitude | 0x7f800000u);  // inf, nan
  // The multiplication by 2^112 rebases the exponent and normalises subnormal values.
  return FloatOf(sign | BitsOf(FloatOf(magnitude) * 0x1p112f));
}

static inline void FromFloat(float x, float* y) { *y = x; }
static inline void FromFloat(float x, BFloat16* y) {
  const uint32_t u = BitsOf(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    y->bits = static_cast<uint16_t>((u >> 16) | 0x40u);  // quiet nan
  } else {
    y->bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
}
static inline void FromFloat(float x, Float16* y) {
  const uint32_t u = BitsOf(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  uint32_t h;
  if (a > 0x7f800000u) {
    h = 0x7e00u;
  } else if (a >= 0x477ff000u) {  // rounds to 65536 or more
    h = 0x7c00u;
  } else if (a < 0x38800000u) {  // subnormal: adding 0.5 leaves round(a * 2^24) in the low bits
    h = BitsOf(FloatOf(a) + 0.5f) - 0x3f000000u;
  } else {
    h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  }
  y->bits = static_cast<uint16_t>(sign | h);
}

// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on kPhilox
// counters (first + i, c1, c2, c3) at once, so that the compiler vectorises over i.
// words[w][i] is word w of counter i.
constexpr int kPhilox = 16;
static inline void Philox(uint32_t first, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0,
                          uint32_t key1, uint32_t words[4][kPhilox]) {
  for (int i = 0; i < kPhilox; ++i) {
    words[0][i] = first + static_cast<uint32_t>(i);
    words[1][i] = c1;
    words[2][i] = c2;
    words[3][i] = c3;
  }
  for (int round = 0; round < 7; ++round) {
    for (int i = 0; i < kPhilox; ++i) {
      const uint64_t a = uint64_t{0xD2511F53u} * words[0][i];
      const uint64_t b = uint64_t{0xCD9E8D57u} * words[2][i];
      words[0][i] = static_cast<uint32_t>(b >> 32) ^ words[1][i] ^ key0;
      words[2][i] = static_cast<uint32_t>(a >> 32) ^ words[3][i] ^ key1;
      words[1][i] = static_cast<uint32_t>(b);
      words[3][i] = static_cast<uint32_t>(a);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// A draw of 15 bits drops its weight below this.
static inline uint32_t DropoutThreshold(double rate) {
  return static_cast<uint32_t>(rate * 32768.0 + 0.5);
}

}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_NUMERIC_H_
