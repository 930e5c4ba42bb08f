// The last kernel of a call with tails: what parts of the pages in common and the tail give a row
// becomes its result. Rows that the main kernel has marked are computed again first.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

// Eight rows of a warp's 16 of the main kernel, by a warp: 16 lanes have a row.
template <class Params>
struct MergedRows {
  static constexpr int kAtOnce = 4;  // parts whose loads are under way together; and pairs of rows
  const Params& p;
  int request, head, tile, half;

  static __device__ __forceinline__ int tiles(const Params& p) {
    return p.query_blocks * kWarpsOfConsumers;
  }
  static __device__ __forceinline__ int count(const Params& p) {
    return p.requests * (p.query_heads / kPackedHeads) * tiles(p) * 2;
  }
  __device__ __forceinline__ MergedRows(const Params& p, int index) : p(p) {
    const int heads = p.query_heads / kPackedHeads;
    half = index % 2;
    tile = index / 2 % tiles(p);
    head = index / 2 / tiles(p) % heads;
    request = index / 2 / tiles(p) / heads;
  }
  __device__ __forceinline__ int batch_of(int part) const {
    return part < p.parts_in_common ? request * p.parts_in_common + part
                                    : batch_in_common(p) + request;
  }
  __device__ __forceinline__ int mark_of(int part) const {
    return (batch_of(part) * (p.query_heads / kPackedHeads) + head) * tiles(p) + tile;
  }
  // The marks of these rows.
  __device__ __forceinline__ uint32 marks(int part) const {
    return p.marks[mark_of(part)] & 0x11111111u << half;
  }

  __device__ __forceinline__ void merge() const {
    const int lane = threadIdx.x % 32, column = lane % 16 * 8, all = p.parts_in_common + 1;
    int64 row[4], to[4];
    float largest[4], total[4], sums[4][8];
    const int64 step = static_cast<int64>(p.query_len) * p.query_heads;  // to the next batch row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int packed = tile * 16 + half * 8 + 2 * i + lane / 16;
      const int query = min(packed / kPackedHeads, p.query_len - 1);
      row[i] = query_row(p, 0, query, head * kPackedHeads + packed % kPackedHeads);
      to[i] = packed / kPackedHeads < p.query_len ? request * step + row[i] : -1;
      largest[i] = kNegativeInfinity;
      total[i] = 0.0f;
#pragma unroll
      for (float& x : sums[i]) x = 0.0f;
    }
#pragma unroll 1
    for (int first = 0; first < all; first += kAtOnce) {
      float lse[4][kAtOnce];
      uint4 piece[4][kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64 batch = batch_of(min(first + j, all - 1)) * step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          lse[i][j] = kNegativeInfinity;
          piece[i][j] = make_uint4(0, 0, 0, 0);
          if (first + j >= all || column >= kValueDim) continue;
          lse[i][j] = p.lse[batch + row[i]];
          const uint16* from = static_cast<const uint16*>(p.out) + (batch + row[i]) * kValueDim;
          piece[i][j] = *reinterpret_cast<const uint4*>(from + column);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float now = largest[i];
#pragma unroll
        for (float x : lse[i]) now = fmaxf(now, x);
        const float from = now == kNegativeInfinity ? 0.0f : now;
        const float correction = ptx::exp2_approx((largest[i] - from) * kLog2E);
        largest[i] = now;
        total[i] *= correction;
#pragma unroll
        for (float& x : sums[i]) x *= correction;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const float weight = ptx::exp2_approx((lse[i][j] - from) * kLog2E);
          if (weight == 0.0f) continue;  // of a part that may hold anything
          total[i] += weight;
          const uint32 words[4] = {piece[i][j].x, piece[i][j].y, piece[i][j].z, piece[i][j].w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            sums[i][2 * k] = fmaf(weight, Element::unpack_low(words[k]), sums[i][2 * k]);
            sums[i][2 * k + 1] = fmaf(weight, Element::unpack_high(words[k]), sums[i][2 * k + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (to[i] < 0 || column >= kValueDim) continue;
      const Tail tail = tail_of(p, request, static_cast<int>(row[i] / p.query_heads));
      const float instead = tail.is_wrong() ? kNan : 0.0f;
      const bool is_needed = tail.is_needed();
      const float factor = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
      uint32 words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = Element::pack(is_needed ? sums[i][2 * k] * factor : instead,
                                 is_needed ? sums[i][2 * k + 1] * factor : instead);
      }
      uint16* out = static_cast<uint16*>(p.merged) + to[i] * kValueDim;
      *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
      if (column > 0) continue;
      const float lse = largest[i] + ptx::log2_approx(total[i]) * kLn2;
      p.merged_lse[to[i]] = is_needed ? lse : tail.is_wrong() ? kNan : kNegativeInfinity;
    }
  }
};

}  // namespace forward
