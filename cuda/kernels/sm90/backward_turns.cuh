// Sums of dq: how accumulators are added, and in which order in deterministic mode.
#pragma once

#include "sm90/backward_units.cuh"

namespace backward {

// Deterministic sums: the units of a head add to a query block in ascending order of keys, with
// kFromDiagonals in descending order where walks rise, and the first stores. Units whose segment
// ids cannot meet the query block's, or that a block mask hides from it, take no part. A counter
// per block and part says who has added: how many, or where some take no part (kTurnsLeft) the last
// one's key block plus one. With kPairs the two units of a pair are one, and each CTA has a part.
//
// A unit waits only for units of its head that are handed out before it, to CTAs that run
// (Planner), of smaller keys or where walks rise of larger ones, and walk over every block at which
// they are waited for (`narrow_by_segments` drops none that they meet). So the unit handed out
// first, of those that are not done, never waits, however few CTAs of the grid run.
//
// The turn of a unit at a query block: what the counter says when it may add.
struct Turn {
  int count;
  static __device__ __forceinline__ Turn none() { return {-1}; }
  static __device__ __forceinline__ Turn first() { return {0}; }
  // Without segments all units after the first do the same: they add.
  static __device__ __forceinline__ Turn later() { return {1}; }
  // Does the unit add? Without segments every unit does.
  __device__ __forceinline__ bool takes_part() const { return !kHasSegments || count != -1; }
  // Is nothing there to add to?
  __device__ __forceinline__ bool stores() const { return kDeterministic && count == 0; }
};

// The first block of keys that the queries from m0 on see.
__device__ __forceinline__ int first_keys(const BackwardParams& p, const volatile UnitRecord& u,
                                          int m0) {
  return kWindowLeft ? max(m0 + u.offset - p.window_left, 0) / kKeys : 0;
}

// With kFromDiagonals: the last block of keys, or pair of them, that the queries from m0 on see.
__device__ __forceinline__ int last_keys(const BackwardParams& p, int m0) {
  return (min(m0 + kQueries, p.query_len) - 1) / (kKeys * kPair);
}

// The smallest and largest of segment ids that no smaller key block of the unit has: in shared
// memory, since the warp that waits has 24 registers.
__device__ __forceinline__ volatile int* absent_ids() { return items(&Shared::absent_ids); }
__device__ __forceinline__ void set_absent_ids(int smallest, int largest) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    absent_ids()[0] = smallest;
    absent_ids()[1] = largest;
  }
  __syncwarp();
}

// The turns of a unit, for one query block of its walk after the other. Whole warps call.
__device__ __forceinline__ Turn turn_of(const BackwardParams& p, const volatile UnitRecord& u,
                                        int m0) {
  const int first = first_keys(p, u, m0), block = u.key0 / (kKeys * kPair);
  if (kFromDiagonals && u.step > 0) return {last_keys(p, m0) - block};
  if constexpr (kTurnsShown) {
    return {shown_before(p, u.batch, u.head, u.heads, block, first, m0 / kQueries)};
  }
  if constexpr (!kHasSegments) return {block - first};
  const int2 ids = query_segment_range(p, u.batch, m0 / kQueries);
#pragma unroll 1
  for (int end = block; end >= first; end -= 32) {
    const int n = end - static_cast<int>(threadIdx.x) % 32;
    const int2 range = key_segment_range(p, u.batch, max(n, 0));
    const SegmentRange keys{range.x, range.y};
    uint32 hits = __ballot_sync(0xffffffffu, n >= first && keys.meets(ids));
    if (end == block) {
      if (hits % 2 == 0) return Turn::none();
      hits -= 1;
    }
    if (hits != 0) return {end - __ffs(hits) + 2};
    if (ids.x >= absent_ids()[0] && ids.y <= absent_ids()[1]) return Turn::first();
  }
  if constexpr (!kWindowLeft) set_absent_ids(ids.x, ids.y);
  return Turn::first();
}

// Two warps keep the order beside the warpgroups that add. With kTurnsLeft they leave the turn
// here; without, those that add know it ahead: reading it here too took 0 to 5 % of the speed.
__device__ __forceinline__ volatile int& turn_in(uint32 slot) {
  return items(&Shared::turns)[slot];
}
__device__ __forceinline__ bool adds_first(const BackwardParams& p, const volatile UnitRecord& u,
                                           int m0) {
  if constexpr (!kDeterministic || kTurnsLeft) return false;
  const bool rises = kFromDiagonals && u.step > 0;
  const int first = rises ? last_keys(p, m0) : first_keys(p, u, m0);
  return ptx::uniform(u.key0 / (kKeys * kPair) == first);
}

// With kLastStores: does the unit add last? Units with all keys of their queries in turn do.
__device__ __forceinline__ bool adds_last(const BackwardParams& p, const volatile UnitRecord& u,
                                          int m0) {
  if constexpr (!kLastStores) return false;
  const bool rises = kFromDiagonals && u.step > 0;
  const int last = rises ? 0 : kWindowRight ? last_keys(p, m0) : key_blocks(p) - 1;
  return ptx::uniform(u.key0 / kKeys == last);
}

// The counter of one of this CTA's parts of a query block.
__device__ __forceinline__ int* turn_counter(const BackwardParams& p, int block, int part) {
  return p.turns + block * kTurnParts + pair_rank() * kOwnTurns + part;
}

// This warp waits until the units before have added,
struct TurnWaiter {
  const BackwardParams& p;

  __device__ __forceinline__ void run() {
    const int part = threadIdx.x % 32;
    uint32 received = 0, iteration = part;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      if constexpr (kHasSegments) set_absent_ids(kLargest, kSmallest);
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        const Turn turn = turn_of(p, u, walk.m0);
        const uint32 slot = stage_of<kTurns>(iteration);
        bool waits = part < kOwnTurns;
        if (waits) {
          ptx::barrier_wait(at(&Shared::turn_empty, slot), parity_of<kTurns>(iteration) ^ 1);
          if constexpr (kTurnsLeft) turn_in(slot) = turn.count;
          if constexpr (kTurnsShown) items(&Shared::turn_blocks)[slot] = walk.query_block(p, u);
        }
        while (__any_sync(0xffffffffu, waits)) {
          if (waits &&
              (!turn.takes_part() ||
               ptx::load_acquire(turn_counter(p, walk.query_block(p, u), part)) == turn.count)) {
            ptx::barrier_arrive(at(&Shared::turn_full, slot));
            waits = false;
          }
        }
        iteration += kOwnTurns;
      }
      return_unit(received);
      ++received;
    }
  }
};

// and this one tells the next unit when this unit's additions are visible to it.
struct TurnPasser {
  const BackwardParams& p;

  __device__ __forceinline__ void run() {
    const bool leader = threadIdx.x % 32 == 0;
    uint32 received = 0, turn = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      if constexpr (kTurnsShown) {  // to find the blocks once more there is no register
        for (int left = u.total; left > 0; --left) {
          pass_turns(u, turn, leader, [&](int part) {
            return items(&Shared::turn_blocks)[stage_of<kTurns>(turn + part)];
          });
        }
      } else {
        for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
          pass_turns(u, turn, leader, [&](int) { return walk.block; });
        }
      }
      return_unit(received);
      ++received;
    }
  }

  // Passes the turns of a query block, whose number `block_of` knows once a part has been added.
  template <class BlockOf>
  __device__ __forceinline__ void pass_turns(const volatile UnitRecord& u, uint32& turn,
                                             bool leader, BlockOf block_of) {
    for (int part = 0; part < kOwnTurns;) {
      const auto taken = [&](int i) { return at(&Shared::turn_taken, stage_of<kTurns>(turn + i)); };
      const auto parity = [&](int i) { return parity_of<kTurns>(turn + i); };
      wait_together(taken(part), parity(part));
      int end = part + 1;  // of those that one fence serves
      while (end < kOwnTurns && ptx::uniform(ptx::barrier_test(taken(end), parity(end)))) ++end;
      // All parts take part or none does. Only the lane that arrives looks.
      const bool adds =
          leader && Turn{kTurnsLeft ? turn_in(stage_of<kTurns>(turn + part)) : 0}.takes_part();
      if (adds) ptx::fence_gpu();
      for (; part < end; ++part) {
        if (leader) {
          int* counter = turn_counter(p, block_of(part), part);
          if constexpr (!kTurnsLeft) {
            ptx::add_relaxed(counter, 1);
          } else if (adds) {
            ptx::store_relaxed(counter, u.key0 / kKeys + 1);
          }
          ptx::barrier_arrive(at(&Shared::turn_empty, stage_of<kTurns>(turn + part)));
        }
      }
    }
    turn += kOwnTurns;
  }
};

// Waits for this unit's turn, one part of it; `first` as of `adds_first`.
__device__ __forceinline__ Turn take_turn(uint32 iteration, int part, bool first) {
  if constexpr (!kDeterministic) return Turn::later();
  const uint32 turn = iteration * kOwnTurns + part, slot = stage_of<kTurns>(turn);
  ptx::barrier_wait(at(&Shared::turn_full, slot), parity_of<kTurns>(turn));
  if constexpr (kTurnsLeft) return {ptx::uniform(turn_in(slot))};
  return {first ? Turn::first().count : Turn::later().count};
}
__device__ __forceinline__ void end_turn(uint32 iteration, int part) {
  if constexpr (kDeterministic) {
    release(at(&Shared::turn_taken, stage_of<kTurns>(iteration * kOwnTurns + part)));
  }
}

// Adds a warpgroup's accumulators to a tile of the sum, from its `first` piece on, on a turn of
// this unit. A template: sums with kCompact have no store_or_add.
template <class Sum, int kCount>
__device__ __forceinline__ void add_fragments(const Sum& sum, int first,
                                              const float (&values)[kCount], Turn turn) {
  if constexpr (kFirstByPredicate) {
    const bool stores = turn.stores();
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      sum.store_or_add(stores, first + j,
                       {values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]});
    }
  } else if (turn.stores()) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      sum.store(first + j,
                float4{values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]});
    }
  } else if (turn.takes_part()) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      sum.add(first + j,
              float4{values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]});
    }
  }
}

}  // namespace backward
