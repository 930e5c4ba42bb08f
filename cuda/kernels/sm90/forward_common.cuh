// What the roles of the forward kernel share: sizes, shared memory, units, segments.
//
// The constants it is specialised by are listed in forward.cuh. Read forward_walk.cuh next.
#pragma once

#include "early.cuh"
#include "fragment.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/products.cuh"
#include "sm90/ptx_sm90.cuh"
#include "softmax.cuh"
#include "terms.cuh"
#include "tile.cuh"
#include "walk.cuh"

namespace forward {

inline constexpr int kWarpgroupRows = 64;  // query rows of one consumer warpgroup
inline constexpr int kUnitRows = kWarpgroupRows * kConsumers;
inline constexpr int kHeadTile = kTileColumns<kHeadDim>, kValueTile = kTileColumns<kValueDim>;
inline constexpr int kHeadColumns = kFloat8 ? kHeadDim / 2 : kHeadTile;  // of 16 bits
inline constexpr int kHeadBoxes = kParts * ceil_div(kHeadColumns, kBoxColumns);
inline constexpr int kValueBoxes = kParts * ceil_div(kValueTile, kBoxColumns);
inline constexpr int kValueColumns = round_up(kValueTile, 16);
inline constexpr int kQueryBytes = kHeadBoxes * kWarpgroupRows * kBoxRowBytes;  // of one warpgroup
inline constexpr int kKeyBytes = kHeadBoxes * kBlockKV * kBoxRowBytes;
// Float8 values come as columns, of 128 keys each (sm90_float8/forward_operands.cuh).
inline constexpr int kValueBytes =
    kFloat8 ? kValueDim * kBoxRowBytes : kValueBoxes * kBlockKV * kBoxRowBytes;
// With kSumsByProduct columns of ones behind them.
inline constexpr int kValuePitch = kValueBytes + (kSumsByProduct ? 8 * kBoxRowBytes : 0);
inline constexpr int kWarpsOfConsumers = 4 * kConsumers;
inline constexpr bool kCutsUnits = kCutDocuments > 0;
// Boxes of a block of keys, one above the other: pages do not follow each other in memory.
inline constexpr bool kTails = kTailRows > 0;
inline constexpr int kTailKeys = 64;  // of a block of a tail
inline constexpr int kPageRows =
    kFromPages ? common_divisor(kPageSize, kTails ? kTailKeys : kBlockKV) : kBlockKV;
inline constexpr int kPieces = kBlockKV / kPageRows;
using KeyBlock = KeyTile<kHeadColumns, kBlockKV, kWholeRows>;
using ValueBlock = KeyTile<kValueTile, kBlockKV, kWholeRows>;
// A team is a producer warp and kConsumers warpgroups with buffers and units of their own: a CTA is
// one, or several that hide each other's latencies. Their warpgroups follow the producers' in turn.
inline constexpr int kThreads = 128 * (kTeams * kConsumers + 1 + kTails);
// A unit's description outlives its Q buffer by the epilogue: a slot more, at least; by the whole
// unit where queries are held.
inline constexpr int kInfoStages = (kHoldsQueries ? 4 : 2) * kQueryStages;
inline constexpr int kRepeatSlots = 4;  // units that may be in flight, with kRepeats
// A bias that TMA loads comes with the keys, in their stages and at their barriers.
inline constexpr int kBiasBytes = kBiasTiles ? kUnitRows * kBlockKV * bias::kBytes : 0;
// The compiler knows that lanes walk a unit's blocks together: a step waits for no shuffle. Beside
// sinks and ids of segments 4 to 12 bytes would be spilled, or products serialised.
inline constexpr bool kLanesTogether = kConsumers == 3 && kApart && !kHasSinks && !kHasSegments;
// A condition of a warp.
__device__ __forceinline__ bool together(bool condition) {
  if constexpr (kLanesTogether) return ptx::together(condition);
  return condition;
}
inline constexpr int kTurnBarrier = 1, kWarpgroupBarrier = 1 + kConsumers;  // named barriers

static_assert(kBlockKV % 16 == 0 && kBlockKV >= 32 && kBlockKV <= 256);
static_assert(kConsumers >= 1 && kConsumers <= 3);
static_assert(!kFloat8 || (kBlockKV == kBoxRowBytes && kTmaLoads && kPackedHeads == 1));
static_assert(!kSumsByProduct || (kFloat8 && kApart && !kListsBlocks && kValueDim < kBlockKV));
static_assert(kTeams == 1 || (kTmaLoads && !kPingPong && !kHasKeyValueLengths),
              "named barriers are a team's, and so are loads by four warps");
static_assert(kTmaLoads ? kParts > 1 || kEarly || (kHeadDim % 8 == 0 && kValueDim % 8 == 0)
                        : !kDynamic,
              "planes are padded");
static_assert(!kEarly || (kTmaLoads && kParts == 1 && !kFloat8 && !kFromPages && !kHoldsQueries &&
                          kPackedHeads == 1),
              "a head of queries and its keys have the same columns before them");
static_assert(kWarpgroupRows % kPackedHeads == 0);
static_assert(!kHoldsQueries ||
              (kTmaLoads && kQueryStages == 1 && kParts == 1 && !kFloat8 && kHeadDim % 16 == 0));
static_assert((!kHasMask && !kHasBias && !kHasScoreFunction) || kPackedHeads == 1,
              "a unit has one head's mask, bias and function");
static_assert(!kBiasTiles || (bias::kIsMatrix && kTmaLoads && kBlockKV % bias::kBoxKeys == 0));
static_assert(!kFades || (kTakesLine && kScoreReach <= 0 && kTmaLoads && !kListsBlocks));
static_assert(!kHasDropout || kPackedHeads == 1, "a thread's rows are queries 8 apart");
static_assert(!kCutsUnits || (kHasSegments && kTmaLoads && kPackedHeads == 1 && !kListsWhole &&
                              !kHasQueryLengths && !kHasKeyValueLengths && !kHasBias &&
                              !kHasDropout && !kHasScoreFunction),
              "keys count from a document's first");

static_assert(!kFromPages ||
                  (kTmaLoads && kTeams == 1 && kParts == 1 && !kHasMask && !kHasSegments &&
                   !kHasPositions && !kHasQueryLengths && !kHasKeyValueLengths && !kHasBias &&
                   !kHasScoreFunction && !kHasDropout && !kBottomRight),
              "a unit has a request's lengths");
static_assert(kPageRows % 8 == 0 && kPieces <= 32, "of a swizzle, and a lane's each");

// A thread's fragments: scores or exponentials of one block of keys, and the output.
using Scores = float[kBlockKV / 2];
using Output = float[kValueColumns / 2];

// Units have numbers of the schedule. A unit that is walked a second time has its number with all
// bits turned, and so has the end of second walks.
__device__ __forceinline__ int again(int number) { return ~number; }
__device__ __forceinline__ bool is_again(int number) { return number < 0; }
__device__ __forceinline__ int in_schedule(int number) {
  return is_again(number) ? again(number) : number;
}

inline constexpr int kNoUnit = -1;  // in the place of a batch row: the schedule is at its end

// With kSplits numbers from p.first_split on are of parts: p.split_parts of each unit, of float8 of
// those that the last wave would have whole, which have a part of its keys each
// (forward_parts.cuh). A template: other programs have no such parameters.
template <class Params>
__device__ __forceinline__ int part_at(const Params& p, int number) {
  if constexpr (kSplits) return in_schedule(number) - p.first_split;
  return -1;
}

// What the main kernel stores: float32 where it stores parts alone, which are rounded once joined.
inline constexpr bool kPartsAlone = kSplits && !kFloat8;
using StoredElement =
    ElementType<kBFloat16 && !kPartsAlone, kFloat32 || kCarried || kPartsAlone>::Type;

// Which unit a number of the schedule stands for.
struct UnitIndex {
  int query_block;
  int head;   // of N / kPackedHeads
  int batch;  // or kNoUnit
};

// Units of a head; with kCutsUnits as many as the batch row has that has most, with kFromPages as
// many as requests have.
__device__ __forceinline__ int units_of_head(const ForwardParams& p) {
  if constexpr (kCutsUnits || (kFromPages && !kInCommon)) return *p.unit_count;
  return p.query_blocks;
}
// Batch rows that units have: with kTails those of the tails are behind them.
__device__ __forceinline__ int batch_in_common(const ForwardParams& p) {
  return kTails ? p.batch - p.requests : p.batch;
}
// The unit of a number, walked again or not.
template <class Params>
__device__ __forceinline__ UnitIndex unit_at(const Params& p, int number) {
  int index = in_schedule(number);
  if constexpr (kSplits) {
    const int part = part_at(p, number);
    if (part >= 0) index = p.first_split + part / p.split_parts;
  }
  const int units = units_of_head(p);
  const int heads = p.query_heads / kPackedHeads, all_heads = heads * batch_in_common(p);
  if (index >= units * all_heads) return {0, 0, kNoUnit};
  const HeadBlock at = head_block(index, units, all_heads, p.l2_heads);
  const int batch = at.head / heads;
  // The longest units first.
  const int unit = kLateSeeMost ? units - 1 - at.block : at.block;
  if constexpr (kBatchesTogether) return {unit, at.head / p.batch, at.head % p.batch};
  return {unit, at.head - batch * heads, batch};
}

// Numbers of the schedule, units to walk again aside.
template <class Params>
__device__ __forceinline__ int numbers_of(const Params& p) {
  const int units = batch_in_common(p) * (p.query_heads / kPackedHeads) * units_of_head(p);
  if constexpr (kSplits) return p.first_split + (units - p.first_split) * p.split_parts;
  return units;
}

// The unit that a number of the marks stands for: with kInCommon in the order of the results.
__device__ __forceinline__ UnitIndex marked_unit(const ForwardParams& p, int number) {
  if constexpr (!kInCommon) return unit_at(p, number);
  const int heads = p.query_heads / kPackedHeads, row = number / p.query_blocks;
  return {number - row * p.query_blocks, row % heads, row / heads};
}

// Description of a unit, written by the producer, read by the consumers.
struct UnitInfo {
  int first_row;  // packed rows: query * kPackedHeads + head within the pack
  int head;       // of N / kPackedHeads
  int batch;      // or kNoUnit: there are only units to walk again, if any
  // With kCutsUnits rows from query_length on are not the unit's, and where it has one document all
  // that is told of keys counts from that document's first. With kFromPages all is of the unit's
  // request, and kv_length is below 0 where the request is wrong: its rows are NaN.
  int query_length;
  int kv_length;
  int offset;
  Range blocks;  // that any of its warpgroups walks, from the last to the first
  Range own;     // of these, what the rows of this warpgroup see
  Range full;    // of these, the ones that need no element test
  Range one;     // the ones that need no test of segments; with kListsOwn .begin and .end are how
                 // many of the unit's blocks come before and after its own
  int number;    // of the schedule, or again() of it
};

// What a token sees beside the pages in common: positions first to end, which begin a page, in the
// pages of a row of own_table. As the operand has it.
struct alignas(16) Tail {
  int request, first, end, flags;
  __device__ __forceinline__ int keys() const { return max(end - first, 0); }
  __device__ __forceinline__ bool sees_common() const { return flags & 1; }
  __device__ __forceinline__ bool is_needed() const { return flags & 2; }
  __device__ __forceinline__ bool is_wrong() const { return flags & 4; }
};
__device__ __forceinline__ Tail tail_of(const ForwardParams& p, int request, int token) {
  return reinterpret_cast<const Tail*>(p.tails)[static_cast<int64>(request) * p.query_len + token];
}
inline constexpr int kItemRows = larger(kTailRows, 1);  // of forward_tails.cuh
inline constexpr int kTailGroups = ceil_div(kItemRows, 8);
inline constexpr int kTailPieces = kTailKeys / kPageRows;
static_assert(!kTails || (kInCommon && kConsumers == 2 && kTailGroups <= 2 && kPieces <= 32));

template <bool kUsed>
struct TailBuffers {};
template <>
struct alignas(1024) TailBuffers<true> {
  // Keys and values by turns.
  unsigned char blocks[kTailStages][larger(kHeadBoxes, kValueBoxes) * kTailKeys * kBoxRowBytes];
  unsigned char query[kHeadBoxes * kTailGroups * 8 * kBoxRowBytes];
  unsigned char weights[kTailGroups * 8 * kBoxRowBytes];
  float exchange[4][16];  // of each warp, for each row of an item
  unsigned long long full[kTailStages], empty[kTailStages];
};

struct alignas(1024) Shared : bias::Tiles<kStages, kBiasBytes> {
  unsigned char query[kQueryStages][kConsumers][kQueryBytes];
  unsigned char key[kStages][kKeyBytes];
  unsigned char value[kStages][kValuePitch];
  UnitInfo units[kInfoStages][kConsumers];
  unsigned long long query_full[kQueryStages][kConsumers];
  unsigned long long query_empty[kQueryStages][kConsumers];
  unsigned long long key_full[kStages], key_empty[kStages];
  unsigned long long value_full[kStages], value_empty[kStages];
  int block_list[kStages];    // with kListsBlocks a ListedBlock for each key buffer
  int repeats[kRepeatSlots];  // units to walk again: again(number), or 0
  unsigned long long asked;   // all consumer warps have seen the last unit and left what to repeat
  unsigned long long finished;  // they have read what the others left
  // With kFloat8 the scales of the block in each buffer, and of each warp's queries.
  float key_factors[kFloat8 ? kStages : 1], value_factors[kFloat8 ? kStages : 1];
  float query_factors[kFloat8 ? kWarpsOfConsumers : 1];
  TailBuffers<kTails> tails;

  // Behind the columns of values a quarter for each: four threads add up a row.
  __device__ __forceinline__ void write_sum_columns() {
    constexpr int kWords = (kValuePitch - kValueBytes) / 4, kQuarters = 0x28282828;
#pragma unroll
    for (auto& columns : value) {
      auto* words = reinterpret_cast<uint32*>(columns + kValueBytes);
      for (int i = threadIdx.x; i < kWords; i += kThreads) words[i] = kQuarters;
    }
    ptx::fence_async_proxy();
  }
  // The slots of `repeats` in use, a bit each; `mine`: the slot of this lane's number. All lanes.
  __device__ __forceinline__ uint32 units_to_repeat(int lane, int& mine) const {
    mine = lane < kRepeatSlots ? ptx::load_shared(ptx::shared_address(repeats) + 4 * lane) : 0;
    return __ballot_sync(0xffffffffu, mine != 0);
  }
};

// The offset of a member of Shared, bytes (NVRTC 13.0 has no offsetof).
#define JF_OFFSET(member) \
  static_cast<uint32>(reinterpret_cast<uint64>(&static_cast<Shared*>(nullptr)->member))

// The key blocks that share a segment with the rows of a warpgroup: what segment_plan finds.
struct alignas(16) SegmentPlan {
  Range blocks;  // from the first to the last of them
  Range one;     // of these, some in a row that hold the rows' only segment and no other
  // In `blocks.begin`: there are blocks between that share no segment.
  static constexpr int kSparse = 1 << 30;
};
// A unit has a plan for each warpgroup, with kCutsUnits one more: its `blocks` are the unit's rows,
// none if there is no such unit, its `one` the keys of the unit's only document, if they are
// consecutive.
inline constexpr int kUnitPlans = kConsumers + kCutsUnits;
__device__ __forceinline__ SegmentPlan* plans_of(const ForwardParams& p, int batch, int unit) {
  const int64 index = batch * p.query_blocks + unit;
  return reinterpret_cast<SegmentPlan*>(p.segment_plan) + index * kUnitPlans;
}

}  // namespace forward
