// The results of parts of units (kSplits) become those of units. Included in place of
// forward_entries.cuh by calls that have parts.
#pragma once

#include "sm90/forward_entries.cuh"

namespace forward {

inline constexpr int kJoinLanes = 16, kJoinThreads = 16 * kJoinLanes;  // of a row, of a CTA
inline constexpr float kSeesNothing = -1.0f;  // in the place of a part's weight
inline constexpr uint32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int step = 1; step < kJoinLanes; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float largest_of_row(float x) {
#pragma unroll
  for (int step = 1; step < kJoinLanes; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}

template <class Of>
union RowPiece {
  typename PieceOf<Of>::Type whole;
  typename Of::Bits one[8];
};

// A warp's marks of 16 rows of all parts become the unit's, and those of other parts none.
template <class Params>
__device__ __forceinline__ void join_marks(const Params& p, int first, int warp) {
  uint32 marks = 0;
#pragma unroll 1
  for (int part = threadIdx.x; part < p.split_parts; part += 32) {
    uint32& own = p.marks[(first + part) * kWarpsOfConsumers + warp];
    marks |= own;
    own = 0;
  }
  marks = __reduce_or_sync(kAllLanes, marks);
  __syncwarp();
  if (threadIdx.x == 0) p.marks[first * kWarpsOfConsumers + warp] = marks;
}

// A CTA for 16 rows of a unit in parts: those of a warp of the main kernel, with their marks.
template <class Params>
__device__ __forceinline__ void join_parts(const Params& p) {
  const int unit = blockIdx.x / kWarpsOfConsumers, warp = blockIdx.x % kWarpsOfConsumers;
  const int first = p.first_split + unit * p.split_parts, lane = threadIdx.x % kJoinLanes;
  const UnitIndex at = unit_at(p, first);
  const int of_unit = warp * 16 + threadIdx.x / kJoinLanes;
  const int packed = at.query_block * kUnitRows + of_unit, query = packed / kPackedHeads;
  const int head = at.head * kPackedHeads + packed % kPackedHeads;
  const int64 row = static_cast<int64>(unit) * p.split_parts * kUnitRows + of_unit;
  const float* lse = p.part_lse + row;
  const auto* rows = static_cast<const StoredElement::Bits*>(p.parts) + row * kValueDim;
  ptx::wait_for_the_kernel_ahead();
  if (threadIdx.x < 32) join_marks(p, first, warp);
  const int parts = query < p.query_len ? p.split_parts : 0;  // lanes of other rows shuffle along
  float largest = kNegativeInfinity;
#pragma unroll 1
  for (int part = lane; part < parts; part += kJoinLanes) {
    largest = fmaxf(largest, lse[part * kUnitRows]);
  }
  largest = largest_of_row(largest);
  const float base = largest == kNegativeInfinity ? 0.0f : largest;
  constexpr int kPieces = ceil_div(kValueDim, 8 * kJoinLanes);
  float sums[kPieces][8] = {}, total = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < p.split_parts; begin += kJoinLanes) {
    const int mine = begin + lane, count = min(p.split_parts - begin, kJoinLanes);
    const float own_lse = mine < parts ? lse[mine * kUnitRows] : kNegativeInfinity;
    const bool sees = own_lse != kNegativeInfinity;
    const float weight = sees ? ptx::exp2_approx((own_lse - base) * kLog2E) : kSeesNothing;
    if (sees) total += weight;
#pragma unroll(4 / kPieces)
    for (int part = 0; part < count; ++part) {
      const float own = __shfl_sync(kAllLanes, weight, part, kJoinLanes);
      if (own == kSeesNothing) continue;  // what has no weight may be NaN, and counts
      const auto* from = rows + static_cast<int64>(begin + part) * (kUnitRows * kValueDim);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int column = 8 * (lane + i * kJoinLanes);
        if (column >= kValueDim) continue;
        const RowPiece<StoredElement> piece{load_piece<kValueDim>(from, column)};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          sums[i][k] = fmaf(own, StoredElement::unpack(piece.one[k]), sums[i][k]);
        }
      }
    }
  }
  total = sum_of_row(total);
  if (parts == 0) return;
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  auto* out =
      static_cast<ResultElement::Bits*>(p.out) + query_row(p, at.batch, query, head) * kValueDim;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int column = 8 * (lane + i * kJoinLanes);
    if (column >= kValueDim) continue;
    RowPiece<ResultElement> piece;
#pragma unroll
    for (int k = 0; k < 8; ++k) piece.one[k] = ResultElement::round(sums[i][k] * factor);
    store_piece<kValueDim>(out, column, piece.whole);
  }
  if (lane == 0) {
    p.lse[lse_row(p, at.batch, query, head)] = largest + ptx::log2_approx(total) * kLn2;
  }
}

}  // namespace forward

// Behind the main kernel.
extern "C" __global__ void __launch_bounds__(forward::kJoinThreads)
    flash_forward_join(const __grid_constant__ ForwardParams p) {
  if constexpr (kSplits) forward::join_parts(p);
}
