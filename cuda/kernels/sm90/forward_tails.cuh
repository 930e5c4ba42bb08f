// Tails (kTails): beside pages that all tokens see, each token sees positions of its own request.
//
// A unit's blocks are those of its tokens' tails, one behind the other, and behind them those of
// the pages in common; a part has some of them in a row. They are walked from the last, and stand
// for positions in their order: the last for the first. So the rows of a token see in a part
// positions that follow each other, and scores have a base when tails come, of which a row sees but
// its own. Tensor cores multiply a tail by all rows of the unit: by an H100's rates 128 rows take
// half as long as the tail's bytes from memory.
//
// Juravsky et al., Hydragen (arXiv:2402.05099), has the two parts as two kernels.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

inline constexpr int kUnitTokens = kUnitRows / kPackedHeads;
static_assert(!kTails || (kInCommon && kUnitTokens <= 32 && kBlockKV <= 128));

// As the operand has it: `end` is behind the last position; sees_common: also the pages in common;
// is_needed: of a request that is computed.
struct alignas(16) Tail {
  int request, first, end, flags;
  __device__ __forceinline__ int keys() const { return max(end - first, 0); }
  __device__ __forceinline__ int blocks() const { return ceil_div(keys(), kBlockKV); }
  __device__ __forceinline__ bool sees_common() const { return flags & 1; }
  __device__ __forceinline__ bool is_needed() const { return flags & 2; }
};
__device__ __forceinline__ Tail tail_of(const ForwardParams& p, int request, int token) {
  if (token >= p.query_len) return {0, 0, 0, 1};
  return reinterpret_cast<const Tail*>(p.tails)[static_cast<int64>(request) * p.query_len + token];
}

// The blocks of a unit: [0, tails) and [tails, all), of which a part has `own`. A block of a tail
// takes 2.1 us where one of pages in common takes 1.65 (an H100, head dim 128).
struct UnitBlocks {
  static constexpr int kWeight = 5, kCommonWeight = 4;
  int tails, all;
  Range own;
  // `of_tails`: blocks of the unit's tokens; `any`: one of them sees the pages in common.
  __device__ __forceinline__ UnitBlocks(const ForwardParams& p, int batch, int of_tails, bool any) {
    const int request = query_batch(p, batch), parts = p.parts_in_common;
    const int part = batch - request * parts;
    tails = of_tails;
    all = tails + (any ? ceil_div(max(p.request_lengths[request], 0), kBlockKV) : 0);
    const auto begin_of = [&](int i) {
      const int64 of_all = int64{kWeight} * tails + int64{kCommonWeight} * (all - tails);
      const int64 at = of_all * i / parts, beyond = at - int64{kWeight} * tails;
      return static_cast<int>(beyond <= 0 ? at / kWeight : tails + beyond / kCommonWeight);
    };
    own = {begin_of(part), begin_of(part + 1)};
  }
};

// The producer's side: a lane has a token of the unit.
struct UnitTails {
  Tail tail;
  int end;         // of its blocks
  int tails, all;  // as of UnitBlocks

  // Describes the unit. All lanes call.
  __device__ __forceinline__ void plan(const ForwardParams& p, const UnitIndex& taken,
                                       UnitInfo& unit) {
    const int lane = threadIdx.x % 32, request = query_batch(p, taken.batch);
    tail = {0, 0, 0, 1};
    if (lane < kUnitTokens) tail = tail_of(p, request, taken.query_block * kUnitTokens + lane);
    end = tail.blocks();
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += other;
    }
    const int of_tails = __shfl_sync(0xffffffffu, end, 31);
    const uint32 see = __ballot_sync(0xffffffffu, tail.sees_common());
    const int tokens = min(kUnitTokens, p.query_len - taken.query_block * kUnitTokens);
    const UnitBlocks blocks(p, taken.batch, of_tails, (see & ptx::low_bits(tokens)) != 0);
    tails = blocks.tails;
    all = blocks.all;
    unit.first_row = taken.query_block * kUnitRows;
    unit.query_length = p.query_len;
    unit.kv_length = max(p.request_lengths[request], 0);
    unit.offset = 0;
    unit.blocks = unit.own = blocks.own;
    unit.one = {tails, all};
    unit.full = {tails + (unit.kv_length % kBlockKV != 0), see == 0xffffffffu ? all : 0};
  }
  // For the consumers: which blocks of the unit are a token's tail, and its keys.
  __device__ __forceinline__ int4 row() const {
    return make_int4(end - tail.blocks(), end, tail.keys(), tail.sees_common());
  }
  // The row of the table that a block's pages are in, below 0 of the pages in common, and the
  // position of its first key. All lanes call.
  __device__ __forceinline__ int2 place_of(int block) const {
    const bool begun = tail.keys() > 0 && end - tail.blocks() <= block;
    const uint32 begins = __ballot_sync(0xffffffffu, begun) | 1;
    const int of = 31 - __clz(begins);
    const int request = __shfl_sync(0xffffffffu, tail.request, of);
    const int first = __shfl_sync(0xffffffffu, tail.first, of);
    const int last = __shfl_sync(0xffffffffu, end, of) - 1;
    if (block >= tails) return make_int2(-1, (all - 1 - block) * kBlockKV);
    return make_int2(request, first + (last - block) * kBlockKV);
  }
};

// Hides the first kCount scores of a thread, whose rows are `first_row` of the unit and the other:
// of a tail the rows of other tokens see nothing, of the pages in common those that do not share
// them. `tokens`: UnitTails::row of each. Without branches, of which wgmma in flight allows none.
template <int kCount, int kTokens>
__device__ __forceinline__ void hide_others(const UnitInfo& t, const int4 (&tokens)[kTokens],
                                            int block, int first_row, Scores& scores) {
  const bool common = block >= t.one.begin;
  const int first_column = fragment::first_column(threadIdx.x);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int4 own = tokens[(first_row + fragment::kRowStep * row) / kPackedHeads];
    const bool sees = common ? own.w != 0 : block >= own.x && block < own.y;
    const int keys = common ? t.kv_length : own.z, end = common ? t.one.end : own.y;
    const int left = sees ? keys - (end - 1 - block) * kBlockKV - first_column : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (fragment::row(i) != row) continue;
      scores[i] = fragment::column(i) < left ? scores[i] : kNegativeInfinity;
    }
  }
}

// The keys that a token sees in a part, among those of its request.
__device__ __forceinline__ Range keys_of_token(const ForwardParams& p, int batch, int token) {
  const int request = query_batch(p, batch), first = token / kUnitTokens * kUnitTokens;
  const Tail tail = tail_of(p, request, token);
  if (!tail.is_needed()) return {0, 0};
  int ahead = 0, of_tails = 0;
  bool any = false;
  for (int other = first; other < min(first + kUnitTokens, p.query_len); ++other) {
    const Tail its = tail_of(p, request, other);
    if (other == token) ahead = of_tails;
    of_tails += its.blocks();
    any = any || its.sees_common();
  }
  const UnitBlocks blocks(p, batch, of_tails, any);
  const int end = ahead + tail.blocks();
  Range common{0, 0}, own{0, 0};
  if (tail.sees_common()) {
    const int length = max(p.request_lengths[request], 0);
    common = {max(blocks.all - blocks.own.end, 0) * kBlockKV,
              min((blocks.all - max(blocks.own.begin, blocks.tails)) * kBlockKV, length)};
  }
  const int from = max(ahead, blocks.own.begin), to = min(end, blocks.own.end);
  if (from < to) {
    own = {tail.first + (end - to) * kBlockKV, min(tail.first + (end - from) * kBlockKV, tail.end)};
  }
  if (common.begin >= common.end) return own;
  return {common.begin, own.empty() ? common.end : own.end};
}

}  // namespace forward
