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

// The exponent of a row of which each of kLanes lanes, side by side, has kCount words.
template <int kLanes, int kCount>
__device__ __forceinline__ int exponent_of(const uint32* words) {
  if constexpr (!kBFloat16) return 0;
  uint32 largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest = max(largest, max(words[i] & 0x7fffu, words[i] >> 16 & 0x7fffu));
  }
  if constexpr (kLanes == 32) return query_exponent(__reduce_max_sync(0xffffffffu, largest));
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  return query_exponent(largest);
}
template <class Of>
__device__ __forceinline__ uint32 scaled_pair(uint32 pair, float factor) {
  if constexpr (!kBFloat16) return pair;
  return Float16::pack(Of::unpack_low(pair) * factor, Of::unpack_high(pair) * factor);
}

// Queries as float16, by a power of two of each row, whose inverses are the exchange's factors.
// Lanes side by side have a row, as many as it has chunks.
template <class Of>
struct ScaledQueries {
  static constexpr int kLanes = kQueryChunks <= 8 ? 8 : kQueryChunks <= 16 ? 16 : 32;
  static constexpr int kOfLane = ceil_div(kQueryChunks, kLanes);
  static constexpr int kRows = 32 / kLanes;  // of a warp
  // Whose loads are under way.
  static constexpr int kAtOnce = kRows * kWarps >= kShareRows ? 1 : ceil_div(4, kRows);
  static constexpr int kRounds = ceil_div(kShareRows, kAtOnce * kWarps * kRows);
  static_assert(kShareRows % kRows == 0, "whole warps have rows");
  uint4 pieces[kAtOnce][kOfLane];

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
    each(p, share, round, [&](int, const Place& place, uint4(&own)[kOfLane]) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int chunk = threadIdx.x % kLanes + kLanes * i;
        own[i] = uint4{};
        if (chunk * 8 < kHeadDim && place.exists(p)) {
          own[i] = query_of(p, batch, place).load(chunk);
        }
      }
    });
  }
  template <class AnyExchange>
  __device__ __forceinline__ void store(const DecodeParams& p, const Share& share, const Unit&,
                                        int round, uint32 tile, AnyExchange& exchange) {
    const int lane = threadIdx.x % kLanes;
    each(p, share, round, [&](int row, const Place&, uint4(&own)[kOfLane]) {
      const int exponent = exponent_of<kLanes, kOfLane * 4>(reinterpret_cast<const uint32*>(own));
      const float factor = ptx::power_of_two(-exponent);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int chunk = lane + kLanes * i;
        if (chunk >= kQueryChunks) continue;
        const uint32 pairs[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          ptx::store_shared(query_word(tile, row, chunk, word),
                            scaled_pair<Of>(pairs[word], factor));
        }
      }
      if (lane == 0) exchange.query_factor[row] = ptx::power_of_two(exponent);
    });
  }
};

// Queries of 16 bits that turn: a warp has a row, a lane two and two features of it. As many lanes
// as can share the angles: eight of each lane took a call of 5 us 1 us.
template <class Of>
struct TurnedQueries {
  static constexpr int kItems = kHeadDim / 4, kOwn = ceil_div(kItems, 32);
  static constexpr int kOfWarp = ceil_div(kShareRows, kWarps);       // rows
  static constexpr int kAtOnce = kOfWarp * kOwn <= 4 ? kOfWarp : 1;  // whose loads are under way
  static constexpr int kRounds = kOfWarp / kAtOnce;
  static_assert(kShareRows % kWarps == 0);
  uint32 words[kAtOnce][kOwn][2];

  static __device__ __forceinline__ int item_of(int i) { return threadIdx.x % 32 + 32 * i; }
  // Calls visit(row, its place, its words) for this warp's rows.
  template <class Visit>
  __device__ __forceinline__ void each(const DecodeParams& p, const Share& share, int round,
                                       Visit visit) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = (round * kAtOnce + i) * kWarps + ptx::warp_index();
      visit(row, Place(p, share, row), words[i]);
    }
  }
  __device__ __forceinline__ void ask(const DecodeParams& p, const Share& share, int batch,
                                      int round) {
    each(p, share, round, [&](int, const Place& place, uint32(&own)[kOwn][2]) {
      const bool exists = place.exists(p);
      const uint32* const from = reinterpret_cast<const uint32*>(query_of(p, batch, place).row);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          own[i][j] = exists && item_of(i) < kItems ? from[item_of(i) + j * kItems] : 0;
        }
      }
    });
  }
  template <class AnyExchange>
  __device__ __forceinline__ void store(const DecodeParams& p, const Share& share, const Unit& unit,
                                        int round, uint32 tile, AnyExchange& exchange) {
    each(p, share, round, [&](int row, const Place& place, uint32(&own)[kOwn][2]) {
      const auto put = [&](int word, uint32 pair) {
        const uint32 at = kQuantized
                              ? query_word(tile, row, word / 4, word % 4)
                              : chunk_address<kShareRows>(tile, row, word / 4) + word % 4 * 4;
        ptx::store_shared(at, pair);
      };
      float factor = 1.0f, inverse = 1.0f;
      if (place.exists(p)) {  // whole warps
        const int position = unit.length - p.query_len + place.query;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (item_of(i) >= kItems) break;
          rotary::turn_words<Of, 1>(p.frequencies, 2 * item_of(i), position, &own[i][0],
                                    &own[i][1]);
        }
        if constexpr (kQuantized) {
          const int exponent = exponent_of<32, kOwn * 2>(&own[0][0]);
          factor = ptx::power_of_two(-exponent);
          inverse = ptx::power_of_two(exponent);
        }
      }
      if constexpr (kQuantized) {
        if (threadIdx.x % 32 == 0) exchange.query_factor[row] = inverse;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (item_of(i) >= kItems) break;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32 pair = own[i][j];
          put(item_of(i) + j * kItems, kQuantized ? scaled_pair<Of>(pair, factor) : pair);
        }
      }
      for (int word = 2 * kItems + threadIdx.x % 32; word < kQueryChunks * 4; word += 32) {
        put(word, 0);
      }
    });
  }
};

enum class QueryKind { kPlain, kScaled, kTurned };
template <QueryKind kKind>
struct QueriesOf {
  using Type = PlainQueries;
};
template <>
struct QueriesOf<QueryKind::kScaled> {
  using Type = ScaledQueries<Element>;
};
template <>
struct QueriesOf<QueryKind::kTurned> {
  using Type = TurnedQueries<Element>;
};
inline constexpr QueryKind kQueryKind = kRotates && !kFloat32 ? QueryKind::kTurned
                                        : kQuantized          ? QueryKind::kScaled
                                                              : QueryKind::kPlain;

// The queries of a CTA's units, one after the other.
struct Queries {
  using Own = QueriesOf<kQueryKind>::Type;
  static constexpr bool kInCluster = kCluster > 1;
  static constexpr bool kAhead = (kAsksAhead || kInCluster) && Own::kRounds == 1;
  Own own;
  int asked = -1;  // batch row
  __device__ __forceinline__ Queries() {}

  // In a cluster, whose batch row is known before its length.
  __device__ __forceinline__ void ask_first(const DecodeParams& p, const Share& share) {
    if constexpr (kInCluster && kAhead) {
      asked = share.batch;
      own.ask(p, share, asked, 0);
    }
  }

  __device__ __forceinline__ void load(const DecodeParams& p, const Share& share, const Unit& unit,
                                       uint32 tile, Exchange& exchange) {
    if constexpr (kAhead) {
      if (!kInCluster && asked != unit.batch) own.ask(p, share, unit.batch, 0);
      own.store(p, share, unit, 0, tile, exchange);
      asked = unit.batch + 1;
      if (!kInCluster && asked < p.batch) own.ask(p, share, asked, 0);
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
