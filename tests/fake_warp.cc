// Runs cuda/kernels/softmax.cuh and dropout.cuh on the host, for test_cuda_softmax.py and
// test_dropout.py: 32 threads are the lanes of a warp, which meet at each exchange. The walk over
// blocks is that of the forward kernel.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kLanes = 32;

struct Meeting {
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0;
  std::uint64_t round = 0;
  float posted[kLanes];

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const std::uint64_t mine = round;
    if (++here == kLanes) {
      here = 0;
      ++round;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return round != mine; });
    }
  }
};
Meeting meeting;
thread_local int this_lane;
thread_local struct {
  unsigned x;
} threadIdx;

float Exchange(float mine, int from) {
  meeting.posted[this_lane] = mine;
  meeting.Wait();
  const float result = meeting.posted[from];
  meeting.Wait();
  return result;
}
int Count(bool mine) {
  meeting.posted[this_lane] = mine;
  meeting.Wait();
  int count = 0;
  for (float one : meeting.posted) count += one != 0;
  meeting.Wait();
  return count;
}
float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

// What the text takes from CUDA, and from ptx.cuh, which is empty here.
#define __device__
#define __host__
#define __forceinline__ inline
using std::fmaf;
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
inline float fminf(float a, float b) { return std::fmin(a, b); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float __shfl_xor_sync(unsigned, float x, int mask) { return Exchange(x, this_lane ^ mask); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
  return __float_as_uint(Exchange(__uint_as_float(x), this_lane ^ mask));
}
inline bool __any_sync(unsigned, bool x) { return Count(x) > 0; }
inline bool __all_sync(unsigned, bool x) { return Count(x) == kLanes; }
inline void __syncwarp() { Count(true); }
// Constants of the generated header. Both types are run here.
constexpr bool kBFloat16 = true, kFloat32 = false, kCarried = false, kRest = false,
               kHasDropout = true, kDropsMost = DROPS_MOST;
constexpr bool kDropsPart = true;
constexpr bool kScoreHasSlope = false, kFloat8 = false;

#include "numbers.cuh"

namespace ptx {
inline float exp2_approx(float x) { return Flushed(std::exp2(Flushed(x))); }
inline float log2_approx(float x) { return std::log2(Flushed(x)); }
inline float sqrt_approx(float x) { return std::sqrt(Flushed(x)); }
inline float reciprocal_approx(float x) { return Flushed(1.0f / Flushed(x)); }
inline float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }
inline uint32 round_bfloat16(float x) {
  uint32 bits = __builtin_bit_cast(uint32, x);
  if (std::isfinite(x)) bits += 0x7fff + (bits >> 16 & 1);
  return bits >> 16;
}
inline uint32 pack_bfloat16(float low, float high) {
  return round_bfloat16(high) << 16 | round_bfloat16(low);
}
// Rounds a weight to 11 bits, from 2^-24 on; it has no sign.
inline uint32 round_float16(float x) {
  if (std::isnan(x)) return 0x7e00;
  if (x == 0) return 0;
  if (x > 65504) return 0x7c00;
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent, -13);
  const auto steps = static_cast<uint32>(std::nearbyint(std::ldexp(x, 11 - exponent)));
  return (exponent + 13) * 0x400 + steps;  // a normal number's 2^10 steps raise the exponent
}
inline uint32 pack_float16(float low, float high) {
  return round_float16(high) << 16 | round_float16(low);
}
inline float unpack_float16(uint16 bits) {
  const int exponent = bits >> 10, fraction = bits & 0x3ff;
  if (exponent == 31) return fraction ? NAN : kInfinity;
  return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                       : std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
}
inline uint32 fma_bfloat16(uint32, uint32, uint32) { std::abort(); }  // nobody calls these
inline uint32 fma_float16(uint32, uint32, uint32) { std::abort(); }
inline uint32 pack_positive_bfloat16(float, float) { std::abort(); }
inline uint32 pack_positive_float16(float, float) { std::abort(); }

inline int opaque(int value) { return value; }
template <class Compare>
uint32 compare_halves(uint32 a, uint32 b, Compare compare) {
  const auto half = [&](int shift) {
    return compare(unpack_float16(a >> shift & 0x7fff), unpack_float16(b >> shift & 0x7fff));
  };
  return (half(0) ? 0xffffu : 0) | (half(16) ? 0xffff0000u : 0);
}
inline uint32 below(uint32 a, uint32 b) {
  return compare_halves(a, b, [](float x, float y) { return x < y; });
}
inline uint32 above(uint32 a, uint32 b) {
  return compare_halves(a, b, [](float x, float y) { return !(x <= y); });
}
inline uint32 transpose_matrix(uint32 pair) {
  const int row = this_lane / 4, column = this_lane % 4 * 2;
  uint32 result = 0;
  for (int i = 0; i < 2; ++i) {  // element (column + i, row) of what was given
    const uint32 other =
        __float_as_uint(Exchange(__uint_as_float(pair), (column + i) * 4 + row / 2));
    result |= (other >> 16 * (row % 2) & 0xffff) << 16 * i;
  }
  return result;
}
}  // namespace ptx

#include "dropout.cuh"
#include "element.cuh"
#include "fragment.cuh"
#include "softmax.cuh"

namespace {

template <class Lane>
void RunWarp(const Lane& run) {
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&run, lane] {
      this_lane = lane;
      threadIdx.x = lane;
      run();
    });
  }
  for (std::thread& lane : lanes) lane.join();
}

constexpr int kKeys = 64;  // of a block
constexpr int kCount = kKeys / 2;
constexpr int kRows = 16;

template <class Element>
struct Walk {
  const float* scores;  // [kRows, blocks, kKeys], masked ones -inf
  const float* values;  // [blocks, kKeys]
  int blocks;
  float scale_log2;
  bool second;  // a maximum in every block
  bool half;    // the first block's second half is hidden
  float sink;   // log2 units, or NaN
  float* out;   // [kRows]
  float* lse;   // [kRows]
  int* rises;   // blocks after the first that asked for a correction

  static float Rounded(float weight) { return Element::unpack_low(Element::pack(weight, 0.0f)); }

  void RunLane() const {
    SoftmaxState<Element> softmax;
    float output[2] = {0, 0};
    bool searches = false;
    for (int block = 0; block < blocks; ++block) {
      float fragment[kCount];
      for (int i = 0; i < kCount; ++i) fragment[i] = scores[At(i, block)];
      float correction[2] = {1, 1};
      if (block == 0) {
        half ? softmax.template start<kCount / 2>(fragment, scale_log2, Alone{})
             : softmax.template start<kCount>(fragment, scale_log2, Alone{});
        searches = !softmax.is_started() || second;
      } else {
        const bool corrects = softmax.extend(fragment, scale_log2, searches, correction, Alone{});
        if (searches) searches = !softmax.is_started() || second;
        if (corrects && this_lane == 0) ++*rises;
        for (int row = 0; row < 2; ++row) output[row] *= corrects ? correction[row] : 1.0f;
      }
      for (int i = 0; i < kCount; ++i) {
        output[fragment::row(i)] += Rounded(fragment[i]) * values[block * kKeys + Column(i)];
      }
    }
    for (int row = 0; row < 2; ++row) {
      const float sum = fragment::quad_sum(output[row]);
      float row_lse;
      const float factor = std::isnan(sink) ? softmax.template finish<false>(row, 0, row_lse)
                                            : softmax.template finish<true>(row, sink, row_lse);
      if (this_lane % 4 == 0) {
        out[Row(row)] = sum * factor;
        lse[Row(row)] = row_lse;
      }
    }
  }
  static int Row(int row) { return fragment::first_row(this_lane) + fragment::kRowStep * row; }
  static int Column(int i) { return fragment::first_column(this_lane) + fragment::column(i); }
  int At(int i, int block) const {
    return (Row(fragment::row(i)) * blocks + block) * kKeys + Column(i);
  }
  void Run() const {
    RunWarp([this] { RunLane(); });
  }
};

struct DropoutParams {
  const uint32* dropout_state;
  int query_heads;
  uint32 dropout_threshold;
};

// Dropout of 64 x 64 weights: the first 16 queries' as the forward kernel does it, the first 16
// keys' as the backward kernel does, and pair by pair.
struct Drop {
  DropoutParams p;
  int batch, head, query, key;
  float *by_query, *by_key, *by_pair;  // [64, 64] each, ones

  void RunLane() const {
    const Draws draws(p, batch, head);
    const int row = this_lane / 4, column = this_lane % 4 * 2;
    DroppedPairs<64> pairs;
    const RowDraws of_row(draws, query + row, key + column);
    for (int i = 0; i < 4; i += 2) pairs.draw(p, of_row, i);
    for (int i = 0; i < 32; ++i) {
      by_query[(row + 8 * fragment::row(i)) * 64 + column + fragment::column(i)] =
          pairs.keep(i / 2, 0x10001) >> i % 2 * 16 & 1;
    }
    Dropped<32> dropped;
    dropped.draw(p, draws, query, key);
    for (int i = 0; i < 32; ++i) {
      by_key[(column + fragment::column(i)) * 64 + row + 8 * fragment::row(i)] =
          dropped.mark(i, 1.0f);
    }
    for (int i = this_lane; i < 64 * 64; i += kLanes) {
      by_pair[i] = keeps(p, batch, head, query + i / 64, key + i % 64);
    }
  }
};

}  // namespace

extern "C" int Run(const float* scores, const float* values, int blocks, float scale_log2,
                   bool bfloat16, bool second, bool half, float sink, float* out, float* lse) {
  int rises = 0;
  if (bfloat16) {
    Walk<BFloat16>{scores, values, blocks, scale_log2, second, half, sink, out, lse, &rises}.Run();
  } else {
    Walk<Float16>{scores, values, blocks, scale_log2, second, half, sink, out, lse, &rises}.Run();
  }
  return rises;
}

extern "C" void RunDropout(const uint32* state, int heads, uint32 threshold, int batch, int head,
                           int query, int key, float* by_query, float* by_key, float* by_pair) {
  const Drop drop{{state, heads, threshold}, batch, head, query, key, by_query, by_key, by_pair};
  RunWarp([&] { drop.RunLane(); });
}
