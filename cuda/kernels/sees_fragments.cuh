// Which elements of a fragment there are: of S in the forward pass, where hidden scores become
// -inf, and of S^T in the backward pass. A pair by itself: sees.cuh.
#pragma once

#include "fragment.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "sees.cuh"

// ---- a fragment of S, rows are queries ----------------------------------------------------------

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

// Hides the scores of the first kCount elements whose keys stand where the rows see none.
template <int kCount, class Params, class QueryOf, int kScores>
__device__ __forceinline__ void hide_positions(const Params& p, int batch, const Visibility& sight,
                                               QueryOf query_of, int first_key,
                                               float (&scores)[kScores]) {
  constexpr int kWords = ceil_div(2 * kScores, 32);
  int keys[kWords];  // of the keys first_key + 32 * w + lane; past the length they are hidden
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int key = first_key + 32 * w + static_cast<int>(threadIdx.x) % 32;
    keys[w] = key < sight.kv_length ? key_position(p, batch, key) : 0;
  }
  Positions reach[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = query_of(row);
    reach[row] =
        positions_seen(p, query < sight.query_length ? query_position(p, batch, query) : 0);
  }
  const int first_column = fragment::first_column(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int key = __shfl_sync(0xffffffffu, keys[j / 4], 8 * (j % 4) + first_column + c);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& score = scores[fragment::element(j, row, c)];
        score = reach[row].hold(key) ? score : kNegativeInfinity;
      }
    }
  }
}

// Masks the first kCount of the scores of a block of keys. query_of(row): of the thread's row 0 or
// 1; `one_segment`: all pairs share theirs; `bits`: what the mask has for row 0 and 1, which are
// one where it does not vary with the query. With kBranches halves that a warp sees whole are left
// out, one of most diagonal blocks; wgmma in flight would be serialised by a branch here.
template <int kCount, bool kBranches, class Params, class QueryOf, class RowBits, int kScores>
__device__ __forceinline__ void hide_scores(const Params& p, int batch, const Visibility& sight,
                                            QueryOf query_of, int first_key, bool one_segment,
                                            const RowBits& bits, float (&scores)[kScores]) {
  if constexpr (kHasPositions) {
    hide_positions<kCount>(p, batch, sight, query_of, first_key, scores);
  }
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
    if constexpr (kHasMaskBytes) {
      uint32 mine = bits.of(row);
      if (kHasSegments && !one_segment) {
        uint32 words[kWords];
        const bool valid = query < sight.query_length;
        match_segment(valid ? p.query_segments[static_cast<int64>(batch) * p.query_len + query] : 0,
                      ids, words);
        mine &= mask::thread_bits(words, first_column);
      }
      if constexpr (kHasKeyValueLengths || kWindowRight || !kByteKeys) {
        mine &= mask::low_thread_bits(columns.end - first_column);
      }
      if constexpr (kWindowLeft) mine &= ~mask::low_thread_bits(columns.begin - first_column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment::row(i) != row) continue;
        scores[i] = mine >> mask::thread_bit(i) & 1 ? scores[i] : kNegativeInfinity;
      }
    } else if constexpr (kHasSegments || kHasMask) {
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
      uint32 mine = 0;  // of both ends at once: an element takes a selection, not two tests with it
      if constexpr (kWindowLeft) {
        static_assert(kKeys <= 128);
        mine = mask::low_thread_bits(columns.end) & ~mask::low_thread_bits(columns.begin);
      }
#pragma unroll
      for (int half = 0; half < kCount; half += kScores / 2) {
        const int first = fragment::column(half);
        const bool whole = columns.begin <= first && columns.end > first + kKeys / 2 - 7;
        if (kBranches && whole) continue;
#pragma unroll
        for (int i = half; i < half + kScores / 2; ++i) {
          if (fragment::row(i) != row) continue;
          const int column = fragment::column(i);
          const bool visible = kWindowLeft ? mine >> mask::thread_bit(i) & 1 : column < columns.end;
          scores[i] = visible ? scores[i] : kNegativeInfinity;
        }
      }
    }
  }
}

// ---- a fragment of S^T, rows are keys -----------------------------------------------------------

// The thread's pairs among its warp's 16 keys and kQueries queries from first_query on; `key` is
// its first. The bits of a mask are in blocks of kBlock queries, of which these may be a part.
template <int kQueries, int kBlock = kQueries>
struct SeenPairs {
  int first_column;
  Range columns[2];  // of queries that its keys see, relative to its first query
  mask::QueryBits<kBlock> bits[2];
  int key_segment[2];
  int segments[kQueries / 32];  // of query first_query + 32 i + lane
  Positions seeing[2];          // of the queries that see its keys
  int positions[kQueries / 32];

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
    if constexpr (kHasPositions) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        const int query =
            min(first_query + 32 * i + static_cast<int>(threadIdx.x) % 32, p.query_len - 1);
        positions[i] = query_position(p, batch, query);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int mine = key + fragment::kRowStep * row;
      columns[row] = key_columns(sight, mine, first_query + first_column);
      if constexpr (kHasMask) {
        bits[row].load(p, batch, head, mine, first_query / kBlock);
        if constexpr (kBlock > kQueries && kMaskQueries) {
          static_assert(kQueries == 32 && kBlock == 64);
          uint32(&words)[2] = bits[row].words;
          words[0] = (first_query % kBlock < 32 ? words[0] : words[1]) >> first_query % 32;
        }
      }
      if constexpr (kHasSegments) {
        key_segment[row] =
            p.key_value_segments[static_cast<int64>(batch) * p.kv_len + min(mine, p.kv_len - 1)];
      }
      if constexpr (kHasPositions) {
        seeing[row] = positions_seeing(p, key_position(p, batch, min(mine, p.kv_len - 1)));
      }
    }
    if constexpr (kMaskBlock != 0)
      mask::keep_blocks<kQueries>(p, batch, head, key, first_query, bits);
  }
  // Are the pairs of elements 4j to 4j + 3 there? Whole warps call.
  __device__ __forceinline__ void see(int j, bool (&seen)[4]) const {
    int query_segment[2];
    if constexpr (kHasSegments) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_segment[c] =
            __shfl_sync(0xffffffffu, segments[j / 4], 8 * (j % 4) + first_column + c);
      }
    }
    int query_at[2];
    if constexpr (kHasPositions) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_at[c] = __shfl_sync(0xffffffffu, positions[j / 4], 8 * (j % 4) + first_column + c);
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
      if constexpr (kHasPositions) {
        seen[i] = seen[i] && seeing[fragment::row(i)].hold(query_at[i % 2]);
      }
      if constexpr (kHasMask) {
        const uint32 mine = bits[fragment::row(i)].word(column / 32) >> first_column;
        seen[i] = seen[i] && mine >> column % 32 & 1;
      }
    }
  }
};
