// From a block of keys to the rows that are loaded for it, with TMA and without: with key_row and
// KeyRows (rows.cuh) all that knows where keys and values lie.
#pragma once

#include "rows.cuh"
#include "sm90/products.cuh"

// Bytes of a block of kRows keys or values in shared memory.
template <int kDim, int kRows, int kPlanes = 1>
inline constexpr int kKeyBlockBytes = kPlanes * ceil_div(kDim, kBoxColumns) * kRows * kBoxRowBytes;

// Where a block's rows lie: boxes of 64 columns one behind the other, each of all rows; with kWhole
// groups of eight rows, each with all of its boxes, so that TMA loads whole rows of a head at once.
template <int kDim, int kRows, bool kWhole>
struct KeyTile {
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  static constexpr int kEight = 8 * kBoxRowBytes;
  static constexpr int kBoxBytes = kWhole ? kEight : kRows * kBoxRowBytes;  // to the next box
  static constexpr int kGroupBytes = kWhole ? kBoxes * kEight : kEight;     // to the next group
  // The chunk of 16 bytes, counted from the first of a row on.
  static __device__ __forceinline__ uint32 chunk(int box, int row, int chunk) {
    if constexpr (!kWhole) return box * kBoxBytes + row * kBoxRowBytes + chunk * 16;
    row += chunk / 8;
    return box * kBoxBytes + row / 8 * kGroupBytes + row % 8 * kBoxRowBytes + chunk % 8 * 16;
  }
};

// Loads the block by TMA; one thread calls, when the bytes are announced at the barrier `full`. Two
// planes are two heads side by side. `column`: where the head's box begins in the map's rows.
template <int kDim, int kRows, int kPlanes = 1>
__device__ __forceinline__ void fetch_key_block(uint32 tile, const TensorMap& map, uint32 full,
                                                uint64 policy, int kv_head, int first_key,
                                                int batch, int column = 0) {
  constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
#pragma unroll
  for (int i = 0; i < kPlanes * kBoxes; ++i) {
    ptx::tma_load(tile + i * kRows * kBoxRowBytes, &map, full, policy,
                  column + i % kBoxes * kBoxColumns, kPlanes * kv_head + i / kBoxes, first_key,
                  batch);
  }
}
// The same by kWarps warps, ready once their arrivals have been seen; `rows` from its first key on,
// of which `count` are left.
template <int kRows, int kWarps, int kDim>
__device__ __forceinline__ void copy_key_block(const DenseKeyRows<kDim>& rows, const void* array,
                                               uint32 tile, int count) {
  fill_tile<kDim, kRows, kWarps>(tile, static_cast<const uint16*>(array) + rows.first, rows.step,
                                 count);
}
