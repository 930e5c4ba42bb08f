// The producer of the forward kernel: one warp that takes tiles and loads by TMA; four where TMA
// does not load. Read forward_warpgroup.cuh next.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

struct Producer {
  const ForwardParams& p;
  Shared& shared;
  Ring<kStages, false> ring;  // of K and V alike: each block takes one stage of both
  uint32 tiles = 0;           // handed over: one register for the positions in two rings
  int next_number = 0;

  // Read at each use: what depends on it would be kept in registers that are not there.
  __device__ __forceinline__ int lane() const { return ptx::fresh_lane(); }
  // The lane that talks to barriers and TMA.
  __device__ __forceinline__ bool is_leader() const { return threadIdx.x == 0; }

  // Asks for the tile after this one. Where tiles differ in length it asks with the last block: who
  // is done first then takes the next tile. Elsewhere with the first, and the answer is never
  // waited for; with segments the next tile's plan is fetched meanwhile.
  static constexpr bool kAsksLate = kWindowRight && !kHasSegments;
  __device__ __forceinline__ void request_number(int number) {
    if (number < 0) return;  // a second walk: the next number has been asked for
    const int stride = gridDim.x;
    if constexpr (!kDynamic) {
      next_number = number + stride;
    } else if (is_leader()) {
      next_number = stride + atomicAdd(p.tile_counter, 1);
    }
  }
  // The answer, in all lanes.
  __device__ __forceinline__ int receive_number() const { return ptx::uniform(next_number); }

  // The next tile: one to walk again (~number), or the one that was asked for last.
  __device__ __forceinline__ int next_tile() {
    if constexpr (kRepeats) {
      int mine;
      const uint32 asked = shared.tiles_to_repeat(lane(), mine);
      if (asked != 0) {
        const int slot = __ffs(asked) - 1;
        if (lane() == slot) shared.repeats[slot] = 0;
        return __shfl_sync(0xffffffffu, mine, slot);
      }
    }
    return receive_number();
  }
  // Whether tiles are to be walked again after the last one; their end has a negative number.
  __device__ __forceinline__ bool repeats_remain(int number) {
    if (!kRepeats || number < 0) return false;
    next_number = ~number;
    ptx::barrier_wait(ptx::shared_address(&shared.finished), 0);
    int mine;
    return shared.tiles_to_repeat(lane(), mine) != 0;
  }
  // Who loads and waits for empty buffers.
  __device__ __forceinline__ bool loads() const { return !kTmaLoads || is_leader(); }
  // A warp's part has been copied.
  __device__ __forceinline__ void arrive(uint32 barrier) const {
    __syncwarp();
    if (lane() == 0) ptx::barrier_arrive(barrier);
  }
  template <int kDim>
  __device__ __forceinline__ void load_block(const TensorMap& map, const void* data,
                                             unsigned char* buffer, unsigned long long* full,
                                             int head, int block, int batch) {
    constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
    const uint32 barrier = ptx::shared_address(full);
    if constexpr (!kTmaLoads) {
      const int first_key = block * kTileKV;
      // Opaque: pointers kept from block to block would take registers that are not there.
      const KeyRows<kDim> rows(p, key_row(p, ptx::opaque(batch), first_key, ptx::opaque(head)));
      fill_tile<kDim, kTileKV, kLoadWarps>(ptx::shared_address(buffer),
                                           static_cast<const uint16*>(data) + rows.first, rows.step,
                                           p.kv_len - first_key);
      arrive(barrier);
      return;
    }
    ptx::barrier_arrive_expect(barrier, kBoxes * kTileKV * kBoxRowBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32 target = ptx::shared_address(buffer) + box * kTileKV * kBoxRowBytes;
      ptx::tma_load(target, &map, barrier, ptx::kEvictLast, box * kBoxColumns, head,
                    block * kTileKV, batch);
    }
  }
  __device__ __forceinline__ void wait_empty(unsigned long long* barrier, uint32 parity) {
    ptx::barrier_wait(ptx::shared_address(barrier), parity ^ 1);
  }
  __device__ __forceinline__ void load_key(int head, int block, int batch) {
    const int stage = ring.stage();
    if (loads()) {
      wait_empty(&shared.key_empty[stage], ring.parity());
      if constexpr (kHasSegments) {
        if (kTmaLoads || is_leader()) shared.block_list[stage] = block;
      }
      load_block<kHeadDim>(p.key, p.key_data, shared.key[stage], &shared.key_full[stage], head,
                           block, batch);
    }
  }
  __device__ __forceinline__ void load_value(int head, int block, int batch) {
    const int stage = ring.stage();
    if (loads()) {
      wait_empty(&shared.value_empty[stage], ring.parity());
      load_block<kValueDim>(p.value, p.value_data, shared.value[stage], &shared.value_full[stage],
                            head, block, batch);
    }
    ring.advance();
  }

  // The blocks that the rows of warpgroup `lane` see, and which of them need no test.
  __device__ __forceinline__ void describe_rows(TileInfo& tile) const {
    const int first_row = tile.first_row + lane() * kGroupRows;
    const int first_query = first_row / kPackedHeads;
    const int last_query = (first_row + kGroupRows - 1) / kPackedHeads;
    // Opaque: what follows would be computed ahead of the loop, for registers that are not there.
    const Visibility seen{tile.offset, p.window_left, p.window_right,
                          ptx::opaque(tile.query_length), ptx::opaque(tile.kv_length)};
    tile.own = blocks_of<kTileKV>(visible_keys(seen, first_query, last_query));
    tile.full = full_blocks<kTileKV>(seen, first_query, min(last_query, seen.query_length - 1));
  }
  // Hands the tile to warpgroup `lane`.
  __device__ __forceinline__ void hand_over(const TileInfo& tile) {
    TileInfo info = tile;
    if constexpr (!kHasSegments) describe_rows(info);
    // Word by word: pieces of 16 bytes need four registers in a row that are not there.
    struct Words {
      int word[sizeof(TileInfo) / 4];
    };
    const Words words = __builtin_bit_cast(Words, info);
    const uint32 slot = ptx::shared_address(&shared.tiles[tiles % kInfoStages][lane()]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(TileInfo) / 4); ++i) {
      ptx::store_shared(slot + 4 * i, words.word[i]);
    }
  }
  // Hands the tile and its Q rows to each warpgroup, by ordinary loads of four warps.
  __device__ __forceinline__ void copy_query(const TileInfo& tile) {
#pragma unroll 1
    for (int group = 0; group < kConsumers; ++group) {
      const int stage = tiles % kQueryStages;
      const uint32 barrier = ptx::shared_address(&shared.query_full[stage][group]);
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][group]),
                        ~(tiles / kQueryStages) & 1);
      if (threadIdx.x == group) hand_over(tile);
      if (tile.batch >= 0 && !tile.blocks.empty()) {
        const int first_query = (tile.first_row + group * kGroupRows) / kPackedHeads;
        const int64 row = query_row(p, ptx::opaque(tile.batch), first_query,
                                    ptx::opaque(tile.head) * kPackedHeads);
        fill_tile<kHeadDim, kGroupRows, kLoadWarps, kPackedHeads>(
            ptx::shared_address(shared.query[stage][group]),
            static_cast<const uint16*>(p.query_data) + row * kHeadDim,
            static_cast<int64>(p.query_heads) * kHeadDim,
            (p.query_len - first_query) * kPackedHeads);
      }
      arrive(barrier);
    }
  }
  // The same by TMA: a lane for each.
  __device__ __forceinline__ void load_query(const TileInfo& tile) {
    const int group = lane();
    if constexpr (!kTmaLoads) {
      copy_query(tile);
    } else if (group < kConsumers) {
      const int stage = tiles % kQueryStages;
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][group]),
                        ~(tiles / kQueryStages) & 1);
      hand_over(tile);
      const uint32 barrier = ptx::shared_address(&shared.query_full[stage][group]);
      if (tile.batch < 0 || tile.blocks.empty()) {
        ptx::barrier_arrive(barrier);
      } else {
        ptx::barrier_arrive_expect(barrier, kQueryBytes);
        const uint32 target = ptx::shared_address(shared.query[stage][group]);
#pragma unroll 1
        for (int box = 0; box < kHeadBoxes; ++box) {
          ptx::tma_load(target + box * kGroupRows * kBoxRowBytes, &p.query, barrier,
                        ptx::kEvictFirst, box * kBoxColumns, tile.head * kPackedHeads,
                        (tile.first_row + group * kGroupRows) / kPackedHeads, tile.batch);
        }
      }
    }
    __syncwarp();
    ++tiles;
  }

  // -- segments; all lanes take part --
  // The plan of the warpgroup that is this lane's number.
  __device__ __forceinline__ const SegmentPlan* plan_of(const TileIndex& taken) const {
    const int64 tile = taken.batch * p.query_tiles + taken.query_tile;
    return reinterpret_cast<const SegmentPlan*>(p.segment_plan) + tile * kConsumers + lane();
  }
  // Finds the blocks of the tile and those of each warpgroup. In a sparse tile, where blocks that
  // share no segment with it lie between, all warpgroups walk all the others: `queries` is its
  // range then, else it stays empty.
  __device__ __forceinline__ void plan_blocks(TileInfo& tile, const TileIndex& taken,
                                              SegmentRange& queries) const {
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (lane() < kConsumers) plan = *plan_of(taken);
    describe_rows(tile);
    tile.own.begin = max(tile.own.begin, plan.blocks.begin & ~SegmentPlan::kSparse);
    tile.own.end = min(tile.own.end, plan.blocks.end);
    tile.one = plan.one;
    tile.full.begin = max(tile.full.begin, plan.one.begin);
    tile.full.end = min(tile.full.end, plan.one.end);
    const bool any = !tile.own.empty();
    tile.blocks.begin = __reduce_min_sync(0xffffffffu, any ? tile.own.begin : 0x7fffffff);
    tile.blocks.end = __reduce_max_sync(0xffffffffu, any ? tile.own.end : 0);
    const int walked = __reduce_add_sync(0xffffffffu, any ? tile.own.end - tile.own.begin : 0);
    const bool sparse = __any_sync(0xffffffffu, any && plan.blocks.begin >= SegmentPlan::kSparse);
    if (!sparse && walked >= tile.blocks.end - tile.blocks.begin) return;
    const int* ids = p.query_segments + static_cast<int64>(tile.batch) * p.query_len;
    const int end = min((tile.first_row + kTileRows) / kPackedHeads, tile.query_length);
#pragma unroll 1
    for (int query = tile.first_row / kPackedHeads + lane(); query < end; query += 32) {
      queries.include(ids[query]);
    }
    queries.reduce_warp();
    tile.blocks.end = find_block<-1>(queries, tile, tile.blocks.end - 1) + 1;
    tile.blocks.begin = find_block<1>(queries, tile, tile.blocks.begin);
    tile.own = tile.blocks;
  }
  // The first block from `block` on, in steps of kStep, that shares a segment with the tile; one
  // past the tile's blocks if there is none.
  template <int kStep>
  __device__ __forceinline__ int find_block(const SegmentRange& queries, const TileInfo& tile,
                                            int block) const {
    const int64 first = static_cast<int64>(tile.batch) * ceil_div(p.kv_len, kTileKV);
    const int2* ranges = reinterpret_cast<const int2*>(p.segment_ranges) + first;
#pragma unroll 1
    for (; block >= tile.blocks.begin && block < tile.blocks.end; block += 32 * kStep) {
      const int mine = block + kStep * lane();
      const bool inside = mine >= tile.blocks.begin && mine < tile.blocks.end;
      const uint32 found = __ballot_sync(0xffffffffu, inside && queries.meets(ranges[mine]));
      if (found != 0) return block + kStep * (__ffs(found) - 1);
    }
    return kStep > 0 ? tile.blocks.end : tile.blocks.begin - 1;
  }

  __device__ __forceinline__ TileIndex decode(int number) const {
    const int index = number < 0 ? ~number : number;
    const int heads = p.query_heads / kPackedHeads, all_heads = heads * p.batch;
    if (index >= p.query_tiles * all_heads) return {0, 0, -1};
    const HeadBlock at = head_block(index, p.query_tiles, all_heads, p.head_group);
    const int batch = at.head / heads;
    // With a bounded right window (causal) late queries see most keys: the longest tiles first.
    const int tile = kWindowRight ? p.query_tiles - 1 - at.block : at.block;
    return {tile, at.head - batch * heads, batch};
  }
  __device__ __forceinline__ void run() {
    int number = blockIdx.x;
    while (true) {
      const TileIndex taken = decode(number);
      if (!kAsksLate) request_number(number);
      TileInfo tile{0, taken.head, taken.batch, 0, 0, 0, {0, 0}};
      tile.number = number;
      if (taken.batch < 0) {
        load_query(tile);
        if (!repeats_remain(number)) return;
        number = next_tile();
        continue;
      }
      const Visibility seen = visibility(p, taken.batch);
      tile.first_row = taken.query_tile * kTileRows;
      tile.query_length = seen.query_length;
      tile.kv_length = seen.kv_length;
      tile.offset = seen.offset;
      const int kv_head = kPackedHeads > 1 ? taken.head : kv_head_of(p, taken.head);
      SegmentRange queries;  // of a sparse tile
      if constexpr (kHasSegments) {
        plan_blocks(tile, taken, queries);
      } else {
        const int first = tile.first_row / kPackedHeads;
        const int last = (tile.first_row + kTileRows - 1) / kPackedHeads;
        tile.blocks = blocks_of<kTileKV>(visible_keys(seen, first, last));
      }

      if (tile.blocks.empty()) {
        if (kAsksLate) request_number(number);
        load_query(tile);
      } else {
        int block = tile.blocks.end - 1;
        load_key(kv_head, block, tile.batch);
        load_query(tile);
        if (kAsksLate && block == tile.blocks.begin) request_number(number);
        load_value(kv_head, block, tile.batch);
        if constexpr (kHasSegments) {  // the next tile's plan on its way into L1
          const TileIndex next = decode(receive_number());
          if (next.batch >= 0 && lane() < kConsumers) ptx::prefetch(plan_of(next));
        }
#pragma unroll 1
        while (block > tile.blocks.begin) {
          --block;
          if (kHasSegments && !queries.empty()) block = find_block<-1>(queries, tile, block);
          load_key(kv_head, block, tile.batch);
          if (kAsksLate && block == tile.blocks.begin) request_number(number);
          load_value(kv_head, block, tile.batch);
        }
      }
      number = next_tile();
    }
  }
};

}  // namespace forward
