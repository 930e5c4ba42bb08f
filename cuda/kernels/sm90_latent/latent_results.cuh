// Latent decoding: what becomes of a unit's sums.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

// What a CTA leaves of a unit that it shares lies as its threads have it, 16 bytes of each side by
// side: two times two columns of a row, 8 columns apart.
inline constexpr int kLeftPieces = kShareRows * kValueDim / 4;
struct LeftPiece {
  int row, column;  // of the first two
  __device__ __forceinline__ explicit LeftPiece(int piece) {
    const int of_group = piece / kGroupThreads;  // pairs of 8 columns, then rows, then halves
    column = of_group / (kHalfColumns / 8) * kHalfColumns + of_group % (kHalfColumns / 16) * 16 +
             fragment::first_column(piece);
    row = fragment::first_row(piece) + of_group / (kHalfColumns / 16) % 2 * fragment::kRowStep;
  }
};

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
        leave(partial_row(blockIdx.x, is_first, 0), i, total[i]);
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
  // For latent_merge.cuh: row i of this thread; see LeftPiece. `at` is the unit's first row.
  __device__ __forceinline__ void leave(int64 at, int i, float total) const {
    constexpr int kPairs = kHalfColumns / 16;
    float4* const to = reinterpret_cast<float4*>(p.partial_out + at * kValueColumns) +
                       (2 * kGroup + i) * kPairs * kGroupThreads + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int left = fragment::element(2 * j, i, 0), right = fragment::element(2 * j + 1, i, 0);
      to[j * kGroupThreads] =
          make_float4(output[left], output[left + 1], output[right], output[right + 1]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) {
      reinterpret_cast<float2*>(p.partial_rows)[at + own_row(i)] = make_float2(base[i], total);
    }
  }
};

}  // namespace decode
