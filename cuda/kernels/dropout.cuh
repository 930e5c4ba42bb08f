// Dropout: which weights are kept, by the pattern of jax_flash/_philox.py.
//
// One counter serves sixteen weights: of two threads, lanes l and l + 16, the eight each has in a
// cell of 16 queries and 16 keys, where rows are queries. A warp draws for two cells side by side,
// half of its lanes for one, half for the other, and the halves exchange what they have drawn. The
// sum of a row and its lse are of all weights; the kept ones count 1 / (1 - rate) times, a factor
// that results get at their end. terms.cuh has what else there is to a weight.
#pragma once

#include "fragment.cuh"
#include "numbers.cuh"
#include "ptx.cuh"

// Philox4x32-7: four random words of a key's two words and a counter's four. Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
struct PhiloxWords {
  uint32 word[4];
};

__device__ __forceinline__ PhiloxWords philox(uint32 key0, uint32 key1, uint32 c0, uint32 c1,
                                              uint32 c2, uint32 c3) {
#pragma unroll
  for (uint32 round = 0; round < 7; ++round) {
    const uint64 a = static_cast<uint64>(0xD2511F53u) * c0;
    const uint64 b = static_cast<uint64>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32>(b >> 32) ^ c1 ^ (key0 + round * 0x9E3779B9u);
    c2 = static_cast<uint32>(a >> 32) ^ c3 ^ (key1 + round * 0xBB67AE85u);
    c1 = static_cast<uint32>(b);
    c3 = static_cast<uint32>(a);
  }
  return {{c0, c1, c2, c3}};
}

// The words of a thread's eight weights in a cell, of the two that are drawn for them. Word 2 * i +
// j is of the thread's query of row j and, low half first, of its two keys of column 8 * i on.
__device__ __forceinline__ PhiloxWords widen(uint32 word0, uint32 word1) {
  return {{word0, word1, word0 * 0x93D765DDu + word1, word1 * 0xD2511F53u + word0}};
}

// Which counters a thread draws: those of its first row and column in the first of two cells, and
// `other` more keys' or queries' counters, 4, if it draws for the second cell.
struct Counters {
  uint32 query, key, other;
  __device__ __forceinline__ bool draws_first() const { return other == 0; }
  // Of what it has drawn and what it has been given, that of the first cell; of the second one, if
  // they are exchanged.
  __device__ __forceinline__ uint32 first(uint32 drawn, uint32 given) const {
    return other == 0 ? drawn : given;
  }
};

// The draws of one query head.
class Draws {
 public:
  Draws() = default;
  template <class Params>
  __device__ __forceinline__ Draws(const Params& p, int batch, int head) {
    const int64 row = static_cast<int64>(batch) * p.query_heads + head;
    if constexpr (kDropsPart) {
      const uint2* words = reinterpret_cast<const uint2*>(p.dropout_state) + 3 * row;
      state_ = {words[0].x, words[0].y, words[1].x, words[1].y};
      first_ = words[2];
    } else {
      state_ = reinterpret_cast<const uint4*>(p.dropout_state)[row];
    }
  }
  // Of a thread's first query and first key. Queries q and q + 4 share counters; sixteen on, of
  // queries or keys, they are 4 larger. In cells that alternate like a chessboard's those of q, or
  // those of q + 4 draw and take words 0 and 1; the other ones get words 2 and 3.
  __device__ __forceinline__ Counters at(uint32 query, uint32 key) const {
    uint32 row = query / 16 * 4 + query % 4, column = key / 16 * 4 + key % 8 / 2;
    if constexpr (kDropsPart) {
      row += first_.x;
      column += first_.y;
    }
    return {row, column, (row ^ column ^ query) & 4};
  }
  // Those of the same query, `keys` keys on, a multiple of 16.
  static __device__ __forceinline__ Counters after(const Counters& at, uint32 keys) {
    return {at.query, at.key + keys / 4, at.other ^ (keys / 4 & 4)};
  }
  __device__ __forceinline__ PhiloxWords words(uint32 query_counter, uint32 key_counter) const {
    return philox(state_.x, state_.y, key_counter, query_counter, state_.z, state_.w);
  }

 private:
  uint4 state_;  // key words, head id, batch id
  uint2 first_;  // the counters of query 0 and key 0
};

// What of a word's low and high half is dropped, as masks. A number of 15 bits is below the
// threshold exactly if it is so as a float16, where NaN are the largest ones: below nothing. Above
// the infinity, with kDropsMost, the complements are compared, as if NaN were above everything.
template <class Params>
__device__ __forceinline__ uint32 dropped_halves(const Params& p, uint32 word) {
  return kDropsMost ? ptx::above(~word, ~p.dropout_threshold)
                    : ptx::below(word, p.dropout_threshold);
}

// The dropped ones of a fragment of weights whose rows are queries, by kKeys: masks of its pairs
// as they are packed.
template <int kKeys>
class DroppedPairs {
 public:
  // Of all keys. The counters' words come first: they need no other lane, and go among the
  // exponentials, which what is exchanged cannot. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw_all(const Params& p, const Draws& draws,
                                           const Counters& counters) {
    constexpr int kPairs = ceil_div(kKeys, 32);
    PhiloxWords words[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      words[i] = draws.words(counters.query, counters.key + counters.other + 8 * i);
    }
    uint32 given[kPairs][2];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      given[i][0] = __shfl_xor_sync(0xffffffffu, words[i].word[2], 16);
      given[i][1] = __shfl_xor_sync(0xffffffffu, words[i].word[3], 16);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) set(p, counters, 2 * i, words[i], given[i]);
  }
  // Of the 32 keys from 16 * i on. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws,
                                       const Counters& counters, int i) {
    const PhiloxWords words = draws.words(counters.query, counters.key + counters.other + 4 * i);
    const uint32 given[2] = {__shfl_xor_sync(0xffffffffu, words.word[2], 16),
                             __shfl_xor_sync(0xffffffffu, words.word[3], 16)};
    set(p, counters, i, words, given);
  }
  // Elements 2 * i and 2 * i + 1, with zeros for the dropped ones.
  __device__ __forceinline__ uint32 keep(int i, uint32 pair) const { return pair & ~masks_[i]; }

 private:
  template <class Params>
  __device__ __forceinline__ void set(const Params& p, const Counters& counters, int i,
                                      const PhiloxWords& words, const uint32 (&given)[2]) {
#pragma unroll
    for (int cell = i; cell < i + 2 && cell < kKeys / 16; ++cell) {
      uint32 mine[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mine[j] = cell == i ? counters.first(words.word[j], given[j])
                            : counters.first(given[j], words.word[j]);
      }
      const PhiloxWords own = widen(mine[0], mine[1]);
#pragma unroll
      for (int k = 0; k < 4; ++k) masks_[4 * cell + k] = dropped_halves(p, own.word[k]);
    }
  }

  uint32 masks_[kKeys / 4];
};

// The dropped ones of a fragment of S^T, whose rows are keys, a bit each.
template <int kCount>
class Dropped {
 public:
  // `key`: the first of the warp's 16. Words are drawn by the threads that have their weights where
  // rows are queries. Of two cells, side by side now in queries, a thread has what it keeps and
  // what it gives of one, a bit each, and gets its own of the other. The bits are 8 x 8 matrices of
  // 16 bits, whose transposes are wanted here: one for sixteen words. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws, int first_query,
                                       int key) {
    const int lane = ptx::opaque(threadIdx.x) % 32;  // read again, not kept in a register
    const Counters at = draws.at(first_query + lane / 4, key + fragment::first_column(lane));
    uint32 kept[kWords], given[kWords];
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 8) {
      // One at a time: with more the wide backward spilled 16 bytes.
      if (kDropsPart) __syncwarp();
      const PhiloxWords words = draws.words(at.query + at.other + i, at.key);
      add(p, i, words.word[0], words.word[1], kept[i / 16]);
      add(p, i, words.word[2], words.word[3], given[i / 16]);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32 got = __shfl_xor_sync(0xffffffffu, given[i], 16);
      bits_[i] = ptx::transpose_matrix(at.first(kept[i], got) | at.first(got, kept[i]) << 4);
    }
  }
  // The weight of element i, with a sign if it is dropped. A slope gives weights a sign of their
  // own: then the lowest bit tells.
  __device__ __forceinline__ float mark(int i, float weight) const {
    if constexpr (kScoreHasSlope) {
      return __uint_as_float((__float_as_uint(weight) & ~1u) | drops(i));
    }
    const uint32 sign = bits_[i / 32] << (31 - i / 2 % 16 - i % 2 * 16) & 0x80000000u;
    return __uint_as_float(__float_as_uint(weight) | sign);
  }
  // Elements 2 * i and 2 * i + 1 as they are packed: a mask of the dropped ones.
  __device__ __forceinline__ uint32 halves(int i) const {
    return (bits_[i / 16] >> i % 16 & 0x00010001u) * 0xffffu;
  }
  // Is the weight of element i dropped?
  __device__ __forceinline__ bool drops(int i) const {
    return bits_[i / 32] >> (i / 2 % 16 + i % 2 * 16) & 1;
  }

 private:
  static constexpr int kWords = ceil_div(kCount, 32);

  // The bits of a cell, from `i` on: k of the elements 2 (i + k) and the one after it.
  template <class Params>
  static __device__ __forceinline__ void add(const Params& p, int i, uint32 word0, uint32 word1,
                                             uint32& set) {
    const PhiloxWords words = widen(word0, word1);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32 halves = dropped_halves(p, words.word[k % 2 * 2 + k / 2]);
      set = (i % 16 + k == 0 ? 0 : set) | (halves & 0x00010001u << (i + k) % 16);
    }
  }

  uint32 bits_[kWords];
};

// Does dropout keep one pair's weight?
template <class Params>
__device__ __forceinline__ bool keeps(const Params& p, int batch, int head, int query, int key) {
  if constexpr (!kHasDropout) return true;
  const Draws draws(p, batch, head);
  const Counters at = draws.at(query, key);
  const PhiloxWords words = draws.words(at.query, at.key);
  const PhiloxWords own =
      at.draws_first() ? widen(words.word[0], words.word[1]) : widen(words.word[2], words.word[3]);
  const int chosen = key / 8 % 2 * 2 + query / 8 % 2;
  uint32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word = i == chosen ? own.word[i] : word;
  const int shift = key % 2 * 16;
  return (word >> shift & 0x7fffu) >= (p.dropout_threshold >> shift & 0x7fffu);
}
// What kept weights are multiplied by.
template <class Params>
__device__ __forceinline__ float dropout_scale(const Params& p) {
  return kHasDropout ? p.dropout_scale : 1.0f;
}
