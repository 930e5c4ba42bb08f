// Decoding, where the CTAs of a cluster share a batch row: how they merge what they found.
//
// Each adds up what its warps found and sends it on, a part of every row's columns to each CTA,
// which merges and writes that part. An mbarrier counts the bytes that come: nobody reads what is
// another's, so nobody waits for others to end.
#pragma once

#include "decode_attend.cuh"
#include "ring.cuh"

namespace decode {

// Pieces are four columns of a row. A CTA has runs of them, 32 bytes of a result in 16 bits, in
// turn.
inline constexpr int kRowPieces = kValueColumns / 4, kRun = 4, kRowRuns = kRowPieces / kRun;
inline constexpr int kMostRuns = ceil_div(kShareRows * kRowRuns, kCluster);  // of a CTA

// What the CTAs of the cluster sent to this one.
struct Gathered {
  float4 values[kCluster][kMostRuns * kRun];  // relative to 2^base
  float2 rows[kCluster][kShareRows];          // base and sum
  Barrier all;
};

template <class Loader>
struct ClusterMerge {
  const DecodeParams& p;
  const Share& share;
  Gathered& gathered;
  int rows;  // of the batch row, that exist

  __device__ __forceinline__ ClusterMerge(const DecodeParams& p, const Share& share,
                                          Gathered& gathered)
      : p(p), share(share), gathered(gathered) {
    rows = existing_rows(p, share);
  }

  // One thread calls, before the cluster meets for the first time.
  __device__ __forceinline__ void expect() const {
    Loader::expect(ptx::shared_address(&gathered.all),
                   kCluster * (runs() * kRun * sizeof(float4) + rows * sizeof(float2)));
  }

  // All threads of kWarps * 32 call, after all have left what they found. `factor`: of the sums.
  __device__ __forceinline__ void write(const Unit& unit, const Found& found, float factor,
                                        int thread) const {
    for (int i = thread; i < rows * kCluster; i += kWarps * 32) {
      const int row = i / kCluster;
      const float base = largest_base(found, row);
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float weight = ptx::exp2_approx(found.base[warp][row] - base);
        total = fmaf(found.total[warp][row], weight, total);
      }
      ptx::send_to(&gathered.rows[share.part][row], make_float2(base, total), i % kCluster,
                   &gathered.all);
    }
    for (int i = thread; i < rows * kRowPieces; i += kWarps * 32) {
      const int row = i / kRowPieces, column = i % kRowPieces * 4, run = i / kRun;
      const float base = largest_base(found, row);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float weight = ptx::exp2_approx(found.base[warp][row] - base);
        const float4 x = *reinterpret_cast<const float4*>(&found.values[warp][row][column]);
        sum.x = fmaf(x.x, weight, sum.x);
        sum.y = fmaf(x.y, weight, sum.y);
        sum.z = fmaf(x.z, weight, sum.z);
        sum.w = fmaf(x.w, weight, sum.w);
      }
      if constexpr (kQuantized) {
        const float of_row = Attend::factor_of_row(base, factor);
        sum = make_float4(sum.x * of_row, sum.y * of_row, sum.z * of_row, sum.w * of_row);
      }
      ptx::send_to(&gathered.values[share.part][run / kCluster * kRun + i % kRun], sum,
                   run % kCluster, &gathered.all);
    }
    // Also who has nothing to write waits, while others send to this CTA.
    Loader::wait(ptx::shared_address(&gathered.all), 0);
    for (int i = thread; i < runs() * kRun; i += kWarps * 32) {
      const int piece = (i / kRun * kCluster + share.part) * kRun + i % kRun;
      const int row = piece / kRowPieces, column = piece % kRowPieces * 4;
      write_merged(p, unit, Place(p, share, row), column, kCluster,
                   [&](int cta, float2& of, float4& values) {
                     of = gathered.rows[cta][row];
                     values = gathered.values[cta][i];
                   });
    }
  }

 private:
  // The runs of columns that this CTA merges.
  __device__ __forceinline__ int runs() const {
    return max(rows * kRowRuns - share.part + kCluster - 1, 0) / kCluster;
  }
  static __device__ __forceinline__ float largest_base(const Found& found, int row) {
    float base = kNoBase;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) base = fmaxf(base, found.base[warp][row]);
    return base;
  }
};

}  // namespace decode
