// Which blocks of keys a unit walks, in which order, and which of them need a test of their
// elements: the producer, which loads them, and the consumers, which compute, ask here alone.
//
// Blocks come from the last to the first. Other sets of blocks (a list, a part of the range) are
// another UnitWalk: where there may be gaps, the number of each goes through Shared::block_list.
// Read forward_load.cuh next.
#pragma once

#include "sm90/forward_fading.cuh"

namespace forward {

// An element of Shared::block_list: a block, and a bit for each warpgroup whose rows mask and
// positions let see all of it.
struct ListedBlock {
  int bits;
  static constexpr int kWholeBit = 28;
  __device__ __forceinline__ void add_whole(int warpgroups) { bits |= warpgroups << kWholeBit; }
  __device__ __forceinline__ int number() const { return bits & ((1 << kWholeBit) - 1); }
  __device__ __forceinline__ bool is_whole(int warpgroup) const {
    return bits >> (kWholeBit + warpgroup) & 1;
  }
};

// The first and the last of `blocks`, which is not empty, that the walk of a unit comes to.
__device__ __forceinline__ int first_of_walk(const UnitInfo& unit, const Range& blocks) {
  const int last = blocks.end - 1;
  return kBeginsNear ? min((unit.first_row + kUnitRows - 1) / kBlockKV, last) : last;
}
__device__ __forceinline__ int last_of_walk(const Range& blocks, int first) {
  return kBeginsNear && first + 1 < blocks.end ? first + 1 : blocks.begin;
}

// What masks, positions and segments let the rows of a unit see of its blocks. All lanes take part.
struct SeenBlocks {
  const ForwardParams& p;
  SegmentRange queries;  // ids of the rows, in a sparse unit; else empty, with kCutsUnits the
                         // unit's first key and no end: one register for both
  // With kListsWhole: what was read last, of 32 blocks.
  int window = -1;  // the first of them
  int seen;         // of this lane's block: a bit for each warpgroup that sees all of it by mask
                    // and positions, and 8 bits higher one for each that sees any; with kListsWords
                    // of this lane's 32 blocks of 1024 a bit for each that any warpgroup sees
  static constexpr int kAny = 8, kAll = (1 << kConsumers) - 1;
  static constexpr int kWindow = kListsWords ? 1024 : 32;
  int left;  // with kListsLayout: blocks of the window that are still to come, and this one

  __device__ __forceinline__ int lane() const { return ptx::fresh_lane(); }
  // The first key of block 0.
  __device__ __forceinline__ int origin() const {
    return kCutsUnits && queries.empty() ? queries.low : 0;
  }

  // -- mask --
  // What there is to see in a block for the rows of a warpgroup.
  __device__ __forceinline__ int mask_flag(const UnitInfo& unit, int warpgroup, int block) const {
    const int rows = unit.first_row / kWarpgroupRows + warpgroup;
    if (rows * kWarpgroupRows >= p.query_len) return 0;
    return mask::flag_by_query<kWarpgroupRows, kBlockKV>(p, unit.batch, unit.head, rows, block);
  }
  // The warpgroups whose rows see all of the block that was found last, a bit each.
  __device__ __forceinline__ int whole_rows(const UnitInfo& unit, int block) const {
    if constexpr (kListsLayout) return (block + 1) * kBlockKV <= p.kv_len ? kAll : 0;
    if constexpr (kListsWords) {
      uint32 whole = 0;
      if (lane() < kConsumers) whole = flag_word(unit, lane(), block / 32, 1) >> block % 32 & 1;
      return __ballot_sync(0xffffffffu, whole);
    }
    return __shfl_sync(0xffffffffu, seen, block % 32) & kAll;
  }
  // Word `which` of 32 blocks, with kListsWords.
  __device__ __forceinline__ uint32 flag_word(const UnitInfo& unit, int warpgroup, int group,
                                              int which) const {
    const int rows = unit.first_row / kWarpgroupRows + warpgroup;
    if (rows * kWarpgroupRows >= p.query_len) return 0;
    const uint32 at =
        mask::flags_by_query<kWarpgroupRows, kBlockKV>(p, unit.batch, unit.head, rows, group);
    return p.block_mask.flags[at + which];
  }
  // The blocks of the unit that a warpgroup sees, among the window's that are this lane's.
  __device__ __forceinline__ uint32 seen_word(const UnitInfo& unit, int warpgroup) const {
    const int mine = window + 32 * lane();
    if (mine >= unit.blocks.end || mine + 32 <= unit.blocks.begin) return 0;
    return flag_word(unit, warpgroup, mine / 32, 0) & ptx::low_bits(unit.blocks.end - mine) &
           ~ptx::low_bits(unit.blocks.begin - mine);
  }
  // The first bit of the window that a lane has set, or the last; one has.
  template <int kStep>
  static __device__ __forceinline__ int end_of_bits(uint32 word, uint32 lanes) {
    const int group = kStep < 0 ? 31 - __clz(lanes) : __ffs(lanes) - 1;
    const uint32 bits = __shfl_sync(0xffffffffu, word, group);
    return 32 * group + (kStep < 0 ? 31 - __clz(bits) : __ffs(bits) - 1);
  }
  // Reads of 32 blocks, a lane for each, what the rows of each warpgroup see by mask and positions,
  // and which of them share a segment with the unit, if it is sparse.
  __device__ __forceinline__ void read_window(const UnitInfo& unit, int first) {
    window = first;
    if constexpr (kListsWords) {
      uint32 word = 0;
#pragma unroll(kConsumers == 3 ? 1 : kConsumers)
      for (int i = 0; i < (kListsLayout ? 1 : kConsumers); ++i) word |= seen_word(unit, i);
      seen = static_cast<int>(word);
      if constexpr (kListsLayout) left = __reduce_add_sync(0xffffffffu, __popc(word));
      return;
    }
    const int mine = first + lane();
    bool met = mine >= unit.blocks.begin && mine < unit.blocks.end;
    if constexpr (kHasSegments) {
      met = met && (queries.empty() || queries.meets(segment_range_of(unit, mine)));
    }
    seen = 0;
    if (met) {
      // Three warpgroups leave the producer 32 registers: unrolled, 56 bytes are spilled.
#pragma unroll(kConsumers == 3 ? 1 : kConsumers)
      for (int i = 0; i < kConsumers; ++i) {
        bool any = true, all = true;
        if constexpr (kHasMask) {
          const int flag = mask_flag(unit, i, mine);
          any = flag != 0;
          all = (flag & mask::kSeesAll) != 0;
        }
        if constexpr (kHasPositions) {
          const int2 rows = query_positions(unit, i), keys = key_positions(unit, mine);
          any = any && positions_meet(p, rows, keys);
          all = all && positions_all_meet(p, rows, keys);
        }
        seen |= (any << kAny | all) << i;
      }
    }
  }
  // -- positions --
  // The smallest and largest of the rows of a warpgroup, and of a block of keys.
  __device__ __forceinline__ int2 query_positions(const UnitInfo& unit, int warpgroup) const {
    const int64 rows = static_cast<int64>(unit.batch) * p.query_blocks * kConsumers +
                       unit.first_row / kWarpgroupRows + warpgroup;
    return reinterpret_cast<const int2*>(p.query_position_ranges)[rows];
  }
  __device__ __forceinline__ int2 key_positions(const UnitInfo& unit, int block) const {
    const int64 first = static_cast<int64>(unit.batch) * ceil_div(p.kv_len, kBlockKV);
    return reinterpret_cast<const int2*>(p.key_position_ranges)[first + block];
  }
  __device__ __forceinline__ int2 segment_range_of(const UnitInfo& unit, int block) const {
    const int64 first = static_cast<int64>(unit.batch) * ceil_div(p.kv_len, kBlockKV);
    return reinterpret_cast<const int2*>(p.segment_ranges)[first + block];
  }
};

// The producer's side: plans a unit and finds its next block. All lanes take part.
struct UnitWalk : SeenBlocks {
  // Finds the blocks that the unit walks.
  __device__ __forceinline__ void plan(UnitInfo& unit, const UnitIndex& taken,
                                       const Visibility& seen) {
    if constexpr (kHasSegments) {
      plan_segments(unit, taken);
    } else {
      const int first = unit.first_row / kPackedHeads;
      const int last = (unit.first_row + kUnitRows - 1) / kPackedHeads;
      unit.blocks = blocks_of<kBlockKV>(visible_keys(seen, first, last));
    }
    if constexpr (kFades) {
      unit.blocks =
          fading::blocks_that_count(p, taken.batch, taken.head, unit.first_row, unit.blocks);
    }
    if constexpr (kListsWhole) narrow(unit);
  }
  // The block after `block`, which is not the unit's last.
  __device__ __forceinline__ int next(const UnitInfo& unit, int block) {
    if (kBeginsNear && block == unit.blocks.begin) return unit.blocks.end - 1;
    --block;
    if constexpr (kListsLayout) --left;
    if constexpr (kListsWhole) return find_listed<-1>(unit, block);
    if (kHasSegments && !queries.empty()) block = find_block<-1>(unit, block);
    return block;
  }

  // The blocks that the rows of warpgroup `lane` see, and which of them need no test.
  __device__ __forceinline__ void describe_rows(UnitInfo& unit) const {
    const int first_row = unit.first_row + lane() * kWarpgroupRows;
    const int first_query = first_row / kPackedHeads;
    const int last_query = (first_row + kWarpgroupRows - 1) / kPackedHeads;
    // Opaque: what follows would be computed ahead of the loop, for registers that are not there.
    const Visibility seen{unit.offset - origin(), p.window_left, p.window_right,
                          ptx::opaque(unit.query_length), ptx::opaque(unit.kv_length)};
    unit.own = blocks_of<kBlockKV>(visible_keys(seen, first_query, last_query));
    if constexpr (kFades) {
      unit.own.begin = max(unit.own.begin, unit.blocks.begin);
      unit.own.end = min(unit.own.end, unit.blocks.end);
    }
    unit.full = full_blocks<kBlockKV>(seen, first_query, min(last_query, seen.query_length - 1));
  }
  // As find_block.
  template <int kStep>
  __device__ __forceinline__ int find_listed(const UnitInfo& unit, int block) {
#pragma unroll 1
    while (block >= unit.blocks.begin && block < unit.blocks.end) {
      const int first = block & -kWindow;
      if (window != first) read_window(unit, first);
      if constexpr (kListsWords) {
        const int from = block - first - 32 * lane();  // in this lane's word
        const uint32 word = seen & (kStep < 0 ? ptx::low_bits(from + 1) : ~ptx::low_bits(from));
        const uint32 lanes = __ballot_sync(0xffffffffu, word != 0);
        if (lanes != 0) return first + end_of_bits<kStep>(word, lanes);
      } else {
        const uint32 ahead =
            kStep < 0 ? 0xffffffffu >> (31 - (block - first)) : 0xffffffffu << (block - first);
        const uint32 found = __ballot_sync(0xffffffffu, seen >> kAny != 0) & ahead;
        if (found != 0) return first + (kStep < 0 ? 31 - __clz(found) : __ffs(found) - 1);
      }
      block = kStep < 0 ? first - 1 : first + kWindow;
    }
    return kStep > 0 ? unit.blocks.end : unit.blocks.begin - 1;
  }
  // With kListsOwn: finds the blocks of warpgroup `lane`, where the unit's are in one window; else
  // all of them, since more windows take registers that are not there.
  __device__ __forceinline__ void find_own(UnitInfo& unit) const {
    unit.own = unit.blocks;
    unit.one = {0, 0};
    if (kListsLayout || unit.blocks.empty() || window != (unit.blocks.begin & -kWindow)) return;
    if constexpr (kListsWords) {
      if (unit.blocks.end > window + kWindow) return;
#pragma unroll 1
      for (int i = 0; i < kConsumers; ++i) {
        const uint32 word = seen_word(unit, i);
        const uint32 lanes = __ballot_sync(0xffffffffu, word != 0);
        Range own{0, 0};
        int end = 0;  // of the window's
        if (lanes != 0) {
          const int low = end_of_bits<1>(word, lanes);
          end = end_of_bits<-1>(word, lanes) + 1;
          own = {window + low, window + end};
        }
        const int first = lanes == 0 ? 0 : own.begin - window;
        const uint32 after = seen & ~ptx::low_bits(end - 32 * lane());
        const uint32 before = seen & ptx::low_bits(first - 32 * lane());
        const int above = __reduce_add_sync(0xffffffffu, __popc(after));
        const int below = __reduce_add_sync(0xffffffffu, __popc(before));
        if (lane() != i) continue;
        unit.own = own;
        unit.one = {above, below};
      }
      return;
    }
    const uint32 listed = __ballot_sync(0xffffffffu, seen >> kAny != 0);
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const uint32 mine = __ballot_sync(0xffffffffu, seen >> (kAny + i) & 1);
      if (lane() != i) continue;
      const int low = __ffs(mine) - 1, end = 32 - __clz(mine);
      unit.own = mine == 0 ? Range{0, 0} : Range{window + low, window + end};
      unit.one = {mine == 0 ? __popc(listed) : __popc(listed & ~ptx::low_bits(end)),
                  __popc(listed & ((mine & -mine) - 1))};
    }
  }
  // With kListsLayout: are no more than kAskAhead blocks of the unit to come, with this one?
  static constexpr int kAskAhead = 3;
  __device__ __forceinline__ bool nears_end(const UnitInfo& unit) const {
    return left <= kAskAhead && window <= unit.blocks.begin;
  }
  // What the producer reads first of a unit, on its way into L1.
  __device__ __forceinline__ void prefetch(const UnitIndex& next) const {
    const int rows = next.query_block * kConsumers;
    if (lane() < ceil_div(p.kv_len, 32 * kBlockKV)) {
      ptx::prefetch(p.block_mask.flags + mask::flags_by_query<kWarpgroupRows, kBlockKV>(
                                             p, next.batch, next.head, rows, lane()));
    }
  }
  // Drops the blocks at both ends that mask or positions hide or that share no segment.
  __device__ __forceinline__ void narrow(UnitInfo& unit) {
    if constexpr (kListsWhole) {
      window = -1;  // read for other blocks or segments
      unit.blocks.begin = find_listed<1>(unit, unit.blocks.begin);
      unit.blocks.end = find_listed<-1>(unit, unit.blocks.end - 1) + 1;
    } else {
      unit.blocks.end = find_block<-1>(unit, unit.blocks.end - 1) + 1;
      unit.blocks.begin = find_block<1>(unit, unit.blocks.begin);
    }
  }

  // -- segments; all lanes take part --
  // The plan of the warpgroup that is this lane's number.
  __device__ __forceinline__ const SegmentPlan* plan_of(const UnitIndex& taken) const {
    return plans_of(p, taken.batch, taken.query_block) + lane();
  }
  // With kCutsUnits: takes the unit's rows from the last plan, and its document. False: it has
  // several, or one whose keys are not consecutive.
  __device__ __forceinline__ bool take_cut(UnitInfo& unit, SegmentPlan& plan) {
    const auto of_unit = [](int mine) { return __shfl_sync(0xffffffffu, mine, kConsumers); };
    unit.first_row = of_unit(plan.blocks.begin);
    unit.query_length = of_unit(plan.blocks.end);
    queries.low = of_unit(plan.one.begin);
    const int length = of_unit(plan.one.end) - queries.low;
    if (length == 0) {
      if (lane() == kConsumers) plan = {{0, 0}, {0, 0}};
      return false;
    }
    unit.kv_length = length;
    plan = {{0, kLargest}, {0, kLargest}};
    return true;
  }
  // Finds the blocks of the unit and those of each warpgroup. In a sparse unit, where blocks that
  // share no segment with it lie between, all warpgroups walk all the others.
  __device__ __forceinline__ void plan_segments(UnitInfo& unit, const UnitIndex& taken) {
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (lane() < kUnitPlans) plan = *plan_of(taken);
    const bool is_document = kCutsUnits && take_cut(unit, plan);
    describe_rows(unit);
    unit.own.begin = max(unit.own.begin, plan.blocks.begin & ~SegmentPlan::kSparse);
    unit.own.end = min(unit.own.end, plan.blocks.end);
    unit.one = plan.one;
    unit.full.begin = max(unit.full.begin, plan.one.begin);
    unit.full.end = min(unit.full.end, plan.one.end);
    const bool any = !unit.own.empty();
    unit.blocks.begin = __reduce_min_sync(0xffffffffu, any ? unit.own.begin : kLargest);
    unit.blocks.end = __reduce_max_sync(0xffffffffu, any ? unit.own.end : 0);
    const int walked = __reduce_add_sync(0xffffffffu, any ? unit.own.end - unit.own.begin : 0);
    const bool sparse = __any_sync(0xffffffffu, any && plan.blocks.begin >= SegmentPlan::kSparse);
    if (is_document || (!sparse && walked >= unit.blocks.end - unit.blocks.begin)) return;
    const int* ids = p.query_segments + static_cast<int64>(unit.batch) * p.query_len;
    const int end = min((unit.first_row + kUnitRows) / kPackedHeads, unit.query_length);
    if constexpr (kCutsUnits) queries = {};
#pragma unroll 1
    for (int query = unit.first_row / kPackedHeads + lane(); query < end; query += 32) {
      queries.include(ids[query]);
    }
    queries.reduce_warp();
    narrow(unit);
    unit.own = unit.blocks;
  }
  // The first block from `block` on, in steps of kStep, that shares a segment with the unit, if it
  // is sparse; one past the unit's blocks if there is none.
  template <int kStep>
  __device__ __forceinline__ int find_block(const UnitInfo& unit, int block) const {
    const int64 first = static_cast<int64>(unit.batch) * ceil_div(p.kv_len, kBlockKV);
    const int2* ranges = reinterpret_cast<const int2*>(p.segment_ranges) + first;
#pragma unroll 1
    for (; block >= unit.blocks.begin && block < unit.blocks.end; block += 32 * kStep) {
      const int mine = block + kStep * lane();
      const bool inside = mine >= unit.blocks.begin && mine < unit.blocks.end;
      bool met = inside;
      if constexpr (kHasSegments) met = met && (queries.empty() || queries.meets(ranges[mine]));
      const uint32 found = __ballot_sync(0xffffffffu, met);
      if (found != 0) return block + kStep * (__ffs(found) - 1);
    }
    return kStep > 0 ? unit.blocks.end : unit.blocks.begin - 1;
  }
};

// A consumer warpgroup's side.
struct RowWalk {
  int last;       // the last block it walks: the lowest that its rows see, but with kBeginsNear
  Range full;     // blocks that need no element test
  int block = 0;  // the one whose scores or weights it holds
  bool whole;     // do mask and positions let the rows see all of it? With kListsWhole: of the one
                  // whose scores were started last

  // Begins a unit; `block` is the first of it.
  __device__ __forceinline__ void begin(const UnitInfo& t) {
    last = kBoundedBegin || kFades ? ptx::uniform(t.own.begin) : 0;
    full = {kBoundedBegin ? ptx::uniform(t.full.begin) : 0, ptx::uniform(t.full.end)};
    block = ptx::uniform(t.own.end) - 1;
    if (kBeginsNear && block >= 0) {
      block = ptx::uniform(first_of_walk(t, t.own));
      last = ptx::uniform(last_of_walk(t.own, block));
    }
  }
  __device__ __forceinline__ bool sees_nothing() const { return block < (kBeginsNear ? 0 : last); }
  __device__ __forceinline__ bool is_last() const { return block == last; }
  // The block after this one, unless they are listed.
  __device__ __forceinline__ int next_block(const UnitInfo& t) const {
    const int begin = kFades ? ptx::uniform(t.own.begin) : 0;
    return kBeginsNear && block == begin ? ptx::uniform(t.own.end) - 1 : block - 1;
  }
  // Does the current block need no test of its elements, or another one of the unit?
  __device__ __forceinline__ bool is_full(const UnitInfo& t) const { return is_full(t, block); }
  __device__ __forceinline__ bool is_full(const UnitInfo& t, int block) const {
    const Range untested = kHoldsFull ? full : t.full;
    if (kListsWhole && !whole) return false;
    if (kWholeIsFull) return true;
    return block < untested.end && (!kBoundedBegin || block >= untested.begin);
  }
};

}  // namespace forward
