// Latent decoding, where the CTAs of a cluster share a row: how they merge what they found.
//
// A CTA merges some columns of all rows, which all CTAs send to it, in the place of its queries.
// Thread t gets what threads t have. An mbarrier counts the bytes that come.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

// Eight sums of row i of a thread, two columns of four times 8 from 32 * `piece` on, in float16.
__device__ __forceinline__ uint4 half_sums(const float (&output)[kHalfColumns / 2], int i,
                                           int piece, float scale) {
  uint32 pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int from = fragment::element(4 * piece + k, i, 0);
    pairs[k] = Float16::pack(output[from] * scale, output[from + 1] * scale);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

struct LatentGathered {
  static constexpr int kPieces = kHalfColumns / 32;    // of a row, of a warpgroup
  static constexpr int kOwn = kPieces / kCluster;      // that a CTA merges
  float4 pieces[kCluster][2][2][kOwn][kGroupThreads];  // by sender, warpgroup and row of a thread
  float4 rows[kCluster][kShareRows];                   // base, sum and exponent
};
static_assert(kCluster == 1 || LatentGathered::kPieces % kCluster == 0);
static_assert(kCluster == 1 || sizeof(LatentGathered) <= sizeof(LatentShared::queries));

// One thread calls, before it arrives at the cluster's barrier.
__device__ __forceinline__ void expect_sums(const DecodeParams& p, const Share& share,
                                            LatentShared& shared) {
  constexpr int kOfRow = kValueDim * 2 + kCluster * static_cast<int>(sizeof(float4));
  ptx::barrier_arrive_expect(ptx::shared_address(&shared.gathered),
                             existing_rows(p, share) * kOfRow);
}

template <int kGroup>
struct LatentClusterMerge {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  const Unit& unit;
  const float (&output)[kHalfColumns / 2];
  const float (&base)[2];

  // All CTAs have read their queries.
  __device__ __forceinline__ void wait() const { ptx::cluster_wait(); }

  // Row i of this thread, which exists; its sums relative to 2^exponent.
  __device__ __forceinline__ void send(int i, float total, int exponent) const {
    const float scale = ptx::power_of_two(-exponent);
#pragma unroll
    for (int j = 0; j < LatentGathered::kPieces; ++j) {
      const uint4 x = half_sums(output, i, j, scale);
      const float4 bits = make_float4(__uint_as_float(x.x), __uint_as_float(x.y),
                                      __uint_as_float(x.z), __uint_as_float(x.w));
      ptx::send_to(&place(share.part, i, j % LatentGathered::kOwn), bits, j / LatentGathered::kOwn,
                   &shared.gathered);
    }
    if (kGroup == 1 || threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int cta = 0; cta < kCluster; ++cta) {
      ptx::send_to(&gathered().rows[share.part][own_row(i)],
                   make_float4(base[i], total, __int_as_float(exponent), 0.0f), cta,
                   &shared.gathered);
    }
  }

  // Whole warps call, all of both warpgroups: others send to a CTA that has nothing to write.
  __device__ __forceinline__ void merge() const {
    ptx::barrier_wait(ptx::shared_address(&shared.gathered), 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) merge(i);
  }

 private:
  __device__ __forceinline__ LatentGathered& gathered() const {
    return *reinterpret_cast<LatentGathered*>(shared.queries);
  }
  __device__ __forceinline__ float4& place(int cta, int i, int piece) const {
    return gathered().pieces[cta][kGroup][i][piece][threadIdx.x % kGroupThreads];
  }

  __device__ __forceinline__ void merge(int i) const {
    const int row = own_row(i);
    const Place of(p, share, row);
    const bool exists = of.exists(p);
    float4 rows[kCluster];
    float factors[kCluster], largest = kNoBase, total = 0.0f;
#pragma unroll
    for (int cta = 0; cta < kCluster; ++cta) {
      rows[cta] = exists ? gathered().rows[cta][row] : make_float4(kNoBase, 0.0f, 0.0f, 0.0f);
      largest = fmaxf(largest, rows[cta].x);
    }
#pragma unroll
    for (int cta = 0; cta < kCluster; ++cta) {
      factors[cta] = ptx::exp2_approx(rows[cta].x - largest);
      total = fmaf(rows[cta].y, factors[cta], total);
    }
    Conclusion end{0.0f, 0.0f};
    if (exists) end = conclude(p, largest, total, unit.batch, of.head);
#pragma unroll
    for (int cta = 0; cta < kCluster; ++cta) {
      factors[cta] *= end.factor * ptx::power_of_two(__float_as_int(rows[cta].z));
    }
    const int64 of_unit = static_cast<int64>(unit.batch) * p.query_len + of.query;
    uint4* const to =
        static_cast<uint4*>(p.out) + (of_unit * p.query_heads + of.head) * (kValueDim / 8);
#pragma unroll
    for (int j = 0; j < LatentGathered::kOwn; ++j) {
      float sums[16] = {};  // a fragment, of whose first row these are
#pragma unroll
      for (int cta = 0; cta < kCluster; ++cta) {
        const float4 x = exists ? place(cta, i, j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32 pair = __float_as_uint(four[k]);
          float &low = sums[fragment::element(k, 0, 0)], &high = sums[fragment::element(k, 0, 1)];
          low = fmaf(Float16::unpack_low(pair), factors[cta], low);
          high = fmaf(Float16::unpack_high(pair), factors[cta], high);
        }
      }
      uint32 pieces[4];
      fragment::gather_row(sums, 0, 1.0f, pieces);
      const int chunk = kGroup * LatentGathered::kPieces + share.part * LatentGathered::kOwn + j;
      if (exists) {
        to[4 * chunk + threadIdx.x % 4] = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
      }
    }
    if (exists && kGroup == 0 && share.part == 0 && threadIdx.x % 4 == 0) {
      store_lse(p, unit, of, end.lse);
    }
  }
};

}  // namespace decode
