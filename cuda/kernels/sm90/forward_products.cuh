// A consumer warpgroup of the forward kernel, 64 query rows: its registers, its barriers and the
// two products. Read forward_warpgroup.cuh next.
#pragma once

#include "sm90/forward_terms.cuh"
#include "sm90/forward_walk.cuh"

namespace forward {

// Registers and barriers. Its bases take no place where there is no function and no bias: other
// members would move, and plain kernels be compiled to other registers.
struct WarpgroupState : RowWalk,
                        BiasReader<kBiasBeside>,
                        ScoreFunction<ForwardParams>,
                        FunctionOfRows<ForwardParams>,
                        BlockLine<kTakesLine>,
                        UnitDraws<kHoldsDraws>,
                        UnitBits<RowBits, kHoldsBits> {
  using UnitFunction = ScoreFunction<ForwardParams>;  // read once a unit
  using UnitRows = FunctionOfRows<ForwardParams>;     // likewise
  using UnitLine = BlockLine<kTakesLine>;             // likewise, and what follows once a block
  using Drawing = UnitDraws<kHoldsDraws>;             // likewise
  using BitsOfMask = UnitBits<RowBits, kHoldsBits>;   // likewise
  const ForwardParams& p;
  Shared& shared;
  const int warpgroup;  // warpgroup among the consumers
  Ring<kStages> key_ring, value_ring;
  uint32 units = 0;  // read so far
  bool searches;     // a maximum in the next block: a row of the warp has no base, second walk
  Scores scores;
  Operands operands;
  Output output;
  float correction[2];
  Softmax softmax;
  RowBits bits;                    // of the block whose scores are on their way, unless it is whole
  bias::RowTile<kBlockKV> biases;  // likewise
  DroppedPairs<kBlockKV> dropped;

  // The address of `shared`, in a register: the compiler would find it again for every barrier.
  const uint32 start = ptx::opaque(ptx::shared_address(&shared));

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  // The same, read again instead of kept in a register between the ends of units.
  __device__ __forceinline__ int fresh_lane() const { return ptx::opaque(threadIdx.x) % 32; }
  __device__ __forceinline__ const UnitInfo& unit() const {
    return shared.units[(units - 1) % kInfoStages][warpgroup];
  }
  // Packed row of this thread, row = 0 or 1.
  __device__ __forceinline__ int packed_row(const UnitInfo& t, int row) const {
    const int thread = ptx::opaque(threadIdx.x);  // read again, not kept in a register
    // The warpgroup's number, in a uniform register, would take one more to get here: 4 bytes
    // spilled.
    if constexpr (kLanesTogether && !kSumsByProduct) {
      return t.first_row + thread / 32 * 16 - kWarpgroupRows + thread % 32 / 4 +
             fragment::kRowStep * row;
    }
    return t.first_row + warpgroup * kWarpgroupRows + fragment::first_row(thread) +
           fragment::kRowStep * row;
  }
  __device__ __forceinline__ Visibility seen(const UnitInfo& t) const {
    return {t.offset, p.window_left, p.window_right, t.query_length, t.kv_length};
  }

  // -- barriers --
  // The buffer of the values: with kApart that of the keys which were given back last.
  __device__ __forceinline__ Ring<kStages> value_at() const {
    return kApart ? key_ring.before() : value_ring;
  }
  __device__ __forceinline__ void release(uint32 barrier) const {
    if (ptx::kEveryLaneArrives || lane() == 0) ptx::lane_arrive(barrier);
  }
  // The stages of the current unit's queries, and of the next unit's.
  __device__ __forceinline__ int query_stage() const { return (units - 1) % kQueryStages; }
  __device__ __forceinline__ int next_query_stage() const { return units % kQueryStages; }
  __device__ __forceinline__ uint32 next_query_parity() const { return units / kQueryStages & 1; }
  // Barriers of one kind lie side by side; `kind` is an immediate of the instruction.
  __device__ __forceinline__ uint32 barrier(int kind, int offset) const {
    return ptx::unfolded(start + offset) + kind;
  }
  __device__ __forceinline__ uint32 next_query_full() const {
    return barrier(JF_OFFSET(query_full), 8 * (kConsumers * next_query_stage() + warpgroup));
  }
  __device__ __forceinline__ uint32 query_empty() const {
    return barrier(JF_OFFSET(query_empty), 8 * (kConsumers * query_stage() + warpgroup));
  }
  __device__ __forceinline__ uint32 key_full() const {
    return barrier(JF_OFFSET(key_full), key_ring.barrier_offset());
  }
  __device__ __forceinline__ uint32 key_empty() const {
    return barrier(JF_OFFSET(key_empty), key_ring.barrier_offset());
  }
  __device__ __forceinline__ uint32 value_full() const {
    return barrier(JF_OFFSET(value_full), value_at().barrier_offset());
  }
  __device__ __forceinline__ uint32 value_empty() const {
    return barrier(JF_OFFSET(value_empty), value_at().barrier_offset());
  }
  __device__ __forceinline__ void wait_query() const {
    ptx::barrier_wait(next_query_full(), next_query_parity());
  }
  __device__ __forceinline__ void wait_key() const {
    ptx::barrier_wait(key_full(), key_ring.parity());
  }
  __device__ __forceinline__ bool query_and_key_are_ready() const {
    return ptx::uniform(ptx::barrier_test(next_query_full(), next_query_parity()) &&
                        ptx::barrier_test(key_full(), key_ring.parity()));
  }
  __device__ __forceinline__ void release_key() {
    release(key_empty());
    key_ring.advance();
  }
  __device__ __forceinline__ void wait_value() const {
    ptx::barrier_wait(value_full(), value_at().parity());
  }
  // The values of the block in the current key buffer.
  __device__ __forceinline__ void wait_next_value() const {
    ptx::barrier_wait(barrier(JF_OFFSET(value_full), key_ring.barrier_offset()), key_ring.parity());
  }
  __device__ __forceinline__ void release_value() {
    release(value_empty());
    if constexpr (!kApart) value_ring.advance();
  }
  __device__ __forceinline__ void release_query() {
    if (ptx::kEveryLaneArrives || lane() == 0) ptx::lane_arrive(query_empty());
  }
  // Turns at the tensor cores: every warpgroup takes one per block of the unit, also for blocks
  // that it skips.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kPingPong) {
      ptx::named_barrier_sync(kTurnBarrier + turn(), 256);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kPingPong) {
      const int next = turn() + 1 == kConsumers ? 0 : turn() + 1;
      ptx::named_barrier_arrive(kTurnBarrier + next, 256);
    }
  }
  __device__ __forceinline__ int turn() const {
    return Operands::kFindsTurn ? ptx::opaque(threadIdx.x) / 128 - 1 : warpgroup;
  }
};

// Products, and what terms fetch beside them.
struct WarpgroupProducts : WarpgroupState {
  __device__ __forceinline__ void begin_scores(Scores& scores) const {
    const uint32 query = start + kQueryBytes * (kConsumers * query_stage() + warpgroup);
    const uint32 key = start + kKeyBytes / 8 * key_ring.barrier_offset();
    ptx::wgmma_fence();
    operands.issue_scores(
        p, scores, ptx::descriptor<kLanesTogether>(query, JF_OFFSET(query), 0, 1024),
        ptx::descriptor<kLanesTogether>(key, JF_OFFSET(key), 0, KeyBlock::kGroupBytes));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void begin_output(int accumulate) {
    const uint32 value = start + kValuePitch / 8 * value_at().barrier_offset();
    operands.begin_output(p, shared, value_at().stage(), block);
    ptx::wgmma_fence();
    const auto tile = ptx::descriptor<kLanesTogether>(
        value, JF_OFFSET(value), ValueBlock::kBoxBytes, ValueBlock::kGroupBytes);
    operands.issue_output(p, shared, value_at().stage(), output, scores, tile, accumulate);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void accept_output() {
    operands.accept_output(shared, value_at().stage(), output, scores);
    add_row_sums(operands);
  }
  template <class Of>
  __device__ __forceinline__ void add_row_sums(const Of& of) {
    if constexpr (kSumsByProduct) softmax.add_block(of.row_sums(scores));
  }
  __device__ __forceinline__ void begin_last_output(int accumulate) {
    wait_turn();
    begin_output(accumulate);
    pass_turn();
  }
  // The block in the current key buffer.
  __device__ __forceinline__ ListedBlock listed_block() const {
    return {ptx::uniform(shared.block_list[key_ring.stage()])};
  }
  // After the wait for a block's scores.
  __device__ __forceinline__ void accept_scores() {
    ptx::pin(scores);
    if constexpr (kListsBlocks && !kListsWhole) {
      block = listed_block().number();
    }
    if constexpr (kBiasTiles) {
      visit_bias(staged_bias(), bias_row(),
                 [&](int i, float bias) { scores[i] = with_bias(p, scores[i], bias); });
    }
  }
  // The bias of the block in the current key buffer, and the warp's first row of it.
  __device__ __forceinline__ uint32 staged_bias() const {
    return Shared::bias_tile(start, key_ring.stage());
  }
  __device__ __forceinline__ int bias_row() const {
    return warpgroup * kWarpgroupRows + ptx::opaque(threadIdx.x) % 128 / 32 * 16;
  }
  // Fetches what terms have for the block whose scores have been started, beside their product;
  // `next`: its number, unless it is listed; `is_first`: it is the unit's first block. With
  // kListsWhole it is `block` from here on: what is read of shared memory after the product is
  // waited for.
  __device__ __forceinline__ void fetch_terms(int next, bool is_first) {
    if constexpr (kListsWhole) {
      const ListedBlock listed = listed_block();
      whole = listed.is_whole(warpgroup);
      block = listed.number();
      if constexpr (kHoldsBits) {
        const UnitInfo& t = unit();
        const int first_query = t.first_row + warpgroup * kWarpgroupRows;
        if (is_first) BitsOfMask::find(p, t.batch, t.head, first_query);
      }
      if constexpr (kBitsAhead) fetch_bits(bits, block, !whole);
    }
    operands.begin_scores(p, shared, key_ring.stage(), next);
    if constexpr (kHoldsDraws) {
      const UnitInfo& t = unit();
      const auto query_of = [&](int row) { return packed_row(t, row); };
      if (is_first) Drawing::read(p, t.batch, t.head, query_of);
    }
    if constexpr (kHasScoreFunction) {
      if (is_first) {
        UnitFunction::read(p, unit().batch, unit().head);
        UnitRows::read(*this, [&](int row) { return packed_row(unit(), row); });
        UnitLine::begin_line(p, unit().batch, unit().head, packed_row(unit(), 0));
        fetch_line(next);
      }
    }
    if constexpr (kBiasTiles) {
      read_bias(staged_bias(), bias_row());
    } else if constexpr (kHasBias) {
      if constexpr (kListsBlocks) {
        next = listed_block().number();
      }
      if (!kBiasAhead || is_first) fetch_bias(next);
    }
  }
  // The same of the line that a function adds. Written behind both products it comes, as ptxas has
  // it, after the wait for the scores: 40 instructions and their latencies that nothing hides.
  __device__ __forceinline__ void fetch_line(int next) {
    if constexpr (kTakesLine) {
      if constexpr (kListsBlocks) {
        next = listed_block().number();
      }
      UnitLine::fetch(p, next * kBlockKV);
    }
  }
  __device__ __forceinline__ void fetch_bias(int of_block) {
    const UnitInfo& t = unit();
    const int first_key = of_block * kBlockKV;
    biases.load(p, t.batch, t.head, [&](int row) { return packed_row(t, row); }, first_key);
    // Most likely the one after it.
    bias::prefetch(p, t.batch, t.head, t.first_row + warpgroup * kWarpgroupRows,
                   max(first_key - kBlockKV, 0));
  }
  __device__ __forceinline__ void fetch_bits(RowBits& to, int of_block, bool tests) const {
    const UnitInfo& t = unit();
    const auto query_of = [&](int row) { return packed_row(t, row); };
    BitsOfMask::load(p, t.batch, t.head, query_of, of_block, tests, to);
  }
  // The same of a unit's first block. `factor`: what has been read of the unit.
  __device__ __forceinline__ void fetch_first_terms(Operands::UnitFactor factor) {
    operands.begin_unit(p, shared, unit(), factor, warpgroup);
    fetch_terms(block, true);
  }
  __device__ __forceinline__ Operands::UnitFactor read_factor() const {
    return Operands::read_factor(p, unit(), warpgroup);
  }
  // Gives the operands of the scores back.
  __device__ __forceinline__ void release_scores() {
    release_key();
    if (!kHoldsQueries && is_last()) release_query();
  }
};

}  // namespace forward
