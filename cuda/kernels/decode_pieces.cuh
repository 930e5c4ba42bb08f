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
// in boxes of 32 columns, eight bits in boxes of 128.
inline constexpr int kElementBytes = kQuantized ? 1 : sizeof(Bits);
inline constexpr int kCacheColumns = kBoxRowBytes / kElementBytes;  // of a box
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

// Eight elements of eight bits.
__device__ __forceinline__ void store_in_tile(uint32 tile, int row, int index, const uint2& piece) {
  const uint32 at = chunk_address<kBlockKV>(tile, row, index / 2) + index % 2 * 8;
  ptx::store_shared(at, piece.x);
  ptx::store_shared(at + 4, piece.y);
}

// Quotients by a scale, to nearest. A division has branches for extreme numbers, which keep its
// neighbours waiting, 100 cycles each; here a scale has one for all.
struct Quotients {
  float scale, inverse;
  bool is_plain;  // no quotient that matters has a remainder below the least number
  __device__ __forceinline__ explicit Quotients(float scale)
      : scale(scale),
        inverse(__fdiv_rn(1.0f, scale)),
        is_plain(fabsf(scale) > 0x1p-60f && fabsf(scale) < 0x1p60f) {}
  // Markstein's: with the inverse to nearest one step gives the quotient to nearest. What saturates
  // is left, as are infinity and NaN, and what a cache has as a zero, whose sign stays.
  __device__ __forceinline__ float of(float x) const {
    const float quotient = x * inverse;
    const float nearest = fmaf(fmaf(-quotient, scale, x), inverse, quotient);
    const float size = fabsf(quotient);
    return size > 0x1p-12f && size < 0x1p20f ? nearest : quotient;
  }
};

// Two numbers of 16 bits by a scale, as a cache of eight bits has them: rounded to nearest, ties to
// even, and saturated.
template <class Of>
__device__ __forceinline__ uint32 quantized_pair(uint32 pair, const Quotients& by) {
  float low = Of::unpack_low(pair), high = Of::unpack_high(pair);
  if (by.is_plain) {
    low = by.of(low);
    high = by.of(high);
  } else {
    low = __fdiv_rn(low, by.scale);
    high = __fdiv_rn(high, by.scale);
  }
  if constexpr (kFloat8) {
    return ptx::pack_e4m3(low, high);
  } else {
    const auto rounded = [](float x) {
      const int whole = static_cast<int>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
      return static_cast<uint32>(x == x ? whole : 0) & 0xffu;
    };
    return rounded(low) | rounded(high) << 8;
  }
}
template <class Of>
__device__ __forceinline__ uint2 quantized(const uint4& piece, float scale) {
  const Quotients by(scale);
  return make_uint2(quantized_pair<Of>(piece.x, by) | quantized_pair<Of>(piece.y, by) << 16,
                    quantized_pair<Of>(piece.z, by) | quantized_pair<Of>(piece.w, by) << 16);
}
// A piece of a new key or value as the cache has it.
template <class AnyPiece>
__device__ __forceinline__ auto cache_piece(const AnyPiece& piece, float scale) {
  if constexpr (kQuantized) {
    return quantized<Element>(piece, scale);
  } else {
    return piece;
  }
}

// A row of the cache in pieces of eight elements.
template <int kDim, bool kEightBits = kQuantized>
struct CachePieces : RowPieces<kDim> {
  using RowPieces<kDim>::RowPieces;
};
template <int kDim>
struct CachePieces<kDim, true> {
  static constexpr int kStride = kDim / 8;
  uint2* row;
  __device__ __forceinline__ CachePieces(void* array, int64 place)
      : row(static_cast<uint2*>(array) + place) {}
  __device__ __forceinline__ void store(int i, const uint2& piece) const { row[i] = piece; }
};

// The number of a row of the cache, or -1. Without pages a position is its slot, without division.
__device__ __forceinline__ int64 row_of(const DecodeParams& p, int batch, int position,
                                        int kv_head) {
  const int page = page_of(p, batch, position);
  if (page < 0) return -1;
  const int64 first = static_cast<int64>(page) * p.page_size;
  return (first + (kPaged ? position % p.page_size : position)) * p.kv_heads + kv_head;
}
// The place of a row of the cache, see CachePieces, or -1.
template <int kDim>
__device__ __forceinline__ int64 place_of(const DecodeParams& p, int batch, int position,
                                          int kv_head) {
  const int64 row = row_of(p, batch, position, kv_head);
  return row < 0 ? -1 : row * CachePieces<kDim>::kStride;
}

// The scale of a kv head in a page, or a batch row without pages.
__device__ __forceinline__ float scale_of(const Scales& scales, int page, int kv_head) {
  return scales.data[page * scales.page + kv_head];
}
// The scale of a kv head in a batch row; with kScalesOfPages there is none.
__device__ __forceinline__ float scale_of_row(const Scales& scales, int batch, int kv_head,
                                              float none) {
  if constexpr (!kQuantized || kScalesOfPages) return none;
  return scale_of(scales, kPaged ? 0 : batch, kv_head);
}
// The scales of keys and values of a batch row, with kQuantized, for a warp's kv head.
struct RowScales {
  static constexpr float kLeast = 0x1p-126f;  // whose reciprocal is finite
  float key, value;
  __device__ __forceinline__ RowScales() {}
  __device__ __forceinline__ RowScales(const DecodeParams& p, int batch, int kv_head)
      : key(scale_of_row(p.key_scale, batch, kv_head, 1.0f)),
        value(scale_of_row(p.value_scale, batch, kv_head, kLeast)) {}
};
// The scales of new keys or values. That of the batch row is loaded here, which a warp does ahead
// of its wait for a block.
struct NewScales {
  const DecodeParams& p;
  const Scales& scales;
  int batch, kv_head;
  float of_row;
  __device__ __forceinline__ NewScales(const DecodeParams& p, const Scales& scales, int batch,
                                       int kv_head)
      : p(p), scales(scales), batch(batch), kv_head(kv_head) {
    of_row = scale_of_row(scales, batch, kv_head, 1.0f);
  }
  // 1 where the position has no page.
  __device__ __forceinline__ float at(int position) const {
    if constexpr (!kScalesOfPages) return of_row;
    const int page = page_of(p, batch, position);
    return page < 0 ? 1.0f : scale_of(scales, page, kv_head);
  }
};

// What the loader tells of a stage: a page that is needed is none, and with kScalesOfPages the
// scales of its pieces, of keys and of values.
template <bool kWithScales>
struct StageNote {
  int spoiled;
};
template <>
struct StageNote<true> {
  int spoiled;
  float scales[2][kHeads][kPieces];
};
using Note = StageNote<kScalesOfPages>;

// The scales of this lane's pieces, which come while a stage is not free yet.
template <bool kWithScales>
struct PieceScales {
  __device__ __forceinline__ PieceScales(const DecodeParams&, const Share&, const Pages&) {}
  template <class AnyNote>
  __device__ __forceinline__ void store(AnyNote&) const {}
};
template <>
struct PieceScales<true> {
  float of[2][kHeads][kPiecesOfLane];
  __device__ __forceinline__ PieceScales(const DecodeParams& p, const Share& share,
                                         const Pages& pages) {
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
#pragma unroll
        for (int i = 0; i < kPiecesOfLane; ++i) {
          const Scales& scales = kind == 0 ? p.key_scale : p.value_scale;
          const int page = pages.of[i];
          of[kind][head][i] = page < 0 ? 0.0f : scale_of(scales, page, share.kv_head + head);
        }
      }
    }
  }
  // Lanes are together behind this, before one of them arrives.
  template <class AnyNote>
  __device__ __forceinline__ void store(AnyNote& note) const {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = i * 32 + threadIdx.x % 32;
      if (piece >= kPieces) continue;
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int head = 0; head < kHeads; ++head)
          note.scales[kind][head][piece] = of[kind][head][i];
      }
    }
    __syncwarp();
  }
};

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
