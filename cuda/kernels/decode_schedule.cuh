// Decoding: which positions of a cache the queries of a row see, and how all of them are shared out.
//
// A unit is what some query rows (of a kv head's group, at T positions) have to see: blocks of
// kBlockKV positions. The blocks of all units stand in one line, and each CTA takes an equal part of
// it, whatever the lengths: stream-K. A unit that falls to several CTAs is merged by
// decode_merge.cuh, in the order of the line. Where the parts end depends on lengths and on the
// number of CTAs alone. Sanovar et al., LeanAttention (arXiv:2405.10480).
#pragma once

#include "element.cuh"
#include "numbers.cuh"
#include "params.h"
#include "softmax.cuh"

// Behind params.h.
#include "decode_params.h"

namespace decode {

inline constexpr int kWarps = 4;                      // that compute
inline constexpr int kKeyParts = kWarps / kRowTiles;  // warps that share a block for the same rows
inline constexpr int kPartKeys = kBlockKV / kKeyParts;
inline constexpr int kUnitRows = 16 * kRowTiles;
inline constexpr int kValueColumns = round_up(kValueDim, 16);
static_assert(kPartKeys % 16 == 0);

// The positions that the queries of a batch row see, together; none where the row has no place for
// its length, see is_refused.
__device__ __forceinline__ bool is_refused(const DecodeParams& p, int length) {
  return length > p.columns * p.page_size;
}
// The first that the query at a position sees.
__device__ __forceinline__ int first_seen(const DecodeParams& p, int position) {
  return kWindowLeft ? max(position - p.window_left, 0) : 0;
}
__device__ __forceinline__ Range positions_of(const DecodeParams& p, int length) {
  if (length <= 0 || is_refused(p, length)) return {0, 0};
  return {first_seen(p, max(length - p.query_len, 0)), length};
}

// Numbers of blocks of kBlockKV positions.
__device__ __forceinline__ Range blocks_of(const DecodeParams& p, int length) {
  const Range seen = positions_of(p, length);
  return {seen.begin / kBlockKV, ceil_div(seen.end, kBlockKV)};
}

struct Unit {
  int batch, kv_head, row_group;
  int length;
  int start;     // where it begins in the line
  Range blocks;  // those that its queries see

  __device__ __forceinline__ int end() const { return start + blocks.end - blocks.begin; }
  // Of its kUnitRows rows those that are there, row 0 counted among all of its kv head.
  __device__ __forceinline__ int first_row() const { return row_group * kUnitRows; }
};

// The line of blocks. Whole warps call.
struct Line {
  const DecodeParams& p;
  int units;  // of a batch row
  int total;  // blocks

  __device__ __forceinline__ explicit Line(const DecodeParams& p)
      : p(p), units(p.kv_heads * p.row_groups) {
    int count = 0;
    for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
      const Range blocks = blocks_of(p, p.lengths[batch]);
      count += blocks.end - blocks.begin;
    }
    total = __reduce_add_sync(0xffffffffu, count) * units;
  }

  // Where the part of a CTA begins.
  __device__ __forceinline__ int begin_of(int cta) const {
    return static_cast<int>(static_cast<int64>(total) * cta / gridDim.x);
  }
  // The CTA whose part has a block.
  __device__ __forceinline__ int cta_of(int block) const {
    return static_cast<int>(((static_cast<int64>(block) + 1) * gridDim.x - 1) / total);
  }

  // The unit that has a block; it stands at `from` or behind, whose batch row begins at `before`.
  __device__ __forceinline__ Unit find(int block, int from = 0, int before = 0) const {
    const int lane = threadIdx.x % 32;
    for (;; from += 32) {
      const int length = from + lane < p.batch ? p.lengths[from + lane] : 0;
      const Range blocks = blocks_of(p, length);
      const int own = (blocks.end - blocks.begin) * units;
      int behind = own;  // in the line behind `before`, this row's included
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, behind, step);
        if (lane >= step) behind += other;
      }
      const uint32 beyond = __ballot_sync(0xffffffffu, before + behind > block);
      if (beyond != 0) {
        const int at = __ffs(beyond) - 1;
        Unit unit;
        unit.batch = from + at;
        unit.length = __shfl_sync(0xffffffffu, length, at);
        unit.blocks = blocks_of(p, unit.length);
        const int row_start = before + __shfl_sync(0xffffffffu, behind - own, at);
        const int count = unit.blocks.end - unit.blocks.begin;
        const int index = (block - row_start) / count;
        unit.start = row_start + index * count;
        unit.kv_head = index / p.row_groups;
        unit.row_group = index - unit.kv_head * p.row_groups;
        return unit;
      }
      before += __shfl_sync(0xffffffffu, behind, 31);
    }
  }

  // Calls visit(unit, blocks) for the parts of units that are this CTA's, in order.
  template <class Visit>
  __device__ __forceinline__ void walk(Visit visit) const {
    const int end = begin_of(blockIdx.x + 1);
    int at = begin_of(blockIdx.x), from = 0, before = 0;
    while (at < end) {
      const Unit unit = find(at, from, before);
      const int stop = min(end, unit.end());
      const int shift = unit.blocks.begin - unit.start;
      visit(unit, Range{at + shift, stop + shift});
      at = stop;
      from = unit.batch;
      before = unit.start - (unit.kv_head * p.row_groups + unit.row_group) *
                                (unit.blocks.end - unit.blocks.begin);
    }
  }
};

// Row `row` of a kv head's: query row / group, head row % group of the group.
struct Place {
  int query, head;  // among all query heads
  __device__ __forceinline__ Place(const DecodeParams& p, int kv_head, int row) {
    const int group = p.query_heads / p.kv_heads;
    query = row / group;
    head = kv_head * group + row - query * group;
  }
};
__device__ __forceinline__ int rows_of_head(const DecodeParams& p) {
  return p.query_len * (p.query_heads / p.kv_heads);
}

// Where the part of a unit lies in partial_rows and, times the unit's values, in partial_out: a CTA
// has two at most, since of three the second would be all of a unit.
__device__ __forceinline__ int64 partial_row(int cta, bool is_first, int row) {
  return (static_cast<int64>(cta) * 2 + (is_first ? 0 : 1)) * kUnitRows + row;
}

// What the sums of a row come to.
struct Conclusion {
  float factor;  // of the weighted values
  float lse;     // natural logarithm
};
// Of sums relative to 2^base. A row that sees nothing gives 0 and -inf, or its sink.
__device__ __forceinline__ Conclusion conclude(const DecodeParams& p, float base, float total,
                                               int batch, int head) {
  const bool sees_nothing = total == 0.0f;
  if constexpr (kHasSinks) {
    const float sink = p.sinks[batch * p.sinks_batch_stride + head];
    if (sees_nothing) return {0.0f, sink};
    const float largest = fmaxf(base, sink * kLog2E);
    const float own = ptx::exp2_approx(base - largest);
    total = total * own + ptx::exp2_approx(sink * kLog2E - largest);
    return {own * ptx::reciprocal_approx(total),
            (largest + ptx::log2_approx(total)) * kLn2};
  }
  if (sees_nothing) return {0.0f, kNegativeInfinity};
  return {ptx::reciprocal_approx(total), (base + ptx::log2_approx(total)) * kLn2};
}

// Four values of a row from `column` on, of which the row has more.
__device__ __forceinline__ void store_out(const DecodeParams& p, const Unit& unit,
                                          const Place& place, int column, const float4& values,
                                          float factor) {
  if (column >= kValueDim) return;
  const int64 row =
      (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
  uint2 packed;
  packed.x = Element::pack(values.x * factor, values.y * factor);
  packed.y = Element::pack(values.z * factor, values.w * factor);
  *reinterpret_cast<uint2*>(static_cast<uint16*>(p.out) + row * kValueDim + column) = packed;
}
__device__ __forceinline__ void store_lse(const DecodeParams& p, const Unit& unit,
                                          const Place& place, float lse) {
  p.lse[(static_cast<int64>(unit.batch) * p.query_heads + place.head) * p.query_len +
        place.query] = lse;
}

}  // namespace decode
