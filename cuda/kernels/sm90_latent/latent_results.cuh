// Latent decoding: what becomes of a unit's sums.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

// A warpgroup has half of the columns.
template <int kGroup>
struct LatentResults {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  const Unit& unit;
  const float (&output)[kHalfColumns / 2];
  const float (&base)[2];

  // `units` are behind this warpgroup; `sum` is of this thread's columns.
  __device__ __forceinline__ void finish(const float (&sum)[2], uint32 units, bool is_whole,
                                         bool is_first) const {
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = fragment::quad_sum(sum[i]);
      if (threadIdx.x % 4 == 0) shared.sums[units % 2][kGroup][own_row(i)] = total[i];
    }
    ptx::named_barrier_sync(kSumsBarrier, 2 * kGroupThreads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row(i);
      total[i] += shared.sums[units % 2][1 - kGroup][row];
      const Place place(p, share, row);
      if (is_whole) {
        store(place, i, total[i]);
      } else if (place.exists(p)) {
        leave(partial_row(blockIdx.x, is_first, row), i, total[i]);
      }
    }
  }

 private:
  // Whole warps call.
  __device__ __forceinline__ void store(const Place& place, int i, float total) const {
    const bool exists = place.exists(p);
    Conclusion end{0.0f, 0.0f};
    if (exists) end = conclude(p, base[i], total, unit.batch, place.head);
    uint32 pieces[kHalfColumns / 8];
    fragment::gather_row(output, i, end.factor, pieces);
    if (!exists) return;
    const int64 row =
        (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
    uint4* const to = static_cast<uint4*>(p.out) + (row * kValueDim + kGroup * kHalfColumns) / 8;
#pragma unroll
    for (int g = 0; g < kHalfColumns / 32; ++g) {
      to[4 * g + threadIdx.x % 4] =
          make_uint4(pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) store_lse(p, unit, place, end.lse);
  }
  // For latent_merge.cuh.
  __device__ __forceinline__ void leave(int64 at, int i, float total) const {
    float* const to = p.partial_out + at * kValueColumns + kGroup * kHalfColumns +
                      fragment::first_column(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kHalfColumns / 8; ++j) {
      const int of = fragment::element(j, i, 0);
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(output[of], output[of + 1]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) {
      reinterpret_cast<float2*>(p.partial_rows)[at] = make_float2(base[i], total);
    }
  }
};

}  // namespace decode
