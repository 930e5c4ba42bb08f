// Parts of units along their keys (kSplits): what a part walks, and how the results of parts become
// a unit's.
//
// Whole units in waves leave multiprocessors idle in the last one. Its units are as many parts as
// multiprocessors can take at once.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

static_assert(!kSplits || (kFloat8 && !kWindowLeft && !kWindowRight),
              "keys of a part count from its first");

// Leaves of `seen` the keys of a part, if the number is one's, and returns its first block.
template <class Params>
__device__ __forceinline__ int narrow_to_part(const Params& p, int number, Visibility& seen) {
  if constexpr (kSplits) {
    const int part = part_at(p, number);
    if (part < 0) return 0;
    const int blocks = ceil_div(ceil_div(p.kv_len, kBlockKV), p.split_parts);
    const int first = part % p.split_parts * blocks;
    seen.kv_length = min(seen.kv_length - first * kBlockKV, blocks * kBlockKV);
    return first;
  }
  return 0;
}

inline constexpr int kJoinLanes = 16, kJoinThreads = 16 * kJoinLanes;

// A CTA for 16 rows of a unit in parts: those of a warp of the main kernel, with their marks.
template <class Params>
__device__ __forceinline__ void join_parts(const Params& p) {
  if constexpr (kSplits) {
    const int unit = blockIdx.x / kWarpsOfConsumers, warp = blockIdx.x % kWarpsOfConsumers;
    const int first = p.first_split + unit * p.split_parts, lane = threadIdx.x % kJoinLanes;
    const UnitIndex at = unit_at(p, first);
    const int of_unit = warp * 16 + threadIdx.x / kJoinLanes;
    const int query = at.query_block * kUnitRows + of_unit;
    const int64 row = static_cast<int64>(unit) * p.split_parts * kUnitRows + of_unit;
    ptx::wait_for_the_kernel_ahead();
    if (threadIdx.x == 0) {
      uint32 marks = 0;
#pragma unroll 1
      for (int part = 0; part < p.split_parts; ++part) {
        uint32& own = p.marks[(first + part) * kWarpsOfConsumers + warp];
        marks |= own;
        own = 0;
      }
      p.marks[first * kWarpsOfConsumers + warp] = marks;
    }
    if (query >= p.query_len) return;
    float largest = kNegativeInfinity, total = 0.0f;
#pragma unroll 1
    for (int part = 0; part < p.split_parts; ++part) {
      largest = fmaxf(largest, p.part_lse[row + part * kUnitRows]);
    }
    const float base = largest == kNegativeInfinity ? 0.0f : largest;
    constexpr int kPieces = ceil_div(kValueDim, 8 * kJoinLanes);
    union Piece {
      PieceOf<ResultElement>::Type whole;
      ResultElement::Bits one[8];
    };
    float sums[kPieces][8] = {};
#pragma unroll 1
    for (int part = 0; part < p.split_parts; ++part) {
      const int64 from = row + part * kUnitRows;
      const float weight = ptx::exp2_approx((p.part_lse[from] - base) * kLog2E);
      total += weight;  // without weight NaN is one still
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int column = 8 * (lane + i * kJoinLanes);
        if (column >= kValueDim) continue;
        const auto* parts = static_cast<const ResultElement::Bits*>(p.parts) + from * kValueDim;
        const Piece piece{load_piece<kValueDim>(parts, column)};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          sums[i][k] = fmaf(weight, ResultElement::unpack(piece.one[k]), sums[i][k]);
        }
      }
    }
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    auto* out = static_cast<ResultElement::Bits*>(p.out) +
                query_row(p, at.batch, query, at.head) * kValueDim;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int column = 8 * (lane + i * kJoinLanes);
      if (column >= kValueDim) continue;
      Piece piece;
#pragma unroll
      for (int k = 0; k < 8; ++k) piece.one[k] = ResultElement::round(sums[i][k] * factor);
      store_piece<kValueDim>(out, column, piece.whole);
    }
    if (lane == 0) {
      p.lse[lse_row(p, at.batch, query, at.head)] = largest + ptx::log2_approx(total) * kLn2;
    }
  }
}

}  // namespace forward
