// Tiles of queries, keys and values on their way to shared memory. Read forward_rows.cuh next.
#pragma once

#include "rows.cuh"
#include "sm80/forward_walk.cuh"
#include "tile.cuh"

namespace forward {

inline constexpr int kHeadBoxes = ceil_div(kHeadDim, kBoxColumns);
inline constexpr int kValueBoxes = ceil_div(kValueDim, kBoxColumns);

struct alignas(128) Shared {
  unsigned char query[kHeadBoxes * kUnitRows * kBoxRowBytes];
  unsigned char key[kStages][kHeadBoxes * kBlockKV * kBoxRowBytes];
  unsigned char value[kStages][kValueBoxes * kBlockKV * kBoxRowBytes];
};

// A block and where it lies.
struct Place {
  int block;
  int stage = 0;
  __device__ __forceinline__ void advance(const Walk& walk) {
    block = walk.block_after(block);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
};

// Copies are under way in the order in which tiles are taken, keys and values in turn, each a group
// of its own. A tile is taken when the thread's part of it is there and then, past a barrier, that
// of all; which says too that all are done with the tile before, whose place the next copy takes.
struct Copies {
  const Sm80ForwardParams& p;
  const Walk& walk;
  Shared& shared;
  Place next;  // of which values, or keys and values, are not under way

  __device__ __forceinline__ Copies(const Sm80ForwardParams& p, const Walk& walk, Shared& shared)
      : p(p), walk(walk), shared(shared), next{walk.first_block()} {
    queries().begin(walk.sight.query_length - walk.first_query());
    copy_keys();
#pragma unroll
    for (int stage = 1; stage < kStages; ++stage) {
      copy_values();
      copy_keys();
    }
  }
  // Keys of a block and its values after them; `is_first`: queries as well.
  __device__ __forceinline__ uint32 take_keys(const Place& place, bool is_first) {
    ptx::copy_async_wait_but<2 * kStages - 2>();
    if (is_first) queries().finish();
    keys(place).finish();
    __syncthreads();
    copy_values();
    return keys(place).tile;
  }
  __device__ __forceinline__ uint32 take_values(const Place& place) {
    ptx::copy_async_wait_but<2 * kStages - 2>();
    values(place).finish();
    __syncthreads();
    copy_keys();
    return values(place).tile;
  }
  __device__ __forceinline__ uint32 query_tile() const { return queries().tile; }

 private:
  __device__ __forceinline__ CopiedRows<kHeadDim, kUnitRows, 4> queries() const {
    const int64 row = query_row(p, walk.batch, walk.first_query(), walk.head);
    return {ptx::shared_address(shared.query),
            static_cast<const uint16*>(p.query_data) + row * kHeadDim,
            static_cast<int64>(p.query_heads) * kHeadDim};
  }
  template <int kDim>
  __device__ __forceinline__ CopiedRows<kDim, kBlockKV, 4> block_of(const void* array,
                                                                    const unsigned char* tile,
                                                                    int block) const {
    // Opaque: what follows would be computed ahead of the loop, for registers that are not there.
    const KeyRows<kDim> rows(p, key_row(p, walk.batch, 0, ptx::opaque(walk.kv_head)));
    return {ptx::shared_address(tile),
            static_cast<const uint16*>(array) + rows.at(block * kBlockKV), rows.step};
  }
  __device__ __forceinline__ CopiedRows<kHeadDim, kBlockKV, 4> keys(const Place& place) const {
    return block_of<kHeadDim>(p.key_data, shared.key[place.stage], place.block);
  }
  __device__ __forceinline__ CopiedRows<kValueDim, kBlockKV, 4> values(const Place& place) const {
    return block_of<kValueDim>(p.value_data, shared.value[place.stage], place.block);
  }
  // Rows past the length read as zero: what they hold may be NaN.
  __device__ __forceinline__ int rows_left() const {
    return walk.sight.kv_length - next.block * kBlockKV;
  }
  __device__ __forceinline__ void copy_keys() {
    if (!walk.is_over(next.block)) keys(next).begin(rows_left());
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void copy_values() {
    if (!walk.is_over(next.block)) {
      values(next).begin(rows_left());
      next.advance(walk);
    }
    ptx::copy_async_commit();
  }
};

}  // namespace forward
