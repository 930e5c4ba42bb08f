// Tiles of queries, keys and values on their way to shared memory. Read forward_rows.cuh next.
#pragma once

#include "rows.cuh"
#include "sm80/forward_walk.cuh"
#include "sm80/split.cuh"
#include "tile.cuh"

namespace forward {

// Scores that warps which share their rows tell each other, in place of the keys: bytes.
inline constexpr int kExchangeBytes = kValueWarps == 1 ? 0 : kValueWarps * kUnitRows * kBlockKV * 4;
inline constexpr int kKeyBytes = larger(kParts * kPlaneBytes<kHeadDim, kBlockKV>, kExchangeBytes);
inline constexpr int kValueBytes = kParts * kPlaneBytes<kValueDim, kBlockKV>;

// kStages = 0: values take the place of the keys.
struct alignas(128) Shared {
  unsigned char query[kParts * kPlaneBytes<kHeadDim, kUnitRows>];
  unsigned char
      blocks[kStages == 0 ? larger(kKeyBytes, kValueBytes) : kStages * (kKeyBytes + kValueBytes)];

  __device__ __forceinline__ const unsigned char* key(int stage) const {
    return blocks + stage * kKeyBytes;
  }
  __device__ __forceinline__ const unsigned char* value(int stage) const {
    return blocks + kStages * kKeyBytes + stage * kValueBytes;
  }
};

// A block and where it lies.
struct Place {
  int block;
  int stage = 0;
  __device__ __forceinline__ void advance(const Walk& walk) {
    block = walk.block_after(block);
    stage = stage + 1 >= kStages ? 0 : stage + 1;
  }
};

// Rows of a tile that four warps fill.
template <class Of, int kDim, int kRows>
struct RowsOf {
  using Type = CopiedRows<kDim, kRows, 4>;
};
template <int kDim, int kRows>
struct RowsOf<Float32, kDim, kRows> {
  using Type = SplitRows<kDim, kRows, kParts, 128>;
};
template <int kDim, int kRows>
using TileRows = typename RowsOf<Element, kDim, kRows>::Type;

// Copies are under way in the order in which tiles are taken, keys and values in turn, each a group
// of its own. A tile is taken when the thread's part of it is there and then, past a barrier, that
// of all; which says too that all are done with the tile before, whose place the next copy takes.
// kStages = 0: a tile is copied when it is wanted. Of eight warps four copy queries and keys, the
// others values.
struct Copies {
  const Sm80ForwardParams& p;
  const Walk& walk;
  Shared& shared;
  Place next;  // of which values, or keys and values, are not under way

  __device__ __forceinline__ Copies(const Sm80ForwardParams& p, const Walk& walk, Shared& shared)
      : p(p), walk(walk), shared(shared), next{walk.first_block()} {
    if (copies_keys()) queries().begin(walk.sight.query_length - walk.first_query());
    if constexpr (kStages > 0) copy_keys();
#pragma unroll
    for (int stage = 1; stage < kStages; ++stage) {
      copy_values();
      copy_keys();
    }
  }
  // Keys of a block and its values after them; `is_first`: queries as well.
  __device__ __forceinline__ uint32 take_keys(const Place& place, bool is_first) {
    if constexpr (kStages == 0) {
      __syncthreads();
      copy_keys();
    }
    wait();
    if (copies_keys()) {
      if (is_first) queries().finish();
      keys(place).finish();
    }
    __syncthreads();
    if constexpr (kStages > 0) copy_values();
    return keys(place).tile;
  }
  __device__ __forceinline__ uint32 take_values(const Place& place) {
    if constexpr (kStages == 0) {
      __syncthreads();
      copy_values();
    }
    wait();
    if (copies_values()) values(place).finish();
    __syncthreads();
    if constexpr (kStages > 0) copy_keys();
    return values(place).tile;
  }
  __device__ __forceinline__ uint32 query_tile() const { return queries().tile; }

 private:
  static constexpr int kCopying = 128;  // threads, of each tile
  static_assert(kThreads == kCopying || kThreads == 2 * kCopying);

  static __device__ __forceinline__ bool copies_keys() {
    return kThreads == kCopying || threadIdx.x < kCopying;
  }
  static __device__ __forceinline__ bool copies_values() {
    return kThreads == kCopying || threadIdx.x >= kCopying;
  }
  static __device__ __forceinline__ void wait() {
    ptx::copy_async_wait_but<kStages == 0 ? 0 : 2 * kStages - 2>();
  }
  template <int kDim, int kRows>
  static __device__ __forceinline__ TileRows<kDim, kRows> rows_of(const unsigned char* tile,
                                                                  const void* array, int64 first,
                                                                  int64 pitch) {
    // Opaque: addresses would be computed ahead of the loop, for registers that are not there.
    return {ptx::shared_address(tile), static_cast<const Element::Bits*>(array) + first, pitch,
            static_cast<uint32>(ptx::opaque(threadIdx.x)) % kCopying};
  }
  __device__ __forceinline__ TileRows<kHeadDim, kUnitRows> queries() const {
    const int64 row = query_row(p, walk.batch, walk.first_query(), walk.head);
    return rows_of<kHeadDim, kUnitRows>(shared.query, p.query_data, row * kHeadDim,
                                        static_cast<int64>(p.query_heads) * kHeadDim);
  }
  template <int kDim>
  __device__ __forceinline__ TileRows<kDim, kBlockKV> block_of(const void* array,
                                                               const unsigned char* tile,
                                                               int block) const {
    const KeyRows<kDim> rows(p, key_row(p, walk.batch, 0, ptx::opaque(walk.kv_head)));
    return rows_of<kDim, kBlockKV>(tile, array, rows.at(block * kBlockKV), rows.step);
  }
  __device__ __forceinline__ TileRows<kHeadDim, kBlockKV> keys(const Place& place) const {
    return block_of<kHeadDim>(p.key_data, shared.key(place.stage), place.block);
  }
  __device__ __forceinline__ TileRows<kValueDim, kBlockKV> values(const Place& place) const {
    return block_of<kValueDim>(p.value_data, shared.value(place.stage), place.block);
  }
  // Rows past the length read as zero: what they hold may be NaN.
  __device__ __forceinline__ int rows_left() const {
    return walk.sight.kv_length - next.block * kBlockKV;
  }
  __device__ __forceinline__ void copy_keys() {
    if (copies_keys() && !walk.is_over(next.block)) keys(next).begin(rows_left());
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void copy_values() {
    if (!walk.is_over(next.block)) {
      if (copies_values()) values(next).begin(rows_left());
      next.advance(walk);
    }
    ptx::copy_async_commit();
  }
};

}  // namespace forward
