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

// Four random words.
struct PhiloxWords {
  uint32 word[4];
};

// Philox4x32-7 of a key's two words and a counter's four: head, query, batch row and key. Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A round multiplies words 0 and 2,
// and has a word and one of the key to each product's high half: so queries and keys, in words 1
// and 3, meet in the third round. What that takes of a query and of a key is here, each with what
// the fourth round has to it of the key: two products of each and eight of both, of fourteen.
struct QueryWords {
  uint32 word0, word1, word2;  // none for word 3
};
struct KeyWords {
  uint32 word0, word2, word3;  // none for word 1
};
class Philox {
 public:
  Philox() = default;
  __device__ __forceinline__ Philox(uint32 key0, uint32 key1, uint32 head, uint32 batch)
      : key0_(key0), key1_(key1) {
    const uint64 a = product0(head), b = product1(batch);
    query_ = {high(b) ^ key(0), low(a) ^ other_key(1)};
    key_ = {high(a) ^ other_key(0), low(b) ^ key(1)};
  }
  __device__ __forceinline__ QueryWords of_query(uint32 query) const {
    const uint64 a = product0(query_.x ^ query);
    const uint64 b = product1(query_.y ^ high(a));
    return {high(b) ^ key(2), low(b) ^ key(3), low(a)};
  }
  __device__ __forceinline__ KeyWords of_key(uint32 key) const {
    const uint64 b = product1(key_.x ^ key);
    const uint64 a = product0(key_.y ^ high(b));
    return {low(b), high(a) ^ other_key(2), low(a) ^ other_key(3)};
  }
  __device__ __forceinline__ PhiloxWords words(const QueryWords& query, const KeyWords& key) const {
    uint64 a = product0(query.word0 ^ key.word0), b = product1(query.word2 ^ key.word2);
    uint32 word0 = high(b) ^ query.word1, word2 = high(a) ^ key.word3;
#pragma unroll
    for (uint32 round = 4; round < 7; ++round) {
      const uint32 word1 = low(b), word3 = low(a);
      a = product0(word0), b = product1(word2);
      word0 = high(b) ^ word1 ^ this->key(round);
      word2 = high(a) ^ word3 ^ other_key(round);
    }
    return {{word0, low(b), word2, low(a)}};
  }

 private:
  static __device__ __forceinline__ uint64 product0(uint32 word) {
    return static_cast<uint64>(0xD2511F53u) * word;
  }
  static __device__ __forceinline__ uint64 product1(uint32 word) {
    return static_cast<uint64>(0xCD9E8D57u) * word;
  }
  static __device__ __forceinline__ uint32 high(uint64 product) {
    return static_cast<uint32>(product >> 32);
  }
  static __device__ __forceinline__ uint32 low(uint64 product) {
    return static_cast<uint32>(product);
  }
  // The key's words in a round.
  __device__ __forceinline__ uint32 key(uint32 round) const { return key0_ + round * 0x9E3779B9u; }
  __device__ __forceinline__ uint32 other_key(uint32 round) const {
    return key1_ + round * 0xBB67AE85u;
  }

  uint32 key0_, key1_;
  uint2 query_, key_;  // what the first two rounds have to a query's words, and to a key's
};

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
  // The first cell's word: what the thread has drawn or what it has been given. With the arguments
  // exchanged it is the second cell's.
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
      philox_ = {words[0].x, words[0].y, words[1].x, words[1].y};
      first_ = words[2];
    } else {
      const uint4 words = reinterpret_cast<const uint4*>(p.dropout_state)[row];
      philox_ = {words.x, words.y, words.z, words.w};
    }
  }
  // The counters of a thread's first query and first key. Queries q and q + 4 share counters; 16
  // queries or keys on, counters are 4 larger. Cells alternate like a chessboard's: the threads of
  // q draw in one, those of q + 4 in the next. Who draws takes words 0 and 1, the others words 2
  // and 3.
  __device__ __forceinline__ Counters at(uint32 query, uint32 key) const {
    uint32 row = query / 16 * 4 + query % 4, column = key / 16 * 4 + key % 8 / 2;
    if constexpr (kDropsPart) {
      row += first_.x;
      column += first_.y;
    }
    return {row, column, (row ^ column ^ query) & 4};
  }
  __device__ __forceinline__ const Philox& philox() const { return philox_; }

 private:
  Philox philox_;
  uint2 first_;  // the counters of query 0 and key 0
};

// What a thread draws with whose rows are queries: of the first one, from its first key on.
class RowDraws {
 public:
  RowDraws() = default;
  __device__ __forceinline__ RowDraws(const Draws& draws, uint32 query, uint32 key)
      : philox_(draws.philox()), at_(draws.at(query, key)) {
    query_ = philox_.of_query(at_.query);
  }
  // The counters `keys` keys on, a multiple of 16.
  __device__ __forceinline__ Counters counters(uint32 keys) const {
    return {at_.query, at_.key + keys / 4, at_.other ^ (keys / 4 & 4)};
  }
  // The words of two cells, `cells` cells on.
  __device__ __forceinline__ PhiloxWords words(const Counters& at, uint32 cells) const {
    return philox_.words(query_, philox_.of_key(at.key + at.other + 4 * cells));
  }

 private:
  Philox philox_;
  QueryWords query_;
  Counters at_;
};

// The same of a thread whose rows are keys: of the first one, from its first query on.
class ColumnDraws {
 public:
  ColumnDraws() = default;
  __device__ __forceinline__ ColumnDraws(const Draws& draws, uint32 query, uint32 key)
      : philox_(draws.philox()), at_(draws.at(query, key)), key_(philox_.of_key(at_.key)) {}
  __device__ __forceinline__ const Counters& counters() const { return at_; }
  // The words of two cells, `queries` on, a multiple of 32.
  __device__ __forceinline__ PhiloxWords words(uint32 queries) const {
    return philox_.words(philox_.of_query(at_.query + at_.other + queries / 4), key_);
  }

 private:
  Philox philox_;
  Counters at_;
  KeyWords key_;
};

// What of a word's low and high half is dropped, as masks. A number of 15 bits is below the
// threshold exactly if it is so as a float16, where NaN are the largest ones: below nothing. Above
// the infinity, with kDropsMost, the complements are compared, as if NaN were above everything.
template <class Params>
__device__ __forceinline__ uint32 dropped_pair(const Params& p, uint32 word) {
  return kDropsMost ? ptx::above(~word, ~p.dropout_threshold)
                    : ptx::below(word, p.dropout_threshold);
}

// The dropped ones of a fragment of weights whose rows are queries, by kKeys: masks of its pairs
// as they are packed.
template <int kKeys>
class DroppedPairs {
 public:
  // Draws for all keys. The counters' words come first: they need no other lane, so they go among
  // the exponentials; words from another lane cannot. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw_all(const Params& p, const RowDraws& draws, uint32 key) {
    constexpr int kPairs = ceil_div(kKeys, 32);
    const Counters counters = draws.counters(key);
    PhiloxWords words[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      words[i] = draws.words(counters, 2 * i);
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
  // Draws for the 32 keys from 16 * i on. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const RowDraws& draws, int i) {
    const Counters counters = draws.counters(0);
    const PhiloxWords words = draws.words(counters, i);
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
      for (int k = 0; k < 4; ++k) masks_[4 * cell + k] = dropped_pair(p, own.word[k]);
    }
  }

  uint32 masks_[kKeys / 4];
};

// The dropped ones of a fragment of S^T, whose rows are keys, a bit each.
template <int kCount>
class Dropped {
 public:
  // `key`: the first of the warp's 16. Words are drawn by the threads that hold the weights where
  // rows are queries. Two cells lie side by side in queries here: a thread draws for one of them,
  // keeps half of the bits, gives the other half away and is given its own of the other cell. The
  // bits are 8 x 8 matrices of 16 bits, whose transposes are wanted here: one for sixteen words.
  // Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws, int first_query,
                                       int key) {
    const int lane = ptx::opaque(threadIdx.x) % 32;  // read again, not kept in a register
    const uint32 column = key + fragment::first_column(lane);
    draw(p, ColumnDraws(draws, first_query + lane / 4, column), 0);
  }
  // The same `queries` on, a multiple of 32.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const ColumnDraws& draws, int queries) {
    const Counters& at = draws.counters();
    uint32 kept[kWords], given[kWords];
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 8) {
      // One at a time: with more the wide backward spilled 16 bytes.
      if (kDropsPart) __syncwarp();
      const PhiloxWords words = draws.words(queries + 4 * i);
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
  __device__ __forceinline__ uint32 pair_mask(int i) const {
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
      const uint32 pair = dropped_pair(p, words.word[k % 2 * 2 + k / 2]);
      set = (i % 16 + k == 0 ? 0 : set) | (pair & 0x00010001u << (i + k) % 16);
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
  const Philox& philox = draws.philox();
  const PhiloxWords words = philox.words(philox.of_query(at.query), philox.of_key(at.key));
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
