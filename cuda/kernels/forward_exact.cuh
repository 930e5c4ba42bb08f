// One query row of attention by one warp, without tensor cores and without touching a masked value.
//
// The tiled kernels multiply every value of a block, those of masked keys by a weight of zero, and
// 0 * NaN is NaN; and a row overflows when a score is more than 128 above its base (log2 units). A
// unit with rows that overflow is walked again first, where TMA loads and a slot is free. Rows
// whose result is not finite even so come here. If visible values explain it, it stands; else the
// row is computed again, exactly as the definition has it.
#pragma once

#include "rows.cuh"
#include "terms.cuh"

namespace forward {

// Values under way together: their latency is what takes time. Wide rows have registers for fewer.
inline constexpr int kKeysAtOnce = kValueDim <= 256 ? 8 : 4;

// The next keys of the set `left` (a bit each), lowest first; -1 where there are no more.
__device__ __forceinline__ void take_keys(uint32& left, int (&taken)[kKeysAtOnce]) {
#pragma unroll
  for (int& key : taken) {
    key = __ffs(left) - 1;
    left &= left - 1;
  }
}

// The values of the keys first_key + taken[i], this lane's columns; zeros for none.
template <int kColumns, class Params>
__device__ __forceinline__ void load_values(const Params& p, const KeyRows<kValueDim>& rows,
                                            int first_key, const int (&taken)[kKeysAtOnce],
                                            float (&values)[kKeysAtOnce][kColumns]) {
  const auto* first = static_cast<const Stored::Bits*>(p.value_data) + rows.begin(first_key);
#pragma unroll
  for (int i = 0; i < kKeysAtOnce; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = threadIdx.x % 32 + 32 * c;
      const bool inside = taken[i] >= 0 && column < kValueDim;
      values[i][c] = inside ? Stored::unpack(first[rows.after(first_key, taken[i]) + column]) : 0;
    }
  }
}

// A result that is not finite is explained if the sum of the visible values that are not finite is
// the same infinity, or NaN as well. True: it is not explained yet.
__device__ __forceinline__ bool is_open(float result, float sum) {
  const bool agrees = sum == result || (sum != sum && result != result);
  return !(fabsf(result) < kInfinity) && !agrees;
}

// Adds the values that are not finite, of those of `keys` that the query sees, to `sum`, until it
// is NaN or infinite wherever the row's `result` is: then it returns true, the visible values
// explain the result. The whole warp takes part; lane l holds columns l, l + 32, ... Most often the
// first keys decide.
template <int kColumns, class Params>
__device__ __forceinline__ bool explain_nan(const Params& p, int batch, int head, int query,
                                            const KeyRows<kValueDim>& value_rows, Range keys,
                                            const float (&result)[kColumns],
                                            float (&sum)[kColumns]) {
#pragma unroll 1
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int mine = first + static_cast<int>(threadIdx.x % 32);
    uint32 left = __ballot_sync(0xffffffffu, mine < keys.end && sees(p, batch, head, query, mine));
#pragma unroll 1
    while (left != 0) {
      int taken[kKeysAtOnce];
      float values[kKeysAtOnce][kColumns];
      take_keys(left, taken);
      load_values(p, value_rows, first, taken, values);
      bool open = false;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kKeysAtOnce; ++i) {
          if (!(fabsf(values[i][c]) < kInfinity)) sum[c] += values[i][c];
        }
        open = open || is_open(result[c], sum[c]);
      }
      if (!__any_sync(0xffffffffu, open)) return true;
    }
  }
  return false;
}

// dot + the product of two pieces of 16 bytes.
template <class Of>
__device__ __forceinline__ float add_products(const uint4& x, const uint4& y, float dot) {
  const uint32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kSame<Of, Float32>) {
      dot = fmaf(__uint_as_float(xs[j]), __uint_as_float(ys[j]), dot);
    } else {
      dot = fmaf(Of::unpack_low(xs[j]), Of::unpack_low(ys[j]), dot);
      dot = fmaf(Of::unpack_high(xs[j]), Of::unpack_high(ys[j]), dot);
    }
  }
  return dot;
}

// The product of two rows of the head dim.
__device__ __forceinline__ float dot_rows(const void* a, int64 a_index, const void* b,
                                          int64 b_index) {
  float dot = 0.0f;
  if constexpr (kFloat8) {
#pragma unroll 4
    for (int d = 0; d < kHeadDim; ++d) {
      dot = fmaf(Stored::unpack(static_cast<const Stored::Bits*>(a)[a_index + d]),
                 Stored::unpack(static_cast<const Stored::Bits*>(b)[b_index + d]), dot);
    }
  } else if constexpr (kHeadDim % 8 == 0) {  // rows are aligned to 16 bytes
    using Bits = Element::Bits;
    const auto* a_pieces = reinterpret_cast<const uint4*>(static_cast<const Bits*>(a) + a_index);
    const auto* b_pieces = reinterpret_cast<const uint4*>(static_cast<const Bits*>(b) + b_index);
#pragma unroll 4
    for (int i = 0; i < kHeadDim / (16 / static_cast<int>(sizeof(Bits))); ++i) {
      dot = add_products<Element>(a_pieces[i], b_pieces[i], dot);
    }
  } else {
#pragma unroll 4
    for (int d = 0; d < kHeadDim; ++d) {
      dot = fmaf(load_element(a, a_index + d), load_element(b, b_index + d), dot);
    }
  }
  return dot;
}

// Scales of float8: of 64 queries of a head, of 128 keys of one.
inline constexpr int kQueriesOfScale = 64, kKeysOfScale = 128;
template <class Params>
__device__ __forceinline__ int query_scale_at(const Params& p, int batch, int head, int query) {
  const int block = batch * ceil_div(p.query_len, kQueriesOfScale) + query / kQueriesOfScale;
  return block * p.query_heads + head;
}
template <class Params>
__device__ __forceinline__ int key_scale_at(const Params& p, int batch, int kv_head, int key) {
  const int block = batch * ceil_div(p.kv_len, kKeysOfScale) + key / kKeysOfScale;
  return block * p.kv_heads + kv_head;
}
// What a product of the stored numbers of a query and a key has to be multiplied by, and a value.
template <class Params>
__device__ __forceinline__ float score_factor_of(const Params& p, int batch, int head, int query,
                                                 int key) {
  if constexpr (kFloat8) {
    return p.query_scales[query_scale_at(p, batch, head, query)] *
           p.key_scales[key_scale_at(p, batch, kv_head_of(p, head), key)];
  }
  return 1.0f;
}
template <class Params>
__device__ __forceinline__ float value_factor_of(const Params& p, int batch, int head, int key) {
  if constexpr (kFloat8) return p.value_scales[key_scale_at(p, batch, kv_head_of(p, head), key)];
  return 1.0f;
}

// Softmax of those of `keys` that the query sees, times their values; the whole warp takes part.
// Lane l holds output columns l, l + 32, ... in out; `largest` in log2 units.
template <int kColumns, class Params>
__device__ __forceinline__ void exact_row(const Params& p, int batch, int head, int query,
                                          const KeyRows<kHeadDim>& key_rows,
                                          const KeyRows<kValueDim>& value_rows, Range keys,
                                          float (&out)[kColumns], float& largest, float& sum) {
  const int64 query_at = query_row(p, batch, query, head) * kHeadDim;
  const int lane = threadIdx.x % 32;
  largest = kNegativeInfinity;
  sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = 0.0f;
#pragma unroll 1
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int mine = first + lane;
    const bool seen = mine < keys.end && sees(p, batch, head, query, mine);
    uint32 left = __ballot_sync(0xffffffffu, seen);
    if (left == 0) continue;
    uint32 kept = 0xffffffffu;
    if constexpr (kHasDropout) {
      kept = __ballot_sync(0xffffffffu, keeps(p, batch, head, query, mine));
    }
    float logit = kNegativeInfinity;
    if (seen) {
      float score = dot_rows(p.query_data, query_at, p.key_data, key_rows.at(mine));
      if constexpr (kFloat8) score *= score_factor_of(p, batch, head, query, mine);
      logit = score_of_pair<kPreScale>(p, batch, head, query, mine, score) * p.scale_log2;
    }
    if constexpr (kHasScoreFunction) {
      left &= __ballot_sync(0xffffffffu, logit != kNegativeInfinity);
      if (left == 0) continue;
    }
    float now = logit;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, distance));
    }
    now = fmaxf(now, largest);
    const float correction = now == largest ? 1.0f : ptx::exp2_approx(largest - now);
    largest = now;
    sum *= correction;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= correction;
    const float weight = ptx::exp2_approx(logit - largest);
#pragma unroll 1
    while (left != 0) {
      int taken[kKeysAtOnce];
      float values[kKeysAtOnce][kColumns];
      take_keys(left, taken);
      load_values(p, value_rows, first, taken, values);
#pragma unroll
      for (int i = 0; i < kKeysAtOnce; ++i) {
        const float shared = __shfl_sync(0xffffffffu, weight, max(taken[i], 0));
        const float w = taken[i] >= 0 ? shared : 0.0f;
        sum += w;
        float factor = kept >> max(taken[i], 0) & 1 ? w : 0.0f;
        if constexpr (kFloat8) factor *= value_factor_of(p, batch, head, first + max(taken[i], 0));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] = fmaf(factor, values[i][c], out[c]);
      }
    }
  }
}

// A row of the result.
struct Row {
  int query, head;
  int64 first_key;  // row of its head's first key
  Range keys;       // that it sees, mask, segments and positions aside
  int64 lse;        // index
  ResultElement::Bits* result;
};

// Looks at rows of one batch row, a bit of `rows` each, whose results are stored: calls
// wrong(bit, row_of(bit)) for each that is not finite, if no visible value explains it. Whole warps
// call.
template <class Params, class RowOf, class Wrong>
__device__ __forceinline__ void find_wrong(const Params& p, int batch, uint32 rows, RowOf row_of,
                                           Wrong wrong) {
  constexpr int kColumns = ceil_div(kValueDim, 32);
  const auto fresh_lane = [] { return ptx::opaque(threadIdx.x) % 32; };
  const auto load_result = [&](const Row& row, float (&out)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = fresh_lane() + 32 * c;
      out[c] = column < kValueDim ? ResultElement::unpack(row.result[column]) : 0.0f;
    }
  };
  const auto explain = [&](const float (&result)[kColumns], const Row& row, Range keys,
                           float (&sum)[kColumns]) {
    return explain_nan(p, batch, row.head, row.query, {p, row.first_key}, keys, result, sum);
  };
  // First the keys that all of these rows see, for the first of them.
  const Row first = row_of(__ffs(rows) - 1);
  Range common = first.keys;
#pragma unroll 1
  for (uint32 left = rows; left != 0; left &= left - 1) {
    const Row other = row_of(__ffs(left) - 1);
    common.begin = max(common.begin, other.keys.begin);
    common.end = min(common.end, other.keys.end);
    if (!see_alike(p, batch, first.query, other.query)) common.end = common.begin;
  }
  float common_sum[kColumns];  // of its values that are not finite
#pragma unroll
  for (int c = 0; c < kColumns; ++c) common_sum[c] = 0.0f;
  // Which keys a function of the scores hides is known by their products alone.
  constexpr bool kExplains = !kHasScoreFunction;
  bool all_added = false;  // else what explains the first row was enough
  if constexpr (kExplains) {
    float result[kColumns];
    load_result(first, result);
    all_added = !common.empty() && !explain(result, first, common, common_sum);
  }
#pragma unroll 1
  for (uint32 left = rows; left != 0; left &= left - 1) {
    const int bit = __ffs(left) - 1;
    const Row row = row_of(bit);
    if (kExplains && p.lse[row.lse] < kInfinity) {
      float out[kColumns], explained[kColumns];
      load_result(row, out);
      bool open = false;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        explained[c] = common_sum[c];
        open = open || is_open(out[c], explained[c]);
      }
      open = __any_sync(0xffffffffu, open);
      // Then the keys before the common ones, and those after them; or once more all.
      Range rest = row.keys, last{row.keys.end, row.keys.end};
      if (all_added) {
        rest.end = common.begin;
        last.begin = common.end;
      }
#pragma unroll 1
      for (int part = 0; open && part < 2; ++part) {
        open = !explain(out, row, part == 0 ? rest : last, explained);
      }
      if (!open) continue;
    }
    wrong(bit, row);
  }
}

// Computes a row of a batch row again. Whole warps call.
template <class Params>
__device__ __forceinline__ void repeat_row(const Params& p, int batch, const Row& row) {
  constexpr int kColumns = ceil_div(kValueDim, 32);
  const auto fresh_lane = [] { return ptx::opaque(threadIdx.x) % 32; };
  float out[kColumns], largest = 0.0f, sum = 0.0f;
  exact_row(p, batch, row.head, row.query, {p, row.first_key}, {p, row.first_key}, row.keys, out,
            largest, sum);
  if constexpr (kHasSinks) {
    const float sink = p.sinks[batch * p.sinks_batch_stride + row.head] * kLog2E;
    const float with_sink = fmaxf(largest, sink);
    const float factor = ptx::exp2_approx(largest - with_sink);
    sum = sum * factor + ptx::exp2_approx(sink - with_sink);
    largest = with_sink;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= factor;
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int column = fresh_lane() + 32 * c;
    if (column < kValueDim) {
      const float result = out[c] / sum * dropout_scale(p);
      row.result[column] = ResultElement::round(result);
    }
  }
  if (fresh_lane() == 0) {
    p.lse[row.lse] = (largest + ptx::log2_approx(sum)) * kLn2;
  }
}

}  // namespace forward
