// Decoding: what a warp has found of its rows, the running softmax and the sums of weighted values,
// and how warps leave it to be added up.
#pragma once

#include "decode_new_rows.cuh"
#include "decode_quantized.cuh"
#include "decode_schedule.cuh"
#include "decode_split.cuh"
#include "softmax.cuh"

namespace decode {

// A running maximum of every block: memory is what decoding waits for.
struct RunningMaximum {
  static constexpr int kHeadroom = decode::kHeadroom;
  static constexpr float kSumLimit = kInfinity;
};

// Where results are added up. Padding: the rows of a fragment lie in other banks.
inline constexpr int kSumsPitch = kValueColumns + 8;
struct Sums {
  float values[kHeads * kRowTiles][16][kSumsPitch];  // relative to the largest base of the row
  float base[kWarps][16];
  float total[kWarps][16];
};
// What the warps of a CTA of a cluster found, each by itself.
struct Found {
  float values[kWarps][16][kSumsPitch];
  float base[kWarps][16];
  float total[kWarps][16];
};
// What the float16 of each row of queries are to be multiplied by.
template <bool kScaled>
struct QueryFactors {};
template <>
struct QueryFactors<true> {
  float query_factor[kShareRows];
};
// What warps exchange for every block, with kSplitsColumns: a tile of weights, and maxima.
struct Exchange : QueryFactors<kQuantized>, PreparedOf<kNewTokens> {
  static constexpr int kTile = ceil_div(kBlockKV, kBoxColumns) * kShareRows * kBoxRowBytes;
  unsigned char weights[kSplitsColumns ? kTile : 16];
  float largest[kSplitsColumns ? kWarps : 1][16];
};

// Do four warps add up what they have of eight rows or fewer in two places? Two turns take half as
// long as four.
__device__ __forceinline__ bool leaves_halves(const DecodeParams& p, const Share& share) {
  return kKeyParts == 4 && kOwnColumns <= 128 && !kSplitsColumns && existing_rows(p, share) <= 8;
}

// The warps that compute meet, without the loader.
__device__ __forceinline__ void meet() { ptx::named_barrier_sync(1, 32 * kWarps); }

// What a warp has found of its rows: the running softmax and the sums, and how it leaves them.
struct Attended {
  const DecodeParams& p;
  const Unit& unit;
  const Share& share;
  uint32 queries;      // tile of kShareRows
  Exchange* exchange;  // with kSplitsColumns
  int tile, part;      // this warp's rows and keys, of kHeads * kRowTiles and kKeyParts

  SoftmaxState<RunningMaximum> state;
  float output[kOwnColumns / 2];
  Seen seen;          // positions that this thread's rows see
  Range seen_by_all;  // by every row of the unit
  // With kQuantized: of scores, and what the sums are to be multiplied by.
  float score_factor[2], value_factor;

  __device__ __forceinline__ int first_key() const { return kSplitsColumns ? 0 : part * kPartKeys; }
  __device__ __forceinline__ int first_column() const {
    return kSplitsColumns ? part * kOwnColumns : 0;
  }

  // Every row gives NaN from here on.
  __device__ __forceinline__ void spoil() { state.sum[0] = state.sum[1] = kInfinity - kInfinity; }

  // The first of the columns of this thread's sums 4 * j and on.
  static __device__ __forceinline__ int column_of(int j) {
    const int lane = threadIdx.x % 32;
    if constexpr (kQuantized) return j / 2 * 16 + lane % 4 * 4 + j % 2 * 2;
    return 8 * j + fragment::first_column(lane);
  }
  // Sums of eight bits as `leave` has them. Of 16 columns a thread has four side by side: the first
  // and the third, then the others.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; j += 2) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float third = output[fragment::element(j, row, 1)];
        output[fragment::element(j, row, 1)] = output[fragment::element(j + 1, row, 0)];
        output[fragment::element(j + 1, row, 0)] = third;
      }
    }
    if constexpr (kCluster > 1 && !kScalesOfPages) return;  // that of all: ClusterMerge::write
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) {
      output[i] *= factor_of_row(state.base[fragment::row(i)], value_factor);
    }
  }
  // A row that saw nothing stays 0, whatever the scale is.
  static __device__ __forceinline__ float factor_of_row(float base, float value_factor) {
    return base == kNoBase ? 0.0f : value_factor;
  }

  // Does a score's row see its key? `first`: the position of the block's first.
  __device__ __forceinline__ bool sees(int first, int i) const {
    const int column = fragment::first_column(threadIdx.x % 32) + fragment::column(i);
    const int at = first + part * kPartKeys + column;
    const Range& row = seen[fragment::row(i)];
    return at >= row.begin && at < row.end;
  }

  // ---- scales, with kQuantized ------------------------------------------------------------------

  // Before queries are there, whose factors start_scales takes.
  __device__ __forceinline__ void take_scales(const RowScales& of_row) {
    score_factor[0] = score_factor[1] = of_row.key;
    value_factor = of_row.value;
  }
  template <class AnyExchange>
  __device__ __forceinline__ void start_scales(const AnyExchange& exchange) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * 16 + threadIdx.x % 32 / 4 + i * fragment::kRowStep;
      score_factor[i] *= exchange.query_factor[row];
    }
  }
  // Scores of keys as they are stored become those of keys.
  template <class AnyNote>
  __device__ __forceinline__ void scale_scores(float (&scores)[kPartKeys / 2],
                                               const AnyNote& note) const {
#pragma unroll
    for (int i = 0; i < kPartKeys / 2; ++i) {
      float factor = score_factor[fragment::row(i)];
      if constexpr (kScalesOfPages) factor *= note.scales[0][tile / kRowTiles][piece_of(i)];
      scores[i] *= factor;
    }
  }
  // The piece of the block that the key of a score is in.
  __device__ __forceinline__ int piece_of(int i) const {
    const int column = fragment::first_column(threadIdx.x % 32) + fragment::column(i);
    return (part * kPartKeys + column) / kBoxRows;
  }
  // Weights of values as they are stored, by the largest scale so far, which `correction` is of
  // too. A key that a row does not see has the weight 0, whatever its scale is.
  template <class AnyNote>
  __device__ __forceinline__ void scale_weights(float (&weights)[kPartKeys / 2],
                                                float (&correction)[2], const AnyNote& note,
                                                int first, bool is_partial) {
    const float* const scales = note.scales[1][tile / kRowTiles];
    float largest = 0.0f;
    for (int i = threadIdx.x % 32; i < kPieces; i += 32) largest = fmaxf(largest, fabsf(scales[i]));
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    const float now = fmaxf(largest, value_factor);
    const float inverse = 1.0f / now;
    const float kept = now == value_factor ? 1.0f : value_factor * inverse;
    value_factor = now;
#pragma unroll
    for (float& x : correction) x *= kept;
#pragma unroll
    for (int i = 0; i < kPartKeys / 2; ++i) {
      const bool hides = is_partial && !sees(first, i);
      weights[i] *= hides ? 0.0f : scales[piece_of(i)] * inverse;
    }
  }

  // Adds what was found to that of the warps with the same rows, for `write`, one after the other,
  // or with leaves_halves two beside two.
  __device__ __forceinline__ void leave(Sums& sums) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * fragment::kRowStep, warp = tile * kKeyParts + part;
      const float total = fragment::quad_sum(state.sum[i]);
      if (lane % 4 == 0) {
        sums.base[warp][row] = state.base[i];
        sums.total[warp][row] = total;
      }
    }
    meet();
    const bool halves = leaves_halves(p, share);
    const int turns = kSplitsColumns ? 1 : halves ? 2 : kKeyParts;
    const int own_turn = kSplitsColumns ? 0 : halves ? part / 2 : part;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      if (own_turn == turn) add_to(sums, turn > 0, halves);
      meet();
    }
  }
  __device__ __forceinline__ void add_to(Sums& sums, bool adds, bool halves) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i > 0 && halves) return;
      const int row = lane / 4 + i * fragment::kRowStep;
      const int at_row = halves ? row + part % 2 * 8 : row;
      const float weight = ptx::exp2_approx(state.base[i] - largest_base(sums, tile, row));
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        const int at = fragment::element(j, i, 0);
        float2& place =
            *reinterpret_cast<float2*>(&sums.values[tile][at_row][first_column() + column_of(j)]);
        const float2 before = adds ? place : make_float2(0.0f, 0.0f);
        place =
            make_float2(fmaf(output[at], weight, before.x), fmaf(output[at + 1], weight, before.y));
      }
    }
  }

  // Leaves what was found of the first `rows`, for decode_cluster.cuh.
  __device__ __forceinline__ void leave(Found& found, int warp, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * fragment::kRowStep;
      const float total = fragment::quad_sum(state.sum[i]);
      if (row >= rows) continue;
      if (lane % 4 == 0) {
        found.base[warp][row] = state.base[i];
        found.total[warp][row] = total;
      }
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        const int at = fragment::element(j, i, 0);
        *reinterpret_cast<float2*>(&found.values[warp][row][column_of(j)]) =
            make_float2(output[at], output[at + 1]);
      }
    }
  }

  static __device__ __forceinline__ float largest_base(const Sums& sums, int tile, int row) {
    float base = kNoBase;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      base = fmaxf(base, sums.base[tile * kKeyParts + part][row]);
    }
    return base;
  }
};

}  // namespace decode
