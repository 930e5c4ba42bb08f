// Owns the elementary functions of the kernels. Polynomials are minimax fits in relative error.

namespace jax_flash::cpu {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_huge_valf();

// 2^x for x <= 126, within 1.5 ulp (polynomial error 9.1e-8); 0 for -inf; nan for nan.
inline F Exp2(F x) {
  x = Max(Set1(-150.0f), x);
  const F n = Round(x);
  const F f = Sub(x, n);
  F y = Set1(0.001326472731307149f);
  y = Fma(y, f, Set1(0.009671512991189957f));
  y = Fma(y, f, Set1(0.05550733581185341f));
  y = Fma(y, f, Set1(0.24022242426872253f));
  y = Fma(y, f, Set1(0.6931470036506653f));
  y = Fma(y, f, Set1(1.0f));
  return TimesPowerOf2(y, n);
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
