// The consumers of the forward kernel: the walk over units and their blocks, and the results.
#pragma once

#include "sm90/forward_warpgroup.cuh"

namespace forward {

// A row of the result on its way from the accumulators.
template <class Of>
struct OutputRow {
  static constexpr int kPieces = round_up(kValueColumns, 32) / 8;
  uint32 pieces[kPieces];

  // Other than 0: it is not finite.
  template <int kCount>
  __device__ __forceinline__ uint32 take(const float (&output)[kCount], int row, float factor) {
    fragment::gather_row(output, row, factor, pieces);
    uint32 flaw = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) flaw = Of::accumulate_nonfinite(flaw, pieces[i]);
    return flaw;
  }
  // By lane c of a quad; zeros if it is empty.
  template <int kCount>
  __device__ __forceinline__ void store(uint16* out, int c, bool empty, const float (&)[kCount],
                                        int, float) const {
#pragma unroll
    for (int g = 0; g < kPieces / 4; ++g) {
      const int column = 8 * (4 * g + c);
      if constexpr (kEarlyColumns<kValueDim> > 0) {  // rows of all heads are of whole pieces
        const int before = static_cast<int>(reinterpret_cast<uint64>(out) / 2 % 8);
        const uint4 piece{pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]};
        store_early<kValueDim>(out, column, before, empty ? make_uint4(0, 0, 0, 0) : piece);
      } else if (kValueDim % 32 == 0 || column < kValueDim) {
        store_piece<kValueDim>(out, column,
                               empty ? make_uint4(0, 0, 0, 0)
                                     : make_uint4(pieces[4 * g], pieces[4 * g + 1],
                                                  pieces[4 * g + 2], pieces[4 * g + 3]));
      }
    }
  }
};
template <>
struct OutputRow<Float32> {
  // No product is kept: at head dim 256 up to 660 bytes were spilled. A mean of finite values is
  // finite.
  template <int kCount>
  __device__ __forceinline__ uint32 take(const float (&output)[kCount], int row, float factor) {
    float sum = factor * 0.0f;  // stays zero as long as all are finite
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (fragment::row(i) == row) sum = fmaf(output[i], 0.0f, sum);
    }
    return sum != 0.0f;
  }
  // 32 bytes of a quad side by side.
  template <int kCount>
  __device__ __forceinline__ void store(float* out, int c, bool empty,
                                        const float (&output)[kCount], int row,
                                        float factor) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int i = fragment::element(j, row, 0);
      store_pair<kValueDim>(out, 8 * j + 2 * c, empty ? 0.0f : output[i] * factor,
                            empty ? 0.0f : output[i + 1] * factor);
    }
  }
};

// The results of a unit.
struct UnitResults : Warpgroup {
  static constexpr uint32 kQuads = 0x11111111;  // a bit for each
  // Stores the unit. Returns the warp's rows that came out with NaN or infinity, bit 4 * quad + row
  // for each, and bit 4 * quad + row + 2 if it overflowed. A NaN lse is right, and the row with it:
  // masked scores never reach the sum of the weights.
  __device__ __forceinline__ uint32 finish_unit(const UnitInfo& t, const Softmax& softmax) const {
    uint32 nonfinite = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = packed_row(t, row);
      const int query = packed / kPackedHeads;
      const int head = t.head * kPackedHeads + packed % kPackedHeads;
      float sink = 0.0f;
      if constexpr (kHasSinks) {
        sink = p.sinks[t.batch * p.sinks_batch_stride + head] * kLog2E;
      }
      float lse;
      const float factor = softmax.finish<kHasSinks>(row, sink, lse) * dropout_scale(p);
      bool empty = lse == kNegativeInfinity;
      if constexpr (kHasQueryLengths) empty = empty || query >= t.query_length;

      OutputRow<StoredElement> result;
      const uint32 flaw = result.take(output, row, factor);
      const bool stored = query < end_of_rows(t);
      const bool counts = stored && !empty;
      const bool flawed = flaw != 0 || lse == kInfinity;
      uint32 lanes =
          __ballot_sync(0xffffffffu, flawed && counts && (Operands::kNanMayBeWrong || lse == lse));
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      nonfinite |= (lanes & kQuads) << row;
      if constexpr (kRepeats) {
        const uint32 overflows = __ballot_sync(0xffffffffu, lse == kInfinity && counts);
        nonfinite |= (overflows & kQuads) << (row + 2);
      }
      if (!stored) continue;
      StoredElement::Bits* out = out_of(t, query, head);
      const int c = lane() % 4;
      result.store(out, c, empty, output, row, factor);
      if (c == 0) lse_of(t, query, head) = empty ? empty_lse(t, head) : lse;
    }
    return nonfinite;
  }
  // The queries from here on are not the unit's.
  __device__ __forceinline__ int end_of_rows(const UnitInfo& t) const {
    return kCutsUnits || kFromPages ? t.query_length : p.query_len;
  }
  // The lse of a row that sees nothing.
  __device__ __forceinline__ float empty_lse(const UnitInfo& t, int head) const {
    if constexpr (kFromPages) {
      if (t.kv_length <= 0) return t.kv_length < 0 ? kNan : kNegativeInfinity;  // of no request
    }
    if constexpr (kHasSinks) return p.sinks[t.batch * p.sinks_batch_stride + head];
    return kNegativeInfinity;
  }
  // Zeros by the four threads of a quad, NaN of a wrong request.
  __device__ __forceinline__ void store_zeros(const UnitInfo& t, StoredElement::Bits* out) const {
    using Piece = PieceOf<StoredElement>;
    typename Piece::Type piece{};
    if constexpr (kFromPages) {
      if (t.kv_length < 0) piece = Piece::filled(kNan);
    }
    for (int column = 8 * (lane() % 4); column < kValueDim; column += 32) {
      store_piece<kValueDim>(out, column, piece);
    }
  }
  // The first element of a row of the result.
  __device__ __forceinline__ StoredElement::Bits* out_of(const UnitInfo& t, int query,
                                                         int head) const {
    if constexpr (kSplits) {
      auto* rows = part_rows(p, t);
      if (kPartsAlone || rows) return rows + row_of_part(t, query, head) * kValueDim;
    }
    return static_cast<StoredElement::Bits*>(p.out) +
           query_row(p, t.batch, query, head) * kValueDim;
  }
  __device__ __forceinline__ float& lse_of(const UnitInfo& t, int query, int head) const {
    if constexpr (kSplits) {
      if (float* rows = part_lse(p, t)) return rows[row_of_part(t, query, head)];
    }
    return p.lse[lse_row(p, t.batch, query, head)];
  }
  static __device__ __forceinline__ int row_of_part(const UnitInfo& t, int query, int head) {
    return query * kPackedHeads + head % kPackedHeads - t.first_row;
  }
  // Where the results of a part lie; null: the unit is whole.
  template <class Params>
  static __device__ __forceinline__ StoredElement::Bits* part_rows(const Params& p,
                                                                   const UnitInfo& t) {
    const int part = part_at(p, t.number);
    if (!kPartsAlone && part < 0) return nullptr;
    return static_cast<StoredElement::Bits*>(p.parts) +
           static_cast<int64>(part) * (kUnitRows * kValueDim);
  }
  template <class Params>
  static __device__ __forceinline__ float* part_lse(const Params& p, const UnitInfo& t) {
    const int part = part_at(p, t.number);
    return !kPartsAlone && part < 0 ? nullptr : p.part_lse + part * kUnitRows;
  }
  // Leaves rows of the warp, a bit each, to flash_forward_exact. The producer's warpgroup has no
  // mark. With kTails flash_forward_merge looks at results.
  __device__ __forceinline__ void mark_rows(const UnitInfo& t, uint32 rows) const {
    if constexpr (kTails) return;
    const int thread = ptx::opaque(threadIdx.x);
    if (thread % 32 != 0) return;
    const int warp = thread / 32 - 4;
    const int of_team = kTeams == 1 ? warp : warp % kWarpsOfConsumers;
    int unit = in_schedule(t.number);
    if constexpr (kInCommon) {
      const int heads = p.query_heads / kPackedHeads;
      unit = (t.batch * heads + t.head) * p.query_blocks + t.first_row / kUnitRows;
    }
    p.marks[unit * kWarpsOfConsumers + of_team] = rows;
  }
  // With kHoldsQueries: takes the queries of a unit that has been read, and gives their buffer
  // back. A template: not all operands do. With kEarly: zeroes what is of other heads.
  template <class Of>
  __device__ __forceinline__ void take_queries(Of& of) {
    if constexpr (kEarlyColumns<kHeadDim> > 0) {
      clear_others<kHeadDim, kWarpgroupRows, 128>(
          start + JF_OFFSET(query) + kQueryBytes * (kConsumers * query_stage() + warpgroup),
          columns_before<kHeadDim>(unit().head), ptx::opaque(threadIdx.x) % 128);
      ptx::fence_async_proxy();
      ptx::named_barrier_sync(kWarpgroupBarrier - 1 + ptx::warp_index() / 4, 128);
    }
    if constexpr (kHoldsQueries) {
      of.take_queries(start + JF_OFFSET(query) +
                      kQueryBytes * (kConsumers * query_stage() + warpgroup));
      release_query();
    }
  }
  // Asks for another walk of the unit, if this was its first and there is a slot; else its rows
  // that overflowed stay marked.
  __device__ __forceinline__ void repeat_unit(const UnitInfo& t) const {
    if (is_again(t.number) || fresh_lane() != 0) return;
    for (int& slot : shared.repeats) {
      const int before = atomicCAS(&slot, 0, again(t.number));
      if (before == 0 || before == again(t.number)) return;  // another warp may have asked
    }
  }
  __device__ __forceinline__ void store_empty() {
    const UnitInfo& t = unit();
    mark_rows(t, 0);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = packed_row(t, row);
      const int query = packed / kPackedHeads;
      if (query >= end_of_rows(t)) continue;
      const int head = t.head * kPackedHeads + packed % kPackedHeads;
      store_zeros(t, out_of(t, query, head));
      if (lane() % 4 == 0) {
        lse_of(t, query, head) = empty_lse(t, head);
      }
    }
  }
};

// A consumer's units, one after the other.
struct Consumer : UnitResults {
  // With kApart the values of a block are waited for beside the product of its scores. Ids of
  // segments leave no registers for that (C7511).
  static constexpr bool kValueAhead = !kHasSegments;
  // V rows past the length may hold NaN, and 0 * NaN is NaN: zero them where they were loaded. (NaN
  // among other masked values shows in the result, and repair_rows takes it out again.)
  __device__ __forceinline__ void sanitise_value(int value_block) {
    if constexpr (kClearsValues) {
      const int valid = unit().kv_length - value_block * kBlockKV;
      if (valid >= kBlockKV) return;
      const uint32 base = ptx::shared_address(shared.value[value_at().stage()]);
      const int pieces = (kBlockKV - valid) * (kBoxRowBytes / 16);
      for (int i = threadIdx.x % 128; i < pieces * kValueBoxes; i += 128) {
        const int box = i / pieces;
        ptx::store_shared_x4(base + ValueBlock::chunk(box, valid, i - box * pieces), 0, 0, 0, 0);
      }
      ptx::fence_async_proxy();
      ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    }
  }
  // Reads the unit whose Q has arrived. False: there is none.
  __device__ __forceinline__ bool read_unit() {
    ++units;
    const UnitInfo& t = unit();
    if (ptx::uniform(t.batch) == kNoUnit) return false;
    begin(t);
    return true;
  }
  // Is the first block of a unit that has just been read the warpgroup's too?
  __device__ __forceinline__ bool starts_now() const {
    if (sees_nothing()) return false;
    return kBeginsNear || (kListsOwn ? blocks_before() == 0 : block + 1 == walked().end);
  }
  // After the last unit: are there units to walk again? All consumers decide by the same slots,
  // when all have left their requests and before the producer takes from them.
  __device__ __forceinline__ bool repeats_remain() {
    if (!kRepeats || is_again(ptx::uniform(unit().number))) return false;
    release(start + JF_OFFSET(asked));
    ptx::barrier_wait(start + JF_OFFSET(asked), 0);
    int mine;
    const uint32 slots = shared.units_to_repeat(lane(), mine);
    release(start + JF_OFFSET(finished));
    release_query();
    return slots != 0;
  }
  // Blocks that other warpgroups need and this one does not.
  __device__ __forceinline__ void skip_blocks(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_turn();
      pass_turn();
      wait_key();
      release_key();
      wait_value();
      release_value();
    }
  }
  // Takes units until one has a block for this warpgroup and starts its first scores; `next` tells
  // of the first of them. False: the work is done.
  enum Next { kUnread, kNone, kRead, kStarts };  // the unit after this one
  __device__ __forceinline__ bool start_unit(Next next) {
    while (true) {
      if (next == kUnread) {
        wait_query();
        next = read_unit() ? kRead : kNone;
      }
      if (next == kNone) {
        if (!repeats_remain()) return false;
        next = kUnread;
        continue;
      }
      next = kUnread;
      const Range all = walked();
      if (!sees_nothing()) {
        if (!kBeginsNear) skip_blocks(kListsOwn ? blocks_before() : all.end - 1 - block);
        take_queries(operands);
        wait_key();
        const auto factor = read_factor();
        begin_scores(scores);
        fetch_first_terms(factor);
        ptx::wgmma_wait<0>();
        return true;
      }
      release_query();
      skip_blocks(kListsOwn ? blocks_before() : all.end - all.begin);
      store_empty();
    }
  }
  // Blocks of the current unit that any of its warpgroups walks.
  __device__ __forceinline__ Range walked() const {
    return {ptx::uniform(unit().blocks.begin), ptx::uniform(unit().blocks.end)};
  }

  // How many of these blocks come before this warpgroup's first one, all if it has none, and after
  // its last.
  __device__ __forceinline__ int blocks_before() const {
    return kListsOwn ? ptx::uniform(unit().one.begin) : walked().end - 1 - block;
  }
  __device__ __forceinline__ int blocks_after() const {
    return kListsOwn ? ptx::uniform(unit().one.end) : last - walked().begin;
  }

  // The next block's scores start before the current block's output, and the exponentials of the
  // next block run beside it. With kWaits they wait for both products.
  template <bool kWaits, Known kKnown>
  __device__ __forceinline__ void step(int& accumulate) {
    if constexpr (kWaits) {  // while the registers of the scores are free
      wait_value();
      sanitise_value(block);
    }
    if constexpr (kTakesLine && kLineAhead) fetch_line(next_block(unit()));
    wait_key();
    wait_turn();
    begin_scores(scores);
    if constexpr (kTakesLine && !kLineAhead) fetch_line(next_block(unit()));
    if constexpr (!kWaits) {
      wait_value();
      sanitise_value(block);
    }
    begin_output(accumulate);
    pass_turn();
    fetch_terms(next_block(unit()), false);
    accumulate = 1;
    ptx::wgmma_wait<kWaits ? 0 : 1>();
    if constexpr (kWaits) {
      ptx::pin(output);
      if constexpr (Operands::kAddsBlocks) accept_output();
    }
    if (!kListsWhole) block = next_block(unit());
    accept_scores();
    release_scores();
    const bool rescale = extend_softmax<kKnown>(scores);
    draw_after();
    ptx::wgmma_wait<0>();
    if constexpr (!kWaits || !Operands::kAddsBlocks) accept_output();
    release_value();
    if (rescale) rescale_output();
    operands.pack(scores, dropped);
  }
  // The same, where the current block's output and the next block's scores take the same registers:
  // one after the other. The other warpgroup's softmax runs beside.
  __device__ __forceinline__ void step_apart() {
    if constexpr (!kValueAhead) wait_value();
    wait_turn();
    begin_output(1);
    wait_key();
    ptx::wgmma_wait<0>();
    accept_output();
    release_value();
    begin_scores(scores);
    if (!kListsWhole) block = next_block(unit());
    fetch_terms(block, false);
    searches = searches_now();  // found again: kept from block to block it takes a register
    // Asked later of a block that is listed: its number comes with accept_scores().
    const bool plain = (!kListsBlocks || kListsWhole) && is_full(unit()) && !searches &&
                       (!kSumsByProduct || is_full(unit(), block + 1));
    if constexpr (kValueAhead) wait_next_value();
    ptx::wgmma_wait<0>();
    pass_turn();
    accept_scores();
    release_scores();
    extend_apart(plain);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kPingPong) {
      if (warpgroup == kConsumers - 1) pass_turn();
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) scores[i] = 0.0f;
    clear_output();

    if (!start_unit(kUnread)) return;
    while (true) {
      // The unit's first block: nothing to rescale.
      accept_scores();
      release_scores();
      start_softmax(scores);
      draw_after();
      operands.pack(scores, dropped);
      int accumulate = 0;
      if constexpr (Operands::kAddsBlocks) clear_output();
      if constexpr (kApart && kValueAhead) wait_value();

      if constexpr (kLanesTogether) key_ring = key_ring.uniform();
      while (together(!is_last())) {
        if constexpr (kApart) {
          step_apart();
        } else if constexpr (kDrainsToHide) {
          if (is_full(unit(), next_block(unit()))) {
            step<false, kWhole>(accumulate);
          } else {
            step<true, kPartial>(accumulate);
          }
        } else {
          step<kDrains, kUnknown>(accumulate);
        }
      }
      // The last block's output. If the next unit's Q and K are here, its first scores run beside
      // this unit's epilogue. Two whole branches: wgmma in flight where they join would serialise.
      wait_value();
      sanitise_value(block);
      if constexpr (kEarlyOutput) begin_last_output(accumulate);
      const UnitInfo& finished = unit();
      const bool ends = !kBoundedBegin || blocks_after() == 0;
      if constexpr (kOutputFirst) {
        if constexpr (!kEarlyOutput) begin_last_output(accumulate);
        ptx::wgmma_wait<0>();
        accept_output();
        release_value();
      }
      Next next = kUnread;
      uint32 nonfinite;
      if (ends && query_and_key_are_ready()) {
        next = !read_unit() ? kNone : starts_now() ? kStarts : kRead;
      }
      if (next == kStarts) {
        if constexpr (!kEarlyOutput && !kOutputFirst) begin_last_output(accumulate);
        take_queries(operands);
        const auto factor = read_factor();
        begin_scores(scores);
        if constexpr (!kOutputFirst) {
          ptx::wgmma_wait<1>();
          accept_output();
          release_value();
        }
        nonfinite = finish_unit(finished, softmax);
        fetch_first_terms(factor);
        ptx::wgmma_wait<0>();
      } else {
        if constexpr (!kOutputFirst) {
          if constexpr (!kEarlyOutput) begin_last_output(accumulate);
          ptx::wgmma_wait<0>();
          accept_output();
          release_value();
        }
        nonfinite = finish_unit(finished, softmax);
      }
      mark_rows(finished, nonfinite & 3 * kQuads);
      if (kRepeats && nonfinite & 12 * kQuads) {
        repeat_unit(finished);
        __syncwarp();  // the last reads of `finished`, whose buffer lane 0 may give back soon
      }
      if (next != kStarts) {
        if (kBoundedBegin && next == kUnread) skip_blocks(blocks_after());
        if (!start_unit(next)) return;
      }
    }
  }
};

}  // namespace forward
