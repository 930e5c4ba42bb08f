// What the roles of the forward kernel share: sizes, shared memory, units, segments.
//
// The constants it is specialised by are listed in forward.cuh. Read forward_walk.cuh next.
#pragma once

#include "cuda/runtime/families/sm90_params.h"
#include "fragment.cuh"
#include "halves.cuh"
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
inline constexpr int kHeadBoxes = kParts * ceil_div(kHeadDim, kBoxColumns);
inline constexpr int kValueBoxes = kParts * ceil_div(kValueDim, kBoxColumns);
inline constexpr int kValueColumns = round_up(kValueDim, 16);
inline constexpr int kQueryBytes = kHeadBoxes * kWarpgroupRows * kBoxRowBytes;  // of one warpgroup
inline constexpr int kKeyBytes = kHeadBoxes * kBlockKV * kBoxRowBytes;
inline constexpr int kValueBytes = kValueBoxes * kBlockKV * kBoxRowBytes;
inline constexpr int kWarpsOfConsumers = 4 * kConsumers;
inline constexpr int kLoadWarps = kTmaLoads ? 1 : 4;  // each arrives when its part is there
// A team is a producer warp and kConsumers warpgroups with buffers and units of their own: a CTA is
// one, or several that hide each other's latencies. Their warpgroups follow the producers' in turn.
inline constexpr int kThreads = 128 * (kTeams * kConsumers + 1);
// A unit's description outlives its Q buffer by the epilogue: a slot more, at least.
inline constexpr int kInfoStages = 2 * kQueryStages;
// The last output of a unit starts before the next unit is looked at: 4% at T 512 for narrow
// values; wide ones lack the registers for it (12% slower).
inline constexpr bool kEarlyOutput = kValueDim <= 128;
// A warpgroup's blocks may begin after the first one of its unit.
inline constexpr bool kBoundedBegin = kWindowLeft || kHasSegments || kHasPositions || kHasMask;
// The producer tells the consumers which block is in each buffer: there may be gaps.
inline constexpr bool kListsBlocks = kHasSegments || kHasPositions || kHasMask;
// And of each, which warpgroups' rows see all of it as far as these terms go.
inline constexpr bool kListsWhole = kHasPositions || kHasMask;
// That is what a block mask says, alone: of 1024 blocks at once, a word of 32 for each lane.
inline constexpr bool kListsWords = mask::kIsBlocks && kTmaLoads && !kHasPositions && !kHasSegments;
// And of a layout whose blocks hold a unit's rows: these see the same, and all of it but what is
// past the last key.
inline constexpr bool kListsLayout = kListsWords && mask::kTilesAreWhole<kUnitRows, kBlockKV>;
// Q comes behind the second block's keys, where the unit before gives its buffer back last, and is
// there when the unit before has its last output.
inline constexpr bool kQueriesLate = kListsLayout && kQueryStages == 1;
// Of SoftmaxState. Functions at head dim 64 have no registers for it: 16 bytes would be spilled.
inline constexpr bool kAsksRow = !kHasScoreFunction || larger(kHeadDim, kValueDim) > 64;
// The line that a function adds goes into the exponent. Not beside dropout at wide heads: 156 bytes
// would be spilled.
inline constexpr bool kTakesLine = kScoreIsLine && (!kHasDropout || kValueDim <= 64);
// A function that bends at the query has its largest and smallest values there: a unit's walk
// begins with its last query's block. Towards it from the last block, maxima would rise block by
// block.
inline constexpr bool kBeginsNear =
    kScoreBends && kTakesLine && !kWindowLeft && !kWindowRight && !kListsBlocks;
// Then each warpgroup walks from the first to the last block that its own rows see. With segments
// all walk what any of them sees; beyond 128 columns 8 bytes would be spilled, without TMA 136.
inline constexpr bool kListsOwn = kListsWhole && kTmaLoads && !kHasSegments && kValueDim <= 128;
// A unit with rows that overflow is walked again, with a maximum in every block. Not where four
// warps load: they would have to agree on it.
inline constexpr bool kRepeats = kTmaLoads;
inline constexpr int kRepeatSlots = 4;  // units that may be in flight
// The mask's bits are fetched beside the product that they are for; with segments, positions or a
// bias, or a block mask for three warpgroups, there is no register for that. Most blocks of a block
// mask need none: of it alone they are fetched where they are tested.
inline constexpr bool kBitsAhead = kHasMask && !kListsWords && !kHasSegments && !kHasPositions &&
                                   !kHasBias &&
                                   (kConsumers == 2 || (kHasMaskBytes && kMaskBlock == 0));
// A bias that TMA loads comes with the keys, in their stages and at their barriers. Two warpgroups
// have registers for a block's, which they read beside the product that it is for; three read it
// where they add it.
inline constexpr int kBiasBytes = kBiasTiles ? kUnitRows * kBlockKV * bias::kBytes : 0;
inline constexpr bool kBiasBeside = kBiasTiles && kConsumers == 2 && kValueDim <= 128;
inline constexpr int kTurnBarrier = 1, kWarpgroupBarrier = 1 + kConsumers;  // named barriers

static_assert(kBlockKV % 16 == 0 && kBlockKV >= 32 && kBlockKV <= 256);
static_assert(kConsumers >= 2 && kConsumers <= 4);
static_assert(kTeams == 1 || (kTmaLoads && !kPingPong && !kHasKeyValueLengths),
              "named barriers are a team's, and so are loads by four warps");
static_assert(kTmaLoads ? kHalves || (kHeadDim % 8 == 0 && kValueDim % 8 == 0) : !kDynamic);
static_assert(!kHalves || (halves::kRows % kBlockKV == 0 && kPackedHeads == 1 && kTmaLoads),
              "a factor is that of a head's 64 rows");
static_assert(kWarpgroupRows % kPackedHeads == 0);
static_assert((!kHasMask && !kHasBias && !kHasScoreFunction) || kPackedHeads == 1,
              "a unit has one head's mask, bias and function");
static_assert(!kBiasTiles || (bias::kIsMatrix && kTmaLoads && kBlockKV % bias::kBoxKeys == 0));
static_assert(!kFades || (kTakesLine && kScoreReach <= 0 && kTmaLoads && !kListsBlocks));
static_assert(!kHasDropout || kPackedHeads == 1, "a thread's rows are queries 8 apart");

// Units have numbers of the schedule. A unit that is walked a second time has its number with all
// bits turned, and so has the end of second walks.
__device__ __forceinline__ int again(int number) { return ~number; }
__device__ __forceinline__ bool is_again(int number) { return number < 0; }
__device__ __forceinline__ int in_schedule(int number) {
  return is_again(number) ? again(number) : number;
}

inline constexpr int kNoUnit = -1;  // in the place of a batch row: the schedule is at its end

// Which unit a number of the schedule stands for.
struct UnitIndex {
  int query_block;
  int head;   // of N / kPackedHeads
  int batch;  // or kNoUnit
};

// That of a number, walked again or not.
__device__ __forceinline__ UnitIndex unit_at(const ForwardParams& p, int number) {
  const int index = in_schedule(number);
  const int heads = p.query_heads / kPackedHeads, all_heads = heads * p.batch;
  if (index >= p.query_blocks * all_heads) return {0, 0, kNoUnit};
  const HeadBlock at = head_block(index, p.query_blocks, all_heads, p.l2_heads);
  const int batch = at.head / heads;
  // With a bounded right window (causal) late queries see most keys: the longest units first. So
  // they do with most block masks.
  constexpr bool kLateSeeMost = kWindowRight || kReachRight || kMaskBlock != 0;
  const int unit = kLateSeeMost ? p.query_blocks - 1 - at.block : at.block;
  if constexpr (kBatchesTogether) return {unit, at.head / p.batch, at.head % p.batch};
  return {unit, at.head - batch * heads, batch};
}

// Description of a unit, written by the producer, read by the consumers.
struct UnitInfo {
  int first_row;  // packed rows: query * kPackedHeads + head within the pack
  int head;       // of N / kPackedHeads
  int batch;      // or kNoUnit: there are only units to walk again, if any
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

struct alignas(1024) Shared : bias::Tiles<kStages, kBiasBytes> {
  unsigned char query[kQueryStages][kConsumers][kQueryBytes];
  unsigned char key[kStages][kKeyBytes];
  unsigned char value[kStages][kValueBytes];
  UnitInfo units[kInfoStages][kConsumers];
  unsigned long long query_full[kQueryStages][kConsumers];
  unsigned long long query_empty[kQueryStages][kConsumers];
  unsigned long long key_full[kStages], key_empty[kStages];
  unsigned long long value_full[kStages], value_empty[kStages];
  int block_list[kStages];    // with kListsBlocks a ListedBlock for each key buffer
  int repeats[kRepeatSlots];  // units to walk again: again(number), or 0
  unsigned long long asked;   // all consumer warps have seen the last unit and left what to repeat
  unsigned long long finished;  // they have read what the others left

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

}  // namespace forward
