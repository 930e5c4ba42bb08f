// Which blocks of keys a CTA walks, from the last to the first, and which of them need a test of
// their elements: who copies and who computes ask here alone. Read forward_copy.cuh next.
#pragma once

#include "fragment.cuh"
#include "request_units.cuh"
#include "rows.cuh"
#include "terms.cuh"
#include "walk.cuh"

namespace forward {

inline constexpr int kThreads = 32 * kRowWarps * kValueWarps;
inline constexpr int kTileRows = 16 * kRowWarps;  // of the queries that warps have in one tile each
inline constexpr int kUnitRows = kTileRows * kRowTiles;

static_assert(kBlockKV % 16 == 0 && kBlockKV <= 128);
static_assert(kTileRows % kPackedHeads == 0);
static_assert(kPackedHeads == 1 || kFromPages, "terms know rows of one head");
static_assert(!kFromPages || (kParts == 1 && !kHasMask && !kHasSegments && !kHasPositions &&
                              !kHasQueryLengths && !kHasKeyValueLengths && !kHasBias &&
                              !kHasScoreFunction && !kHasDropout && !kBottomRight),
              "a unit has a request's lengths");

// A CTA's block of queries of one head, or of kPackedHeads that share keys: row r of it is query
// r / kPackedHeads of head r % kPackedHeads.
struct Unit {
  const Sm80ForwardParams& p;
  int batch, query_block;
  int head;       // the first
  int first_row;  // packed, with kFromPages
  int request;    // likewise: row of the page table
  Visibility sight;

  // Found anew at each use, since registers are few while it attends.
  __device__ __forceinline__ explicit Unit(const Sm80ForwardParams& p) : p(p) {
    const int units = kFromPages ? *p.unit_count : p.query_blocks;
    const HeadBlock found = head_block(ptx::opaque(static_cast<int>(blockIdx.x)), units,
                                       p.batch * p.query_heads / kPackedHeads, p.l2_heads);
    if constexpr (kFromPages) {
      const int unit = kWindowRight ? units - 1 - found.block : found.block;
      const RequestUnit own = units_of_requests(p)[unit];
      batch = query_block = 0;
      head = found.head * kPackedHeads;
      first_row = own.first_row;
      request = own.request;
      sight = own.sight(p);
      return;
    }
    // Under a causal mask the last queries see most: their units go first.
    query_block = kWindowRight ? p.query_blocks - 1 - found.block : found.block;
    batch = found.head / p.query_heads;
    head = found.head - batch * p.query_heads;
    sight = visibility(p, batch);
  }
  __device__ __forceinline__ int first_query() const {
    return kFromPages ? first_row / kPackedHeads : query_block * kUnitRows;
  }
  // The thread's query, row = 0 or 1 of its warp's `tile`, and its head.
  __device__ __forceinline__ int query(int tile, int row) const {
    return packed_row(tile, row) / kPackedHeads;
  }
  __device__ __forceinline__ int head_of(int tile, int row) const {
    if constexpr (kPackedHeads == 1) return head;
    return head + packed_row(tile, row) % kPackedHeads;
  }
  // Rows of queries from here on are not stored.
  __device__ __forceinline__ int end_of_queries() const {
    return kFromPages ? sight.query_length : p.query_len;
  }
  __device__ __forceinline__ float sink(int head) const {
    return kHasSinks ? p.sinks[batch * p.sinks_batch_stride + head] : 0.0f;
  }
  // What stands for the first key of a kv head (KeyRows).
  __device__ __forceinline__ int64 first_key(int kv_head) const {
    if constexpr (kFromPages) return static_cast<int64>(request) * p.kv_heads + kv_head;
    return key_row(p, batch, 0, kv_head);
  }

 private:
  __device__ __forceinline__ int packed_row(int tile, int row) const {
    const auto thread = static_cast<uint32>(ptx::opaque(threadIdx.x));
    return first_query() * kPackedHeads + kTileRows * tile + thread / 32 % kRowWarps * 16 +
           thread % 32 / 4 + fragment::kRowStep * row;
  }
};

struct Walk : Unit {
  int kv_head;
  Range blocks;  // that window and lengths let any of the rows see
  Range full;    // of these, the ones that all rows see all of, as far as these terms go
  SegmentRange segments, positions;  // of the rows

  // Whole warps call all of these.
  __device__ __forceinline__ explicit Walk(const Sm80ForwardParams& p)
      : Unit(p), kv_head(kv_head_of(p, head)) {
    const int first = first_query();
    const int end = min(first + kUnitRows / kPackedHeads, sight.query_length);
    blocks = blocks_of<kBlockKV>(visible_keys(sight, first, end - 1));
    full = full_blocks<kBlockKV>(sight, first, end - 1);
    const int64 row = static_cast<int64>(batch) * p.query_len;
    if constexpr (kHasSegments) segments = segment_range(p.query_segments + row, first, end);
    if constexpr (kHasPositions) positions = segment_range(p.query_positions + row, first, end);
  }

  __device__ __forceinline__ int first_block() const { return find(blocks.end - 1); }
  __device__ __forceinline__ int block_after(int block) const { return find(block - 1); }
  __device__ __forceinline__ bool is_over(int block) const { return block < blocks.begin; }

  // Do all rows see all of a block?
  __device__ __forceinline__ bool is_whole(int block) const {
    bool whole = block >= full.begin && block < full.end && is_one_segment(block);
    if constexpr (kHasPositions) {
      whole = whole && positions_all_meet(p, pair_of(positions), key_range(block, position_ranges));
    }
    if constexpr (kHasMask) whole = whole && (mask_flag(block) & mask::kSeesAll) != 0;
    return whole;
  }
  // Do all pairs share their segment?
  __device__ __forceinline__ bool is_one_segment(int block) const {
    if constexpr (!kHasSegments) return true;
    return segments.is_one(key_range(block, segment_ranges));
  }

 private:
  enum Ranges { segment_ranges, position_ranges };

  static __device__ __forceinline__ int2 pair_of(const SegmentRange& range) {
    return make_int2(range.low, range.high);
  }
  __device__ __forceinline__ int2 key_range(int block, Ranges of) const {
    const int* ranges = of == segment_ranges ? p.key_segment_ranges : p.key_position_ranges;
    const int64 first = static_cast<int64>(batch) * ceil_div(p.kv_len, kBlockKV);
    return reinterpret_cast<const int2*>(ranges)[first + block];
  }
  __device__ __forceinline__ int mask_flag(int block) const {
    return mask::flag_by_query<kUnitRows, kBlockKV>(p, batch, head, query_block, block);
  }
  // May any row see any key of the block?
  __device__ __forceinline__ bool shows(int block) const {
    bool shown = true;
    if constexpr (kHasSegments) shown = segments.meets(key_range(block, segment_ranges));
    if constexpr (kHasPositions) {
      shown = shown && positions_meet(p, pair_of(positions), key_range(block, position_ranges));
    }
    if constexpr (kHasMask) shown = shown && (mask_flag(block) & mask::kSeesAny) != 0;
    return shown;
  }
  // The first block from `block` down that is not hidden, or one below all blocks.
  __device__ __forceinline__ int find(int block) const {
    if constexpr (!kListsBlocks) return block;
#pragma unroll 1
    for (; block >= blocks.begin; block -= 32) {
      const int mine = block - static_cast<int>(threadIdx.x) % 32;
      const uint32 found = __ballot_sync(0xffffffffu, mine >= blocks.begin && shows(mine));
      if (found != 0) return block + 1 - __ffs(found);
    }
    return blocks.begin - 1;
  }
};

}  // namespace forward
