// Decoding: how the queries of a batch row come to shared memory. Those of the next batch row come
// while one is walked, where registers are left for them: a unit of few positions waits for little
// else.
#pragma once

#include "decode_found.cuh"
#include "split.cuh"

namespace decode {

inline constexpr int kQueryChunks = ceil_div(kHeadDim, kBoxColumns) * 8;  // of a row in the tile
// With kRotates two pieces that turn together are an item, so many chunks apart.
inline constexpr int kTurned = kRotates ? kHeadDim / 16 : 0;

__device__ __forceinline__ RowPieces<kHeadDim> query_of(const DecodeParams& p, int batch,
                                                        const Place& place) {
  const int64 row =
      (static_cast<int64>(batch) * p.query_len + place.query) * p.query_heads + place.head;
  return RowPieces<kHeadDim>(p.query, row * RowPieces<kHeadDim>::kStride);
}

// Queries as they are, or a float32 in parts.
struct PlainQueries {
  static constexpr int kOfRow = kQueryChunks - kTurned;  // items
  static constexpr int kOfItem = kRotates ? 2 : 1;
  static constexpr int kOwn = ceil_div(kShareRows * kOfRow, 32 * kWarps);
  static constexpr int kAtOnce =
      kFloat32 || kRotates || kOwn == 1 ? 1 : 2;  // whose loads are under way
  static constexpr int kRounds = ceil_div(kOwn, kAtOnce);
  Piece pieces[kAtOnce][kOfItem];

  // Calls visit(row, place, first chunk, is it turned, its pieces) for this thread's items.
  template <class Visit>
  __device__ __forceinline__ void each(const DecodeParams& p, const Share& share, int round,
                                       Visit visit) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = threadIdx.x + (round * kAtOnce + i) * 32 * kWarps;
      if (item >= kShareRows * kOfRow) return;
      const int row = item / kOfRow, at = item % kOfRow;
      const bool turns = at < kTurned;
      visit(row, Place(p, share, row), turns ? at : at + kTurned, turns, pieces[i]);
    }
  }
  __device__ __forceinline__ void ask(const DecodeParams& p, const Share& share, int batch,
                                      int round) {
    each(p, share, round,
         [&](int, const Place& place, int chunk, bool turns, Piece(&own)[kOfItem]) {
           own[0] = Piece{};
           if constexpr (kRotates) own[1] = Piece{};
           if (chunk * 8 >= kHeadDim || !place.exists(p)) return;
           const auto query = query_of(p, batch, place);
           own[0] = query.load(chunk);
           if constexpr (kRotates) {
             if (turns) own[1] = query.load(chunk + kTurned);
           }
         });
  }
  __device__ __forceinline__ void store(const DecodeParams& p, const Share& share, const Unit& unit,
                                        int round, uint32 tile, Exchange&) {
    each(p, share, round,
         [&](int row, const Place& place, int chunk, bool turns, Piece(&own)[kOfItem]) {
           if constexpr (kRotates) {
             if (turns) {
               const int position = unit.length - p.query_len + place.query;
               if (place.exists(p)) {
                 rotary::turn<Element>(p.frequencies, chunk, position, own[0], own[1]);
               }
               store_parts<kQueryPlane>(chunk_address<kShareRows>(tile, row, chunk + kTurned),
                                        own[1]);
             }
           }
           store_parts<kQueryPlane>(chunk_address<kShareRows>(tile, row, chunk), own[0]);
         });
  }
};

// Queries as float16, by a power of two of each row, whose inverses are the exchange's factors.
// Lanes side by side have a row, as many as it has items: what turns it is there once, for several
// rows (four times it was 5,000 instructions, which a call of 5 us waits for).
template <class Of>
struct ScaledQueries {
  static constexpr int kItems = kRotates ? kTurned : kQueryChunks;  // chunks, or pairs that turn
  static constexpr int kLanes = kItems <= 4 ? 4 : kItems <= 8 ? 8 : kItems <= 16 ? 16 : 32;
  static constexpr int kOfLane = ceil_div(kItems, kLanes), kOfItem = kRotates ? 2 : 1;
  static constexpr int kRows = 32 / kLanes;                          // of a warp
  static constexpr int kAtOnce = kRotates ? 1 : ceil_div(4, kRows);  // whose loads are under way
  static constexpr int kRounds = ceil_div(kShareRows, kAtOnce * kWarps * kRows);
  static_assert(kShareRows % kRows == 0, "whole warps have rows");
  uint4 pieces[kAtOnce][kOfLane][kOfItem];

  // Calls visit(row, its place, its pieces) for this lane's rows.
  template <class Visit>
  __device__ __forceinline__ void each(const DecodeParams& p, const Share& share, int round,
                                       Visit visit) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int first = ((round * kAtOnce + i) * kWarps + ptx::warp_index()) * kRows;
      if (first >= kShareRows) return;
      const int row = first + threadIdx.x % 32 / kLanes;
      visit(row, Place(p, share, row), pieces[i]);
    }
  }
  __device__ __forceinline__ void ask(const DecodeParams& p, const Share& share, int batch,
                                      int round) {
    const int lane = threadIdx.x % kLanes;
    each(p, share, round, [&](int, const Place& place, uint4(&own)[kOfLane][kOfItem]) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int item = lane + kLanes * i;
#pragma unroll
        for (int j = 0; j < kOfItem; ++j) {
          const int at = item + j * kItems;
          own[i][j] = uint4{};
          if (item < kItems && at * 8 < kHeadDim && place.exists(p)) {
            own[i][j] = query_of(p, batch, place).load(at);
          }
        }
      }
    });
  }
  template <class AnyExchange>
  __device__ __forceinline__ void store(const DecodeParams& p, const Share& share, const Unit& unit,
                                        int round, uint32 tile, AnyExchange& exchange) {
    const int lane = threadIdx.x % kLanes;
    each(p, share, round, [&](int row, const Place& place, uint4(&own)[kOfLane][kOfItem]) {
      if constexpr (kRotates) {
        const int position = unit.length - p.query_len + place.query;
        if (place.exists(p) && lane < kItems) {
          rotary::turn<Of>(p.frequencies, lane, position, own[0][0], own[0][1]);
        }
        for (int at = lane + 2 * kItems; at < kQueryChunks; at += kLanes) {
          for (int word = 0; word < 4; ++word) {
            ptx::store_shared(query_word(tile, row, at, word), 0);
          }
        }
      }
      int exponent = 0;
      if constexpr (kBFloat16) {
        uint32 largest = 0;
#pragma unroll
        for (int i = 0; i < kOfLane * kOfItem * 4; ++i) {
          const uint32 pair = reinterpret_cast<const uint32*>(own)[i];
          largest = max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
          largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        }
        exponent = query_exponent(largest);
      }
      const float factor = ptx::power_of_two(-exponent);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int item = lane + kLanes * i;
        if (item >= kItems) continue;
#pragma unroll
        for (int j = 0; j < kOfItem; ++j) {
          const uint32 pairs[4] = {own[i][j].x, own[i][j].y, own[i][j].z, own[i][j].w};
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            uint32 pair = pairs[word];
            if constexpr (kBFloat16) {
              pair = Float16::pack(Of::unpack_low(pair) * factor, Of::unpack_high(pair) * factor);
            }
            ptx::store_shared(query_word(tile, row, item + j * kItems, word), pair);
          }
        }
      }
      if (lane == 0) exchange.query_factor[row] = ptx::power_of_two(exponent);
    });
  }
};

template <bool kScaled>
struct QueriesOf {
  using Type = PlainQueries;
};
template <>
struct QueriesOf<true> {
  using Type = ScaledQueries<Element>;
};

// The queries of a CTA's units, one after the other.
struct Queries {
  using Own = QueriesOf<kQuantized>::Type;
  static constexpr bool kAhead = kAsksAhead && Own::kRounds == 1;
  Own own;
  int asked = -1;  // batch row
  __device__ __forceinline__ Queries() {}

  __device__ __forceinline__ void load(const DecodeParams& p, const Share& share, const Unit& unit,
                                       uint32 tile, Exchange& exchange) {
    if constexpr (kAhead) {
      if (asked != unit.batch) own.ask(p, share, unit.batch, 0);
      own.store(p, share, unit, 0, tile, exchange);
      asked = unit.batch + 1;
      if (asked < p.batch) own.ask(p, share, asked, 0);
    } else {
#pragma unroll 1
      for (int round = 0; round < Own::kRounds; ++round) {
        Own now;
        now.ask(p, share, unit.batch, round);
        now.store(p, share, unit, round, tile, exchange);
      }
    }
  }
};

}  // namespace decode
