// What a consumer warpgroup holds of terms from block to block: a bias, the line of a function,
// draws of dropout, bits of a mask. Each is a struct, empty where a call lacks its term. Read
// forward_products.cuh next.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

using Softmax = SoftmaxState<Operands::Weight>;
static_assert(!kSharesLine || Operands::Weight::kHeadroom > 64, "weights are larger by the line");
using RowBits = mask::RowBits<kWarpgroupRows, kBlockKV>;

// The bias of the block whose scores are on their way, that TMA has loaded: read ahead, or not.
using StagedBias = bias::StagedRows<kBlockKV, kUnitRows>;
template <bool kAhead>
struct BiasReader {
  StagedBias held;
  __device__ __forceinline__ void read_bias(uint32 tile, int row) { held.load(tile, row); }
  template <class Apply>
  __device__ __forceinline__ void visit_bias(uint32, int, Apply apply) const {
    held.visit(apply);
  }
};
template <>
struct BiasReader<false> {
  __device__ __forceinline__ void read_bias(uint32, int) {}
  template <class Apply>
  __device__ __forceinline__ void visit_bias(uint32 tile, int row, Apply apply) const {
    StagedBias::visit(tile, row, apply);
  }
};

// The line that a function adds to the block whose scores are on their way, if one line serves all
// rows of the warp.
template <bool kExists>
struct BlockLine : ScoreLine<ForwardParams, kExists> {  // none
  __device__ __forceinline__ void begin_line(const ForwardParams&, int, int, int) {}
  __device__ __forceinline__ void fetch(const ForwardParams&, int) {}
  __device__ __forceinline__ bool is_one() const { return false; }
  __device__ __forceinline__ void add_to(const ForwardParams&, Scores&) const {}  // not called
  __device__ __forceinline__ LineFactor<kScoreIsLevel> factor() const { return {}; }
};
template <>
struct BlockLine<true> : ScoreLine<ForwardParams> {
  int distance;  // of the thread's first element in block 0, key - query
  bool one;
  LineFactor<kScoreIsLevel> line;
  __device__ __forceinline__ void begin_line(const ForwardParams& p, int row, int head, int query) {
    ScoreLine<ForwardParams>::read(p, row, head);
    distance = fragment::first_column(threadIdx.x) - query;
  }
  __device__ __forceinline__ void fetch(const ForwardParams& p, int first_key) {
    const int first = first_key + distance;
    one = kScoreReach < 0 || !__any_sync(0xffffffffu, is_bent(first));
    const Line of = of_side(first > 0);
    line = {line_factor(p), of.slope};
    line.set_start(0, of.at(first));
    line.set_start(1, of.at(first - fragment::kRowStep));
  }
  // Are the elements of one of the warp's threads, the first of which is at distance `first`, less
  // than the reach away, or some before and some after it? First elements are from kRowStep - 1
  // before the warp's first query to 6 after it.
  static __device__ __forceinline__ bool is_bent(int first) {
    constexpr int kAfter = kScoreReach + fragment::kRowStep;
    constexpr int kBefore = kScoreReach + kBlockKV - fragment::kRowStep + 1;
    return first < kAfter && first > -kBefore;
  }
  __device__ __forceinline__ bool is_one() const { return one; }
  // A level line, where a block is tested or looked through for maxima.
  __device__ __forceinline__ void add_to(const ForwardParams& p, Scores& scores) const {
    const float added = line.first_start() * kLn2;
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) scores[i] = scaled_score(p, scores[i]) + added;
  }
  __device__ __forceinline__ LineFactor<kScoreIsLevel> factor() const { return line; }
};

// What a thread draws with, read once a unit: of a block's its draws would wait for shared and
// global memory, which take hundreds of cycles beside wgmma.
template <bool kExists>
struct UnitDraws {  // none
  template <class QueryOf>
  __device__ __forceinline__ void read(const ForwardParams&, int, int, QueryOf) {}
  __device__ __forceinline__ void draw(const ForwardParams&, DroppedPairs<kBlockKV>&, int) const {}
};
template <>
struct UnitDraws<true> {
  RowDraws draws;  // from key 0 on
  template <class QueryOf>
  __device__ __forceinline__ void read(const ForwardParams& p, int batch, int head,
                                       QueryOf query_of) {
    const Draws of(p, ptx::uniform(batch), ptx::uniform(head));
    draws = RowDraws(of, query_of(0), fragment::first_column(ptx::opaque(threadIdx.x)));
  }
  __device__ __forceinline__ void draw(const ForwardParams& p, DroppedPairs<kBlockKV>& dropped,
                                       int first_key) const {
    dropped.draw_all(p, draws, first_key);
  }
};

// Loads a block's bits of the mask; those of the boolean one from where they begin for the rows of
// the warpgroup, found once a unit.
template <class Bits, bool kHeld>
struct UnitBits {  // not held
  __device__ __forceinline__ void find(const ForwardParams&, int, int, int) {}
  template <class QueryOf>
  __device__ __forceinline__ void load(const ForwardParams& p, int batch, int head,
                                       QueryOf query_of, int block, bool tests, Bits& bits) const {
    bits.load(p, batch, head, query_of, block, tests);
  }
};
template <class Bits>
struct UnitBits<Bits, true> {
  int tile;
  __device__ __forceinline__ void find(const ForwardParams& p, int batch, int head, int query) {
    tile = ptx::uniform(Bits::tile_of(p, batch, head, query));
  }
  template <class QueryOf>
  __device__ __forceinline__ void load(const ForwardParams& p, int batch, int head, QueryOf,
                                       int block, bool tests, Bits& bits) const {
    const auto row_of = [](int) { return fragment::first_row(ptx::opaque(threadIdx.x)); };
    bits.load(p, tile, batch, head, row_of, block, tests);
  }
};

}  // namespace forward
