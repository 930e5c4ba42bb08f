// Dropout: which weights are kept, by the pattern of jax_flash/_philox.py.
//
// One counter serves the eight weights of the queries q, q + 8 and the keys k, k + 1, k + 8, k + 9,
// 15 bits each. The sum of a row and its lse are of all weights; the kept ones count 1 / (1 - rate)
// times, a factor that results get at their end. terms.cuh has what else there is to a weight.
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

// The draws of one query head.
class Draws {
 public:
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
  // The counters of a query and a key; 16 queries on it is larger by 8, 16 keys on by 4.
  __device__ __forceinline__ uint32 of_query(uint32 query) const {
    return query / 16 * 8 + query % 8 + (kDropsPart ? first_.x : 0);
  }
  __device__ __forceinline__ uint32 of_key(uint32 key) const {
    return key / 16 * 4 + key % 8 / 2 + (kDropsPart ? first_.y : 0);
  }
  // Word 2 * i + j is of query + 8 * j and of the keys key + 8 * i, in its low half, and the one
  // after it, where query % 16 < 8 and key % 16 is 0, 2, 4 or 6.
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
  // Of the keys from 16 * i on. The counters: of the thread's first row and column.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws, uint32 query_counter,
                                       uint32 key_counter, int i) {
    const PhiloxWords words = draws.words(query_counter, key_counter + 4 * i);
#pragma unroll
    for (int k = 0; k < 4; ++k) masks_[4 * i + k] = dropped_halves(p, words.word[k]);
  }
  // Elements 2 * i and 2 * i + 1, with zeros for the dropped ones.
  __device__ __forceinline__ uint32 keep(int i, uint32 pair) const { return pair & ~masks_[i]; }

 private:
  uint32 masks_[kKeys / 4];
};

// The dropped ones of a fragment of S^T, whose rows are keys, a bit each.
template <int kCount>
class Dropped {
 public:
  // `key`: the first of the warp's 16. Words are drawn by the thread that has their weights where
  // rows are queries. A bit each, they are 8 x 8 matrices of 16 bits, whose transposes are wanted
  // here: one for sixteen words. Whole warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws, int first_query,
                                       int key) {
    const int lane = ptx::opaque(threadIdx.x) % 32;  // read again, not kept in a register
    const uint32 columns = draws.of_query(first_query + lane / 4);
    const uint32 rows = draws.of_key(key + fragment::first_column(lane));
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 4) {
      // Two at a time: with more the wide backward spilled 16 bytes.
      if (kDropsPart && i % 8 == 0) __syncwarp();
      const PhiloxWords words = draws.words(columns + 2 * i, rows);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // elements 2 (i + k) and the one after it
        const uint32 halves = dropped_halves(p, words.word[k % 2 * 2 + k / 2]);
        uint32& set = bits_[i / 16];
        set = (i % 16 + k == 0 ? 0 : set) | (halves & 0x00010001u << (i + k) % 16);
      }
    }
#pragma unroll
    for (uint32& set : bits_) set = ptx::transpose_matrix(set);
  }
  // The weight of element i, with a sign if it is dropped. A slope gives weights a sign of their
  // own: then the lowest bit tells.
  __device__ __forceinline__ float mark(int i, float weight) const {
    if constexpr (kHasScoreFunction) {
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
  uint32 bits_[ceil_div(kCount, 32)];
};

// Does dropout keep one pair's weight?
template <class Params>
__device__ __forceinline__ bool keeps(const Params& p, int batch, int head, int query, int key) {
  if constexpr (!kHasDropout) return true;
  const Draws draws(p, batch, head);
  const PhiloxWords words = draws.words(draws.of_query(query), draws.of_key(key));
  const int chosen = key / 8 % 2 * 2 + query / 8 % 2;
  uint32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word = i == chosen ? words.word[i] : word;
  const int shift = key % 2 * 16;
  return (word >> shift & 0x7fffu) >= (p.dropout_threshold >> shift & 0x7fffu);
}
// What kept weights are multiplied by.
template <class Params>
__device__ __forceinline__ float dropout_scale(const Params& p) {
  return kHasDropout ? p.dropout_scale : 1.0f;
}
