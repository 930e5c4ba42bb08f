// Decoding: the new keys and values of few tokens, where CTAs of a cluster have a batch row. They
// come while its length does, are rotated and rounded beside the queries, a warp for each row, and
// lie in shared memory as the cache has them when their block comes.
#pragma once

#include "decode_pieces.cuh"

namespace decode {

template <int kTokens>
struct PreparedOf {
  alignas(16) unsigned char new_keys[kTokens][kHeadDim * kElementBytes];
  alignas(16) unsigned char new_values[kTokens][kValuesInKeys ? 16 : kValueDim * kElementBytes];
};
template <>
struct PreparedOf<0> {};  // warps take new rows with their block

// A row of 16 bits, of which each lane of a warp has words, two and two: side by side, or with
// kTurns so many apart that their elements turn together.
template <int kDim, bool kTurns>
struct PreparedRow {
  static constexpr int kWords = kDim / 2, kItems = kWords / 2, kOwn = ceil_div(kItems, 32);
  uint32 words[kOwn][2];

  static __device__ __forceinline__ int item_of(int i) { return threadIdx.x % 32 + 32 * i; }
  static __device__ __forceinline__ int word_of(int item, int j) {
    return kTurns ? item + j * kItems : 2 * item + j;
  }
  __device__ __forceinline__ void ask(const void* array, int64 row) {
    const uint32* const from = static_cast<const uint32*>(array) + row * kWords;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        words[i][j] = item_of(i) < kItems ? from[word_of(item_of(i), j)] : 0;
      }
    }
  }
  __device__ __forceinline__ void store(const DecodeParams& p, unsigned char* to, int position,
                                        float scale) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int item = item_of(i);
      if (item >= kItems) return;
      uint32(&own)[2] = words[i];
      if constexpr (kTurns) {
        rotary::turn_words<Element, 1>(p.frequencies, 2 * item, position, &own[0], &own[1]);
      }
      if constexpr (kQuantized) {
        const Quotients by(scale);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          reinterpret_cast<uint16*>(to)[word_of(item, j)] =
              static_cast<uint16>(quantized_pair<Element>(own[j], by));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) reinterpret_cast<uint32*>(to)[word_of(item, j)] = own[j];
      }
    }
  }
};

// The rows of a CTA's kv head. The last warps have one each: queries are the first ones'.
template <int kTokens>
struct PreparedRows {
  static constexpr int kKinds = kValuesInKeys ? 1 : 2;
  static constexpr int kKeyChunks = kHeadDim * kElementBytes / 16;  // of 16 bytes
  static constexpr int kChunks = kKeyChunks + (kValuesInKeys ? 0 : kValueDim * kElementBytes / 16);
  static_assert(kTokens * kKinds <= kWarps);
  PreparedRow<kHeadDim, kRotates> key;
  PreparedRow<kValueDim, false> value;

  static __device__ __forceinline__ int item() { return kWarps - 1 - ptx::warp_index(); }
  static __device__ __forceinline__ bool exists() { return item() < kTokens * kKinds; }
  static __device__ __forceinline__ int token() { return item() / kKinds; }
  static __device__ __forceinline__ bool is_key() { return item() % kKinds == 0; }

  __device__ __forceinline__ void ask(const DecodeParams& p, const Share& share) {
    if (!exists()) return;
    const int64 row =
        (static_cast<int64>(share.batch) * kTokens + token()) * p.kv_heads + share.kv_head;
    if (is_key()) {
      key.ask(p.new_key, row);
    } else {
      value.ask(p.new_value, row);
    }
  }

  // Where the CTA has a block of theirs.
  template <class AnyExchange>
  __device__ __forceinline__ void store(const DecodeParams& p, const Share& share, const Unit& unit,
                                        const Range& blocks, const RowScales& scales,
                                        AnyExchange& exchange) {
    const int position = unit.length - kTokens + token();
    if (!exists() || blocks.empty() || position < 0) return;
    if (blocks.end * kBlockKV <= position || blocks.begin * kBlockKV > position) return;
    if (is_key()) {
      const float scale = scale_at(p, p.key_scale, unit, position, share, scales.key);
      key.store(p, exchange.new_keys[token()], position, scale);
    } else if constexpr (!kValuesInKeys) {
      const float scale = scale_at(p, p.value_scale, unit, position, share, scales.value);
      value.store(p, exchange.new_values[token()], position, scale);
    }
  }

  // Puts those of positions that a warp has into its block, once wait() has it, and into the cache.
  template <class AnyExchange, class Wait>
  static __device__ __forceinline__ void place(const DecodeParams& p, const Share& share,
                                               const Unit& unit, const Range& positions, int first,
                                               uint32 keys, uint32 values,
                                               const AnyExchange& exchange, Wait wait) {
    const int count = (positions.end - positions.begin) * kChunks;
    int item = threadIdx.x % 32;
    const auto row_at = [&](int item) {
      return row_of(p, unit.batch, positions.begin + item / kChunks, share.kv_head);
    };
    int64 row = item < count ? row_at(item) : 0;
    wait();
    for (; item < count; item += 32) {
      if (item >= 32) row = row_at(item);
      const int position = positions.begin + item / kChunks, chunk = item % kChunks;
      const int token = position - (unit.length - kTokens);
      if (chunk < kKeyChunks) {
        const uint4 piece = reinterpret_cast<const uint4*>(exchange.new_keys[token])[chunk];
        store_in_tile(keys, position - first, chunk, piece);
        if (row >= 0) static_cast<uint4*>(p.key_cache)[row * kKeyChunks + chunk] = piece;
      } else if constexpr (!kValuesInKeys) {
        constexpr int kOfRow = kChunks - kKeyChunks;
        const int at = chunk - kKeyChunks;
        const uint4 piece = reinterpret_cast<const uint4*>(exchange.new_values[token])[at];
        store_in_tile(values, position - first, at, piece);
        if (row >= 0) static_cast<uint4*>(p.value_cache)[row * kOfRow + at] = piece;
      }
    }
  }

 private:
  static __device__ __forceinline__ float scale_at(const DecodeParams& p, const Scales& scales,
                                                   const Unit& unit, int position,
                                                   const Share& share, float of_row) {
    if constexpr (!kScalesOfPages) return of_row;
    return NewScales(p, scales, unit.batch, share.kv_head).at(position);
  }
};

template <>
struct PreparedRows<0> {
  template <class... Any>
  __device__ __forceinline__ void ask(const Any&...) const {}
  template <class... Any>
  __device__ __forceinline__ void store(const Any&...) const {}
  template <class... Any>
  __device__ __forceinline__ void place(const Any&...) const {}
};

}  // namespace decode
