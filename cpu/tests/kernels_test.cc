// Checks every build of the kernels that this processor runs against attention in float64, over
// random shapes and combinations of features, with poison where nothing may be read or kept.
// Usage: kernels_test [cases per build] [first seed]

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/attention.h"
#include "cpu/tests/eight_bits.h"
#include "cpu/tests/random_case.h"

namespace jax_flash::cpu {
namespace {

class ThreadWorkers : public Workers {
 public:
  explicit ThreadWorkers(int64_t count) : count_(count) {}
  int64_t count() const override { return count_; }
  void Run(int64_t tasks, void (*body)(void*, int64_t), void* context) override {
    std::atomic<int64_t> next{0};
    auto drain = [&] {
      for (int64_t i = next++; i < tasks; i = next++) body(context, i);
    };
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < count_; ++i) threads.emplace_back(drain);
    drain();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int64_t count_;
};

struct Oracle {
  std::vector<double> out, lse, dq, dk, dv, dbias;
  std::vector<double> dq_terms, dk_terms;  // what dq and dk sum, without signs
};

// After RunKernels, whose output the gradients of the oracle go with.
Oracle Expect(const Case& c) {
  const Shapes& s = c.s;
  const Problem& p = c.p;
  Oracle o;
  o.out.assign(c.out.values.size(), 0);
  o.lse.assign(c.lse.size(), -std::numeric_limits<double>::infinity());
  o.dq.assign(c.q.values.size(), 0);
  o.dk.assign(c.k.values.size(), 0);
  o.dv.assign(c.v.values.size(), 0);
  o.dbias.assign(c.bias.values.size(), 0);
  o.dq_terms = o.dq;
  o.dk_terms = o.dk;
  std::vector<double> w(s.kv_len), slope(s.kv_len), dp(s.kv_len);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t n = 0; n < s.q_heads; ++n) {
      for (int64_t t = 0; t < s.q_len; ++t) {
        const double* q = &c.q.values[c.Q(b, t, n) * s.head_dim];
        const double* dout = &c.dout.values[c.Q(b, t, n) * s.value_dim];
        double* out = &o.out[c.Q(b, t, n) * s.value_dim];
        std::vector<int64_t> seen;
        double total = c.sinks.empty() ? 0 : std::exp(static_cast<double>(c.sinks[n]));
        for (int64_t j = 0; j < s.kv_len; ++j) {
          if (!c.Visible(b, n, t, j)) continue;
          seen.push_back(j);
          const double* k = &c.k.values[c.K(b, j, n) * s.head_dim];
          double x = 0;
          for (int64_t d = 0; d < s.head_dim; ++d) x += q[d] * k[d];
          x *= p.scale;
          if (c.bias_view.data) {
            x += c.bias.values[c.bias_view.Offset(b, n, t) + (c.bias_view.keys == 1 ? 0 : j)];
          }
          slope[j] = 1;
          if (p.softcap > 0) {
            const double y = std::tanh(x / p.softcap);
            x = p.softcap * y;
            slope[j] = 1 - y * y;
          }
          w[j] = std::exp(x);
          total += w[j];
        }
        if (seen.empty()) {
          if (!c.sinks.empty()) o.lse[c.L(b, t, n)] = c.sinks[n];
          continue;
        }
        o.lse[c.L(b, t, n)] = std::log(total);
        double delta = c.with_dlse ? -static_cast<double>(c.dlse[c.L(b, t, n)]) : 0;
        const double kept = 1 / (1 - p.dropout_rate);
        std::vector<double> keep(s.kv_len, 1);
        for (int64_t j : seen) {
          w[j] /= total;
          if (!c.dropout.empty()) keep[j] = c.Keep(b, n, t, j) ? kept : 0;
          const double* v = &c.v.values[c.K(b, j, n) * s.value_dim];
          dp[j] = 0;
          for (int64_t d = 0; d < s.value_dim; ++d) {
            out[d] += w[j] * keep[j] * v[d];
            dp[j] += keep[j] * dout[d] * v[d];
          }
        }
        // The backward pass gets the output as the forward pass stored it, and with a gradient of
        // the bias, in whose sums the error of that rounding would not cancel, goes without.
        for (int64_t d = 0; d < s.value_dim && !c.with_dbias; ++d) {
          delta += c.out.Get(c.Q(b, t, n) * s.value_dim + d) * dout[d];
        }
        for (int64_t j : seen) {
          if (c.with_dbias) delta += w[j] * dp[j];
        }
        for (int64_t j : seen) {
          const double ds = w[j] * (dp[j] - delta) * slope[j];
          const double apart = w[j] * (std::fabs(dp[j]) + std::fabs(delta)) * slope[j];
          const double* k = &c.k.values[c.K(b, j, n) * s.head_dim];
          for (int64_t d = 0; d < s.head_dim; ++d) {
            const int64_t at_q = c.Q(b, t, n) * s.head_dim + d;
            const int64_t at_k = c.K(b, j, n) * s.head_dim + d;
            o.dq[at_q] += p.scale * ds * k[d];
            o.dk[at_k] += p.scale * ds * q[d];
            o.dq_terms[at_q] += std::fabs(p.scale * apart * k[d]);
            o.dk_terms[at_k] += std::fabs(p.scale * apart * q[d]);
          }
          for (int64_t d = 0; d < s.value_dim; ++d) {
            o.dv[c.K(b, j, n) * s.value_dim + d] += w[j] * keep[j] * dout[d];
          }
          if (c.bias_view.data) {
            o.dbias[c.bias_view.Offset(b, n, t) + (c.bias_view.keys == 1 ? 0 : j)] += ds;
          }
        }
      }
    }
  }
  return o;
}

double RootMeanSquare(const std::vector<double>& x) {
  double square = 0;
  int64_t finite = 0;
  for (double one : x) {
    if (!std::isfinite(one)) continue;
    square += one * one;
    ++finite;
  }
  return std::sqrt(square / std::fmax(1, finite));
}

// Largest error relative to the root mean square of what is expected, at least 1/4. Gradients that
// cancel to nothing keep the rounding of their terms: at least 1/64 of the sum of these, of which
// the bound of float32 is 26 roundings.
double Error(const std::vector<double>& expected, const std::vector<double>& got,
             const std::vector<double>& terms = {}) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(expected[i])) {
      if (!(got[i] == expected[i])) return std::numeric_limits<double>::infinity();
      continue;
    }
    if (!std::isfinite(got[i])) return std::numeric_limits<double>::infinity();
    worst = std::fmax(worst, std::fabs(expected[i] - got[i]));
  }
  const double size = std::fmax(RootMeanSquare(expected), RootMeanSquare(terms) / 64);
  return worst / std::fmax(0.25, size);
}

std::vector<double> Values(const Array& a) {
  std::vector<double> x(a.values.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = a.Get(i);
  return x;
}

std::string Describe(const Case& c, uint64_t seed) {
  char text[400];
  std::snprintf(
      text, sizeof text,
      "seed %llu B%lld T%lld S%lld N%lld K%lld H%lld Hv%lld dtype %d scale %.3f window "
      "(%lld,%lld) br %d cap %.1f bias %d mask %d qlen %d kvlen %d seg %d pos %d sinks %d drop %d "
      "dlse %d",
      static_cast<unsigned long long>(seed), (long long)c.s.batch, (long long)c.s.q_len,
      (long long)c.s.kv_len, (long long)c.s.q_heads, (long long)c.s.kv_heads,
      (long long)c.s.head_dim, (long long)c.s.value_dim, static_cast<int>(c.p.dtype), c.p.scale,
      (long long)c.p.window_left, (long long)c.p.window_right, c.p.bottom_right, c.p.softcap,
      c.bias_view.data != nullptr, !c.mask.empty(), !c.q_lengths.empty(), !c.kv_lengths.empty(),
      !c.q_segments.empty(), !c.q_positions.empty(), !c.sinks.empty(), !c.dropout.empty(),
      c.with_dlse);
  return text;
}

struct Results {
  std::vector<unsigned char> bytes;
  bool done = false;
};

// Runs forward and backward into poisoned outputs; all outputs as one string of bytes.
Results RunKernels(const Kernels& kernels, Case& c, int64_t threads) {
  ThreadWorkers workers(threads);
  for (Array* a : {&c.out, &c.dq, &c.dk, &c.dv, &c.dbias}) a->Poison();
  for (float& x : c.lse) x = std::nanf("");
  ForwardCall forward{c.View(), c.out.bytes.data(), c.lse.data()};
  Results results;
  results.done = kernels.forward(forward, workers);
  BackwardCall backward;
  backward.in = c.View();
  backward.out = c.out.bytes.data();
  backward.lse = c.lse.data();
  backward.dout = c.dout.bytes.data();
  backward.dlse = c.with_dlse ? c.dlse.data() : nullptr;
  backward.dq = c.dq.bytes.data();
  backward.dk = c.dk.bytes.data();
  backward.dv = c.dv.bytes.data();
  backward.dbias = c.with_dbias ? c.dbias.bytes.data() : nullptr;
  results.done = results.done && kernels.backward(backward, workers);
  for (const Array* a : {&c.out, &c.dq, &c.dk, &c.dv, &c.dbias}) {
    results.bytes.insert(results.bytes.end(), a->bytes.begin(), a->bytes.end());
  }
  const auto* lse = reinterpret_cast<const unsigned char*>(c.lse.data());
  results.bytes.insert(results.bytes.end(), lse, lse + c.lse.size() * 4);
  return results;
}

// The same forward pass by the kernel for few queries, from keys and values in shuffled pages.
// Leaves out and lse in the case, and returns their bytes.
Results RunPaged(const Kernels& kernels, Case& c, int64_t page_size, int64_t threads) {
  const Shapes& s = c.s;
  const int64_t columns = (s.kv_len + page_size - 1) / page_size;
  const int64_t pages = s.batch * columns;
  std::vector<int32_t> table(pages), lengths(s.batch, static_cast<int32_t>(s.kv_len));
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(pages - 1 - i);
  for (int64_t i = 0; i + 5 < pages; i += 3) std::swap(table[i], table[i + 5]);
  auto scatter = [&](const Array& from, int64_t dim) {
    const int64_t row = s.kv_heads * dim * Array::Size(c.p.dtype);
    std::vector<unsigned char> to(pages * page_size * row, 0xff);
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t j = 0; j < s.kv_len; ++j) {
        const int64_t slot = table[b * columns + j / page_size] * page_size + j % page_size;
        std::memcpy(&to[slot * row], &from.bytes[(b * s.kv_len + j) * row], row);
      }
    }
    return to;
  };
  const std::vector<unsigned char> k = scatter(c.k, s.head_dim), v = scatter(c.v, s.value_dim);
  c.out.Poison();
  for (float& x : c.lse) x = std::nanf("");
  DecodeCall call;
  call.in = c.View();
  call.in.shapes.kv_len = columns * page_size;
  call.in.k = k.data();
  call.in.v = v.data();
  if (c.kv_lengths.empty()) call.in.kv_lengths = lengths.data();
  call.pages = pages;
  call.page_size = page_size;
  call.page_table = table.data();
  call.checked = true;
  call.out = c.out.bytes.data();
  call.lse = c.lse.data();
  ThreadWorkers workers(threads);
  Results results;
  results.done = kernels.decode(call, workers);
  results.bytes = c.out.bytes;
  const auto* lse = reinterpret_cast<const unsigned char*>(c.lse.data());
  results.bytes.insert(results.bytes.end(), lse, lse + c.lse.size() * 4);
  return results;
}

int CheckPaged(const Kernels& kernels, Case& c, const Oracle& oracle, double bound, uint64_t seed) {
  if (c.bias_view.data || !c.mask.empty() || !c.q_segments.empty() || !c.q_positions.empty() ||
      !c.dropout.empty()) {
    return 0;
  }
  const int64_t sizes[] = {1, 3, 16, 64, 100, c.s.kv_len};
  const Results first = RunPaged(kernels, c, sizes[seed % 6], 7);
  std::vector<double> lse(c.lse.begin(), c.lse.end());
  int failures = 0;
  auto check = [&](bool good, const char* what) {
    if (good) return;
    std::printf("FAIL %s decode %s: %s\n", kernels.name, what, Describe(c, seed).c_str());
    ++failures;
  };
  check(first.done && Error(oracle.out, Values(c.out)) < bound, "out");
  check(first.done && Error(oracle.lse, lse) < bound, "lse");
  check(RunPaged(kernels, c, sizes[(seed + 1) % 6], 1).bytes == first.bytes, "threads or pages");
  return failures;
}

// Changes keys and values of the case.
int CheckStored(const Kernels& kernels, Case& c, double bound, uint64_t seed) {
  if (seed % 3 == 0 || c.bias_view.data || !c.mask.empty() || !c.q_segments.empty() ||
      !c.q_positions.empty() || !c.dropout.empty()) {
    return 0;
  }
  ThreadWorkers workers(2);
  const bool done = seed % 3 == 1 ? DecodeStored<Float8>(kernels, c, workers)
                                  : DecodeStored<Int8>(kernels, c, workers);
  const Oracle oracle = Expect(c);
  if (done && Error(oracle.out, Values(c.out)) < bound) return 0;
  std::printf("FAIL %s decode of eight bits: %s\n", kernels.name, Describe(c, seed).c_str());
  return 1;
}

int Check(const Kernels& kernels, uint64_t seed) {
  const std::unique_ptr<Case> owner = RandomCase(seed);
  Case& c = *owner;
  const int64_t threads = 1 + static_cast<int64_t>(seed % 3);
  const Results first = RunKernels(kernels, c, threads);
  const Oracle oracle = Expect(c);
  std::vector<double> lse(c.lse.begin(), c.lse.end());
  struct {
    const char* name;
    double error;
  } errors[] = {{"out", Error(oracle.out, Values(c.out))},
                {"lse", Error(oracle.lse, lse)},
                {"dq", Error(oracle.dq, Values(c.dq), oracle.dq_terms)},
                {"dk", Error(oracle.dk, Values(c.dk), oracle.dk_terms)},
                {"dv", Error(oracle.dv, Values(c.dv))},
                {"dbias", c.with_dbias ? Error(oracle.dbias, Values(c.dbias)) : 0}};
  // Largest element error against the root mean square of the array: about 8 roundings of 4 sigma.
  const double bound = c.p.dtype == DType::kFloat32    ? 1e-4
                       : c.p.dtype == DType::kBFloat16 ? 0.12
                                                       : 0.02;
  int failures = 0;
  for (const auto& e : errors) {
    if (first.done && e.error < bound) continue;
    std::printf("FAIL %s %s error %.3g: %s\n", kernels.name, e.name, e.error,
                Describe(c, seed).c_str());
    ++failures;
  }
  if (RunKernels(kernels, c, threads).bytes != first.bytes) {
    std::printf("FAIL %s not repeatable: %s\n", kernels.name, Describe(c, seed).c_str());
    ++failures;
  }
  failures += CheckPaged(kernels, c, oracle, bound, seed);
  c.p.deterministic = true;
  if (RunKernels(kernels, c, 1).bytes != RunKernels(kernels, c, 7).bytes) {
    std::printf("FAIL %s depends on threads: %s\n", kernels.name, Describe(c, seed).c_str());
    ++failures;
  }
  failures += CheckStored(kernels, c, bound, seed);
  return failures;
}

// The known answer is Random123's for philox4x32-7.
int CheckPhilox() {
  uint32_t words[4][kPhilox];
  Philox(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u, words);
  const uint32_t expected[] = {0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au};
  for (int w = 0; w < 4; ++w) {
    if (words[w][0] != expected[w]) {
      std::printf("FAIL philox word %d\n", w);
      return 1;
    }
  }
  return 0;
}

int CheckHalves() {
  int failures = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 h{static_cast<uint16_t>(bits)};
    Float16 back;
    FromFloat(ToFloat(h), &back);
    const bool nan = (bits & 0x7fff) > 0x7c00;
    failures += !nan && back.bits != h.bits;
    const BFloat16 g{static_cast<uint16_t>(bits)};
    BFloat16 again;
    FromFloat(ToFloat(g), &again);
    failures += (bits & 0x7fff) <= 0x7f80 && again.bits != g.bits;
  }
  if (failures) std::printf("FAIL 16-bit conversions: %d\n", failures);
  return failures;
}

}  // namespace
}  // namespace jax_flash::cpu

int main(int argc, char** argv) {
  using namespace jax_flash::cpu;
  const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  int failures = CheckPhilox() + CheckHalves() + CheckEightBits();
  const Kernels* builds[8];
  const int count = SupportedKernels(builds, 8);
  for (int i = 0; i < count; ++i) {
    int failed = 0;
    for (int c = 0; c < cases; ++c) failed += Check(*builds[i], seed + static_cast<uint64_t>(c));
    std::printf("%s: %d cases, %d failures\n", builds[i]->name, cases, failed);
    failures += failed;
  }
  return failures == 0 ? 0 : 1;
}
