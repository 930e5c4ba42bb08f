// Owns the packed layouts of operands, in words (gemm-inl.h), and the care for non-finite numbers.
//
//   rows    [rows][RowWords]            a row's elements in order            operand A
//   columns [panel][words][kPanel]      lane = key, summed over the head     operand B of scores
//   lanes   [rows / kPair][kPanel..]    lane = head element, summed over     operand B of the rest
//                                       rows
//
// A masked score meets a value or key row as 0 * x in the products that sum over rows, so `lanes`
// must hold no inf or nan: they are replaced by zero there, and listed, so that rows which do see
// them can still be given what they would have produced.

#include <cstring>

namespace jax_flash::cpu {
namespace {

inline int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }

// Words of a vector of `dim` elements, padded to whole registers.
template <class Op>
int64_t RowWords(int64_t dim) {
  return RoundUp((dim + Op::kPair - 1) / Op::kPair, kLanes);
}
template <class Op>
int64_t Words(int64_t elements) {
  return (elements + Op::kPair - 1) / Op::kPair;
}

// kLanes words of the row p, of which n elements exist.
template <class Op, class T>
F LoadWords(const T* p, int64_t n) {
  if constexpr (Op::kPair == 1) {
    return LoadPartial(p, n);
  } else {
#if defined(JAX_FLASH_BF16_DOT)
    return LoadPairsPartial(reinterpret_cast<const uint16_t*>(p), n);
#endif
  }
}

// `rows` layout; row(i) is null where zeros stand instead.
template <class Op, class T, class Row>
void PackRows(Row row, int64_t rows, int64_t dim, float* dst) {
  const int64_t words = RowWords<Op>(dim);
  for (int64_t i = 0; i < rows; ++i) {
    const T* p = row(i);
    for (int64_t w = 0; w < words; w += kLanes) {
      const int64_t first = w * Op::kPair;
      Store(dst + i * words + w, p ? LoadWords<Op>(p + first, dim - first) : Zero());
    }
  }
}

// `columns` layout of `count` keys (a multiple of kLanes), the first `valid` of which exist.
template <class Op, class T>
void PackColumns(const T* src, int64_t stride, int64_t valid, int64_t count, int64_t dim,
                 float* dst) {
  const int64_t words = Words<Op>(dim);
  for (int64_t key = 0; key < count; key += kLanes) {
    float* panel = dst + key / kPanel * words * kPanel + key % kPanel;
    for (int64_t w = 0; w < words; w += kLanes) {
      const int64_t first = w * Op::kPair;
      F block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] =
            key + i < valid ? LoadWords<Op>(src + (key + i) * stride + first, dim - first) : Zero();
      }
      Transpose(block);
      const int64_t left = Least(kLanes, words - w);
      for (int64_t i = 0; i < left; ++i) Store(panel + (w + i) * kPanel, block[i]);
    }
  }
}

inline bool IsFinite(float x) { return x - x == 0.0f; }

// `lanes` layout of `count` rows (a multiple of Op::kPair) with `ld` words between word rows.
// Returns how many rows hold a non-finite element; their indices go to bad[count].
template <class Op, class T, class Row>
int64_t PackLanes(Row row, int64_t count, int64_t dim, int64_t ld, float* dst, int32_t* bad) {
  F probe = Zero();  // 0 * x is nan for the elements in question
  for (int64_t i = 0; i < count; i += Op::kPair) {
    float* to = dst + i / Op::kPair * ld;
    if constexpr (Op::kPair == 1) {
      const T* p = row(i);
      for (int64_t d = 0; d < ld; d += kLanes) {
        const F x = p ? LoadPartial(p + d, dim - d) : Zero();
        probe = Fma(x, Zero(), probe);
        Store(to + d, x);
      }
    } else {
#if defined(JAX_FLASH_BF16_DOT)
      const uint16_t* even = reinterpret_cast<const uint16_t*>(row(i));
      const uint16_t* odd = reinterpret_cast<const uint16_t*>(row(i + 1));
      for (int64_t d = 0; d < ld; d += kLanes) {
        const F x = InterleavePairs(even ? even + d : nullptr, odd ? odd + d : nullptr, dim - d);
        probe = DotPairs(x, Zero(), probe);
        Store(to + d, x);
      }
#endif
    }
  }
  if (!Any(Unordered(probe, probe))) return 0;

  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const T* p = row(i);
    bool clean = true;
    for (int64_t d = 0; p && d < dim; ++d) {
      if (IsFinite(ToFloat(p[d]))) continue;
      clean = false;
      char* word = reinterpret_cast<char*>(dst + i / Op::kPair * ld + d);
      if constexpr (Op::kPair == 1) {
        std::memset(word, 0, 4);
      } else {
        std::memset(word + i % 2 * 2, 0, 2);
      }
    }
    if (!clean) bad[found++] = static_cast<int32_t>(i);
  }
  return found;
}

// c[dim] += weight * (the non-finite elements of p).
template <class T>
void AddNonFinite(float weight, const T* p, int64_t dim, float* c) {
  for (int64_t d = 0; d < dim; ++d) {
    const float x = ToFloat(p[d]);
    if (!IsFinite(x)) c[d] += weight * x;
  }
}

// Element i of a word array that holds kPair elements a word, as float.
template <class Op>
float ElementOf(const float* words, int64_t i) {
  if constexpr (Op::kPair == 1) {
    return words[i];
  } else {
    BFloat16 x;
    std::memcpy(&x, reinterpret_cast<const char*>(words) + i * 2, 2);
    return ToFloat(x);
  }
}

}  // namespace
}  // namespace jax_flash::cpu
