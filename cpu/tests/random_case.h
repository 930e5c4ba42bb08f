// A random case for the kernels: shapes, features, and arrays whose hidden places hold poison.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cpu/attention.h"
#include "cpu/numeric.h"

namespace jax_flash::cpu {

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  bool Chance(double p) { return std::uniform_real_distribution<double>(0, 1)(engine) < p; }
  double Normal() { return std::normal_distribution<double>()(engine); }
};

// An array of one of the three element types, with its values as double beside it.
struct Array {
  DType dtype = DType::kFloat32;
  std::vector<unsigned char> bytes;
  std::vector<double> values;

  static int Size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
  Array() = default;
  Array(DType type, int64_t n) : dtype(type), bytes(n * Size(type)), values(n) {}
  void Set(int64_t i, double x) {
    const float f = static_cast<float>(x);
    if (dtype == DType::kFloat32) {
      std::memcpy(&bytes[i * 4], &f, 4);
    } else if (dtype == DType::kBFloat16) {
      BFloat16 h;
      FromFloat(f, &h);
      std::memcpy(&bytes[i * 2], &h, 2);
    } else {
      Float16 h;
      FromFloat(f, &h);
      std::memcpy(&bytes[i * 2], &h, 2);
    }
    values[i] = Get(i);
  }
  double Get(int64_t i) const {
    if (dtype == DType::kFloat32) {
      float f;
      std::memcpy(&f, &bytes[i * 4], 4);
      return f;
    }
    uint16_t h;
    std::memcpy(&h, &bytes[i * 2], 2);
    return dtype == DType::kBFloat16 ? ToFloat(BFloat16{h}) : ToFloat(Float16{h});
  }
  void Fill(Random& random, double scale) {
    for (size_t i = 0; i < values.size(); ++i) Set(i, scale * random.Normal());
  }
  // Every byte 0xff: nan in each of the types.
  void Poison() { std::fill(bytes.begin(), bytes.end(), 0xff); }
};

struct Case {
  Shapes s;
  Problem p;
  bool with_dlse = false, with_dbias = false;
  Array q, k, v, bias, out, dout, dq, dk, dv, dbias;
  std::vector<float> lse, dlse, sinks;
  std::vector<uint8_t> mask;
  std::vector<int64_t> bias_batch, mask_batch, sinks_batch;
  Broadcast bias_view, mask_view, sinks_view;
  std::vector<int32_t> q_lengths, kv_lengths, q_segments, kv_segments;
  std::vector<int32_t> q_positions, kv_positions;
  std::vector<uint32_t> dropout;

  int64_t Q(int64_t b, int64_t t, int64_t n) const { return (b * s.q_len + t) * s.q_heads + n; }
  int64_t K(int64_t b, int64_t j, int64_t n) const {
    return (b * s.kv_len + j) * s.kv_heads + n / (s.q_heads / s.kv_heads);
  }
  int64_t L(int64_t b, int64_t t, int64_t n) const { return (b * s.q_heads + n) * s.q_len + t; }

  bool Visible(int64_t b, int64_t n, int64_t t, int64_t j) const {
    const int64_t q_len = q_lengths.empty() ? s.q_len : q_lengths[b];
    const int64_t kv_len = kv_lengths.empty() ? s.kv_len : kv_lengths[b];
    int64_t d = j - t - (p.bottom_right ? kv_len - q_len : 0);
    if (!q_positions.empty()) {
      d = int64_t{kv_positions[b * s.kv_len + j]} - q_positions[b * s.q_len + t];
    }
    if (t >= q_len || j >= kv_len) return false;
    if (p.window_left >= 0 && d < -p.window_left) return false;
    if (p.window_right >= 0 && d > p.window_right) return false;
    if (!q_segments.empty() && q_segments[b * s.q_len + t] != kv_segments[b * s.kv_len + j]) {
      return false;
    }
    return mask.empty() || mask[mask_view.Offset(b, n, t) + (mask_view.keys == 1 ? 0 : j)] != 0;
  }

  bool Keep(int64_t b, int64_t n, int64_t t, int64_t j) const {
    const uint32_t* state = &dropout[(b * s.q_heads + n) * 6];
    uint32_t words[4][kPhilox];
    const uint32_t query = state[4] + static_cast<uint32_t>(t / 16 * 4 + t % 4);
    const uint32_t key = state[5] + static_cast<uint32_t>(j / 16 * 4 + j % 8 / 2);
    Philox(state[2], query, state[3], key, state[0], state[1], words);
    const int64_t first = (query / 4 + key / 4 + t / 4) % 2 * 2;
    const uint32_t x = words[first][0], y = words[first + 1][0];
    const uint32_t numbers[] = {x, y, x * 0x93D765DDu + y, y * 0xD2511F53u + x};
    const uint32_t draw = numbers[2 * (j / 8 % 2) + t / 8 % 2] >> (j % 2 * 16) & 0x7fff;
    return draw >= std::round(p.dropout_rate * 32768.0);
  }

  Inputs View() const {
    Inputs in;
    in.problem = p;
    in.shapes = s;
    in.q = q.bytes.data();
    in.k = k.bytes.data();
    in.v = v.bytes.data();
    in.bias = bias_view;
    in.bias_dtype = bias.dtype;
    in.mask = mask_view;
    in.sinks = sinks_view;
    auto data = [](const auto& x) { return x.empty() ? nullptr : x.data(); };
    in.q_lengths = data(q_lengths);
    in.kv_lengths = data(kv_lengths);
    in.q_segments = data(q_segments);
    in.kv_segments = data(kv_segments);
    in.q_positions = data(q_positions);
    in.kv_positions = data(kv_positions);
    in.dropout_state = data(dropout);
    in.dropout_words = 6;
    return in;
  }
};

inline Broadcast RandomBroadcast(Random& random, const Shapes& s, std::vector<int64_t>& batch) {
  Broadcast view;
  view.batch_count = random.Chance(0.5) ? s.batch : 1;
  view.heads = random.Chance(0.5) ? s.q_heads : 1;
  view.rows = random.Chance(0.6) ? s.q_len : 1;
  view.keys = random.Chance(0.7) ? s.kv_len : 1;
  batch.resize(s.batch);
  for (int64_t b = 0; b < s.batch; ++b) batch[b] = view.batch_count == 1 ? 0 : b;
  view.batch = batch.data();
  return view;
}

inline int64_t Count(const Broadcast& view) {
  return view.batch_count * view.heads * view.rows * view.keys;
}

inline std::unique_ptr<Case> RandomCase(uint64_t seed) {
  Random random(seed);
  auto result = std::make_unique<Case>();
  Case& c = *result;
  Shapes& s = c.s;
  Problem& p = c.p;
  const int64_t lengths[] = {1, 2, 5, 17, 63, 64, 65, 100, 191, 193, 257, 300};
  const int64_t dims[] = {1, 3, 8, 16, 24, 33, 64, 64, 64, 80, 128, 130};
  s.batch = 1 + random.Below(3);
  s.q_len = lengths[random.Below(12)];
  s.kv_len = random.Chance(0.4) ? s.q_len : lengths[random.Below(12)];
  s.kv_heads = 1 + random.Below(2);
  s.q_heads = s.kv_heads * (1 + random.Below(3));
  s.head_dim = dims[random.Below(12)];
  s.value_dim = random.Chance(0.5) ? s.head_dim : dims[random.Below(12)];
  if (random.Chance(0.03)) s.head_dim = 300, s.value_dim = 260;
  p.dtype = static_cast<DType>(random.Below(3));
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  if (random.Chance(0.1)) p.scale = -p.scale;
  p.bottom_right = random.Chance(0.5);
  if (random.Chance(0.4)) p.window_right = random.Chance(0.6) ? 0 : random.Below(40);
  if (random.Chance(0.3)) p.window_left = random.Below(150);
  if (random.Chance(0.2)) p.softcap = 1.0f + static_cast<float>(random.Below(20));
  auto make = [&](Array& a, int64_t n, double scale) {
    a = Array(p.dtype, n);
    a.Fill(random, scale);
  };
  make(c.q, s.batch * s.q_len * s.q_heads * s.head_dim, 1);
  make(c.k, s.batch * s.kv_len * s.kv_heads * s.head_dim, 1);
  make(c.v, s.batch * s.kv_len * s.kv_heads * s.value_dim, 1);
  make(c.dout, s.batch * s.q_len * s.q_heads * s.value_dim, 1);
  if (random.Chance(0.3)) {
    c.bias_view = RandomBroadcast(random, s, c.bias_batch);
    c.bias = Array(random.Chance(0.5) ? DType::kFloat32 : p.dtype, Count(c.bias_view));
    c.bias.Fill(random, 1);
    c.bias_view.data = c.bias.bytes.data();
    c.with_dbias = random.Chance(0.8);
    c.dbias = Array(c.bias.dtype, Count(c.bias_view));
  }
  if (random.Chance(0.25)) {
    c.mask_view = RandomBroadcast(random, s, c.mask_batch);
    c.mask.resize(Count(c.mask_view));
    const double density = random.Chance(0.3) ? 0.03 : 0.7;
    for (uint8_t& x : c.mask) x = random.Chance(density);
    c.mask_view.data = c.mask.data();
  }
  if (random.Chance(0.3)) {
    for (int64_t b = 0; b < s.batch; ++b)
      c.q_lengths.push_back(static_cast<int32_t>(random.Below(s.q_len + 1)));
  }
  if (random.Chance(0.3)) {
    for (int64_t b = 0; b < s.batch; ++b)
      c.kv_lengths.push_back(static_cast<int32_t>(random.Below(s.kv_len + 1)));
  }
  if (random.Chance(0.25)) {
    const bool sorted = random.Chance(0.6);
    auto fill = [&](std::vector<int32_t>& ids, int64_t n) {
      for (int64_t i = 0; i < s.batch * n; ++i) {
        ids.push_back(static_cast<int32_t>(sorted ? (i % n) * 4 / n : random.Below(3)));
      }
    };
    fill(c.q_segments, s.q_len);
    fill(c.kv_segments, s.kv_len);
  }
  if (random.Chance(0.3)) {
    p.bottom_right = false;
    const int64_t kind = random.Below(4);
    const int64_t start = random.Below(100) - 50;
    auto fill = [&](std::vector<int32_t>& positions, int64_t n) {
      for (int64_t b = 0; b < s.batch; ++b) {
        for (int64_t i = 0; i < n; ++i) {
          int64_t at = start + b * 70 + i;              // in order
          if (kind == 1) at = i % 4 * (n / 4) + i / 4;  // striped
          if (kind == 2) at = random.Below(200);        // in no order, with ties
          if (kind == 3) at = random.Below(2) ? INT32_MIN + i : INT32_MAX - i;  // at the ends
          positions.push_back(static_cast<int32_t>(at));
        }
      }
    };
    fill(c.q_positions, s.q_len);
    fill(c.kv_positions, s.kv_len);
    if (kind == 3 && random.Chance(0.5)) p.window_left = (int64_t{1} << 32) - 1 - random.Below(200);
    if (kind == 3 && random.Chance(0.5)) p.window_right = INT32_MAX + random.Below(300);
  }
  if (random.Chance(0.2)) {
    for (int64_t i = 0; i < s.q_heads; ++i) c.sinks.push_back(static_cast<float>(random.Normal()));
    c.sinks_batch.assign(s.batch, 0);
    c.sinks_view = {c.sinks.data(), c.sinks_batch.data(), 1, s.q_heads, 1, 1};
  }
  if (random.Chance(0.2)) {
    p.dropout_rate = 9830 / 32768.0;
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t n = 0; n < s.q_heads; ++n) {
        for (uint32_t x :
             {123u, 456u, static_cast<uint32_t>(n), static_cast<uint32_t>(b), 48u, 160u})
          c.dropout.push_back(x);
      }
    }
  }
  c.with_dlse = random.Chance(0.5);
  for (int64_t i = 0; i < s.batch * s.q_heads * s.q_len; ++i)
    c.dlse.push_back(static_cast<float>(random.Normal()));
  c.lse.resize(c.dlse.size());
  c.out = Array(p.dtype, c.dout.values.size());
  c.dq = Array(p.dtype, c.q.values.size());
  c.dk = Array(p.dtype, c.k.values.size());
  c.dv = Array(p.dtype, c.v.values.size());

  // Keys that no query sees, and gradients of rows that see nothing, hold nan and inf.
  if (random.Chance(0.5)) {
    const double poison[] = {std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()};
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t j = 0; j < s.kv_len; ++j) {
        for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
          bool seen = false;
          const int64_t group = s.q_heads / s.kv_heads;
          for (int64_t n = kv * group; n < (kv + 1) * group; ++n) {
            for (int64_t t = 0; t < s.q_len && !seen; ++t) seen = c.Visible(b, n, t, j);
          }
          if (seen) continue;
          const int64_t at = (b * s.kv_len + j) * s.kv_heads + kv;
          c.k.Set(at * s.head_dim + random.Below(s.head_dim), poison[random.Below(2)]);
          c.v.Set(at * s.value_dim + random.Below(s.value_dim), poison[random.Below(2)]);
        }
      }
      for (int64_t n = 0; n < s.q_heads; ++n) {
        for (int64_t t = 0; t < s.q_len; ++t) {
          bool sees = false;
          for (int64_t j = 0; j < s.kv_len && !sees; ++j) sees = c.Visible(b, n, t, j);
          if (sees) continue;
          c.q.Set(c.Q(b, t, n) * s.head_dim, poison[0]);
          c.dout.Set(c.Q(b, t, n) * s.value_dim, poison[random.Below(2)]);
        }
      }
    }
  }
  return result;
}

}  // namespace jax_flash::cpu
