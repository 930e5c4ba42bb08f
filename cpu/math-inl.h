// Owns the elementary functions of the kernels, and vector operations that are one for all
// instruction sets. Polynomials are minimax fits in relative error.

namespace jax_flash::cpu {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kInfinity = __builtin_huge_valf();

// Loads 2 * kLanes elements. For float32 whole vectors: AVX-512 would keep a partial load's masks.
inline void LoadTwo(const float* p, F& first, F& second) {
  first = Load(p);
  second = Load(p + kLanes);
}
template <class T>
void LoadTwo(const T* p, F& first, F& second) {
  first = LoadPartial(p, kLanes);
  second = LoadPartial(p + kLanes, kLanes);
}
// Where LoadTwo leaves element i: in lane i % kLanes of the vector i / kLanes.
template <class T>
int64_t PlaceOfTwo(T, int64_t i) {
  return i;
}

// Where InterleaveTwo of a simd_*.h, which works on 128 bits at a time, leaves element i.
inline int64_t PlaceOfPairs(int64_t i) { return i % 8 / 4 * kLanes + i / 8 * 4 + i % 4; }

// 2^x for x <= 126; 0 for -inf; nan for nan. Exactly 1 at 0. T is the type in which the result ends
// up: the polynomial's error is 8.2e-8 for float32 and 2.9e-6 for the 16-bit types.
template <class T>
F Exp2(F x) {
  const F f = SplitExponent(x);
  F y;
  if constexpr (sizeof(T) == 4) {
    y = Set1(0.0018671303987503052f);
    y = Fma(y, f, Set1(0.009017029777169228f));
    y = Fma(y, f, Set1(0.05579991266131401f));
    y = Fma(y, f, Set1(0.24016444385051727f));
    y = Fma(y, f, Set1(0.6931512951850891f));
  } else {
    y = Set1(0.013426687568426132f);
    y = Fma(y, f, Set1(0.0522424690425396f));
    y = Fma(y, f, Set1(0.2412802129983902f));
    y = Fma(y, f, Set1(0.6930448412895203f));
  }
  y = Fma(y, f, Set1(1.0f));
  return TimesPowerOf2(y, x);
}

// tanh(x) = e / (e + 2) with e = exp(2x) - 1 = 2^n (2^f - 1) + (2^n - 1): accurate near zero too.
inline F Tanh(F x) {
  const F y = Mul(Max(Set1(-10.0f), Min(Set1(10.0f), x)), Set1(2.0f * kLog2E));
  const F n = Round(y);
  const F f = Sub(y, n);
  F q = Set1(0.00015403512225020677f);
  q = Fma(q, f, Set1(0.0013390735257416964f));
  q = Fma(q, f, Set1(0.009618237614631653f));
  q = Fma(q, f, Set1(0.05550357326865196f));
  q = Fma(q, f, Set1(0.24022649228572845f));
  q = Fma(q, f, Set1(0.6931471824645996f));
  const F power = TimesPowerOf2(Set1(1.0f), n);
  const F e = Fma(power, Mul(q, f), Sub(power, Set1(1.0f)));
  return Div(e, Add(e, Set1(2.0f)));
}

}  // namespace
}  // namespace jax_flash::cpu
