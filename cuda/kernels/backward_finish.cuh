// Last kernel of the backward pass: dq = scale * dq_sum, rounded, in the user's layout. One block
// per 64-row tile and 64-column box; the tile turns through shared memory so that rows leave in
// 128-byte pieces. With kSharesKeys the last blocks do the same for dk and dv of 64 keys each. Rows
// of dq, dk and dv that are not finite are computed again (backward_exact.cuh): with kMarksRows
// that is all that is left, and a few blocks look at the marks.
#pragma once

#include "backward_exact.cuh"
#include "backward_sums.cuh"
#include "fragment.cuh"

namespace backward {

inline constexpr int kFinishThreads = 128;

// 64 columns of dq of 64 rows on their way from the order of fragments to that of rows.
template <class Of>
struct FinishTile {
  static constexpr int kPitch = 64 + 8;  // elements; 16 bytes of padding spread the rows over banks
  alignas(16) uint16 elements[64 * kPitch];

  __device__ __forceinline__ void set(int row, int column, float low, float high) {
    *reinterpret_cast<uint32*>(elements + row * kPitch + column) = Of::pack(low, high);
  }
  // Eight elements of a row, to columns of `to`, a row of dq.
  __device__ __forceinline__ void store(int row, int column, uint16* to, int to_column,
                                        int before = 0) const {
    const uint4 piece = *reinterpret_cast<const uint4*>(elements + row * kPitch + column);
    if constexpr (kEarlyColumns<kHeadDim> > 0) {
      store_early<kHeadDim>(to, to_column, before, piece);
    } else if constexpr (kWholePieces) {
      __stcs(reinterpret_cast<uint4*>(to + to_column), piece);
    } else {
      store_piece<kHeadDim>(to, to_column, piece);
    }
  }
};
template <>
struct FinishTile<Float32> {
  static constexpr int kPitch = 64 + 4;
  alignas(16) float elements[64 * kPitch];

  __device__ __forceinline__ void set(int row, int column, float low, float high) {
    *reinterpret_cast<float2*>(elements + row * kPitch + column) = float2{low, high};
  }
  __device__ __forceinline__ void store(int row, int column, float* to, int to_column,
                                        int = 0) const {
    const Eight piece = load_piece<kPitch>(elements + row * kPitch, column);
    if constexpr (kWholePieces) {  // dk's and dv's too, which may be wider than dq
      store_piece<8>(to + to_column, 0, piece);
    } else {
      store_piece<kHeadDim>(to, to_column, piece);
    }
  }
};

// Has any unit added to this tile of the sum? Only in deterministic mode may there be none: there
// the first unit stores, and nothing else writes the sum before.
template <class Params>
__device__ __forceinline__ bool is_summed(const Params& p, int tile) {
  if constexpr (!kDeterministic) return true;
  return p.turns[tile / (kQueries / 64 * kHeadBoxes) * kTurnParts] != 0;
}

// With kSharesKeys: CTAs that make dk and dv, behind those for dq.
template <class Params>
__device__ __forceinline__ int key_ctas(const Params& p) {
  if constexpr (!kSharesKeys) return 0;
  return p.batch * p.kv_heads * key_blocks(p) * (kKeys / 64);
}

// A tile of sums of 64 columns to rows of an array, `at(row)` their first elements: rows beyond
// `rows` and columns beyond `columns` are not there. Are the sums finite?
template <class Tile, class At>
__device__ __forceinline__ bool finish_tile(Tile& tile, const float4 (&values)[8], float scale,
                                            int rows, int columns, void* array, At at) {
  const int row = fragment::first_row(threadIdx.x), column = fragment::first_column(threadIdx.x);
  bool finite = true;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    finite = finite && is_finite((values[j].x * 0.f + values[j].y * 0.f) +
                                 (values[j].z * 0.f + values[j].w * 0.f));
    tile.set(row, 8 * j + column, values[j].x * scale, values[j].y * scale);
    tile.set(row + fragment::kRowStep, 8 * j + column, values[j].z * scale, values[j].w * scale);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 16 + threadIdx.x / 8, c = threadIdx.x % 8 * 8;
    if (r < rows && c < columns) {
      tile.store(r, c, static_cast<ResultElement::Bits*>(array) + at(r), c);
    }
  }
  __syncthreads();
  return finite;
}

// With kSharesKeys: dk and dv of 64 keys, whose sums are tiles of `slab`. Are they finite?
template <class Params, class Tile>
__device__ __forceinline__ bool finish_keys(const Params& p, int slab, Tile& tile) {
  const int slabs = key_blocks(p) * (kKeys / 64), head_index = slab / slabs;
  const int row0 = (slab - head_index * slabs) * 64, rows = p.kv_len - row0;
  const int batch = head_index / p.kv_heads, kv_head = head_index - batch * p.kv_heads;
  bool finite = true;
#pragma unroll 1
  for (int i = 0; i < KeySumTile::kTiles && rows > 0; ++i) {
    const bool of_value = i >= kHeadBoxes;
    const int first = (of_value ? i - kHeadBoxes : i) * 64, dim = of_value ? kValueDim : kHeadDim;
    const KeySumTile sum(p, slab, i);
    float4 values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // what is beyond was not added
      values[j] = first + 8 * j < dim ? sum.load(j) : float4{0.f, 0.f, 0.f, 0.f};
    }
    finite &= finish_tile(tile, values, of_value ? value_scale(p) : query_key_scale(p), rows,
                          dim - first, of_value ? p.dvalue_data : p.dkey_data, [&](int r) {
                            return key_row(p, batch, row0 + r, kv_head) * dim + first;
                          });
  }
  return finite;
}

// With kRing: the tiles that the main kernel finished whose marks this CTA looks after.
template <class Params>
__device__ __forceinline__ Range own_tiles(const Params& p, int tiles) {
  if constexpr (!kRing) return {0, 0};
  const int share = ceil_div(tiles, static_cast<int>(gridDim.x) - key_ctas(p));
  const int begin = min(tiles, static_cast<int>(blockIdx.x) * share);
  return {begin, min(tiles, begin + share)};
}
template <class Params>
__device__ __forceinline__ bool any_tile_marked(const Params& p, Range tiles) {
  bool marked = false;
  if constexpr (kRing) {
    for (int i = tiles.begin + static_cast<int>(threadIdx.x); i < tiles.end; i += kFinishThreads) {
      marked = marked || p.dq_marks[i] != 0;
    }
  }
  return marked;
}

// With kMarksRows: dq is there, and marks of 64 rows each. Is one of this CTA's set?
template <class Params>
__device__ __forceinline__ bool finish_stored(const Params& p, Suspects& suspects) {
  const int rows = p.batch * p.query_len * p.query_heads, count = ceil_div(rows, 64);
  const int share = ceil_div(count, static_cast<int>(gridDim.x) - key_ctas(p));
  const int begin = min(count, static_cast<int>(blockIdx.x) * share);
  suspects = {-1, {begin, min(count, begin + share)}, own_groups(p)};
  bool marked = any_marked(p, suspects.groups);
  for (int i = begin + static_cast<int>(threadIdx.x); i < suspects.tiles.end; i += kFinishThreads) {
    marked = marked || p.dq_marks[i] != 0;
  }
  return marked;
}

// Stores the CTA's results. Has one of its threads found something that is not finite, or a mark?
template <class Params, class Tile>
__device__ __forceinline__ bool store_results(const Params& p, Tile& tile, Suspects& suspects) {
  const int tiles = query_blocks(p) * (kQueries / 64);
  if constexpr (kSharesKeys) {
    const int slab = blockIdx.x - (gridDim.x - key_ctas(p));
    if (slab >= 0) {
      suspects = {-1, {0, 0}, {4 * slab, 4 * slab + 4}};
      return __syncthreads_or(!finish_keys(p, slab, tile));
    }
  }
  if constexpr (kMarksRows) return __syncthreads_or(finish_stored(p, suspects));
  // The heads that the main kernel took last are still in L2 and come first.
  const int all = kRing ? p.batch * p.query_heads * tiles * kHeadBoxes : gridDim.x - key_ctas(p);
  const int index = all - 1 - blockIdx.x;
  const int box = index % kHeadBoxes;
  const int head_index = index / kHeadBoxes / tiles;
  const int row0 = (index / kHeadBoxes - head_index * tiles) * 64;
  const int batch = head_index / p.query_heads, head = head_index - batch * p.query_heads;

  const SumTile sum = sum_tile(p, batch, head, row0, box);
  float4 values[8];
  if (is_summed(p, index)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = sum.load(j);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = float4{0.f, 0.f, 0.f, 0.f};
  }
  suspects = {index, own_tiles(p, all), own_groups(p)};
  bool finite = !any_marked(p, suspects.groups) && !any_tile_marked(p, suspects.tiles);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    finite = finite && is_finite((values[j].x * 0.f + values[j].y * 0.f) +
                                 (values[j].z * 0.f + values[j].w * 0.f));
  }
  const int row = fragment::first_row(threadIdx.x), column = fragment::first_column(threadIdx.x);
  const float scale = query_key_scale(p);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    tile.set(row, 8 * j + column, values[j].x * scale, values[j].y * scale);
    tile.set(row + fragment::kRowStep, 8 * j + column, values[j].z * scale, values[j].w * scale);
  }
  const bool repairs = __syncthreads_or(!finite);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 16 + threadIdx.x / 8, c = threadIdx.x % 8 * 8;
    const int before = columns_before<kHeadDim>(head);
    if (row0 + r < p.query_len && box * 64 + c < before + kHeadDim) {
      const int64 at = query_row(p, batch, row0 + r, head) * kHeadDim;
      tile.store(r, c, static_cast<ResultElement::Bits*>(p.dquery) + at, box * 64 + c, before);
    }
  }
  return repairs;
}

template <class Params>
__device__ __forceinline__ void finish(const Params& p) {
  if (is_left_to_other(p)) return;
  __shared__ FinishTile<ResultElement> tile;
  Suspects suspects;
  if (!store_results(p, tile, suspects)) return;
  __syncthreads();  // the results are written
  exact_suspects(p, suspects);
}

}  // namespace backward
