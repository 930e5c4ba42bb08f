// dq as the main kernels store it, with kStoresDq: where a unit has all keys of its queries, which
// are one block or, with kPairs, two.
//
// What a unit makes of dq for a block of queries is all of it: there is no sum to zero, to add to
// and to round. Of 64 rows in memory one mark says that some are not finite: flash_backward_finish
// computes those again. Blocks of queries that a unit's walk leaves out are zero:
// flash_backward_prepare clears them.
#pragma once

#include "backward_exact.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_turns.cuh"

namespace backward {

// Stores a warpgroup's accumulators of dQ to a tile of a block of queries, whose first row is
// `index` (sum_index), from the `first` 8 columns of the tile on. Whole warps call.
template <int kCount>
__device__ __forceinline__ void store_dq(const BackwardParams& p, const volatile UnitRecord& u,
                                         int index, int tile, int first,
                                         const float (&values)[kCount]) {
  const int row0 = tile / kHeadBoxes * 64 + fragment::first_row(ptx::opaque(threadIdx.x));
  const float scale = query_key_scale(p);
  // The rows of dq up to those of the batch row: a block's first query would take a register.
  const uint32 end = static_cast<uint32>((u.batch + 1) * p.query_len * p.query_heads);
  const bool finite = all_finite(values);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32 row = index + (row0 + fragment::kRowStep * r) * p.query_heads;
    store_result_row<kHeadDim>(values, r, scale, row < end, p.dquery,
                               static_cast<int64>(row) * kHeadDim,
                               tile % kHeadBoxes * 64 + 8 * first);
    if (!finite && row < end) p.dq_marks[row / 64] = 1;
  }
}

// With kLastStores: a warpgroup's accumulators and what the units before have added to this tile
// are dq. `barrier`: a named one of the warpgroup.
template <int kCount>
__device__ __forceinline__ void store_sum(const BackwardParams& p, const volatile UnitRecord& u,
                                          int index, int tile, int barrier,
                                          const float (&values)[kCount], Turn turn) {
  float total[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[i] = values[i];
  if (!turn.stores()) {
    const SumTile before(p, index, tile);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float4 x = before.load(j);
      total[4 * j] += x.x;
      total[4 * j + 1] += x.y;
      total[4 * j + 2] += x.z;
      total[4 * j + 3] += x.w;
    }
    ptx::named_barrier_sync(barrier, 128);  // all have read what the rows of dq held
  }
  store_dq(p, u, index, tile, 0, total);
}

}  // namespace backward
