// From S^T and dP^T to P^T and dS^T: fragments of a warp's 16 keys. Read backward_rows.cuh next.
#pragma once

#include "fragment.cuh"
#include "sm80/backward_copy.cuh"
#include "sm80/products.cuh"
#include "terms.cuh"

namespace backward {

// Warps that share 16 keys and compute scores, of 16 queries or more each: few queries leave the
// others without.
inline constexpr int kScoreWarps =
    kColumnWarps < kStepQueries / 16 ? kColumnWarps : kStepQueries / 16;
// A warp takes its queries of a step in parts, as registers allow.
inline constexpr int kWarpQueries = kStepQueries / kScoreWarps;
inline constexpr int kFragmentQueries = kWarpQueries < kMostQueries ? kWarpQueries : kMostQueries;
inline constexpr int kScores = kFragmentQueries / 2;  // elements of S^T per thread
using Scores = float[kScores];

// P^T or dS^T of a fragment, an operand of products by rows: elements two and two, or float32 to be
// split when they are used, which takes fewer registers.
template <class Of>
class Operand {
 public:
  // Elements 2i and 2i + 1.
  __device__ __forceinline__ void set(int i, float low, float high) {
    pairs_[i] = Of::pack(low, high);
  }
  // The same with zeros for what has a sign.
  __device__ __forceinline__ void set_positive(int i, float low, float high) {
    pairs_[i] = Of::pack_positive(low, high);
  }
  __device__ __forceinline__ void drop(int i, bool low, bool high) {
    pairs_[i] &= (low ? 0u : 0xffffu) | (high ? 0u : 0xffff0000u);
  }
  __device__ __forceinline__ void get(int i, uint32 (&parts)[kParts]) const {
    parts[0] = pairs_[i];
  }
  // Nothing to do: the same range as float32, or rounded anyway.
  __device__ __forceinline__ float rescale() { return 1.f; }
  // As the gradient of a bias that nothing shares.
  __device__ __forceinline__ void store_dbias(const Sm80BackwardParams& p, int batch, int head,
                                              int first_query, int first_key) const {
    backward::store_dbias(p, batch, head, first_query, first_key, pairs_);
  }

 private:
  uint32 pairs_[kScores / 2];
};
template <>
class Operand<Float32> {
 public:
  __device__ __forceinline__ void set(int i, float low, float high) {
    numbers_[2 * i] = low;
    numbers_[2 * i + 1] = high;
  }
  __device__ __forceinline__ void set_positive(int i, float low, float high) {
    set(i, low < 0.f ? 0.f : low, high < 0.f ? 0.f : high);  // NaN stays
  }
  __device__ __forceinline__ void drop(int i, bool low, bool high) {
    set(i, low ? 0.f : numbers_[2 * i], high ? 0.f : numbers_[2 * i + 1]);
  }
  // Brings a warp's numbers to float16's range; returns what brings them back.
  __device__ __forceinline__ float rescale() {
    if constexpr (!kHalves) return 1.f;
    float largest = 0.f;
#pragma unroll
    for (float x : numbers_) largest = fmaxf(largest, fabsf(x));
    const int bits = __reduce_max_sync(0xffffffffu, __float_as_int(largest));
    // What is not finite stays so.
    const int exponent = bits == 0 || bits >= 0x7f800000 ? 0 : min(14 + 127 - (bits >> 23), 126);
#pragma unroll
    for (float& x : numbers_) x *= ptx::power_of_two(exponent);
    return ptx::power_of_two(-exponent);
  }
  __device__ __forceinline__ void get(int i, uint32 (&parts)[kParts]) const {
    split_pair(numbers_[2 * i], numbers_[2 * i + 1], parts);
  }
  __device__ __forceinline__ void store_dbias(const Sm80BackwardParams& p, int batch, int head,
                                              int first_query, int first_key) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;
    const int64 row = static_cast<int64>(batch) * p.query_heads + head;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int query = first_query + fragment::first_column(lane) + fragment::column(i);
      const int key = first_key + lane / 4 + fragment::kRowStep * fragment::row(i);
      if (query < p.query_len && key < p.kv_len) {
        static_cast<float*>(p.dbias)[(row * p.query_len + query) * p.kv_len + key] = numbers_[i];
      }
    }
  }

 private:
  float numbers_[kScores];
};
using Packed = Operand<Element>;

struct Fragment {
  const Sm80BackwardParams& p;
  const Walk& walk;
  const Step& at;
  int first_key, first_query;

  // From S^T to P^T, which is packed as well. With dropout what is dropped gets a mark, and is zero
  // in `packed`; with a softcap x becomes P times the cap's slope, with a function times its own.
  __device__ __forceinline__ void to_probabilities(Scores& x, Packed& packed,
                                                   uint32 minus_lse) const {
    if constexpr (kHasBias) add_bias(x);
    score_function(p, x);
    if (walk.is_whole<kFragmentQueries>(at, first_key, first_query)) {
      exponentials<false>(x, packed, minus_lse);
    } else {
      exponentials<true>(x, packed, minus_lse);
    }
  }

  // dS^T of P^T and dP^T.
  __device__ __forceinline__ void to_gradients(const Scores& x, const Scores& dp, Packed& gradient,
                                               uint32 minus_delta) const {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 delta = numbers(minus_delta, j);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        float low = score_gradient(x[i], dp[i], delta.x);
        float high = score_gradient(x[i + 1], dp[i + 1], delta.y);
        if constexpr (kHasDbias && kStoresDbias) {  // what is hidden may hold NaN
          low = x[i] == 0.f ? 0.f : low;
          high = x[i + 1] == 0.f ? 0.f : high;
        }
        gradient.set(i / 2, low, high);
      }
    }
  }

 private:
  // -lse or -delta of the two queries to which elements 4j to 4j + 3 belong.
  __device__ __forceinline__ float2 numbers(uint32 of_step, int j) const {
    const int column = first_query % kStepQueries + 8 * j + fragment::first_column(threadIdx.x);
    return ptx::load_shared_f2(of_step + column * 4);
  }

  __device__ __forceinline__ void add_bias(Scores& x) const {
    constexpr int kColumns = kFragmentQueries < 32 ? kFragmentQueries : 32;  // as registers allow
#pragma unroll
    for (int part = 0; part < kFragmentQueries / kColumns; ++part) {
      bias::ColumnTile<kColumns> tile;
      tile.load(p, walk.unit.batch, walk.head(at), first_query + part * kColumns, first_key);
      tile.visit([&](int i, float bias) {
        float& score = x[part * (kColumns / 2) + i];
        score = with_bias(p, score, bias);
      });
    }
  }

  template <bool kPartial>
  __device__ __forceinline__ void exponentials(Scores& x, Packed& packed, uint32 minus_lse) const {
    Dropped<kScores> dropped;
    if constexpr (kHasDropout) {
      const Draws draws(p, walk.unit.batch, walk.head(at));
      dropped.draw(p, draws, first_query, first_key);
    }
    ScoreFunctionAndSlope<Sm80BackwardParams> function;
    function.read(p, walk.unit.batch, walk.head(at));
    const Place query = place(first_query + fragment::first_column(threadIdx.x));
    const int key = first_key + static_cast<int>(threadIdx.x) % 32 / 4;
    const Place keys[2] = {place(key), place(key + fragment::kRowStep)};
    const auto apply = [&](float score, int i, float& slope) {
      if constexpr (!kHasScoreFunction) return score;
      return function.value(p, score, column_after<kQueries>(query, fragment::column(i)),
                            fragment::row(i) == 0 ? keys[0] : keys[1], slope);
    };
    FunctionOfScores<decltype(function)::kTogether, kScores> made;
    made.begin(x, apply);
    constexpr int kCount = kFragmentQueries < 32 ? 32 : kFragmentQueries;
    const auto run = [&](const auto& see) {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float2 shifts = numbers(minus_lse, j);
        bool seen[4];
        see(j, seen);
        float slopes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = x[4 * j + i];
          if constexpr (kHasScoreFunction) {
            score = made.value(score, 4 * j + i, slopes[i], apply);
          } else {
            slopes[i] = score_slope(score);
          }
          score = probability_of(fmaf(score, p.scale_log2, i % 2 == 0 ? shifts.x : shifts.y));
          score = seen[i] ? score : 0.f;
          if constexpr (kHasDropout && !kScoreHasSlope) score = dropped.mark(4 * j + i, score);
        }
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i += 2) {
          if constexpr (kHasDropout && !kScoreHasSlope) {
            packed.set_positive(i / 2, x[i], x[i + 1]);
          } else {
            packed.set(i / 2, x[i], x[i + 1]);
          }
          if constexpr (kHasDropout && kScoreHasSlope) {
            packed.drop(i / 2, dropped.drops(i), dropped.drops(i + 1));
          }
        }
        if constexpr (kHasSlope) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x_i = x[4 * j + i];
            // The slope of a hidden pair may be NaN.
            x_i = kZeroesHidden && x_i == 0.f ? 0.f : x_i * slopes[i];
            if constexpr (kHasDropout && kScoreHasSlope) x_i = dropped.mark(4 * j + i, x_i);
          }
        }
      }
    };
    if constexpr (kPartial) {
      const SeenPairs<kCount, kQueries> pairs(p, walk.unit.batch, walk.head(at), walk.unit.sight,
                                              first_key + static_cast<int>(threadIdx.x) % 32 / 4,
                                              first_query);
      run([&](int j, bool (&seen)[4]) { pairs.see(j, seen); });
    } else {
      run([](int, bool (&seen)[4]) {
        for (bool& one : seen) one = true;
      });
    }
  }
};

}  // namespace backward
