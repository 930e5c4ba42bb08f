// Units of work and where the main kernels keep what: shared memory, barriers, records.
//
// A unit is a block of keys of one key/value head with all query blocks that see it, of all query
// heads of the group or of kUnitHeads. The plan role hands units out; the other roles walk over
// their query blocks. Read backward_turns.cuh next.
#pragma once

#include "ring.cuh"
#include "sm90/backward_walk.cuh"
#include "sm90/ptx_sm90.cuh"

namespace backward {

inline constexpr int kBoxK = kKeys * kBoxRowBytes;
inline constexpr int kBoxQ = kQueries * kBoxRowBytes;
// Boxes of a tile, of one plane after the other.
inline constexpr int kHeadTile = kParts * kHeadBoxes, kValueTile = kParts * kValueBoxes;
inline constexpr int kQueryBytes = kHeadTile * kBoxQ;  // of a tile of Q, and so on
inline constexpr int kDoutBytes = kValueTile * kBoxQ;
inline constexpr int kNumberBytes = kQueries * 4;  // a number for each query
inline constexpr int kGradientPlane = kKeys * kQueries * 2;
inline constexpr int kGradientBytes = kParts * kGradientPlane;
// A bias that TMA loads comes with Q, in its stages and at its barriers.
inline constexpr int kBiasBytes = kBiasTiles ? kKeys * kQueries * bias::kBytes : 0;
static_assert(!kBiasTiles || (bias::kIsMatrix && kTmaLoads && kKeys % bias::kBoxKeys == 0));

// Each warp that loads arrives at the barrier of a tile; the numbers that come with Q and dO take
// one arrival more, unless they come by TMA.
inline constexpr int kKeyArrivals = kLoadWarps;
inline constexpr int kQueryArrivals = kTmaLoads ? 1 : kLoadWarps + 1;

// With kPairs: boxes of the other CTA's keys that this one reads, half of the columns.
inline constexpr int kPairBoxes = kPairs ? ceil_div(kHeadBoxes, 2) : 0;
static_assert(!kEarly || (kTmaLoads && !kPairs && !kRing && !kCompact && kDqRowBytes == 0));
static_assert(!kPairs || (kTmaLoads && !kCompact && !kRing && kParts == 1));

inline constexpr int kScoreWarps = 4 * kScoreWarpgroups;  // that read Q and dO

inline constexpr int kUnits = 2;  // records that may be in use

// The next unit is taken when the loads of so many steps of this one are still to be issued.
inline constexpr int kAskAhead = 2;

inline constexpr int kFinishers = 2;   // warps that make dq of its sum, with kRing
inline constexpr int kSlabsAhead = 3;  // of the sum that are on their way to one

inline constexpr int kTurns = 8;  // turns that may have come, deterministic mode
inline constexpr int kOwnTurns = kTurnParts / kPair;  // of a query block that this CTA takes
static_assert(kOwnTurns * kPair == kTurnParts && kOwnTurns <= kTurns);

// What roles have ahead of what all share: nothing, or where tiles have two planes what
// sm90_float32/backward_shared.cuh says, which is included before this file.
template <int kPlanes>
struct OwnShared {};

// With kEarly: K and V have come by TMA, see early.cuh.
template <bool kUsed>
struct EarlyShared {};
template <>
struct EarlyShared<true> {
  Barrier landed[2];
};

// What all roles share; the main kernels add tiles of their own. Barriers are named by their event.
struct alignas(1024) Shared : bias::Tiles<kStages, kBiasBytes>,
                              OwnShared<kParts>,
                              EarlyShared<kEarly> {
  Barrier unit_full[kUnits], unit_empty[kUnits];
  Barrier unit_asked;
  Barrier key_full, key_empty;
  Barrier value_full, value_empty;
  Barrier query_full[kStages], query_empty[kStages];
  Barrier dout_full[kDoutStages], dout_empty[kDoutStages];
  Barrier gradient_full[kScoreStages], gradient_empty[kScoreStages];
  Barrier turn_full[kTurns], turn_empty[kTurns], turn_taken[kTurns];
  Barrier probability_full, probability_empty;                     // backward_wide.cuh
  Barrier sum_added[kUnits], slab_full[kFinishers * kSlabsAhead];  // backward_ring.cuh
  Barrier other_full[kScoreStages];                                // backward_pairs.cuh
  Barrier pair_told[kUnits], pair_heard[kUnits];                   // Planner
  alignas(512) UnitRecord units[kUnits];
  int2 pair_units[kUnits];  // Planner
  alignas(64) int turns[kTurns];
  alignas(64) int absent_ids[2];
  // With kSkipsMasked, in the padding of the line: the first queries of the blocks of Q, and the
  // blocks of the turns.
  int first_queries[kStages], turn_blocks[kTurns];
  // With kPairs followed by boxes of the other CTA's keys.
  alignas(1024) unsigned char key[(kHeadTile + kPairBoxes) * kBoxK];
  unsigned char value[kValueTile * kBoxK];
  unsigned char query[kStages][kQueryBytes];
  unsigned char dout[kDoutStages][kDoutBytes];
  float minus_lse[kStages][kQueries];
  float minus_delta[kDoutStages][kQueries];
  // [q box][key][64]; with kPairs followed by copies of the other CTA's.
  alignas(1024) unsigned char gradient[kPair * kScoreStages][kGradientBytes];
};

// Aligned as declared, so every address is a constant plus an index.
extern __shared__ __align__(1024) char shared_memory[];

template <class Owner, class Item>
__device__ __forceinline__ uint32 offset_of(Item Owner::* member) {
  return static_cast<uint32>(reinterpret_cast<uint64>(&(static_cast<Owner*>(nullptr)->*member)));
}
// The address of a member of the shared memory, or of an element of it: a sum, since of a reference
// with an index the compiler computes 64 bits.
template <class Owner, class Item>
__device__ __forceinline__ uint32 at(Item Owner::* member) {
  return ptx::shared_address(shared_memory) + offset_of(member);
}
template <class Owner, class Item, int kCount>
__device__ __forceinline__ uint32 at(Item (Owner::*member)[kCount], uint32 index) {
  return at(member) + index * static_cast<uint32>(sizeof(Item));
}
// A descriptor of shared memory of this CTA. In a cluster its addresses have its number in the bits
// from 24 on, which would fall into the descriptor's leading bytes.
__device__ __forceinline__ ptx::Descriptor descriptor(uint32 address, uint32 leading_bytes) {
  return ptx::descriptor(kPairs ? address & 0x3ffff : address, 0, leading_bytes, 1024);
}
// What others write meanwhile.
template <class Owner, class Item, int kCount>
__device__ __forceinline__ volatile Item* items(Item (Owner::*member)[kCount]) {
  return reinterpret_cast<volatile Item*>(shared_memory + offset_of(member));
}

// With kPairs: which of the two CTAs this one is. The one with the higher number has the later
// keys.
__device__ __forceinline__ int pair_rank() { return blockIdx.x % kPair; }

__device__ __forceinline__ uint32 in_other(uint32 address) {
  return ptx::address_in_cluster(address, pair_rank() ^ 1);
}

// Waits with the whole warp, of which one lane may then arrive elsewhere: that lets others end the
// next phase of this barrier too, and a lane that has not looked by then would wait for ever.
__device__ __forceinline__ void wait_together(uint32 barrier, uint32 parity) {
  ptx::barrier_wait(barrier, parity);
  __syncwarp();
}
// One lane arrives for its warp, after all lanes are done.
__device__ __forceinline__ void release(uint32 barrier) {
  __syncwarp();
  if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::lane_arrive(barrier);
}
__device__ __forceinline__ volatile UnitRecord& unit_record(uint32 i) {
  return items(&Shared::units)[i % kUnits];
}

// With kCompact: the numbers past those that are loaded of the only query block. The first
// `threads` of a CTA call, ahead of all loads.
__device__ __forceinline__ void fill_numbers(int threads) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kStages * kQueries; i += threads) {
    ptx::store_shared(at(&Shared::minus_lse) + 4 * i, __float_as_uint(kNegativeInfinity));
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kDoutStages * kQueries; i += threads) {
    ptx::store_shared(at(&Shared::minus_delta) + 4 * i, 0);
  }
}

// Barriers of the roles of warpgroup 0. The arguments count the arrivals that give a unit, K and V
// back.
__device__ __forceinline__ void set_up_load(int unit_readers, int key_readers, int value_readers) {
  for (int i = 0; i < 2; ++i) {
    ptx::barrier_init(at(&Shared::unit_full, i), 1);
    ptx::barrier_init(at(&Shared::unit_empty, i),
                      unit_readers + kLoadWarps + (kDeterministic ? 2 : 0));
  }
  ptx::barrier_init(at(&Shared::unit_asked), 1);
  if constexpr (kPairs) {
    for (int i = 0; i < kUnits; ++i) {
      ptx::barrier_init(at(&Shared::pair_told, i), 1);
      ptx::barrier_init_lanes(at(&Shared::pair_heard, i), 1);
    }
  }
  if constexpr (kEarly) {
    for (int i = 0; i < 2; ++i) ptx::barrier_init(at(&EarlyShared<true>::landed, i), 1);
  }
  ptx::barrier_init(at(&Shared::key_full), kKeyArrivals);
  ptx::barrier_init(at(&Shared::key_empty), key_readers);
  ptx::barrier_init(at(&Shared::value_full), kKeyArrivals);
  ptx::barrier_init(at(&Shared::value_empty), value_readers);
  for (int i = 0; i < kStages; ++i) {
    ptx::barrier_init(at(&Shared::query_full, i), kQueryArrivals);
    ptx::barrier_init(at(&Shared::query_empty, i), kScoreWarps);
  }
  for (int i = 0; i < kDoutStages; ++i) {
    ptx::barrier_init(at(&Shared::dout_full, i), kQueryArrivals);
    ptx::barrier_init(at(&Shared::dout_empty, i), kScoreWarps);
  }
  for (int i = 0; i < kTurns; ++i) {
    ptx::barrier_init(at(&Shared::turn_full, i), 1);
    ptx::barrier_init(at(&Shared::turn_empty, i), 1);
    ptx::barrier_init(at(&Shared::turn_taken, i), 4);  // warps of the one warpgroup that adds
  }
}

// With kRing: waits until the sum of dq of this unit's set has a place, see backward_ring.cuh.
__device__ __forceinline__ void wait_for_sum(const BackwardParams& p, int index) {
  if constexpr (kRing) {
    const int units = p.l2_heads * key_blocks(p), before = index / units - p.ring_sets;
    if (before < 0) return;
    while (ptx::load_acquire(p.ring_counts + 2 * before + 1) != 2 * units) {
    }
    __syncwarp();
  }
}

// The plan role.
struct Planner {
  const BackwardParams& p;

  // The walk over query blocks, as the record has it.
  __device__ __forceinline__ void set_walk(volatile UnitRecord& r, int first, int count) {
    r.m0 = first * kQueries;
    r.total = count * r.heads;
    r.block = (r.batch * p.query_heads + r.head) * query_blocks(p) + first;
  }

  __device__ __forceinline__ void send_unit(uint32 sent, int index) {
    const bool leader = threadIdx.x % 32 == 0;
    wait_together(at(&Shared::unit_empty, stage_of<kUnits>(sent)), parity_of<kUnits>(sent) ^ 1);
    volatile UnitRecord& r = unit_record(sent);
    const bool stop = index >= taken_units(p);
    if (kRing && !stop) wait_for_sum(p, index);
    const Taken taken = taken_at(p, stop ? 0 : index);
    const Unit u = unit_at(p, taken.unit);
    if (leader) {
      r.step = stop ? 0 : u.step;
      r.batch = u.batch;
      r.kv_head = u.kv_head;
      r.key0 = u.key0;
      r.offset = u.sight.offset;
      r.query_length = u.sight.query_length;
      r.kv_length = u.sight.kv_length;
      r.heads = unit_heads(p);
      r.head = u.head;
      const Range seen = visible_keys(u.sight, 0, p.query_len - 1);
      r.seen_keys.begin = seen.begin - u.key0;
      r.seen_keys.end = seen.end - u.key0;
      // Rows past the end of the array read as zero.
      const Range seeing = visible_queries(u.sight, 0, p.kv_len - 1);
      r.seen_queries.begin = seeing.begin;
      r.seen_queries.end = seeing.end == p.query_len ? kLargest : seeing.end;
    }
    if constexpr (kFromDiagonals) __syncwarp();
    WalkPlan walk = plan_walk(p, r, u.blocks);
    if (kSharesUnits && taken.share >= 0) {
      const int begin = walk.count * taken.share / p.shares;
      walk = {walk.first + begin * step_of(r), walk.count * (taken.share + 1) / p.shares - begin};
    }
    if (leader) set_walk(r, walk.first, walk.count);
    if constexpr (kGivesBackEarly && kTmaLoads) {  // K and V on their way to L2
      if (leader && !stop && walk.count > 0) {
        for (int box = 0; box < kHeadBoxes; ++box) {
          ptx::tma_prefetch(&p.key, box_column<kHeadDim>(u.kv_head) + 64 * box, box_head(u.kv_head),
                            u.key0, u.batch);
        }
        for (int box = 0; box < kValueBoxes; ++box) {
          ptx::tma_prefetch(&p.value, box_column<kValueDim>(u.kv_head) + 64 * box,
                            box_head(u.kv_head), u.key0, u.batch);
        }
      }
    }
    if (leader) ptx::barrier_arrive(at(&Shared::unit_full, stage_of<kUnits>(sent)));
  }

  // Hands out units until there are no more. A unit is taken when the one before nears its end, not
  // earlier: units of a head then start in the order of their keys, in which they add in
  // deterministic mode.
  __device__ __forceinline__ void run() {
    if constexpr (kPairs) return run_pairs();
    const int given = kInOrder ? 0 : gridDim.x;  // without the counter
    int index = blockIdx.x;
    int row = 0;  // with kDbiasByRows, of the batch rows of what has been taken
    for (uint32 sent = 0;; ++sent) {
      if (sent > 0) ptx::barrier_wait(at(&Shared::unit_asked), parity_of<1>(sent - 1));
      if ((kInOrder || sent > 0) && (!kDbiasByRows || row == 0)) {
        if (threadIdx.x % 32 == 0) index = given + atomicAdd(p.next_unit, 1);
        index = __shfl_sync(0xffffffffu, index, 0);
      }
      const int unit = kDbiasByRows ? index * p.batch + row : index;
      send_unit(sent, unit);
      if (unit >= taken_units(p)) break;
      if constexpr (kDbiasByRows) row = row + 1 == p.batch ? 0 : row + 1;
    }
  }
  // With kPairs: the first CTA takes the counter's next pair of units and tells the other one.
  __device__ __forceinline__ void run_pairs() {
    int pair = blockIdx.x / kPair;
    for (uint32 sent = 0;; ++sent) {
      if (sent > 0) ptx::barrier_wait(at(&Shared::unit_asked), parity_of<1>(sent - 1));
      if (kInOrder || sent > 0) {
        const uint32 told = kInOrder ? sent : sent - 1;
        pair = pair_rank() == 0 ? tell_pair(told) : hear_pair(told);
      }
      const int unit = pair * kPair + pair_rank();
      send_unit(sent, unit);
      if (unit >= taken_units(p)) break;
    }
  }
  __device__ __forceinline__ int tell_pair(uint32 told) {
    const uint32 slot = stage_of<kUnits>(told);
    int pair = 0;
    const int given = kInOrder ? 0 : gridDim.x / kPair;
    if (threadIdx.x % 32 == 0) pair = given + atomicAdd(p.next_unit, 1);
    wait_together(at(&Shared::pair_heard, slot), parity_of<kUnits>(told) ^ 1);
    if (threadIdx.x % 32 == 0) {
      ptx::send(in_other(at(&Shared::pair_units, slot)), float2{__int_as_float(pair), 0.f},
                in_other(at(&Shared::pair_told, slot)));
    }
    return __shfl_sync(0xffffffffu, pair, 0);
  }
  __device__ __forceinline__ int hear_pair(uint32 heard) {
    const uint32 slot = stage_of<kUnits>(heard), told = at(&Shared::pair_told, slot);
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive_expect(told, sizeof(int2));
    wait_together(told, parity_of<kUnits>(heard));
    const int pair = items(&Shared::pair_units)[slot].x;
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive_in_cluster(in_other(at(&Shared::pair_heard, slot)));
    return pair;
  }
};

// The load role's: lets Planner take the next unit, once for each unit.
__device__ __forceinline__ void ask_for_unit() {
  if (threadIdx.x == 0) ptx::barrier_arrive(at(&Shared::unit_asked));
}

// The i-th unit as the other roles see it; each warp gives it back with `return_unit`.
__device__ __forceinline__ const volatile UnitRecord& receive_unit(uint32 i) {
  ptx::barrier_wait(at(&Shared::unit_full, stage_of<kUnits>(i)), parity_of<kUnits>(i));
  return unit_record(i);
}
__device__ __forceinline__ void return_unit(uint32 i) {
  release(at(&Shared::unit_empty, stage_of<kUnits>(i)));
}

}  // namespace backward
