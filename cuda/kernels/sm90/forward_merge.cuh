// What parts of the pages in common and a tail give a row becomes its result: the last kernel of a
// call with tails. Rows of parts that are not finite it computes again, for which others have
// flash_forward_exact: that kernel took 1.4 us more, and its text is long.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

inline constexpr int kMergeThreads = 256, kRowLanes = 16, kMergedRows = kMergeThreads / kRowLanes;

// A row of the result by 16 lanes, of which each has eight columns. `Of` is named so late because
// programs without tails may have elements that are no pairs.
template <class Params, class Of>
struct MergedRow {
  const Params& p;
  int request;
  int64 row;  // among those of a batch row
  bool exists;
  int begin;  // its first part: that of its tail, if it does not see pages in common

  float largest, total, sums[8];
  bool flawed;  // a part is, as is_flawed() says

  static __device__ __forceinline__ int column() { return threadIdx.x % kRowLanes * 8; }
  __device__ __forceinline__ int64 step() const {  // to the next batch row
    return static_cast<int64>(p.query_len) * p.query_heads;
  }
  __device__ __forceinline__ int64 row_of(int part) const {
    const int parts = p.parts_in_common;
    const int batch = part < parts ? request * parts + part : batch_in_common(p) + request;
    return batch * step() + row;
  }
  __device__ __forceinline__ uint4* piece_of(int part) const {
    uint16* out = static_cast<uint16*>(p.out) + row_of(part) * kValueDim;
    return reinterpret_cast<uint4*>(out + column());
  }
  static __device__ __forceinline__ void unpack(const uint4& piece, float (&x)[8]) {
    const uint32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = Of::unpack_low(words[k]);
      x[2 * k + 1] = Of::unpack_high(words[k]);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&x)[8], float factor) {
    return make_uint4(
        Of::pack(x[0] * factor, x[1] * factor), Of::pack(x[2] * factor, x[3] * factor),
        Of::pack(x[4] * factor, x[5] * factor), Of::pack(x[6] * factor, x[7] * factor));
  }
  // Values that a row does not see, or an overflow, may have made it so. With a NaN lse it is NaN.
  static __device__ __forceinline__ bool is_flawed(float lse, const uint4& piece) {
    uint32 found = Of::accumulate_nonfinite(0, piece.x);
    found = Of::accumulate_nonfinite(found, piece.y);
    found = Of::accumulate_nonfinite(found, piece.z);
    found = Of::accumulate_nonfinite(found, piece.w);
    return lse == kInfinity || (found != 0 && lse == lse && lse != kNegativeInfinity);
  }

  __device__ __forceinline__ void add_parts() {
    constexpr int kAtOnce = 5;  // parts whose loads are under way together
    largest = kNegativeInfinity;
    total = 0.0f;
    flawed = false;
#pragma unroll
    for (float& x : sums) x = 0.0f;
#pragma unroll 1
    for (int first = begin; first <= p.parts_in_common; first += kAtOnce) {
      float lse[kAtOnce];
      uint4 piece[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        lse[i] = kNegativeInfinity;
        piece[i] = make_uint4(0, 0, 0, 0);
        if (first + i > p.parts_in_common) continue;
        lse[i] = p.lse[row_of(first + i)];
        piece[i] = *piece_of(first + i);
      }
      float now = largest;
#pragma unroll
      for (float x : lse) now = fmaxf(now, x);
      const float base = now == kNegativeInfinity ? 0.0f : now;
      const float correction = ptx::exp2_approx((largest - base) * kLog2E);
      largest = now;
      total *= correction;
#pragma unroll
      for (float& x : sums) x *= correction;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        flawed = flawed || is_flawed(lse[i], piece[i]);
        const float weight = ptx::exp2_approx((lse[i] - base) * kLog2E);
        if (weight == 0.0f) continue;  // of a part that may hold anything
        total += weight;
        float x[8];
        unpack(piece[i], x);
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[k] = fmaf(weight, x[k], sums[k]);
      }
    }
  }

  // Computes the row's part again if it is flawed, key by key. Whole warps call.
  __device__ __forceinline__ void repair(int part) const {
    bool own = false;
    if (part >= begin) own = is_flawed(p.lse[row_of(part)], *piece_of(part));
    const uint32 lanes = __ballot_sync(0xffffffffu, own);
    if (lanes == 0) return;
    own = (lanes >> (threadIdx.x & kRowLanes) & 0xffffu) != 0;
    const int head = static_cast<int>(row % p.query_heads);
    const int token = static_cast<int>(row / p.query_heads);
    const Range keys = KeysOfUnit::in_part(p, request, part);
    const int count = own ? keys.end - keys.begin : 0;
    const int most = __reduce_max_sync(0xffffffffu, count);
    const int64 first_key = static_cast<int64>(request) * p.kv_heads + kv_head_of(p, head);
    const KeyRows<kHeadDim> key_rows(p, first_key);
    const KeyRows<kValueDim> value_rows(p, first_key);
    const bool has_keys = own && column() < kHeadDim, has_values = own && exists;
    const auto load = [](const void* array, int64 at) {
      return *reinterpret_cast<const uint4*>(static_cast<const uint16*>(array) + at + column());
    };
    float query[8] = {}, base = kNegativeInfinity, sum = 0.0f, out[8] = {}, unbounded[8] = {};
    if (has_keys) unpack(load(p.query_data, query_row(p, request, token, head) * kHeadDim), query);
#pragma unroll 1
    for (int i = 0; i < most; ++i) {
      const int at = keys.begin + min(i, count - 1);
      const uint4 none = make_uint4(0, 0, 0, 0);
      const uint4 key = has_keys ? load(p.key_data, key_rows.at(at)) : none;
      const uint4 value = has_values ? load(p.value_data, value_rows.at(at)) : none;
      float score = 0.0f, x[8];
      unpack(key, x);
#pragma unroll
      for (int k = 0; k < 8; ++k) score = fmaf(query[k], x[k], score);
#pragma unroll
      for (int step = 1; step < kRowLanes; step *= 2) {
        score += __shfl_xor_sync(0xffffffffu, score, step);
      }
      if (i >= count) continue;
      score *= p.scale_log2;
      const float now = fmaxf(base, score);
      const float correction = base == now ? 1.0f : ptx::exp2_approx(base - now);
      const float weight = ptx::exp2_approx(score - now);
      base = now;
      sum = fmaf(sum, correction, weight);
      unpack(value, x);
#pragma unroll
      for (int k = 0; k < 8; ++k) {  // whatever the weight, which may be 0
        const bool finite = fabsf(x[k]) < kInfinity;
        out[k] = fmaf(out[k], correction, finite ? weight * x[k] : 0.0f);
        unbounded[k] += finite ? 0.0f : x[k];
      }
    }
    if (!has_values) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = out[k] / sum + unbounded[k];
    *piece_of(part) = pack(out, 1.0f);
    if (column() == 0) p.lse[row_of(part)] = (base + ptx::log2_approx(sum)) * kLn2;
  }
};

template <class Params, class Of = Element>
__device__ __forceinline__ void merge_parts(const Params& p) {
  const int64 step = static_cast<int64>(p.query_len) * p.query_heads;
  const int64 to = static_cast<int64>(blockIdx.x) * kMergedRows + threadIdx.x / kRowLanes;
  const int request = min(static_cast<int>(to / step), p.requests - 1);
  using Row = MergedRow<Params, Of>;
  Row row{p, request, to - request * step, to < p.requests * step && Row::column() < kValueDim};
  Tail tail{};
  if (row.exists) tail = tail_of(p, request, static_cast<int>(row.row / p.query_heads));
  row.begin = p.parts_in_common + (row.exists ? 0 : 1);
  if (tail.sees_common() && tail.is_needed()) row.begin = 0;
  ptx::wait_for_the_kernel_ahead();
  row.add_parts();
  if (__any_sync(0xffffffffu, row.flawed)) {
#pragma unroll 1
    for (int part = 0; part < p.parts_in_common; ++part) row.repair(part);
    __syncwarp();
    row.add_parts();
  }
  if (!row.exists) return;
  float factor = row.total == 0.0f ? 0.0f : 1.0f / row.total;
  float lse = row.largest + ptx::log2_approx(row.total) * kLn2;
  if (!tail.is_needed()) {
    lse = tail.is_wrong() ? kNan : kNegativeInfinity;
#pragma unroll
    for (float& x : row.sums) x = tail.is_wrong() ? kNan : 0.0f;
    factor = 1.0f;
  }
  uint16* out = static_cast<uint16*>(p.merged) + to * kValueDim;
  *reinterpret_cast<uint4*>(out + Row::column()) = Row::pack(row.sums, factor);
  if (Row::column() == 0) p.merged_lse[to] = lse;
}

}  // namespace forward
