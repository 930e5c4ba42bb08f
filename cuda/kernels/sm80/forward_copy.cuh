// Tiles of queries, keys and values on their way to shared memory. Read forward_products.cuh next.
#pragma once

#include "halves.cuh"
#include "rows.cuh"
#include "sm80/forward_walk.cuh"
#include "sm80/ptx_sm80.cuh"
#include "split.cuh"
#include "tile.cuh"

namespace forward {

// Scores that warps which share their rows tell each other, in place of the keys: bytes.
inline constexpr int kExchangeBytes = kValueWarps == 1 ? 0 : kValueWarps * kUnitRows * kBlockKV * 4;
inline constexpr int kKeyBytes = larger(kParts * kPlaneBytes<kHeadDim, kBlockKV>, kExchangeBytes);
inline constexpr int kValueBytes = kParts * kPlaneBytes<kValueDim, kBlockKV>;

// Bases and sums of the softmax, four numbers of a thread's rows of each tile, with kParksSoftmax.
template <bool kAreThere>
struct alignas(128) ParkedSoftmax {
  float4 softmax[kRowTiles][kThreads];
};
template <>
struct ParkedSoftmax<false> {};

// kStages = 0: values take the place of the keys.
struct alignas(128) Shared : ParkedSoftmax<kParksSoftmax> {
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

// What is copied: elements, or halves of them in planes.
using halves::Copied;
using halves::kPlanes;
inline constexpr int kCopiedHead = halves::kCopied<kHeadDim>;
inline constexpr int kCopiedValue = halves::kCopied<kValueDim>;

// Rows of a tile that four warps fill.
template <class Of, int kDim, int kRows, int kHeads>
struct RowsOf {
  using Type = CopiedRows<kDim, kRows, 4, kHeads, kPlanes>;
};
template <int kDim, int kRows, int kHeads>
struct RowsOf<Float32, kDim, kRows, kHeads> {
  using Type = SplitRows<kDim, kRows, kParts, 128>;
};
template <int kDim, int kRows, int kHeads = 1>
using TileRows = typename RowsOf<Copied, kDim, kRows, kHeads>::Type;

// A thread's part of the blocks of keys or values where rows are pieces of 16 bytes: of every box a
// piece, of every 16th row. What of its addresses is the same in all blocks stays in registers.
template <int kDim>
struct DensePieces {
  static constexpr bool kFits = (kParts == 1 || kHalves) && kDim % 8 == 0;
  static constexpr int kStep = 16;                            // rows at a time
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);  // of a plane
  static constexpr int kRow = kPlanes * kDim;                 // elements

  uint64 from;  // of block 0, bytes
  uint32 to;    // in a tile
  int row, block_bytes;

  __device__ __forceinline__ DensePieces(const Sm80ForwardParams& p, const Walk& walk,
                                         uint32 thread)
      : row(thread / 8), block_bytes(kBlockKV * 2 * kRow * p.kv_heads) {
    from = 2 * (KeyRows<kRow>(p, walk.first_key(walk.kv_head)).at(row) + thread % 8 * 8);
    to = row * kBoxRowBytes + swizzled(thread % 8, static_cast<uint32>(row));
  }
  // Rows from `count` on read as zero.
  __device__ __forceinline__ void begin(const void* array, uint32 tile, int block,
                                        int count) const {
    uint64 source =
        reinterpret_cast<uint64>(array) + from + static_cast<int64>(block) * block_bytes;
#pragma unroll
    for (int i = 0; i < kBlockKV / kStep; ++i) {
#pragma unroll
      for (int j = 0; j < kPlanes * kBoxes; ++j) {
        const int box = j % kBoxes, plane = j / kBoxes;
        const bool inside = box * kBoxColumns + kBoxColumns <= kDim ||
                            static_cast<int>(threadIdx.x) % 8 * 8 < kDim - box * kBoxColumns;
        ptx::copy_async_past_l1(tile + to + (j * kBlockKV + i * kStep) * kBoxRowBytes,
                                source + plane * (2 * kDim) + box * kBoxRowBytes,
                                inside && row < count - i * kStep);
      }
      source += block_bytes / (kBlockKV / kStep);
    }
  }
};

// The same of a request's pages. A row whose page is none reads as zero: ahead of a window, where
// nobody sees it.
template <int kDim>
struct PagedPieces {
  static constexpr bool kFits = kDim % 8 == 0;
  static_assert(kFits || !kFromPages);
  static constexpr int kStep = 16;
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  static constexpr int kSteps = kBlockKV / kStep;
  static constexpr uint32 kSlots = kPageSize;  // without a sign: quotients take fewer instructions
  static constexpr int kNumbers = kPageSize % kBlockKV == 0 ? 1 : kSteps;  // of pages, of a block

  const Sm80ForwardParams& p;
  uint32 to;  // in a tile
  int request, row;
  int column;  // in a row [K, dim] of a page

  __device__ __forceinline__ PagedPieces(const Sm80ForwardParams& p, const Walk& walk,
                                         uint32 thread)
      : p(p), request(walk.request), row(thread / 8), column(walk.kv_head * kDim + thread % 8 * 8) {
    to = row * kBoxRowBytes + swizzled(thread % 8, static_cast<uint32>(row));
  }
  __device__ __forceinline__ void begin(const void* array, uint32 tile, int block,
                                        int count) const {
    const int first = block * kBlockKV;
    const int* table = p.page_table + static_cast<int64>(request) * p.table_columns;
    int pages[kNumbers];  // all are asked for before one is needed
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const uint32 key = kNumbers == 1 ? first : first + row + i * kStep;
      pages[i] = kNumbers == 1 || row < count - i * kStep ? table[key / kSlots] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int page = pages[kNumbers == 1 ? 0 : i];
      const uint32 slot = static_cast<uint32>(first + row + i * kStep) % kSlots;
      const bool there =
          row < count - i * kStep && static_cast<uint32>(page) < static_cast<uint32>(p.pages);
      const int64 element =
          (static_cast<int64>(page) * kSlots + slot) * (p.kv_heads * kDim) + column;
      const uint64 source = reinterpret_cast<uint64>(array) + 2 * element;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const bool inside = box * kBoxColumns + kBoxColumns <= kDim ||
                            static_cast<int>(threadIdx.x) % 8 * 8 < kDim - box * kBoxColumns;
        ptx::copy_async_past_l1(tile + to + (box * kBlockKV + i * kStep) * kBoxRowBytes,
                                source + box * kBoxRowBytes, inside && there);
      }
    }
  }
};
template <int kDim, bool kPages>
struct PiecesOf {
  using Type = DensePieces<kDim>;
};
template <int kDim>
struct PiecesOf<kDim, true> {
  using Type = PagedPieces<kDim>;
};
template <int kDim>
using BlockPieces = typename PiecesOf<kDim, kFromPages>::Type;

// Copies are under way in the order in which tiles are taken, keys and values in turn, each a group
// of its own. A tile is taken when the thread's part of it is there and then, past a barrier, that
// of all; which says too that all are done with the tile before, whose place the next copy takes.
// kStages = 0: a tile is copied when it is wanted. Four of eight warps copy queries and keys, the
// others values.
struct Copies {
  const Sm80ForwardParams& p;
  const Walk& walk;
  Shared& shared;
  Place next;  // of which values, or keys and values, are not under way
  BlockPieces<kCopiedHead> key_pieces;
  BlockPieces<kCopiedValue> value_pieces;

  __device__ __forceinline__ Copies(const Sm80ForwardParams& p, const Walk& walk, Shared& shared,
                                    const Place& first)
      : p(p),
        walk(walk),
        shared(shared),
        next(first),
        key_pieces(p, walk, threadIdx.x % kCopying),
        value_pieces(pieces_of<kCopiedValue>()) {
    if (copies_keys()) {
      queries().begin((walk.sight.query_length - walk.first_query()) * kPackedHeads);
    }
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
      if constexpr (!BlockPieces<kCopiedHead>::kFits) keys(place).finish();
    }
    __syncthreads();
    if constexpr (kStages > 0) copy_values();
    return ptx::shared_address(shared.key(place.stage));
  }
  __device__ __forceinline__ uint32 take_values(const Place& place) {
    if constexpr (kStages == 0) {
      __syncthreads();
      copy_values();
    }
    wait();
    if constexpr (!BlockPieces<kCopiedValue>::kFits) {
      if (copies_values()) values(place).finish();
    }
    __syncthreads();
    if constexpr (kStages > 0) copy_keys();
    return ptx::shared_address(shared.value(place.stage));
  }
  __device__ __forceinline__ uint32 query_tile() const { return queries().tile; }
  // What is taken after `place`, whose values have been.
  __device__ __forceinline__ Place after(Place place) const {
    if constexpr (kStages <= 1) return next;
    place.advance(walk);
    return place;
  }

 private:
  static constexpr int kCopying = 128;  // threads, of each tile
  static_assert(kThreads == kCopying || kThreads == 2 * kCopying);

  // One set of registers where dims are equal.
  template <int kDim>
  __device__ __forceinline__ BlockPieces<kDim> pieces_of() const {
    if constexpr (kDim == kCopiedHead) {
      return key_pieces;
    } else {
      return {p, walk, threadIdx.x % kCopying};
    }
  }
  static __device__ __forceinline__ bool copies_keys() {
    return kThreads == kCopying || threadIdx.x < kCopying;
  }
  static __device__ __forceinline__ bool copies_values() {
    return kThreads == kCopying || threadIdx.x >= kCopying;
  }
  static __device__ __forceinline__ void wait() {
    ptx::copy_async_wait_but<kStages == 0 ? 0 : 2 * kStages - 2>();
  }
  template <int kDim, int kRows, int kHeads = 1>
  static __device__ __forceinline__ TileRows<kDim, kRows, kHeads> rows_of(const unsigned char* tile,
                                                                          const void* array,
                                                                          int64 first,
                                                                          int64 pitch) {
    // Opaque: addresses would be computed ahead of the loop, for registers that are not there.
    return {ptx::shared_address(tile), static_cast<const Copied::Bits*>(array) + first, pitch,
            static_cast<uint32>(ptx::opaque(threadIdx.x)) % kCopying};
  }
  __device__ __forceinline__ TileRows<kCopiedHead, kUnitRows, kPackedHeads> queries() const {
    const int64 row = query_row(p, walk.batch, walk.first_query(), walk.head);
    return rows_of<kCopiedHead, kUnitRows, kPackedHeads>(
        shared.query, kHalves ? p.query_halves : p.query_data, row * (kPlanes * kCopiedHead),
        static_cast<int64>(p.query_heads) * (kPlanes * kCopiedHead));
  }
  template <int kDim>
  __device__ __forceinline__ TileRows<kDim, kBlockKV> block_of(const void* array,
                                                               const unsigned char* tile,
                                                               int block) const {
    const DenseKeyRows<kPlanes * kDim> rows(p,
                                            key_row(p, walk.batch, 0, ptx::opaque(walk.kv_head)));
    return rows_of<kDim, kBlockKV>(tile, array, rows.at(block * kBlockKV), rows.step);
  }
  __device__ __forceinline__ TileRows<kCopiedHead, kBlockKV> keys(const Place& place) const {
    return block_of<kCopiedHead>(key_data(), shared.key(place.stage), place.block);
  }
  __device__ __forceinline__ TileRows<kCopiedValue, kBlockKV> values(const Place& place) const {
    return block_of<kCopiedValue>(value_data(), shared.value(place.stage), place.block);
  }
  __device__ __forceinline__ const void* key_data() const {
    return kHalves ? p.key_halves : p.key_data;
  }
  __device__ __forceinline__ const void* value_data() const {
    return kHalves ? p.value_halves : p.value_data;
  }
  // Rows past the length read as zero: what they hold may be NaN.
  __device__ __forceinline__ int rows_left() const {
    return walk.sight.kv_length - next.block * kBlockKV;
  }
  __device__ __forceinline__ void copy_keys() {
    if (copies_keys() && !walk.is_over(next.block)) {
      if constexpr (BlockPieces<kCopiedHead>::kFits) {
        key_pieces.begin(key_data(), ptx::shared_address(shared.key(next.stage)), next.block,
                         rows_left());
      } else {
        keys(next).begin(rows_left());
      }
    }
    ptx::copy_async_commit();
  }
  __device__ __forceinline__ void copy_values() {
    if (!walk.is_over(next.block)) {
      if (copies_values()) {
        if constexpr (BlockPieces<kCopiedValue>::kFits) {
          value_pieces.begin(value_data(), ptx::shared_address(shared.value(next.stage)),
                             next.block, rows_left());
        } else {
          values(next).begin(rows_left());
        }
      }
      next.advance(walk);
    }
    ptx::copy_async_commit();
  }
};

}  // namespace forward
