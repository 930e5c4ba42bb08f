// Runs cuda/kernels/softmax.cuh on the host, for test_cuda_softmax.py: 32 threads are the lanes of
// a warp, which meet at each exchange. The walk over blocks is that of the forward kernel.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
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

// What the text takes from CUDA and from sm90/ptx.cuh.
#define __device__
#define __forceinline__ inline
using std::fmaf;
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
inline float fminf(float a, float b) { return std::fmin(a, b); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __shfl_xor_sync(unsigned, float x, int mask) { return Exchange(x, this_lane ^ mask); }
inline bool __any_sync(unsigned, bool x) { return Count(x) > 0; }
inline bool __all_sync(unsigned, bool x) { return Count(x) == kLanes; }
namespace ptx {
inline float exp2_approx(float x) { return Flushed(std::exp2(Flushed(x))); }
inline float log2_approx(float x) { return std::log2(Flushed(x)); }
inline float reciprocal_approx(float x) { return Flushed(1.0f / Flushed(x)); }
inline float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }
}  // namespace ptx

#include "cuda/kernels/softmax.cuh"

namespace {

constexpr int kKeys = 64;  // of a block
constexpr int kCount = kKeys / 2;
constexpr int kRows = 16;

struct Walk {
  const float* scores;  // [kRows, blocks, kKeys], masked ones -inf
  const float* values;  // [blocks, kKeys]
  int blocks;
  float scale_log2;
  bool bfloat16;
  int headroom;
  float limit;
  bool second;  // a maximum in every block
  bool half;    // the first block's second half is hidden
  float sink;   // log2 units, or NaN
  float* out;   // [kRows]
  float* lse;   // [kRows]
  int* rises;   // blocks after the first that asked for a correction

  float Rounded(float weight) const {
    if (!bfloat16) {  // 11 bits, and 2^-24 the smallest step
      if (weight > 65504) return kInfinity;
      int exponent = 0;
      std::frexp(weight, &exponent);
      const float step = std::ldexp(1.0f, std::max(exponent, -13) - 11);
      return std::isfinite(weight) ? std::nearbyint(weight / step) * step : weight;
    }
    if (!std::isfinite(weight)) return weight;
    std::uint32_t bits = __builtin_bit_cast(std::uint32_t, weight);
    bits += 0x7fff + (bits >> 16 & 1);
    return __builtin_bit_cast(float, bits & 0xffff0000u);
  }

  void RunLane() const {
    SoftmaxState softmax;
    float output[2] = {0, 0};
    bool searches = false;
    for (int block = 0; block < blocks; ++block) {
      float fragment[kCount];
      for (int i = 0; i < kCount; ++i) fragment[i] = scores[At(i, block)];
      float correction[2] = {1, 1};
      if (block == 0) {
        half ? softmax.start<kCount / 2>(fragment, scale_log2, headroom)
             : softmax.start<kCount>(fragment, scale_log2, headroom);
        searches = !softmax.is_started() || second;
      } else {
        const bool corrects =
            softmax.extend(fragment, scale_log2, headroom, limit, searches, correction);
        if (searches) searches = !softmax.is_started() || second;
        if (corrects && this_lane == 0) ++*rises;
        for (int row = 0; row < 2; ++row) output[row] *= corrects ? correction[row] : 1.0f;
      }
      for (int i = 0; i < kCount; ++i) {
        output[i / 2 % 2] += Rounded(fragment[i]) * values[block * kKeys + Column(i)];
      }
    }
    for (int row = 0; row < 2; ++row) {
      const float sum = quad_sum(output[row]);
      float row_lse;
      const float factor = std::isnan(sink) ? softmax.finish<false>(row, 0, headroom, row_lse)
                                            : softmax.finish<true>(row, sink, headroom, row_lse);
      if (this_lane % 4 == 0) {
        out[this_lane / 4 + 8 * row] = sum * factor;
        lse[this_lane / 4 + 8 * row] = row_lse;
      }
    }
  }
  static int Column(int i) { return i / 4 * 8 + this_lane % 4 * 2 + i % 2; }
  int At(int i, int block) const {
    return ((this_lane / 4 + i / 2 % 2 * 8) * blocks + block) * kKeys + Column(i);
  }
};

}  // namespace

extern "C" int Run(const float* scores, const float* values, int blocks, float scale_log2,
                   bool bfloat16, int headroom, float limit, bool second, bool half, float sink,
                   float* out, float* lse) {
  int rises = 0;
  const Walk walk{scores, values, blocks, scale_log2, bfloat16, headroom, limit,
                  second, half,   sink,   out,        lse,      &rises};
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes.emplace_back([&walk, lane] {
      this_lane = lane;
      walk.RunLane();
    });
  }
  for (std::thread& lane : lanes) lane.join();
  return rises;
}
