// The terms of attention on a GPU, the arithmetic of each written here and nowhere else.
//
//   logit  what happens to a score between Q.K^T and the softmax: scale, softcap, and its slope
//   sees   which pairs of query and key there are: window, lengths, segments, mask
//   keep   which weights dropout keeps
//
// Three evaluators ask: the forward's fragments, whose rows are queries; the backward's fragments
// of S^T, whose rows are keys; and rows that are computed again element by element. A term that a
// call does not have is constexpr off. Blocks of pairs are the matter of walk.cuh.
#pragma once

#include "fragment.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "params.h"
#include "philox.cuh"
#include "ptx.cuh"

// ---- logit --------------------------------------------------------------------------------------

// Scores x = q.k become y in place; the logit, in log2 units, is y * scale_log2 of the parameters,
// which whoever takes its exponential multiplies in. kScaleFirst: the scale is not positive, so
// that y has to contain it where maxima are looked for.
//   plain    y = x,                        scale_log2 = log2(e) * scale
//   softcap  y = tanh(x * scale / cap),    scale_log2 = log2(e) * cap
template <bool kScaleFirst = false, class Params, int kCount>
__device__ __forceinline__ void score_function(const Params& p, float (&scores)[kCount]) {
  if constexpr (kSoftcap) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // tanh(x) = 1 - 2 / (1 + e^2x): relative error 1e-6, where tanh.approx has 5e-4.
      const float e = ptx::exp2_approx(scores[i] * (p.softcap_inner * 2.8853900817779268f));
      scores[i] = 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + e);
    }
  } else if constexpr (kScaleFirst) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= p.scale;
  }
}
// The logit's derivative by the scaled score.
__device__ __forceinline__ float score_slope(float y) { return kSoftcap ? 1.0f - y * y : 1.0f; }

// ---- sees: one pair, one row --------------------------------------------------------------------
//
// Key j is visible to query t iff -left <= j - (t + offset) <= right and j < kv_length (and the
// segment ids agree, and the mask has it); offset = 0 (top-left) or kv_length - query_length
// (bottom-right).

// Window and lengths of one batch row.
struct Visibility {
  int offset;        // key aligned with query 0
  int left, right;   // window, read only where bounded
  int query_length;  // rows from here on see nothing
  int kv_length;     // keys from here on are seen by nobody
};

// Index of the element of a pair.
__device__ __forceinline__ int64 broadcast_at(const Broadcast& array, int batch, int head,
                                              int query, int key) {
  return batch * array.batch + head * array.head + query * array.query + key * array.key;
}

// Of either pass's parameters, by the constants of the generated header.
template <class Params>
__device__ __forceinline__ Visibility visibility(const Params& p, int batch) {
  Visibility v{0, p.window_left, p.window_right, p.query_len, p.kv_len};
  if constexpr (kHasQueryLengths) v.query_length = min(p.query_len, p.query_lengths[batch]);
  if constexpr (kHasKeyValueLengths) v.kv_length = min(p.kv_len, p.key_value_lengths[batch]);
  if constexpr (kBottomRight) v.offset = v.kv_length - v.query_length;
  return v;
}

// Does the query see the key, window and lengths aside? Those are a range of keys (walk.cuh).
template <class Params>
__device__ __forceinline__ bool sees(const Params& p, int batch, int head, int query, int key) {
  bool seen = true;
  if constexpr (kHasSegments) {
    seen = p.query_segments[static_cast<int64>(batch) * p.query_len + query] ==
           p.key_value_segments[static_cast<int64>(batch) * p.kv_len + key];
  }
  if constexpr (kHasMask) {
    const int64 at = broadcast_at(p.mask.bytes, batch, head, query, key);
    seen = seen && static_cast<const unsigned char*>(p.mask.bytes.data)[at] != 0;
  }
  return seen;
}

// Do two queries see the same keys, window and lengths aside?
template <class Params>
__device__ __forceinline__ bool see_alike(const Params& p, int batch, int one, int other) {
  if constexpr (kHasMask && kMaskQueries) return one == other;
  if constexpr (!kHasSegments) return true;
  const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
  return ids[one] == ids[other];
}

// Keys of one row, relative to `first_key`: element column c is visible iff begin <= c < end.
__device__ __forceinline__ Range row_columns(const Visibility& v, int query, int first_key) {
  Range columns{-0x40000000, v.kv_length - first_key};
  const int aligned = query + v.offset - first_key;
  if constexpr (kWindowLeft) columns.begin = aligned - v.left;
  if constexpr (kWindowRight) columns.end = min(columns.end, aligned + v.right + 1);
  return columns;
}

// Queries of one key, relative to `first_query`: element column c sees it iff begin <= c < end.
__device__ __forceinline__ Range key_columns(const Visibility& v, int key, int first_query) {
  Range columns{-0x40000000, 0x40000000};
  const int aligned = key - v.offset - first_query;
  if constexpr (kWindowLeft) columns.end = aligned + v.left + 1;
  if constexpr (kWindowRight) columns.begin = aligned - v.right;
  if (key >= v.kv_length) columns.end = columns.begin;
  return columns;
}

// ---- sees: a fragment of S, rows are queries ----------------------------------------------------

// Bit c of word w: key 32 * w + c has the segment `mine` of this lane's row; lane l has the id of
// key 32 * w + l. A round for each segment that the warp's rows have, most often one or two.
template <int kWords>
__device__ __forceinline__ void match_segment(int mine, const int (&ids)[kWords],
                                              uint32 (&words)[kWords]) {
  uint32 left = 0xffffffffu;
  while (left != 0) {
    const int id = __shfl_sync(0xffffffffu, mine, __ffs(left) - 1);
    left &= ~__ballot_sync(0xffffffffu, mine == id);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32 same = __ballot_sync(0xffffffffu, ids[w] == id);
      if (mine == id) words[w] = same;
    }
  }
}

// Masks the first kCount of the scores of a block of keys. query_of(row): of the thread's row 0 or
// 1; `one_segment`: all pairs share theirs; `bits`: what the mask has for row 0 and 1, which are
// one where it does not vary with the query. With kBranches halves that a warp sees whole are left
// out, one of most diagonal blocks; wgmma in flight would be serialised by a branch here.
template <int kCount, bool kBranches, class Params, class QueryOf, int kScores>
__device__ __forceinline__ void hide_scores(const Params& p, int batch, const Visibility& sight,
                                            QueryOf query_of, int first_key, bool one_segment,
                                            const mask::RowBits<2 * kScores>& bits,
                                            float (&scores)[kScores]) {
  constexpr int kKeys = 2 * kScores;
  constexpr int kWords = ceil_div(kKeys, 32);  // a bit for each key
  const int lane = threadIdx.x % 32;
  const int first_column = fragment::first_column(threadIdx.x);
  int ids[kWords];  // of the keys first_key + 32 * w + lane
  if (kHasSegments && !one_segment) {
    const int* all = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int key = first_key + 32 * w + lane;
      ids[w] = key < sight.kv_length ? all[key] : 0;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = query_of(row);
    Range columns = row_columns(sight, query, first_key);
    if constexpr (kHasSegments || kHasMask) {
      uint32 words[kWords];  // the columns that the row sees, a bit each
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = 0xffffffffu;
      if (kHasSegments && !one_segment) {
        const bool valid = query < sight.query_length;
        match_segment(valid ? p.query_segments[static_cast<int64>(batch) * p.query_len + query] : 0,
                      ids, words);
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] &= ptx::low_bits(columns.end - 32 * w);
        if constexpr (kHasMask) words[w] &= bits.word(row, w);
        if constexpr (kWindowLeft) words[w] &= ~ptx::low_bits(columns.begin - 32 * w);
        words[w] >>= first_column;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment::row(i) != row) continue;
        const int column = fragment::column(i);
        scores[i] = words[column / 32] >> column % 32 & 1 ? scores[i] : kNegativeInfinity;
      }
    } else {
      columns.begin -= first_column;
      columns.end -= first_column;
#pragma unroll
      for (int half = 0; half < kCount; half += kScores / 2) {
        const int first = fragment::column(half);
        const bool whole = columns.begin <= first && columns.end > first + kKeys / 2 - 7;
        if (kBranches && whole) continue;
#pragma unroll
        for (int i = half; i < half + kScores / 2; ++i) {
          if (fragment::row(i) != row) continue;
          const int column = fragment::column(i);
          bool visible = column < columns.end;
          if constexpr (kWindowLeft) visible = visible && column >= columns.begin;
          scores[i] = visible ? scores[i] : kNegativeInfinity;
        }
      }
    }
  }
}

// ---- sees: a fragment of S^T, rows are keys -----------------------------------------------------

// The thread's pairs among 64 keys and kQueries queries from first_query on; `key` is its first.
template <int kQueries>
struct SeenPairs {
  int first_column;
  Range columns[2];  // of queries that its keys see, relative to its first query
  mask::QueryBits<kQueries> bits[2];
  int key_segment[2];
  int segments[kQueries / 32];  // of query first_query + 32 i + lane

  template <class Params>
  __device__ __forceinline__ SeenPairs(const Params& p, int batch, int head,
                                       const Visibility& sight, int key, int first_query)
      : first_column(fragment::first_column(threadIdx.x)) {
    if constexpr (kHasSegments) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        const int query =
            min(first_query + 32 * i + static_cast<int>(threadIdx.x) % 32, p.query_len - 1);
        segments[i] = p.query_segments[static_cast<int64>(batch) * p.query_len + query];
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int mine = key + fragment::kRowStep * row;
      columns[row] = key_columns(sight, mine, first_query + first_column);
      if constexpr (kHasMask) bits[row].load(p, batch, head, mine, first_query / kQueries);
      if constexpr (kHasSegments) {
        key_segment[row] =
            p.key_value_segments[static_cast<int64>(batch) * p.kv_len + min(mine, p.kv_len - 1)];
      }
    }
  }
  // Of elements 4j to 4j + 3. Whole warps call.
  __device__ __forceinline__ void see(int j, bool (&seen)[4]) const {
    int query_segment[2];
    if constexpr (kHasSegments) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_segment[c] =
            __shfl_sync(0xffffffffu, segments[j / 4], 8 * (j % 4) + first_column + c);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = fragment::column(4 * j + i);
      const Range& range = columns[fragment::row(i)];
      seen[i] = column >= range.begin && column < range.end;
      if constexpr (kHasSegments) {
        seen[i] = seen[i] && query_segment[i % 2] == key_segment[fragment::row(i)];
      }
      if constexpr (kHasMask) {
        const uint32 mine = bits[fragment::row(i)].word(column / 32) >> first_column;
        seen[i] = seen[i] && mine >> column % 32 & 1;
      }
    }
  }
};

// ---- keep ---------------------------------------------------------------------------------------
//
// The pattern of jax_flash/_philox.py: one counter for the eight weights of the queries q, q + 8
// and the keys k, k + 1, k + 8, k + 9, 15 bits each. The sum of a row and its lse are of all
// weights; the kept ones count 1 / (1 - rate) times, a factor that results get at their end.

// The draws of one query head.
class Draws {
 public:
  template <class Params>
  __device__ __forceinline__ Draws(const Params& p, int batch, int head)
      : state_(reinterpret_cast<const uint4*>(
            p.dropout_state)[static_cast<int64>(batch) * p.query_heads + head]) {}
  // Word 2 * i + j is of query + 8 * j and of the keys key + 8 * i, in its low half, and the one
  // after it. query % 16 < 8; key % 16 is 0, 2, 4 or 6.
  __device__ __forceinline__ PhiloxWords words(int query, int key) const {
    return philox(state_.x, state_.y, key / 16 * 4 + key % 8 / 2, query / 16 * 8 + query % 8,
                  state_.z, state_.w);
  }

 private:
  uint4 state_;  // key words, head id, batch id
};

// What of a word's low and high half is dropped. A number of 15 bits is below the threshold exactly
// if it is so as a float16, where NaN are the largest ones: below nothing. Above the infinity, with
// kDropsMost, the complements are compared, as if NaN were above everything.
template <class Params>
__device__ __forceinline__ void dropped_halves(const Params& p, uint32 word, bool (&dropped)[2]) {
  if constexpr (kDropsMost) {
    ptx::above(~word, ~p.dropout_threshold, dropped);
  } else {
    ptx::below(word, p.dropout_threshold, dropped);
  }
}
// The same as masks.
template <class Params>
__device__ __forceinline__ uint32 dropped_halves(const Params& p, uint32 word) {
  return kDropsMost ? ptx::above(~word, ~p.dropout_threshold)
                    : ptx::below(word, p.dropout_threshold);
}

// Zeroes what is dropped of a fragment of weights whose rows are queries. `query`: the thread's
// first row.
template <class Params, int kCount>
__device__ __forceinline__ void drop_weights(const Params& p, const Draws& draws, int query,
                                             int first_key, float (&weights)[kCount]) {
  const int key = first_key + fragment::first_column(ptx::opaque(threadIdx.x));
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    const PhiloxWords words = draws.words(query, key + 16 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bool dropped[2];
      dropped_halves(p, words.word[i], dropped);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float& weight = weights[fragment::element(2 * j + i / 2, i % 2, column)];
        weight = dropped[column] ? 0.0f : weight;
      }
    }
  }
}

// The dropped ones of a fragment of S^T, whose rows are keys, a bit each.
template <int kCount>
class Dropped {
 public:
  // `key`: the first of the warp's 16. Words are drawn by the thread that has their weights where
  // rows are queries; they are 8 x 8 matrices of 16 bits, whose transposes are wanted here. Whole
  // warps call.
  template <class Params>
  __device__ __forceinline__ void draw(const Params& p, const Draws& draws, int first_query,
                                       int key) {
    const int lane = ptx::opaque(threadIdx.x) % 32;  // read again, not kept in a register
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 4) {
      const PhiloxWords words =
          draws.words(first_query + 4 * i + lane / 4, key + fragment::first_column(lane));
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // elements 2 (i + k) and the one after it
        const uint32 word = ptx::transpose_matrix(words.word[k % 2 * 2 + k / 2]);
        uint32& set = bits_[i / 16];
        set = (i % 16 + k == 0 ? 0 : set) | (dropped_halves(p, word) & 0x00010001u << (i + k) % 16);
      }
    }
  }
  // The weight of element i, with a sign if it is dropped.
  __device__ __forceinline__ float mark(int i, float weight) const {
    const uint32 sign = bits_[i / 32] << (31 - i / 2 % 16 - i % 2 * 16) & 0x80000000u;
    return __uint_as_float(__float_as_uint(weight) | sign);
  }

 private:
  uint32 bits_[kCount / 32];
};

// Does dropout keep one pair's weight?
template <class Params>
__device__ __forceinline__ bool keeps(const Params& p, int batch, int head, int query, int key) {
  if constexpr (!kHasDropout) return true;
  const PhiloxWords words = Draws(p, batch, head).words(query & ~8, key & ~9);
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
