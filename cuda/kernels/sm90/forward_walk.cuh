// Which blocks of keys a unit walks, in which order, and which of them need a test of their
// elements: the producer, which loads them, and the consumers, which compute, ask here alone.
//
// Blocks come from the last to the first. Other sets of blocks (a list, a part of the range) are
// another UnitWalk: where there may be gaps, the number of each goes through Shared::block_list.
// Read forward_load.cuh next.
#pragma once

#include "sm90/forward_common.cuh"

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

// The producer's side: plans a unit and finds its next block. All lanes take part.
struct UnitWalk {
  const ForwardParams& p;
  SegmentRange queries;  // ids of the rows, in a sparse unit; else empty

  __device__ __forceinline__ int lane() const { return ptx::fresh_lane(); }

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
    if constexpr (kListsWhole) narrow(unit);
  }
  // The block after `block`, which is not the unit's last.
  __device__ __forceinline__ int next(const UnitInfo& unit, int block) const {
    --block;
    if (kListsWhole || (kHasSegments && !queries.empty())) block = find_block<-1>(unit, block);
    return block;
  }

  // The blocks that the rows of warpgroup `lane` see, and which of them need no test.
  __device__ __forceinline__ void describe_rows(UnitInfo& unit) const {
    const int first_row = unit.first_row + lane() * kWarpgroupRows;
    const int first_query = first_row / kPackedHeads;
    const int last_query = (first_row + kWarpgroupRows - 1) / kPackedHeads;
    // Opaque: what follows would be computed ahead of the loop, for registers that are not there.
    const Visibility seen{unit.offset, p.window_left, p.window_right,
                          ptx::opaque(unit.query_length), ptx::opaque(unit.kv_length)};
    unit.own = blocks_of<kBlockKV>(visible_keys(seen, first_query, last_query));
    unit.full = full_blocks<kBlockKV>(seen, first_query, min(last_query, seen.query_length - 1));
  }
  // -- mask; all lanes take part --
  // What there is to see in a block for the rows of a warpgroup.
  __device__ __forceinline__ int mask_flag(const UnitInfo& unit, int warpgroup, int block) const {
    const int rows = unit.first_row / kWarpgroupRows + warpgroup;
    if (rows * kWarpgroupRows >= p.query_len) return 0;
    return mask::flag_by_query<kWarpgroupRows, kBlockKV>(p, unit.batch, unit.head, rows, block);
  }
  // The warpgroups whose rows see all of a block, a bit each.
  __device__ __forceinline__ int whole_rows(const UnitInfo& unit, int block) const {
    bool whole = lane() < kConsumers;
    if constexpr (kHasMask) {
      whole = whole && (mask_flag(unit, lane(), block) & mask::kSeesAll) != 0;
    }
    if constexpr (kHasPositions) {
      whole =
          whole && positions_all_meet(p, query_positions(unit, lane()), key_positions(unit, block));
    }
    return __ballot_sync(0xffffffffu, whole);
  }
  // Does the mask let any row of the unit see any key of the block? Each lane has its own block.
  __device__ __forceinline__ bool mask_shows(const UnitInfo& unit, int block) const {
    int flags = 0;
    // Three warpgroups leave the producer 32 registers: unrolled, 56 bytes are spilled.
#pragma unroll(kConsumers == 3 ? 1 : kConsumers)
    for (int i = 0; i < kConsumers; ++i) flags |= mask_flag(unit, i, block);
    return flags != 0;
  }
  // Drops the blocks at both ends that mask or positions hide or that share no segment.
  __device__ __forceinline__ void narrow(UnitInfo& unit) const {
    unit.blocks.end = find_block<-1>(unit, unit.blocks.end - 1) + 1;
    unit.blocks.begin = find_block<1>(unit, unit.blocks.begin);
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
  // Do positions let any row of the unit see any key of the block?
  __device__ __forceinline__ bool positions_show(const UnitInfo& unit, int block) const {
    const int2 keys = key_positions(unit, block);
    bool shown = false;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      shown = shown || positions_meet(p, query_positions(unit, i), keys);
    }
    return shown;
  }

  // -- segments; all lanes take part --
  // The plan of the warpgroup that is this lane's number.
  __device__ __forceinline__ const SegmentPlan* plan_of(const UnitIndex& taken) const {
    const int64 unit = taken.batch * p.query_blocks + taken.query_block;
    return reinterpret_cast<const SegmentPlan*>(p.segment_plan) + unit * kConsumers + lane();
  }
  // Finds the blocks of the unit and those of each warpgroup. In a sparse unit, where blocks that
  // share no segment with it lie between, all warpgroups walk all the others.
  __device__ __forceinline__ void plan_segments(UnitInfo& unit, const UnitIndex& taken) {
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (lane() < kConsumers) plan = *plan_of(taken);
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
    if (!sparse && walked >= unit.blocks.end - unit.blocks.begin) return;
    const int* ids = p.query_segments + static_cast<int64>(unit.batch) * p.query_len;
    const int end = min((unit.first_row + kUnitRows) / kPackedHeads, unit.query_length);
#pragma unroll 1
    for (int query = unit.first_row / kPackedHeads + lane(); query < end; query += 32) {
      queries.include(ids[query]);
    }
    queries.reduce_warp();
    narrow(unit);
    unit.own = unit.blocks;
  }
  // The first block from `block` on, in steps of kStep, that shares a segment with the unit, if it
  // is sparse, and that mask and positions do not hide; one past the unit's blocks if there is
  // none.
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
      if constexpr (kHasPositions) met = met && positions_show(unit, mine);
      if constexpr (kHasMask) met = met && mask_shows(unit, mine);
      const uint32 found = __ballot_sync(0xffffffffu, met);
      if (found != 0) return block + kStep * (__ffs(found) - 1);
    }
    return kStep > 0 ? unit.blocks.end : unit.blocks.begin - 1;
  }
};

// A consumer warpgroup's side.
struct RowWalk {
  int first;      // the lowest block that its rows see, the last one it walks
  Range full;     // blocks that need no element test
  int block = 0;  // the one whose scores or weights it holds
  bool whole;     // do mask and positions let the rows see all of it?

  // Begins a unit; `block` is the first of it.
  __device__ __forceinline__ void begin(const UnitInfo& t) {
    first = kBoundedBegin ? ptx::uniform(t.own.begin) : 0;
    full = {kBoundedBegin ? ptx::uniform(t.full.begin) : 0, ptx::uniform(t.full.end)};
    block = ptx::uniform(t.own.end) - 1;
  }
  __device__ __forceinline__ bool sees_nothing() const { return block < first; }
  __device__ __forceinline__ bool is_last() const { return block == first; }
  // Does the block need no test of its elements?
  __device__ __forceinline__ bool is_full(const UnitInfo& t) const {
    // There is no register left to hold the range with segments at wide heads, or if kDrains.
    const Range untested = kHasSegments || kHasPositions || kDrains ? t.full : full;
    if (kListsWhole && !whole) return false;
    return block < untested.end && (!kBoundedBegin || block >= untested.begin);
  }
};

}  // namespace forward
