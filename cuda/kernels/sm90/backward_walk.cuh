// Which blocks of queries a unit walks, in which order, and which of them need a test of their
// elements: all roles of the main kernels ask here alone. Read backward_units.cuh next.
#pragma once

#include "backward_blocks.cuh"
#include "backward_sums.cuh"

namespace backward {

// A unit as the plan role hands it to the others. It stays in shared memory, not in registers, for
// as long as they work on it.
struct UnitRecord {
  int step;  // from block to block of its walk, 1 or -1; 0: no further units
  int batch, kv_head, key0;
  int offset, query_length, kv_length;  // Visibility of the batch row
  int m0;                               // first query of the walk
  int total;                            // its steps: query blocks of all of its heads
  int block;                            // its first query block, as an index of [B, N, query block]
  int head, heads;                      // first query head, their number
  Range seen_keys;                      // of the unit, that some query sees, relative to key0
  Range seen_queries;                   // that see some key
};
static_assert(sizeof(UnitRecord) == 64);

// u.step, which may be known.
__device__ __forceinline__ int step_of(const volatile UnitRecord& u) {
  return kFromDiagonals ? u.step : kDirection;
}
// u.heads, which may be known.
__device__ __forceinline__ int heads_of(const volatile UnitRecord& u) {
  return kSharesKeys ? kUnitHeads : u.heads;
}

__device__ __forceinline__ Visibility sight_of(const BackwardParams& p,
                                               const volatile UnitRecord& u) {
  return {u.offset, p.window_left, p.window_right, u.query_length, u.kv_length};
}

// What the counter hands out: of a unit the share `share`, or -1 all.
struct Taken {
  int unit, share;
};
__device__ __forceinline__ int whole_units(const BackwardParams& p) {
  if constexpr (kSharesUnits) return unit_count(p) - p.shared_units;
  return launched_units(p);
}
__device__ __forceinline__ int taken_units(const BackwardParams& p) {
  if constexpr (kSharesUnits) return whole_units(p) + p.shared_units * p.shares;
  return launched_units(p);
}
__device__ __forceinline__ Taken taken_at(const BackwardParams& p, int index) {
  if constexpr (kSharesUnits) {
    const int after = index - whole_units(p);
    if (after >= 0) return {whole_units(p) + after / p.shares, after % p.shares};
  }
  return {index, -1};
}
__device__ __forceinline__ bool is_share(const BackwardParams& p, const volatile UnitRecord& u) {
  if constexpr (kSharesUnits) return u.total < query_blocks(p) * u.heads;
  return false;
}

// As of shown_blocks, of a unit; `base` is a multiple of 32.
__device__ __forceinline__ uint32 shown_from(const BackwardParams& p, const volatile UnitRecord& u,
                                             int base) {
  if constexpr (kShowsWords)
    return shown_word(p, u.batch, u.head, u.heads, u.key0 / kKeys, base / 32);
  return shown_blocks(p, u.batch, u.kv_head, u.key0, base);
}

// The walk of a unit of query blocks: its first block, and how many there are.
struct WalkPlan {
  int first, count;
};
// `blocks`: those that window and lengths leave. Whole warps call.
__device__ __forceinline__ WalkPlan plan_walk(const BackwardParams& p, const volatile UnitRecord& r,
                                              const Range& blocks) {
  Range met = blocks;
  if constexpr (kHasSegments) {
    __syncwarp();
    met = narrow_by_segments(p, r.batch, r.key0, met);
  }
  int first = step_of(r) < 0 ? met.end - 1 : met.begin, count = met.end - met.begin;
  if constexpr (kSkipsMasked) {
    __syncwarp();
    const int end = met.end;
    count = 0;
    if constexpr (kShowsWords) {  // a word for each lane
#pragma unroll 1
      for (int base = met.begin & ~1023; base < end; base += 1024) {
        const int mine = base + 32 * (static_cast<int>(threadIdx.x) % 32);
        uint32 shown = 0;
        if (mine < end) shown = shown_word(p, r.batch, r.head, r.heads, r.key0 / kKeys, mine / 32);
        shown &= ptx::low_bits(end - mine) & ~ptx::low_bits(met.begin - mine);
        const uint32 lanes = __ballot_sync(0xffffffffu, shown != 0);
        if (lanes != 0 && (kDirection < 0 || count == 0)) {
          const int lane = kDirection < 0 ? 31 - __clz(lanes) : __ffs(lanes) - 1;
          const uint32 bits = __shfl_sync(0xffffffffu, shown, lane);
          first = base + 32 * lane + (kDirection < 0 ? 31 - __clz(bits) : __ffs(bits) - 1);
        }
        count += __reduce_add_sync(0xffffffffu, __popc(shown));
      }
      return {count == 0 ? 0 : first, count};
    }
#pragma unroll 1
    for (int base = met.begin / 32 * 32; base < end; base += 32) {
      uint32 shown = shown_from(p, r, base);
      shown &= ptx::low_bits(end - base) & ~ptx::low_bits(met.begin - base);
      if (shown != 0 && (kDirection < 0 || count == 0)) {
        first = base + (kDirection < 0 ? 31 - __clz(shown) : __ffs(shown) - 1);
      }
      count += __popc(shown);
    }
    if (count == 0) first = 0;
  }
  return {first, count};
}

// Where the sum of a block lies is not told by its number.
inline constexpr bool kSumsApart = kSumsInDq || kRing || kStoresDq;

// A walk over the query blocks of a unit, each with all heads of the unit: units of one group stay
// together, whatever their lengths, and find what they load in L2.
struct Walk {
  int left, m0, block;
  int row;       // as of `sum_index`, only with kSumsApart
  int head = 0;  // of the unit
  uint32 shown;  // with kHoldsShown, blocks of the same 32 that are still to come
  __device__ __forceinline__ Walk(const BackwardParams& p, const volatile UnitRecord& u)
      : left(u.total),
        m0(u.m0),
        block(u.block),
        row(kSumsApart ? sum_index(p, u.batch, u.head, u.m0) : 0) {
    if constexpr (kHoldsShown) {
      const int m = m0 / kQueries, bit = m % 32;
      shown = shown_from(p, u, m - bit);
      shown &= kDirection < 0 ? ptx::low_bits(bit) : ~ptx::low_bits(bit + 1);
    }
  }
  __device__ __forceinline__ int sum() const { return kSumsApart ? row : block; }
  // From the sum of a head to that of the next, or of the last one to that of the first, blocks on.
  __device__ __forceinline__ void next_sum_of_head(const BackwardParams& p) {
    row += kRing ? query_blocks(p) : 1;
  }
  __device__ __forceinline__ void next_sum_of_block(const BackwardParams& p, int step) {
    row += kRing ? step - head * query_blocks(p) : step * kQueries * p.query_heads - head;
  }
  // `block`, or found anew.
  __device__ __forceinline__ int query_block(const BackwardParams& p,
                                             const volatile UnitRecord& u) const {
    if constexpr (kHoldsBlock) return block;
    return (u.batch * p.query_heads + u.head + head) * query_blocks(p) + m0 / kQueries;
  }
  __device__ __forceinline__ int next_shown(const BackwardParams& p, const volatile UnitRecord& u);
  __device__ __forceinline__ void next(const BackwardParams& p, const volatile UnitRecord& u) {
    --left;
    block += query_blocks(p);
    next_sum_of_head(p);
    if (++head == heads_of(u)) {
      const int step = kSkipsMasked ? next_shown(p, u) : step_of(u);
      block += step - head * query_blocks(p);
      next_sum_of_block(p, step);
      m0 += step * kQueries;
      head = 0;
    }
  }
  // The same where another role knows how far it is to the next block: `shown_step`, as next_shown.
  template <class ShownStep>
  __device__ __forceinline__ void follow(const BackwardParams& p, const volatile UnitRecord& u,
                                         ShownStep shown_step) {
    --left;
    block += query_blocks(p);
    next_sum_of_head(p);
    if (++head < heads_of(u)) return;
    const int step = shown_step();
    block += step - head * query_blocks(p);
    next_sum_of_block(p, step);
    m0 += step * kQueries;
    head = 0;
  }
};

// How far it is to the next block that mask and positions show; there is one unless the walk is
// done.
__device__ __forceinline__ int Walk::next_shown(const BackwardParams& p,
                                                const volatile UnitRecord& u) {
  if (left == 0) return 0;
  const int m = m0 / kQueries;
  int base = m / 32 * 32;
  uint32 ahead;
  if constexpr (kHoldsShown) {
    ahead = shown;
  } else {
    ahead = shown_from(p, u, base) &
            (kDirection < 0 ? ptx::low_bits(m - base) : ~ptx::low_bits(m - base + 1));
  }
  while (ahead == 0) {
    base += 32 * kDirection;
    ahead = shown_from(p, u, base);
  }
  const int bit = kDirection < 0 ? 31 - __clz(ahead) : __ffs(ahead) - 1;
  if constexpr (kHoldsShown) shown = ahead ^ 1u << bit;
  return base + bit - m;
}

// First queries of blocks that see all keys [slab, slab + 64) of the unit, segments aside. Queries
// past the length need no test: their lse makes P zero.
__device__ __forceinline__ Range full_starts(const BackwardParams& p, const volatile UnitRecord& u,
                                             int slab) {
  const int key = u.key0 + slab;
  return full_block_starts(sight_of(p, u), key, key + 63, kQueries);
}

// A block of queries of one head that a walk comes to.
struct MetBlock {
  int head, m0;
  bool whole = true;  // does the mask let all its queries see all keys [slab, slab + 64)?
};

// Do the keys [slab, slab + 64) and all queries of the block see each other? `starts` as of
// full_starts, with kReadsAhead alone.
__device__ __forceinline__ bool is_full(const BackwardParams& p, const volatile UnitRecord& u,
                                        const Range& starts, int slab, const MetBlock& met) {
  const int m0 = met.m0;
  bool full;
  if constexpr (kReadsAhead) {
    full = m0 >= starts.begin && m0 < starts.end;
  } else {
    const int key = u.key0 + slab;
    full = all_visible(sight_of(p, u), key, key + 63, m0, m0 + kQueries - 1);
  }
  if constexpr (kHasSegments) {
    const int2 q = query_segment_range(p, u.batch, m0 / kQueries);
    const int2 k = key_segment_range(p, u.batch, u.key0 / kKeys);
    full = full && q.x == q.y && k.x == k.y && q.x == k.x;
  }
  if constexpr (kHasPositions) {
    full = full && positions_all_meet(p, query_position_range(p, u.batch, m0 / kQueries),
                                      key_position_range(p, u.batch, u.key0 / kKeys));
  }
  if constexpr (kHasMask) full = full && met.whole;
  return full;
}

}  // namespace backward
