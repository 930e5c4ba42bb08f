// Decoding: where the positions of a block lie. A block is kPieces pieces of kBoxRows positions,
// each in one page for sure; a lane of the warp that loads has every 32nd.
#pragma once

#include "decode_schedule.cuh"
#include "tile.cuh"

namespace decode {

inline constexpr int kPieces = kBlockKV / kBoxRows;
inline constexpr int kPiecesOfLane = ceil_div(kPieces, 32);
inline constexpr int kPiecesOfRound = kPieces < 32 ? kPieces : 32;  // one of each lane
static_assert(kBlockKV % kBoxRows == 0 && kBoxRows <= 256);

// Tiles of a block in shared memory: of each head keys, then of each values. float32 lies as it is,
// in boxes of 32 columns.
inline constexpr int kElementBytes = sizeof(Bits);
template <int kDim>
inline constexpr int kBoxes = ceil_div(kDim * kElementBytes, kBoxRowBytes);
template <int kDim>
inline constexpr int kTileBytes = kBoxes<kDim> * kBlockKV * kBoxRowBytes;
inline constexpr int kKeyBytes = kTileBytes<kHeadDim>;
inline constexpr int kValueBytes = kValuesInKeys ? 0 : kTileBytes<kValueDim>;
inline constexpr int kStageBytes = kHeads * (kKeyBytes + kValueBytes);

inline constexpr int kNotNeeded = -1, kNone = -2;

// The pages of this lane's pieces of a block, or kNotNeeded, or kNone for one that is needed and is
// none.
struct Pages {
  int of[kPiecesOfLane];

  __device__ __forceinline__ Pages(const DecodeParams& p, const Unit& unit, int block) {
    const Range seen = positions_of(p, unit.length);
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = i * 32 + threadIdx.x % 32;
      const int first = block * kBlockKV + piece * kBoxRows;
      of[i] = kNotNeeded;
      if (piece >= kPieces || first >= seen.end || first + kBoxRows <= seen.begin) continue;
      if constexpr (kPaged) {
        const int page =
            p.page_table[static_cast<int64>(unit.batch) * p.columns + first / p.page_size];
        of[i] = page >= 0 && page < p.pages ? page : kNone;
      } else {
        of[i] = unit.batch;
      }
    }
  }

  // The pieces that are to be loaded, and whether a needed one has no page. Whole warps call.
  __device__ __forceinline__ int count() const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) own += of[i] >= 0 ? 1 : 0;
    return __reduce_add_sync(0xffffffffu, own);
  }
  __device__ __forceinline__ bool lack() const {
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) lacks = lacks || of[i] == kNone;
    return __any_sync(0xffffffffu, lacks);
  }
};

// The page of a position of a batch row that is not refused, or -1.
__device__ __forceinline__ int page_of(const DecodeParams& p, int batch, int position) {
  if constexpr (!kPaged) return batch;
  const int page = p.page_table[static_cast<int64>(batch) * p.columns + position / p.page_size];
  return page < p.pages ? max(page, -1) : -1;
}
// The eight elements of a row of a tile of kBlockKV rows from column 8 * index on.
__device__ __forceinline__ void store_in_tile(uint32 tile, int row, int index, const uint4& piece) {
  ptx::store_shared_x4(chunk_address<kBlockKV>(tile, row, index), piece.x, piece.y, piece.z,
                       piece.w);
}
__device__ __forceinline__ void store_in_tile(uint32 tile, int row, int index, const Eight& piece) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* x = piece.x + 4 * i;
    ptx::store_shared_x4(chunk_address<kBlockKV>(tile, row, 2 * index + i), __float_as_uint(x[0]),
                         __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
}

// The place of a row of the cache, see RowPieces, or -1.
template <int kDim>
__device__ __forceinline__ int64 place_of(const DecodeParams& p, int batch, int position,
                                          int kv_head) {
  const int page = page_of(p, batch, position);
  if (page < 0) return -1;
  const int64 slot = static_cast<int64>(page) * p.page_size + position % p.page_size;
  return (slot * p.kv_heads + kv_head) * RowPieces<kDim>::kStride;
}

// Calls load(block, pages) for the blocks of a part, in order.
template <class AnyLine, class Load>
__device__ __forceinline__ void for_blocks(const DecodeParams& p, const AnyLine& line,
                                           const Share& share, Load load) {
  line.walk(share, [&](const Unit& unit, const Range& blocks) {
    Pages pages(p, unit, blocks.begin);
    for (int block = blocks.begin; block < blocks.end; ++block) {
      load(block, pages);
      // Ahead of the wait for a free stage.
      if (block + 1 < blocks.end) pages = Pages(p, unit, block + 1);
    }
  });
}

}  // namespace decode
