// What parts of the pages in common and a tail give a row becomes its result: the last kernel of a
// call with tails.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

inline constexpr int kMergeThreads = 256, kRowLanes = 16, kMergedRows = kMergeThreads / kRowLanes;

// The thread's eight columns of a row, one of 16 lanes'. `Of` is named so late because programs
// without tails may have elements that are no pairs.
template <class Params, class Of = Element>
__device__ __forceinline__ void merge_parts(const Params& p) {
  constexpr int kAtOnce = 4;  // parts whose loads are under way together
  const int column = threadIdx.x % kRowLanes * 8;
  const int64 step = static_cast<int64>(p.query_len) * p.query_heads;  // to the next batch row
  const int64 to = static_cast<int64>(blockIdx.x) * kMergedRows + threadIdx.x / kRowLanes;
  if (to >= p.requests * step || column >= kValueDim) return;
  const int request = static_cast<int>(to / step);
  const int64 row = to - request * step;
  const Tail tail = tail_of(p, request, static_cast<int>(row / p.query_heads));
  const int64 first_part = static_cast<int64>(request) * p.parts_in_common;
  ptx::wait_for_the_kernel_ahead();
  float largest = kNegativeInfinity, total = 0.0f, sums[8] = {};
#pragma unroll 1
  for (int first = 0; first <= p.parts_in_common; first += kAtOnce) {
    float lse[kAtOnce];
    uint4 piece[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i;
      const int64 batch =
          part < p.parts_in_common ? first_part + part : batch_in_common(p) + request;
      lse[i] = kNegativeInfinity;
      if (part > p.parts_in_common) continue;
      lse[i] = p.lse[batch * step + row];
      const uint16* from = static_cast<const uint16*>(p.out) + (batch * step + row) * kValueDim;
      piece[i] = *reinterpret_cast<const uint4*>(from + column);
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
      const float weight = ptx::exp2_approx((lse[i] - base) * kLog2E);
      if (weight == 0.0f) continue;  // of a part that may hold anything
      total += weight;
      const uint32 words[4] = {piece[i].x, piece[i].y, piece[i].z, piece[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sums[2 * k] = fmaf(weight, Of::unpack_low(words[k]), sums[2 * k]);
        sums[2 * k + 1] = fmaf(weight, Of::unpack_high(words[k]), sums[2 * k + 1]);
      }
    }
  }
  float factor = total == 0.0f ? 0.0f : 1.0f / total,
        lse = largest + ptx::log2_approx(total) * kLn2;
  if (!tail.is_needed()) {
    lse = tail.is_wrong() ? kNan : kNegativeInfinity;
#pragma unroll
    for (float& x : sums) x = tail.is_wrong() ? kNan : 0.0f;
    factor = 1.0f;
  }
  uint32 words[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    words[k] = Of::pack(sums[2 * k] * factor, sums[2 * k + 1] * factor);
  }
  uint16* out = static_cast<uint16*>(p.merged) + to * kValueDim;
  *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
  if (column == 0) p.merged_lse[to] = lse;
}

}  // namespace forward
