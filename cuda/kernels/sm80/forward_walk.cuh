// Which blocks of keys a CTA walks, from the last to the first, and which of them need a test of
// their elements: who copies and who computes ask here alone. Read forward_copy.cuh next.
#pragma once

#include "fragment.cuh"
#include "rows.cuh"
#include "terms.cuh"
#include "walk.cuh"

namespace forward {

inline constexpr int kThreads = 32 * kRowWarps * kValueWarps;
inline constexpr int kTileRows = 16 * kRowWarps;  // of the queries that warps have in one tile each
inline constexpr int kUnitRows = kTileRows * kRowTiles;

static_assert(kBlockKV % 16 == 0 && kBlockKV <= 128);

// A CTA's block of queries of one head.
struct Unit {
  const Sm80ForwardParams& p;
  int batch, head, query_block;
  Visibility sight;

  // Found anew at each use, since registers are few while it attends.
  __device__ __forceinline__ explicit Unit(const Sm80ForwardParams& p) : p(p) {
    const HeadBlock found = head_block(ptx::opaque(static_cast<int>(blockIdx.x)), p.query_blocks,
                                       p.batch * p.query_heads, p.l2_heads);
    // Under a causal mask the last queries see most: their units go first.
    query_block = kWindowRight ? p.query_blocks - 1 - found.block : found.block;
    batch = found.head / p.query_heads;
    head = found.head - batch * p.query_heads;
    sight = visibility(p, batch);
  }
  __device__ __forceinline__ int first_query() const { return query_block * kUnitRows; }
  // The thread's query, row = 0 or 1 of its warp's `tile`.
  __device__ __forceinline__ int query(int tile, int row) const {
    const auto thread = static_cast<uint32>(ptx::opaque(threadIdx.x));
    return first_query() + kTileRows * tile + thread / 32 % kRowWarps * 16 + thread % 32 / 4 +
           fragment::kRowStep * row;
  }
  __device__ __forceinline__ float sink() const {
    return kHasSinks ? p.sinks[batch * p.sinks_batch_stride + head] : 0.0f;
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
    const int first = first_query(), end = min(first + kUnitRows, sight.query_length);
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
