// Rows of dq, dk and dv once more, sixteen by one warp, without touching what is hidden from them.
//
// The tiled kernel multiplies the rows of a partial block by a dS or P of zero where they do not
// see each other, and 0 * NaN is NaN: a NaN or infinity in one row of a block reaches the results
// of the others. Rows whose result is not finite come here. Those that saw it keep it: their lse or
// delta is not finite either.
#pragma once

#include "backward_blocks.cuh"
#include "exact_products.cuh"

namespace backward {

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < kInfinity; }
__device__ __forceinline__ bool row_is_finite(const void* array, int64 at, int count) {
  bool finite = true;
  for (int c = threadIdx.x % 32; c < count; c += 32) {
    finite = finite && is_finite(load_result(array, at + c));
  }
  return __all_sync(0xffffffffu, finite);
}

// The index of a row of lse_log2 and minus_delta.
template <class Params>
__device__ __forceinline__ int64 padded_row(const Params& p, int batch, int head, int query) {
  const int64 row = static_cast<int64>(batch) * p.query_heads + head;
  if constexpr (kCompact) return row * stored_rows(p) + query;
  return row * query_blocks(p) * kQueries + query;
}
// One element of P, dropout applied, and of dS, of the products of its rows.
struct Weights {
  float probability, gradient;
  bool seen;  // a function of the scores may hide what masks do not
};
template <class Params>
__device__ __forceinline__ Weights weights(const Params& p, int batch, int head, int query, int key,
                                           float score, float dp, float lse, float minus_delta) {
  float slope;
  score = score_of_pair(p, batch, head, query, key, score, slope);
  if (kHasScoreFunction && score == kNegativeInfinity) return {0.f, 0.f, false};
  const bool kept = keeps(p, batch, head, query, key);
  const float probability = probability_of(fmaf(score, p.scale_log2, lse));
  if (!kept) dp = 0.f;
  return {kept ? probability : 0.f, probability * (dp + minus_delta) * slope, true};
}
// Is one of the warp's elements of dS beyond the range of float16? Then the tiled kernel had an
// infinity there, though the sums may be finite.
__device__ __forceinline__ bool leave_float16(const exact::Scores& gradients) {
  if constexpr (!kSame<Element, Float16>) return false;
  bool leaves = false;
#pragma unroll
  for (float x : gradients) leaves = leaves || fabsf(x) > 65504.f;
  return __any_sync(0xffffffffu, leaves);
}
// Sixteen rows, from `first` on, of dq of one head, or of dk or dv of one key/value head, whose
// query heads are `heads`. Computes columns of those that are marked, a bit each, in units of 64.
enum class Repaired { kDq, kDk, kDv };
struct ExactRows {
  Repaired of;
  int batch, kv_head;
  Range heads;
  int first;
  uint32 marks;
  Range columns;
};
// dk and dv one after the other, though both want the scores: sums of both took 168 registers, and
// were spilled.
template <int kDim, class Params>
__device__ __forceinline__ void exact_gradient(const Params& p, const ExactRows& rows) {
  const bool of_keys = rows.of != Repaired::kDq, of_value = rows.of == Repaired::kDv;
  const Visibility sight = visibility(p, rows.batch);
  const auto row_at = [&](bool is_key, int index, int head) {
    return is_key ? key_row(p, rows.batch, index, rows.kv_head)
                  : query_row(p, rows.batch, index, head);
  };
  const auto own = [&](int row) {  // rows past the last are not marked
    const int mine = rows.first + exact::lane() / 4 + fragment::kRowStep * row;
    return min(mine, (of_keys ? p.kv_len : p.query_len) - 1);
  };
  bool stores[2];
  Range sees_them[2], all{kLargest, kSmallest};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    stores[row] = rows.marks >> (exact::lane() / 4 + fragment::kRowStep * row) & 1;
    sees_them[row] = of_keys ? visible_queries(sight, own(row), own(row))
                             : visible_keys(sight, own(row), own(row));
    if (!stores[row]) sees_them[row] = {0, 0};
    if (sees_them[row].empty()) continue;
    all = {min(all.begin, sees_them[row].begin), max(all.end, sees_them[row].end)};
  }
  all.begin = __reduce_min_sync(0xffffffffu, all.begin);
  all.end = __reduce_max_sync(0xffffffffu, all.end);
#pragma unroll 1
  for (int column = rows.columns.begin; column < rows.columns.end; column += exact::kBoxColumns) {
    exact::Sums<Element, kDim, 1> sums;
    sums.begin(column);
#pragma unroll 1
    for (int head = rows.heads.begin; head < rows.heads.end; ++head) {
#pragma unroll 1
      for (int from = all.begin; from < all.end; from += exact::kRows) {
        // Found anew in every step: kept, addresses were spilled.
        const bool of_keys = ptx::opaque(static_cast<uint32>(rows.of)) != 0;
        const int64 at[2] = {row_at(of_keys, own(0), head), row_at(of_keys, own(1), head)};
        const auto other = [&](int i) {
          return row_at(!of_keys, min(from + i, all.end - 1), head);
        };
        const void* const right_head = of_keys ? p.query_data : p.key_data;
        const void* const right_value = of_keys ? p.dout_data : p.value_data;
        const auto other_head = [&](int i) { return other(i) * kHeadDim; };
        const auto other_value = [&](int i) { return other(i) * kValueDim; };
        const auto next = [&](int i) { return other(i + exact::kRows); };
        exact::prefetch_rows<Element, kHeadDim>(right_head,
                                                [&](int i) { return next(i) * kHeadDim; });
        exact::prefetch_rows<Element, kValueDim>(right_value,
                                                 [&](int i) { return next(i) * kValueDim; });
        exact::Scores scores, products{};
        const int64 head_at[2] = {at[0] * kHeadDim, at[1] * kHeadDim};
        exact::multiply_rows<Element, kHeadDim, 1>(scores, of_keys ? p.key_data : p.query_data,
                                                   head_at, right_head, other_head);
        if (!of_value) {
          const int64 value_at[2] = {at[0] * kValueDim, at[1] * kValueDim};
          exact::multiply_rows<Element, kValueDim, 1>(
              products, of_keys ? p.value_data : p.dout_data, value_at, right_value, other_value);
        }
        uint32 seen = 0;
        bool is_nan[2] = {false, false};
        // Columns 0 to 7, then the others: all at once were spilled beside many terms. A half has
        // no branches, so that what is loaded for its pairs is on its way together.
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = fragment::row(i), index = from + exact::column_of(i) + 8 * half;
            const int at = min(index, all.end - 1);
            const int query = of_keys ? at : own(row), key = of_keys ? own(row) : at;
            const int64 padded = padded_row(p, rows.batch, ptx::opaque(head), query);
            const float lse = p.lse_log2[padded], minus_delta = p.minus_delta[padded];
            bool visible = index >= sees_them[row].begin && index < sees_them[row].end;
            visible &= sees(p, rows.batch, head, query, key);
            if (visible && (lse != lse || !(of_keys || is_finite(minus_delta)))) is_nan[row] = true;
            Weights w =
                weights(p, rows.batch, head, query, key, scores[i], products[i], lse, minus_delta);
            if (!visible || lse == kNegativeInfinity) w = {0.f, 0.f, false};
            if (w.seen) seen |= 1u << (i + 4 * half);
            scores[i] = of_value ? w.probability : w.gradient;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // the other half comes in front
            const float other = scores[i];
            scores[i] = scores[i + 4], scores[i + 4] = other;
            products[i] = products[i + 4];
          }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {  // then the results are NaN, as they are
          const uint32 lanes = __ballot_sync(0xffffffffu, is_nan[row]);
          if (lanes >> (exact::lane() & ~3) & 15) stores[row] = false;
        }
        if (!__any_sync(0xffffffffu, stores[0] || stores[1])) return;
        const void* const right = of_value ? right_value : right_head;
        const auto right_at = [&](int i) { return other(i) * kDim; };
        auto ahead = sums.load(right, right_at);
        sums.add(scores, seen, ahead, right, right_at, leave_float16(scores));
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (!stores[row]) continue;
      void* const result = of_value ? p.dvalue_data : of_keys ? p.dkey_data : p.dquery;
      sums.template store<ResultElement>(row,
                                         static_cast<ResultElement::Bits*>(result) +
                                             row_at(of_keys, own(row), rows.heads.begin) * kDim,
                                         of_value ? value_scale(p) : query_key_scale(p));
    }
  }
}
template <class Params>
__device__ __forceinline__ void exact_gradients(const Params& p, const ExactRows& rows) {
  if (rows.marks == 0) return;
  if (kHeadDim != kValueDim && rows.of == Repaired::kDv) {
    exact_gradient<kValueDim>(p, rows);
  } else {
    exact_gradient<kHeadDim>(p, rows);
  }
}

// ---- which rows -------------------------------------------------------------------------------

// The main kernel leaves a mark for every 16 rows of dk and of dv, the rows of one warp.
inline constexpr int kMarkedRows = exact::kRows;
// Pairs of marks of a key/value head: with kCompact there is none past the last key, but where
// there are no marks at all and finish_keys counts groups by whole blocks.
template <class Params>
__device__ __forceinline__ int marked_rows(const Params& p) {
  if constexpr (kCompact && !kSharesKeys) return ceil_div(p.kv_len, kMarkedRows);
  return key_blocks(p) * (kKeys / kMarkedRows);
}
template <class Params>
__device__ __forceinline__ int mark_count(const Params& p) {
  if constexpr (kSharesKeys)
    return 0;  // the kernel that makes dk and dv of their sums looks itself
  return p.batch * p.kv_heads * marked_rows(p) * 2;
}
// The first pair of a unit.
template <class Params>
__device__ __forceinline__ int first_mark(const Params& p, int batch, int kv_head, int key0) {
  const int head = batch * p.kv_heads + kv_head;
  if constexpr (kCompact) return head * marked_rows(p) + key0 / kMarkedRows;
  return (head * key_blocks(p) + key0 / kKeys) * (kKeys / kMarkedRows);
}

template <int kCount>
__device__ __forceinline__ bool all_finite(const float (&values)[kCount]) {
  float sums[4] = {0.f, 0.f, 0.f, 0.f};  // stays zero as long as the values are finite
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] = fmaf(values[i], 0.f, sums[i % 4]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]) == 0.f;
}

// Marks the rows of this warp, `row` of the key block on, of dk (which = 0) or dv (1); of rows that
// others add to those alone that are not finite.
template <class Params>
__device__ __forceinline__ void mark_rows(const Params& p, int batch, int kv_head, int key0,
                                          int row, int which, bool finite, bool shares = false) {
  const bool clean = __all_sync(0xffffffffu, finite);
  const int first = first_mark(p, batch, kv_head, key0);
  // With kPairs there may be a unit without keys, which has no marks.
  const bool is_there = !(kCompact || kPairs) || key0 + (kCompact ? row : 0) < p.kv_len;
  if (threadIdx.x % 32 == 0 && is_there && !(shares && clean)) {
    p.marks[(first + row / kMarkedRows) * 2 + which] = clean ? 0 : 1;
  }
}

// The groups of 16 keys that one block of the finishing kernel looks after.
template <class Params>
__device__ __forceinline__ Range own_groups(const Params& p) {
  const int groups = mark_count(p) / 2, share = ceil_div(groups, static_cast<int>(gridDim.x));
  const int begin = min(groups, static_cast<int>(blockIdx.x) * share);
  return {begin, min(groups, begin + share)};
}
template <class Params>
__device__ __forceinline__ bool is_marked(const Params& p, int group) {
  return kSharesKeys || p.marks[2 * group] != 0 || p.marks[2 * group + 1] != 0;
}
template <class Params>
__device__ __forceinline__ bool any_marked(const Params& p, Range groups) {
  bool marked = false;
  for (int i = groups.begin + static_cast<int>(threadIdx.x); i < groups.end; i += blockDim.x) {
    marked = marked || is_marked(p, i);
  }
  return marked;
}

// Of 16 keys of a group those whose dk, or dv, is not finite.
template <class Params>
__device__ __forceinline__ ExactRows wrong_keys(const Params& p, int group, Repaired of) {
  const int groups = marked_rows(p), head_index = group / groups;
  const int batch = head_index / p.kv_heads, kv_head = head_index - batch * p.kv_heads;
  const int dim = of == Repaired::kDv ? kValueDim : kHeadDim;
  const void* const result = of == Repaired::kDv ? p.dvalue_data : p.dkey_data;
  const int first_head = kv_head * group_size(p), first = (group - head_index * groups) * 16;
  ExactRows rows{of, batch, kv_head, {first_head, first_head + group_size(p)}, first, 0, {0, dim}};
#pragma unroll 1
  for (int i = 0; i < exact::kRows && first + i < p.kv_len; ++i) {
    const int64 row = key_row(p, batch, first + i, kv_head);
    rows.marks |= !row_is_finite(result, row * dim, dim) << i;
  }
  return rows;
}
// Of 16 queries of a head those of which 64 columns of dq are not finite.
template <class Params>
__device__ __forceinline__ ExactRows wrong_queries(const Params& p, int batch, int head, int first,
                                                   int count, Range columns) {
  ExactRows rows{Repaired::kDq, batch, head / group_size(p), {head, head + 1}, first, 0, columns};
#pragma unroll 1
  for (int i = 0; i < count && first + i < p.query_len; ++i) {
    const int64 at = query_row(p, batch, first + i, head) * kHeadDim + columns.begin;
    rows.marks |= !row_is_finite(p.dquery, at, min(columns.end, kHeadDim) - columns.begin) << i;
  }
  return rows;
}

// What a CTA of the finishing kernel looks after: its tile of dq, 64 rows, or -1; others, as far as
// they are marked; groups of keys. With kMarksRows a tile has rows of [B, T, N], of several heads.
struct Suspects {
  int own;
  Range tiles, groups;
};
template <class Params>
__device__ __forceinline__ bool is_tile_marked(const Params& p, int tile) {
  if constexpr (kRing || kMarksRows) return p.dq_marks[tile] != 0;
  return false;
}
// Computes again what is stored and not finite of these.
template <class Params>
__device__ __forceinline__ void exact_suspects(const Params& p, const Suspects& suspects) {
  const auto& [own, tiles, groups] = suspects;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, count = tiles.end - tiles.begin;
  const int tiles_of_head = query_blocks(p) * (kQueries / 64);
#pragma unroll 1
  for (int i = own < 0 ? 0 : -1; i < count + groups.end - groups.begin; ++i) {
    const int tile = i < 0 ? own : tiles.begin + i, group = groups.begin + i - count;
    const bool of_keys = i >= count;
    const bool skips = of_keys ? group % warps != warp || !is_marked(p, group)
                               : i >= 0 && !is_tile_marked(p, tile);
    if (skips) continue;
    // dk and dv; with kMarksRows, whose rows are of several heads, one row at a time.
    const int parts = of_keys ? 2 : kMarksRows ? exact::kRows : 1;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      ExactRows rows;
      if (of_keys) {
        rows = wrong_keys(p, group, part == 0 ? Repaired::kDk : Repaired::kDv);
      } else if constexpr (kMarksRows) {
        const int row = 64 * tile + exact::kRows * warp + part, of = row / p.query_heads;
        if (of >= p.batch * p.query_len) break;
        const int batch = of / p.query_len;
        rows = wrong_queries(p, batch, row - of * p.query_heads, of - batch * p.query_len, 1,
                             {0, kHeadDim});
      } else {
        const int of = tile / kHeadBoxes, head_index = of / tiles_of_head;
        const int batch = head_index / p.query_heads, column = 64 * (tile - of * kHeadBoxes);
        // With kEarly the columns of a head begin inside of its first box.
        const Range columns = kEarly ? Range{0, kHeadDim} : Range{column, column + 64};
        rows = wrong_queries(p, batch, head_index - batch * p.query_heads,
                             64 * (of - head_index * tiles_of_head) + exact::kRows * warp,
                             exact::kRows, columns);
      }
      exact_gradients(p, rows);
    }
  }
}

}  // namespace backward
