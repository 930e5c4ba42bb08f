// Owns the matrix products of the kernels: register-blocked micro-kernels on packed operands.
// Included once per instruction set, after a simd_*.h. Read next: pack-inl.h (the layouts).
//
// Operands are arrays of 32-bit words. A word is one float32 (Float32Dot) or two consecutive
// bfloat16 of the summed dimension (BFloat16Dot), so both share every loop below.

#include <cstdint>

namespace jax_flash::cpu {
namespace {

constexpr int64_t kPanel = kTileVectors * kLanes;  // columns of one packed panel

struct Float32Dot {
  static constexpr int kPair = 1;  // elements in a word
  template <class A>
  static F Dot(A a, F b, F c) {
    return Fma(a, b, c);
  }
};
#if defined(JAX_FLASH_BF16_DOT)
struct BFloat16Dot {
  static constexpr int kPair = 2;
  template <class A>
  static F Dot(A a, F b, F c) {
    return DotPairs(a, b, c);
  }
};
#endif

// What becomes of C: replaced, added to, or multiplied by a factor per row and then added to. No
// template's argument: a product asks once, and there are a third of the micro-kernels.
enum class Into { kStore, kAdd, kScaleAdd };

// C[rows, vectors * kLanes] from A[rows, words] and B[words, vectors * kLanes].
struct Product {
  Into into;
  int64_t words;   // length of the summed dimension
  const float* a;  // element (r, k) at a[r * a_row + k * a_word]
  int64_t a_row, a_word;
  const float* b;  // row k at b[k * b_word]
  int64_t b_word;
  float* c;  // row r at c[r * c_row]
  int64_t c_row;
  const float* factor;  // [rows], for kScaleAdd
};

template <class Op, int kRows, int kVectors>
void Micro(const Product& p) {
  F acc[kRows][kVectors];
  if (p.into == Into::kStore) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Zero();
    }
  } else {
    const bool scales = p.into == Into::kScaleAdd;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F factor = Set1(scales ? p.factor[r] : 1.0f);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = Mul(Load(p.c + r * p.c_row + v * kLanes), factor);
      }
    }
  }
  const float* a[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) a[r] = p.a + r * p.a_row;
  const float* b = p.b;
  const int64_t a_word = p.a_word, b_word = p.b_word;
  int64_t offset = 0;
  for (int64_t k = 0; k < p.words; ++k) {
    F bk[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) bk[v] = Load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto ar = LoadFactor(a[r] + offset);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Op::Dot(ar, bk[v], acc[r][v]);
    }
    b += b_word;
    offset += a_word;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Store(p.c + r * p.c_row + v * kLanes, acc[r][v]);
  }
}

template <class Op, int kRows>
void MicroColumns(const Product& p, int64_t vectors) {
  static_assert(kTileVectors == 2 || kTileVectors == 4, "one case below per vector count");
  switch (vectors) {
    case 1:
      return Micro<Op, kRows, 1>(p);
    case 2:
      return Micro<Op, kRows, 2>(p);
    case 3:
      return Micro<Op, kRows, kTileVectors == 4 ? 3 : 1>(p);
    default:
      return Micro<Op, kRows, kTileVectors>(p);
  }
}

// At most kTileRows rows and kTileVectors vectors.
template <class Op>
void MicroProduct(const Product& p, int64_t rows, int64_t vectors) {
  static_assert(kTileRows == 6, "one case below per row count");
  switch (rows) {
    case 1:
      return MicroColumns<Op, 1>(p, vectors);
    case 2:
      return MicroColumns<Op, 2>(p, vectors);
    case 3:
      return MicroColumns<Op, 3>(p, vectors);
    case 4:
      return MicroColumns<Op, 4>(p, vectors);
    case 5:
      return MicroColumns<Op, 5>(p, vectors);
    default:
      return MicroColumns<Op, 6>(p, vectors);
  }
}

// Any number of rows and vectors; panel i of B starts at p.b + i * panel_stride.
template <class Op>
void Multiply(Product p, int64_t rows, int64_t vectors, int64_t panel_stride) {
  const Product first = p;
  for (int64_t panel = 0; panel * kTileVectors < vectors; ++panel) {
    const int64_t left = vectors - panel * kTileVectors;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      p.a = first.a + r * first.a_row;
      p.b = first.b + panel * panel_stride;
      p.c = first.c + r * first.c_row + panel * kPanel;
      p.factor = first.factor + r;
      MicroProduct<Op>(p, rows - r < kTileRows ? rows - r : kTileRows,
                       left < kTileVectors ? left : kTileVectors);
    }
  }
}

}  // namespace
}  // namespace jax_flash::cpu
