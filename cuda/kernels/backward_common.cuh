// What the kernels of the backward pass share: tile constants, factors of results, P and dS of one
// pair, the query heads of a unit, dS as a bias's gradient.
//
// backward_blocks.cuh has which query blocks a key block meets, and in which order;
// backward_sums.cuh where the sums of dq, dk and dv are kept. Read a family's backward.cuh for the
// kernels and the constants of the generated header. jax_flash/_gpu/backward_schedule.py decides
// the flags of all families, and says what each means and why it is set.
#pragma once

#include "early.cuh"
#include "element.cuh"
#include "fragment.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "terms.cuh"
#include "tile.cuh"
#include "walk.cuh"

namespace backward {

inline constexpr int kQueries = kBlockQ;
inline constexpr int kKeys = kBlockKV;
// Columns past a dim read as zero, but for other heads' with kEarly.
inline constexpr int kHead = round_up(kTileColumns<kHeadDim>, 16);
inline constexpr int kValue = round_up(kTileColumns<kValueDim>, 16);
inline constexpr int kHeadBoxes = ceil_div(kHead, kBoxColumns);
inline constexpr int kValueBoxes = ceil_div(kValue, kBoxColumns);

// Do all rows start at multiples of 16 bytes?
inline constexpr bool kWholePieces =
    kRowAlignment<kHeadDim> == 16 && kRowAlignment<kValueDim> == 16;

template <class Params>
__device__ __forceinline__ int query_blocks(const Params& p) {
  return ceil_div(p.query_len, kQueries);
}
template <class Params>
__device__ __forceinline__ int key_blocks(const Params& p) {
  return ceil_div(p.kv_len, kKeys);
}
// Rows of lse_log2 and minus_delta, of a head, and where those of a query block start. With
// kCompact a block that is the only one has no more of them than fill pieces of 16 bytes.
template <class Params>
__device__ __forceinline__ int stored_rows(const Params& p) {
  if (kCompact && p.query_len <= kQueries) return round_up(p.query_len, 4);
  return query_blocks(p) * kQueries;
}
template <class Params>
__device__ __forceinline__ int64 numbers_of(const Params& p, int block) {
  return static_cast<int64>(block) * (kCompact ? min(stored_rows(p), kQueries) : kQueries);
}

// With dropout P^T dO, dS and the delta that enters it lack the factor 1 / (1 - rate), which dq, dk
// and dv get when they are stored; so they get, with kCarried, what P and dO were multiplied by.
template <class Params>
__device__ __forceinline__ float value_scale(const Params& p) {
  return dropout_scale(p) * result_scale(p);
}
template <class Params>
__device__ __forceinline__ float query_key_scale(const Params& p) {
  return p.scale * value_scale(p);
}
// P of a logit less lse, in units of log2. In a row whose lse has no bits left for its weights'
// sum, beyond 2^24, float32 has no weight above 1 either.
__device__ __forceinline__ float probability_of(float exponent) {
  if constexpr (kFloat32) exponent = exponent > 0.f ? 0.f : exponent;  // NaN stays
  return ptx::exp2_approx(exponent);
}
// dS of one pair, the slope of the logit aside. The P of a dropped pair has a mark (dropout.cuh).
__device__ __forceinline__ float score_gradient(float probability, float dp, float minus_delta) {
  if constexpr (kHasDropout && kScoreHasSlope) {
    return probability * ((__float_as_uint(probability) & 1 ? 0.f : dp) + minus_delta);
  } else if constexpr (kHasDropout) {
    return fmaf(fmaxf(probability, 0.f), dp, fabsf(probability) * minus_delta);
  }
  return probability * (dp + minus_delta);
}

// Query heads of one key/value head.
template <class Params>
__device__ __forceinline__ int group_size(const Params& p) {
  return p.query_heads / p.kv_heads;
}

// Query heads that a unit walks: all of its key/value head, or kUnitHeads, a part of them. Then the
// units of a block of keys add to float32 sums of dk and dv, of which flash_backward_finish makes
// the results.
inline constexpr bool kSharesKeys = kUnitHeads > 0;
static_assert(!kSharesKeys || (!kHalves && !kDbiasByRows && !kDbiasByHeads && kWholePieces));
template <class Params>
__device__ __forceinline__ int unit_heads(const Params& p) {
  return kSharesKeys ? kUnitHeads : group_size(p);
}
// Parts of the query heads of a batch row.
template <class Params>
__device__ __forceinline__ int head_parts(const Params& p) {
  return kSharesKeys ? p.query_heads / max(kUnitHeads, 1) : p.kv_heads;
}

// Do hidden pairs need a dS of zero? A function's slope and a gradient that is stored reach
// results.
inline constexpr bool kZeroesHidden = kScoreHasSlope || (kHasDbias && kStoresDbias);

// With kDbiasByHeads: where dS of a query is kept, of a head that the launch takes.
template <class Params>
__device__ __forceinline__ uint16* stored_scores(const Params& p, int batch, int head, int query) {
  const int heads = p.launched_kv_heads * group_size(p);
  const int first = p.first_kv_head * group_size(p);
  const int64 row = (static_cast<int64>(batch) * heads + head - first) * p.query_len + query;
  return reinterpret_cast<uint16*>(p.dbias_sum) + row * p.kv_len;
}
// With kStoresDbias: dS of a warp's 16 keys, from `first_key` on, is the gradient of a bias that
// nothing shares, or with kDbiasByHeads waits for its sum over the batch rows, or with kDbiasByRows
// is added to that of the rows before. `gradient`: dS^T, packed as an operand of products by rows.
template <class Params, int kCount>
__device__ __forceinline__ void store_dbias(const Params& p, int batch, int head, int first_query,
                                            int first_key, const uint32 (&gradient)[kCount]) {
  const int lane = ptx::opaque(threadIdx.x) % 32;
  const int key = first_key + bias::first_of_four(lane);
  const int query = first_query + lane / 4;
  uint16* to;
  if constexpr (kDbiasByHeads) {
    to = stored_scores(p, batch, head, query) + key;
  } else {
    const int64 own = kDbiasByRows ? head : static_cast<int64>(batch) * p.query_heads + head;
    to = static_cast<uint16*>(p.dbias) + (own * p.query_len + query) * p.kv_len + key;
  }
  // The bias of queries beyond their length may be NaN, and dS of them with it.
  int seeing = p.query_len;
  if constexpr (kHasQueryLengths) seeing = min(seeing, p.query_lengths[batch]);
  // The gradient of the batch rows before, stored by this thread.
  uint2 before[kDbiasByRows ? kCount / 2 : 1] = {};
  if constexpr (kDbiasByRows) {
    const bool adds = kDbiasCleared || batch > 0;
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      // Rows are of whole fours.
      if (adds && query + 8 * j < p.query_len && key < p.kv_len) {
        before[j] = *reinterpret_cast<const uint2*>(to + 8 * j * static_cast<int64>(p.kv_len));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    uint2 four = bias::gather(ptx::transpose_matrix(gradient[2 * j]),
                              ptx::transpose_matrix(gradient[2 * j + 1]));
    if (kHasQueryLengths && query + 8 * j >= seeing) four = {0, 0};
    if constexpr (kDbiasByRows) {
      four = {bias::add_pairs(four.x, before[j].x), bias::add_pairs(four.y, before[j].y)};
    }
    if (query + 8 * j < p.query_len) bias::store_four(to, p.kv_len - key, four);
    to += 8 * static_cast<int64>(p.kv_len);
  }
}

}  // namespace backward
