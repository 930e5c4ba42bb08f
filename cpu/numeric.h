// Owns scalar conversions between float32 and the formats of 16 and 8 bits, and Philox4x32-7.
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
struct Float8 {  // e4m3fn: no infinity, and one magnitude is nan
  uint8_t bits;
};
struct Int8 {
  int8_t value;
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
// Here and below no float is below the normal range: XLA has threads take those for 0.
static inline float ToFloat(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  if (magnitude >= 0x0f800000u) return FloatOf(sign | magnitude | 0x7f800000u);  // inf, nan
  // Exponent 0 has no leading 1.
  const float small = FloatOf(magnitude + 0x38800000u) - 0x1p-14f;
  return FloatOf(sign | (magnitude < 0x00800000u ? BitsOf(small) : magnitude + 0x38000000u));
}

// Without branches, for vectors.
static inline float ToFloat(Float8 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const float normal = FloatOf((magnitude << 20) + 0x3c000000u);
  const float small = 2.0f * normal - 0x1p-6f;  // of exponent 0, which has no leading 1
  const uint32_t bits = BitsOf(magnitude < 8u ? small : normal);
  return FloatOf((magnitude == 0x7fu ? 0x7fc00000u : bits) | uint32_t{x.bits & 0x80u} << 24);
}
static inline float ToFloat(Int8 x) { return static_cast<float>(x.value); }

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

// To nearest, ties to even; what is beyond the range becomes its largest.
static inline void FromFloat(float x, Float8* y) {
  const uint32_t a = BitsOf(x) & 0x7fffffffu;
  uint32_t magnitude;
  if (a > 0x7f800000u) {
    magnitude = 0x7fu;
  } else if (a >= 0x43e00000u) {  // 448
    magnitude = 0x7eu;
  } else if (a < 0x3c800000u) {  // below 2^-6: adding 2^14 leaves round(a * 2^9) in the low bits
    magnitude = BitsOf(FloatOf(a) + 0x1p14f) - 0x46800000u;
  } else {
    magnitude = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  }
  y->bits = static_cast<uint8_t>((BitsOf(x) >> 24 & 0x80u) | magnitude);
}
// nan becomes 0.
static inline void FromFloat(float x, Int8* y) {
  const float inside = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x == x ? x : 0.0f;
  // The sum leaves no room for a fraction.
  y->value = static_cast<int8_t>(BitsOf(inside + 0x1.8p23f) - 0x4b400000u);
}

// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on kPhilox
// counters (c0, c1, c2, first + i) at once, so that the compiler vectorises over i; four of the
// first three rounds' six products are the same for all. words[w][i] is word w of counter i.
constexpr int kPhilox = 16;
static inline void Philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t first, uint32_t key0,
                          uint32_t key1, uint32_t words[4][kPhilox]) {
  const auto product0 = [](uint32_t word) { return uint64_t{0xD2511F53u} * word; };
  const auto product1 = [](uint32_t word) { return uint64_t{0xCD9E8D57u} * word; };
  const auto high = [](uint64_t product) { return static_cast<uint32_t>(product >> 32); };
  const auto low = [](uint64_t product) { return static_cast<uint32_t>(product); };
  constexpr uint32_t kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
  const uint64_t a0 = product0(c0), b0 = product1(c2);
  const uint64_t a1 = product0(high(b0) ^ c1 ^ key0);
  const uint64_t b2 = product1(high(a1) ^ low(a0) ^ (key1 + kStep1));
  for (int i = 0; i < kPhilox; ++i) {
    const uint64_t b1 = product1(high(a0) ^ (first + static_cast<uint32_t>(i)) ^ key1);
    const uint64_t a2 = product0(high(b1) ^ low(b0) ^ (key0 + kStep0));
    words[0][i] = high(b2) ^ low(b1) ^ (key0 + 2 * kStep0);
    words[1][i] = low(b2);
    words[2][i] = high(a2) ^ low(a1) ^ (key1 + 2 * kStep1);
    words[3][i] = low(a2);
  }
  for (uint32_t round = 3; round < 7; ++round) {
    for (int i = 0; i < kPhilox; ++i) {
      const uint64_t a = product0(words[0][i]), b = product1(words[2][i]);
      words[0][i] = high(b) ^ words[1][i] ^ (key0 + round * kStep0);
      words[2][i] = high(a) ^ words[3][i] ^ (key1 + round * kStep1);
      words[1][i] = low(b);
      words[3][i] = low(a);
    }
  }
}

// A draw of 15 bits drops its weight below this.
static inline uint32_t DropoutThreshold(double rate) {
  return static_cast<uint32_t>(rate * 32768.0 + 0.5);
}

}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_NUMERIC_H_
