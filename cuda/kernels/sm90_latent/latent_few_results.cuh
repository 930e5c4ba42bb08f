// Latent decoding, few query rows: what becomes of a unit's sums.
#pragma once

#include "sm90_latent/latent_few_scores.cuh"

namespace decode {

struct FewSums : FewScores {
  using FewScores::FewScores;

  uint32 units = 0;                                 // behind this warp
  float base[kQueryTiles][2], sum[kQueryTiles][2];  // of this lane's queries; of its keys
  int exponent;                                     // of the scales of this warp's quarter
  float output[4][4 * kQueryTiles];                 // features 8 * group + 2 * i and the next

  __device__ __forceinline__ void finish(bool is_whole) {
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum[tile][i] += __shfl_xor_sync(0xffffffffu, sum[tile][i], step);
        }
        if (group == 0) shared.sums[query_row(tile, i)][warp] = sum[tile][i];
      }
    }
    meet();
    const float scale = ptx::power_of_two(exponent - kWeightExponent - kScaleExponent);
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = query_row(tile, i);
        const FewRow place(p, row);
        if (!place.exists) continue;
        const float4* const of = reinterpret_cast<const float4*>(shared.sums[row]);
        const float4 a = of[0], b = of[1];
        const float total = (a.x + a.y + (a.z + a.w)) + (b.x + b.y + (b.z + b.w));
        float sums[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] = output[j / 2][4 * tile + 2 * (j % 2) + i] * scale;
        if (is_whole) {
          store(place, conclude(p, base[tile][i], total, unit.batch, place.head), sums);
        } else {
          leave(row, base[tile][i], total, sums);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const FewRow& place, const Conclusion& end,
                                        const float (&sums)[8]) const {
    const int64 row =
        (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = Element::pack(sums[2 * i] * end.factor, sums[2 * i + 1] * end.factor);
    }
    static_cast<uint4*>(p.out)[row * (kValueDim / 8) + 8 * warp + group] =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    if (warp == 0 && group == 0) {
      p.lse[(static_cast<int64>(unit.batch) * p.query_heads + place.head) * p.query_len +
            place.query] = end.lse;
    }
  }
  // For latent_merge.cuh, see LeftPiece: of each of four pieces two columns.
  __device__ __forceinline__ void leave(int row, float own_base, float total,
                                        const float (&sums)[8]) const {
    const int64 at = partial_row(blockIdx.x, units == 0, 0);
    const int column = 64 * ptx::opaque(warp) + 8 * group, half = column / kHalfColumns;
    const int of_group =
        (2 * half + row / 8 % 2) * (kHalfColumns / 32) + column % kHalfColumns / 32;
    const int piece = of_group * kLeftThreads + row / 16 * 32 + row % 8 * 4;
    unsigned char* const to = left_of(p, at) + piece * kLeftBytes + group % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float2*>(to + i * kLeftBytes) = make_float2(sums[2 * i], sums[2 * i + 1]);
    }
    if (warp == 0 && group == 0) {
      reinterpret_cast<LeftRow*>(p.partial_rows)[at + row] = {own_base, total, 0, 0};
    }
  }
};

}  // namespace decode
