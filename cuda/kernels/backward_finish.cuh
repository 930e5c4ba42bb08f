// Last kernel of the backward pass: dq = scale * dq_sum, rounded, in the user's layout. One block
// per 64-row tile and 64-column box; the tile turns through shared memory so that rows leave in
// 128-byte pieces. Rows of dq, dk and dv that are not finite are computed again
// (backward_exact.cuh).
#pragma once

#include "backward_exact.cuh"
#include "fragment.cuh"

namespace backward {

inline constexpr int kFinishThreads = 128;

// Has any unit added to this tile of the sum? Only in deterministic mode may there be none: there
// the first unit stores, and nothing else writes the sum before.
template <class Params>
__device__ __forceinline__ bool is_summed(const Params& p, int tile) {
  if constexpr (!kDeterministic) return true;
  return p.turns[tile / (kQueries / 64 * kHeadBoxes) * kTurnParts] != 0;
}

template <class Params>
__device__ __forceinline__ void finish(const Params& p) {
  constexpr int kPitch = 64 + 8;  // elements; 16 bytes of padding spread the rows over the banks
  __shared__ alignas(16) uint16 tile[64 * kPitch];
  const int tiles = query_blocks(p) * (kQueries / 64);
  // The heads that the main kernel took last are still in L2 and come first.
  const int index = gridDim.x - 1 - blockIdx.x;
  const int box = index % kHeadBoxes;
  const int head_index = index / kHeadBoxes / tiles;
  const int row0 = (index / kHeadBoxes - head_index * tiles) * 64;
  const int batch = head_index / p.query_heads, head = head_index - batch * p.query_heads;
  const int warp = threadIdx.x / 32;

  const SumTile sum = sum_tile(p, batch, head, row0, box);
  float4 values[8];
  if (is_summed(p, index)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = sum.load(j);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = float4{0.f, 0.f, 0.f, 0.f};
  }
  const Range marks = own_marks(p);
  bool finite = !any_marked(p, marks);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    finite = finite && is_finite((values[j].x * 0.f + values[j].y * 0.f) +
                                 (values[j].z * 0.f + values[j].w * 0.f));
  }
  const int row = fragment::first_row(threadIdx.x), column = fragment::first_column(threadIdx.x);
  const float scale = query_key_scale(p);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32* low = reinterpret_cast<uint32*>(tile + row * kPitch + 8 * j + column);
    uint32* high =
        reinterpret_cast<uint32*>(tile + (row + fragment::kRowStep) * kPitch + 8 * j + column);
    *low = Element::pack(values[j].x * scale, values[j].y * scale);
    *high = Element::pack(values[j].z * scale, values[j].w * scale);
  }
  const bool repair = __syncthreads_or(!finite);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 16 + threadIdx.x / 8, c = threadIdx.x % 8 * 8;
    if (row0 + r < p.query_len && box * 64 + c < kHeadDim) {
      const int64 at = query_row(p, batch, row0 + r, head) * kHeadDim + box * 64 + c;
      uint16* to = static_cast<uint16*>(p.dquery) + at;
      const uint4 piece = *reinterpret_cast<const uint4*>(tile + r * kPitch + c);
      if constexpr (kWholePieces) {
        __stcs(reinterpret_cast<uint4*>(to), piece);
      } else {
        store_piece<kHeadDim>(to - box * 64 - c, box * 64 + c, piece);
      }
    }
  }
  if (!repair) return;
  __syncthreads();  // the rows are written
#pragma unroll 1
  for (int r = warp; r < 64 && row0 + r < p.query_len; r += 4) {
    if (!row_is_finite(tile, r * kPitch, min(64, kHeadDim - box * 64))) {
      exact_dq(p, batch, head, row0 + r, box * 64);
    }
  }
  exact_marked(p, marks);
}

}  // namespace backward
