// Which blocks of queries a CTA walks, in which order, which of them need a test of their elements,
// and whose turn it is to add to a block's dq: who copies and who computes ask here alone. Read
// backward_copy.cuh next.
#pragma once

#include "backward_exact.cuh"

namespace backward {

inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kOwnKeys = 16 * kRowTiles;              // of a warp
inline constexpr int kRowWarps = kKeys / kOwnKeys;           // with keys of their own
inline constexpr int kColumnWarps = kWarps / kRowWarps;      // that share them
inline constexpr int kBlockSteps = kQueries / kStepQueries;  // of a block of queries

// With kDefersDq warps that share keys wait for each other alone before dV and dK.
static_assert(!kDefersDq ||
              (!kDeterministic && kColumnWarps > 1 && kStages == 2 && kDoutStages == 2));

static_assert(kQueries == 64 && kStepQueries >= 16 && kQueries % kStepQueries == 0);
static_assert(kKeys % kOwnKeys == 0 && kWarps % kRowWarps == 0 && kColumnWarps <= 4);

// A step: some queries of a block, of one head of the group.
struct Step {
  int m;  // the block
  int head = 0, part = 0;
  int number = 0;  // of steps before
};

// The unit of a CTA: a block of keys of one key/value head. At each block of queries the walk takes
// all heads of the group, so that CTAs side by side find Q and dO in L2.
struct Walk {
  const Sm80BackwardParams& p;
  Unit unit;
  SegmentRange ids;  // of the keys

  __device__ __forceinline__ Walk(const Sm80BackwardParams& p, int index)
      : p(p), unit(unit_at(p, index)) {
    if constexpr (kKeepsGroup) group_ = group_size(p);
    if constexpr (kHasSegments) {
      const int2 range = key_segment_range(p, unit.batch, unit.key0 / kKeys);
      ids = {range.x, range.y};
    }
  }
  // Query heads of the key/value head.
  __device__ __forceinline__ int group() const { return kKeepsGroup ? group_ : group_size(p); }
  // Whole warps call these two.
  __device__ __forceinline__ Step first() const {
    return {find(backward::first_block(unit.blocks))};
  }
  __device__ __forceinline__ Step after(Step at) const {
    ++at.number;
    if (++at.part < kBlockSteps) return at;
    at.part = 0;
    if (++at.head < group()) return at;
    at.head = 0;
    at.m = find(at.m + kDirection);
    return at;
  }
  __device__ __forceinline__ bool is_over(const Step& at) const {
    return at.m < unit.blocks.begin || at.m >= unit.blocks.end;
  }
  __device__ __forceinline__ int head(const Step& at) const {
    return unit.kv_head * group() + at.head;
  }
  static __device__ __forceinline__ int first_query(const Step& at) {
    return at.m * kQueries + at.part * kStepQueries;
  }

  // Keys that some query sees, and queries that see some key.
  __device__ __forceinline__ Range seen_keys() const {
    return visible_keys(unit.sight, 0, p.query_len - 1);
  }
  __device__ __forceinline__ Range seeing_queries() const {
    return visible_queries(unit.sight, 0, p.kv_len - 1);
  }

  // Do 16 keys and kCount queries of the block all see each other? Those past the length need no
  // test: their lse makes P zero.
  template <int kCount>
  __device__ __forceinline__ bool is_whole(const Step& at, int key, int query) const {
    bool whole = all_visible(unit.sight, key, key + 15, query, query + kCount - 1);
    const int block = unit.key0 / kKeys;
    if constexpr (kHasSegments) {
      whole = whole && ids.is_one(query_segment_range(p, unit.batch, at.m));
    }
    if constexpr (kHasPositions) {
      whole = whole && positions_all_meet(p, query_position_range(p, unit.batch, at.m),
                                          key_position_range(p, unit.batch, block));
    }
    if constexpr (kHasMask) {
      const int flag = mask::flag_by_key<kQueries, kKeys>(p, unit.batch, head(at), at.m, block);
      whole = whole && (flag & mask::kSeesAll << (key - unit.key0) / 64) != 0;
    }
    return whole;
  }

  // Deterministic sums: the units of a head add to a block of queries in ascending order of keys,
  // and the first stores. The block's counter is the number of the last that has added, plus one.
  // Units whose segments the block does not have neither walk it nor add.
  //
  // A unit waits for units of smaller keys of its head alone, which CTAs that run took before it
  // (next_unit): of the units that are not done the one taken first never waits.
  __device__ __forceinline__ int* counter(const Step& at) const {
    const int64 row = static_cast<int64>(unit.batch) * p.query_heads + head(at);
    return p.turns + row * query_blocks(p) + at.m;
  }
  // What it says when this unit may add; whole warps call.
  __device__ __forceinline__ int turn(int m) const {
    const int block = unit.key0 / kKeys;
    const int seen = m * kQueries + unit.sight.offset - p.window_left;
    const int first = kWindowLeft ? max(seen, 0) / kKeys : 0;
    if constexpr (kTurnsShown) {
      return shown_before(p, unit.batch, unit.kv_head * group(), group(), block, first, m);
    }
    if constexpr (!kHasSegments) return block > first ? block : 0;
    const int2 queries = query_segment_range(p, unit.batch, m);
#pragma unroll 1
    for (int end = block - 1; end >= first; end -= 32) {
      const int n = end - static_cast<int>(threadIdx.x) % 32;
      const int2 range = key_segment_range(p, unit.batch, max(n, 0));
      const SegmentRange keys{range.x, range.y};
      const uint32 hits = __ballot_sync(0xffffffffu, n >= first && keys.meets(queries));
      if (hits != 0) return end + 2 - __ffs(hits);
    }
    return 0;
  }

 private:
  int group_;

  // The next block from m on that is not hidden, or one past all blocks.
  __device__ __forceinline__ int find(int m) const {
    if constexpr (!kListsBlocks) return m;
    const Range all = unit.blocks;
#pragma unroll 1
    while (m >= all.begin && m < all.end) {
      const int base = kDirection < 0 ? max(m - 31, 0) : m;
      const int begin = kDirection < 0 ? all.begin : m, end = kDirection < 0 ? m + 1 : all.end;
      uint32 shown = ptx::low_bits(end - base) & ~ptx::low_bits(begin - base);
      if constexpr (kSkipsMasked) {
        shown &= shown_blocks(p, unit.batch, unit.kv_head, unit.key0, base);
      }
      if constexpr (kHasSegments) {
        const int mine = min(base + static_cast<int>(threadIdx.x) % 32, all.end - 1);
        shown &= __ballot_sync(0xffffffffu, ids.meets(query_segment_range(p, unit.batch, mine)));
      }
      if (shown != 0) return base + (kDirection < 0 ? 31 - __clz(shown) : __ffs(shown) - 1);
      m = kDirection < 0 ? base - 1 : base + 32;
    }
    return kDirection < 0 ? all.begin - 1 : all.end;
  }
};

}  // namespace backward
