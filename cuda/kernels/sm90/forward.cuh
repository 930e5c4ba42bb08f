// FlashAttention forward for sm_90a: out = softmax(mask(score(scale * Q K^T))) V, and its lse.
//
// One producer warp feeds Q, K and V by TMA to kConsumers warpgroups of 64 query rows each; CTAs
// are persistent. cuda/README.md has the schedule as a diagram. Dao et al. 2022 (arXiv:2205.14135),
// Shah et al. 2024 (arXiv:2407.08608).
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16            element type of q, k, v, out: bfloat16, else float16
//   int kHeadDim, kValueDim   exact sizes, at most 256
//   bool kTmaLoads            TMA loads (8 divides both dims), else four producer warps do, see
//                             unaligned.cuh; then static tiles and no clusters
//   int kTileKV               keys per step, a multiple of 16, at most 256
//   int kConsumers            consumer warpgroups, 1 to 3
//   int kStages               K and V buffers each
//   int kQueryStages          Q buffers; 2 loads the next tile's Q during this tile
//   int kClusterSize          1, or 2: CTAs that load each half of K and V and multicast it
//   int kPackedHeads          query heads of one kv head that share a tile (a divisor of 64), or 1
//   bool kWindowLeft, kWindowRight   that side of the window is bounded (causal: right, by 0)
//   bool kBottomRight         the last query is aligned with the last key
//   bool kHasQueryLengths, kHasKeyValueLengths, kHasSegments, kHasSinks
//   bool kSoftcap             tanh softcap; kPreScale: scale before the maximum (scale <= 0)
//   bool kDynamic             tiles from an atomic counter, else static
//   bool kPingPong            warpgroups take turns at the tensor cores
//   int kPolynomial           every kPolynomial-th exponential on the FMA units, 0 = none
//   int kProducerRegisters, kConsumerRegisters
// Dynamic shared memory: kQueryStages * kConsumers * 64 * 128 * ceil(kHeadDim / 64)
//   + kStages * kTileKV * 128 * (ceil(kHeadDim / 64) + ceil(kValueDim / 64)) + 1024 bytes.
#pragma once

// clang-format off
#include "sm90/ptx.cuh"  // first: the shared headers compute with this architecture's instructions

#include "exact_row.cuh"
#include "mask.cuh"
#include "params.h"
#include "schedule.cuh"
#include "score.cuh"
#include "sm90/tile.cuh"
#include "sm90/unaligned.cuh"
#include "softmax.cuh"
// clang-format on

namespace forward {

using ptx::int64;
using ptx::uint16;
using ptx::uint32;
template <bool kChoice>
struct ElementType {
  using Type = ptx::Float16;
};
template <>
struct ElementType<true> {
  using Type = ptx::BFloat16;
};
using Element = ElementType<kBFloat16>::Type;

inline constexpr int kGroupRows = 64;  // query rows of one consumer warpgroup
inline constexpr int kTileRows = kGroupRows * kConsumers;
inline constexpr int kHeadBoxes = ceil_div(kHeadDim, kBoxColumns);
inline constexpr int kValueBoxes = ceil_div(kValueDim, kBoxColumns);
inline constexpr int kValueColumns = round_up(kValueDim, 16);
inline constexpr int kQueryBytes = kHeadBoxes * kGroupRows * kBoxRowBytes;  // of one warpgroup
inline constexpr int kKeyBytes = kHeadBoxes * kTileKV * kBoxRowBytes;
inline constexpr int kValueBytes = kValueBoxes * kTileKV * kBoxRowBytes;
inline constexpr int kLoadRows = kTileKV / kClusterSize;  // keys that this CTA loads of each block
inline constexpr int kWarpsOfConsumers = 4 * kConsumers;
inline constexpr int kLoadWarps = kTmaLoads ? 1 : 4;  // each arrives when its part is there
// A tile's description outlives its Q buffer by the epilogue: one slot more.
inline constexpr int kInfoStages = kQueryStages + 1;
// The first block's largest exponential is 2^-kHeadroom, and a thread's sum over a block may reach
// kSumLimit before the base of its row rises: float16 weights have to stay below 65504, bfloat16
// has the range of float32.
inline constexpr int kHeadroom = kBFloat16 ? 80 : 0;
inline constexpr float kSumLimit = kBFloat16 ? 0x1p-64f : 0x1p15f;
// The last output of a tile starts before the next tile is looked at: 4% at T 512 for narrow
// values; wide ones lack the registers for it (12% slower).
inline constexpr bool kEarlyOutput = kValueDim <= 128;
inline constexpr uint16 kAllRanks = (1 << kClusterSize) - 1;
// A warpgroup's blocks may begin after the first one of its tile.
inline constexpr bool kBoundedBegin = kWindowLeft || kHasSegments;
inline constexpr int kIdWords = ceil_div(kTileKV, 32);  // a bit for each key of a block
inline constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kConsumers;  // named barriers

static_assert(kTileKV % 16 == 0 && kTileKV <= 256);
static_assert(kTmaLoads ? kHeadDim % 8 == 0 && kValueDim % 8 == 0 : !kDynamic && kClusterSize == 1);
static_assert(kGroupRows % kPackedHeads == 0 && kLoadRows % 8 == 0);
static_assert(!(kHasSegments && kClusterSize > 1), "CTAs of a cluster walk the same blocks");

// Description of a tile, written by the producer, read by the consumers.
struct alignas(16) TileInfo {
  int first_row;  // packed rows: query * kPackedHeads + head within the pack
  int head;       // of N / kPackedHeads
  int batch;      // -1: no more tiles
  int query_length;
  int kv_length;
  int offset;
  Range blocks;  // that the whole cluster walks, from the last to the first
  Range own;     // of these, what the rows of this warpgroup see
  Range full;    // of these, the ones that need no element test
  Range one;     // the ones that need no test of segments
};

struct alignas(1024) Shared {
  unsigned char query[kQueryStages][kConsumers][kQueryBytes];
  unsigned char key[kStages][kKeyBytes];
  unsigned char value[kStages][kValueBytes];
  TileInfo tiles[kInfoStages][kConsumers];
  unsigned long long query_full[kQueryStages][kConsumers];
  unsigned long long query_empty[kQueryStages][kConsumers];
  unsigned long long key_full[kStages], key_empty[kStages];
  unsigned long long value_full[kStages], value_empty[kStages];
  // Numbers of coming tiles that rank 0 of a cluster took for all: two in flight.
  unsigned long long number_full[2], number_empty[2];
  uint32 number[2];
  int block_list[kStages];  // the block in each key buffer, with segments
};

__device__ __forceinline__ Visibility visibility(const ForwardParams& p, int batch) {
  Visibility v{0, p.window_left, p.window_right, p.query_len, p.kv_len};
  if constexpr (kHasQueryLengths) v.query_length = min(p.query_len, p.query_lengths[batch]);
  if constexpr (kHasKeyValueLengths) v.kv_length = min(p.kv_len, p.key_value_lengths[batch]);
  if constexpr (kBottomRight) v.offset = v.kv_length - v.query_length;
  return v;
}

// The key blocks that share a segment with the rows of a warpgroup: what segment_plan finds.
struct alignas(16) SegmentPlan {
  Range blocks;  // from the first to the last of them
  Range one;     // of these, some in a row that hold the rows' only segment and no other
  // In `blocks.begin`: there are blocks between that share no segment.
  static constexpr int kSparse = 1 << 30;
};

// Smallest and largest segment id, and whether they meet another pair.
struct SegmentRange {
  int low = 0x7fffffff, high = -0x7fffffff - 1;
  __device__ __forceinline__ bool empty() const { return low > high; }
  __device__ __forceinline__ void include(int id) {
    low = min(low, id);
    high = max(high, id);
  }
  __device__ __forceinline__ void reduce_warp() {
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ __forceinline__ bool meets(int2 other) const {
    return other.x <= high && low <= other.y;
  }
  __device__ __forceinline__ bool is_one(int2 other) const {
    return low == high && other.x == low && other.y == low;
  }
};

// ---- producer: one warp; four where TMA does not load -------------------------------------------

struct Producer {
  const ForwardParams& p;
  Shared& shared;
  const uint32 rank;
  Ring<kStages> ring;  // of K and V alike: each block takes one stage of both
  Ring<kQueryStages> query_ring;
  Ring<kInfoStages> info_ring;
  Ring<2> number_ring;
  int next_number = 0;

  // Opaque: addresses that depend on it would be kept in registers that are not there.
  __device__ __forceinline__ int lane() const { return ptx::opaque(threadIdx.x % 32); }
  // The lane that talks to barriers and TMA.
  __device__ __forceinline__ bool is_leader() const { return threadIdx.x == 0; }

  // Asks for the tile after this one; the answer is needed only a tile later.
  __device__ __forceinline__ void request_number(int number) {
    const int stride = gridDim.x / kClusterSize;
    if constexpr (!kDynamic) {
      next_number = number + stride;
    } else if (is_leader() && rank == 0) {
      next_number = stride + atomicAdd(p.tile_counter, 1);
    }
  }
  // The answer, in all lanes.
  __device__ __forceinline__ int receive_number() {
    if constexpr (kDynamic && kClusterSize > 1) {
      const int slot = number_ring.stage;
      if (is_leader()) {
        if (rank == 0) {
          ptx::barrier_wait_cluster(ptx::shared_address(&shared.number_empty[slot]),
                                    number_ring.parity ^ 1);
          ptx::store_remote_async(
              ptx::map_to_rank(ptx::shared_address(&shared.number[slot]), 1), next_number,
              ptx::map_to_rank(ptx::shared_address(&shared.number_full[slot]), 1));
        } else {
          const uint32 barrier = ptx::shared_address(&shared.number_full[slot]);
          ptx::barrier_arrive_expect(barrier, 4);
          ptx::barrier_wait_cluster(barrier, number_ring.parity);
          next_number = ptx::load_shared(ptx::shared_address(&shared.number[slot]));
          ptx::barrier_arrive_remote(ptx::shared_address(&shared.number_empty[slot]), 0);
        }
      }
      number_ring.advance();
    }
    return ptx::uniform(next_number);
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
      const int64 row =
          (static_cast<int64>(ptx::opaque(batch)) * p.kv_len + first_key) * p.kv_heads +
          ptx::opaque(head);
      copy_rows<kDim, kTileKV, kLoadWarps>(
          ptx::shared_address(buffer), static_cast<const uint16*>(data) + row * kDim,
          static_cast<int64>(p.kv_heads) * kDim, p.kv_len - first_key);
      arrive(barrier);
      return;
    }
    ptx::barrier_arrive_expect(barrier, kBoxes * kTileKV * kBoxRowBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32 target =
          ptx::shared_address(buffer) + (box * kTileKV + rank * kLoadRows) * kBoxRowBytes;
      const int row = block * kTileKV + rank * kLoadRows;
      if constexpr (kClusterSize > 1) {
        ptx::tma_load_multicast(target, &map, barrier, kAllRanks, ptx::kEvictLast,
                                box * kBoxColumns, head, row, batch);
      } else {
        ptx::tma_load(target, &map, barrier, ptx::kEvictLast, box * kBoxColumns, head, row, batch);
      }
    }
  }
  __device__ __forceinline__ void wait_empty(unsigned long long* barrier, uint32 parity) {
    if constexpr (kClusterSize > 1) {
      ptx::barrier_wait_cluster(ptx::shared_address(barrier), parity ^ 1);
    } else {
      ptx::barrier_wait(ptx::shared_address(barrier), parity ^ 1);
    }
  }
  __device__ __forceinline__ void load_key(int head, int block, int batch) {
    const int stage = ring.stage;
    if (loads()) {
      wait_empty(&shared.key_empty[stage], ring.parity);
      if constexpr (kHasSegments) {
        if (kTmaLoads || is_leader()) shared.block_list[stage] = block;
      }
      load_block<kHeadDim>(p.key, p.key_data, shared.key[stage], &shared.key_full[stage], head,
                           block, batch);
    }
  }
  __device__ __forceinline__ void load_value(int head, int block, int batch) {
    const int stage = ring.stage;
    if (loads()) {
      wait_empty(&shared.value_empty[stage], ring.parity);
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
    tile.own =
        blocks_of<kTileKV>(visible_keys<kWindowLeft, kWindowRight>(seen, first_query, last_query));
    tile.full = full_blocks<kTileKV, kWindowLeft, kWindowRight>(
        seen, first_query, min(last_query, seen.query_length - 1));
  }
  // Hands the tile to warpgroup `lane`.
  __device__ __forceinline__ void hand_over(const TileInfo& tile) {
    TileInfo& info = shared.tiles[info_ring.stage][lane()];
    info = tile;
    if constexpr (!kHasSegments) describe_rows(info);
  }
  // Hands the tile and its Q rows to each warpgroup, by ordinary loads of four warps.
  __device__ __forceinline__ void copy_query(const TileInfo& tile) {
#pragma unroll 1
    for (int group = 0; group < kConsumers; ++group) {
      const int stage = query_ring.stage;
      const uint32 barrier = ptx::shared_address(&shared.query_full[stage][group]);
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][group]),
                        query_ring.parity ^ 1);
      if (threadIdx.x == group) hand_over(tile);
      if (tile.batch >= 0 && !tile.blocks.empty()) {
        const int first_query = (tile.first_row + group * kGroupRows) / kPackedHeads;
        const int64 row =
            (static_cast<int64>(ptx::opaque(tile.batch)) * p.query_len + first_query) *
                p.query_heads +
            ptx::opaque(tile.head) * kPackedHeads;
        copy_rows<kHeadDim, kGroupRows, kLoadWarps, kPackedHeads>(
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
      const int stage = query_ring.stage;
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][group]),
                        query_ring.parity ^ 1);
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
    query_ring.advance();
    info_ring.advance();
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
    return decode_tile<kWindowRight>(number, p.query_tiles, p.query_heads / kPackedHeads, p.batch,
                                     p.head_group);
  }
  __device__ __forceinline__ void run() {
    int number = blockIdx.x / kClusterSize;
    while (true) {
      const TileIndex taken = decode(number);
      request_number(number);
      TileInfo tile{0, taken.head, taken.batch, 0, 0, 0, {0, 0}};
      if (taken.batch < 0) {
        load_query(tile);
        return;
      }
      const Visibility seen = visibility(p, taken.batch);
      const int cluster_row = taken.query_tile * kClusterSize * kTileRows;
      tile.first_row = cluster_row + rank * kTileRows;
      tile.query_length = seen.query_length;
      tile.kv_length = seen.kv_length;
      tile.offset = seen.offset;
      const int kv_head = kPackedHeads > 1 ? taken.head : taken.head / (p.query_heads / p.kv_heads);
      SegmentRange queries;  // of a sparse tile
      if constexpr (kHasSegments) {
        plan_blocks(tile, taken, queries);
      } else {
        const int first = cluster_row / kPackedHeads;
        const int last = (cluster_row + kClusterSize * kTileRows - 1) / kPackedHeads;
        tile.blocks =
            blocks_of<kTileKV>(visible_keys<kWindowLeft, kWindowRight>(seen, first, last));
      }

      if (tile.blocks.empty()) {
        load_query(tile);
      } else {
        int block = tile.blocks.end - 1;
        load_key(kv_head, block, tile.batch);
        load_query(tile);
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
          load_value(kv_head, block, tile.batch);
        }
      }
      number = receive_number();
    }
  }
};

// ---- consumers: warpgroups of 64 query rows -----------------------------------------------------

// Scores or exponentials of one block of keys, a warpgroup's fragment.
using Scores = float[kTileKV / 2];

struct Consumer {
  const ForwardParams& p;
  Shared& shared;
  const int group;  // warpgroup among the consumers
  Ring<kStages> key_ring, value_ring;
  Ring<kQueryStages> query_ring;
  Ring<kInfoStages> info_ring;
  Range own;      // blocks that this warpgroup's rows see
  Range full;     // of these, the ones that need no element test
  int block = 0;  // the block that `scores` or `weights` belong to
  Scores scores;
  uint32 weights[kTileKV / 4];
  float output[kValueColumns / 2];
  float correction[2];
  SoftmaxState softmax;

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  // The same, read again instead of kept in a register between the ends of tiles.
  __device__ __forceinline__ int fresh_lane() const { return ptx::opaque(threadIdx.x) % 32; }
  __device__ __forceinline__ const TileInfo& tile() const {
    const int next = info_ring.stage;
    return shared.tiles[next == 0 ? kInfoStages - 1 : next - 1][group];
  }
  // Packed row of this thread, row = 0 or 1.
  __device__ __forceinline__ int packed_row(const TileInfo& t, int row) const {
    const int thread = ptx::opaque(threadIdx.x) % 128;  // read again, not kept in a register
    return t.first_row + group * kGroupRows + thread / 32 * 16 + thread % 32 / 4 + 8 * row;
  }
  __device__ __forceinline__ Visibility seen(const TileInfo& t) const {
    return {t.offset, p.window_left, p.window_right, t.query_length, t.kv_length};
  }
  __device__ __forceinline__ float scale_log2() const {
    return kSoftcap || kPreScale ? kLog2E : p.scale * kLog2E;
  }

  // -- barriers --
  __device__ __forceinline__ void release(unsigned long long* barrier) const {
    if constexpr (kClusterSize > 1) {
      if (lane() < kClusterSize) {
        ptx::barrier_arrive_remote(ptx::shared_address(barrier), lane());
      }
    } else {
      if (lane() == 0) ptx::barrier_arrive(ptx::shared_address(barrier));
    }
  }
  __device__ __forceinline__ unsigned long long* query_full() const {
    return &shared.query_full[query_ring.stage][group];
  }
  __device__ __forceinline__ unsigned long long* key_full() const {
    return &shared.key_full[key_ring.stage];
  }
  __device__ __forceinline__ void wait_query() const {
    ptx::barrier_wait(ptx::shared_address(query_full()), query_ring.parity);
  }
  __device__ __forceinline__ void wait_key() const {
    ptx::barrier_wait(ptx::shared_address(key_full()), key_ring.parity);
  }
  __device__ __forceinline__ bool query_and_key_are_ready() const {
    return ptx::uniform(ptx::barrier_test(ptx::shared_address(query_full()), query_ring.parity) &&
                        ptx::barrier_test(ptx::shared_address(key_full()), key_ring.parity));
  }
  __device__ __forceinline__ void release_key() {
    release(&shared.key_empty[key_ring.stage]);
    key_ring.advance();
  }
  __device__ __forceinline__ void wait_value() const {
    ptx::barrier_wait(ptx::shared_address(&shared.value_full[value_ring.stage]), value_ring.parity);
  }
  __device__ __forceinline__ void release_value() {
    release(&shared.value_empty[value_ring.stage]);
    value_ring.advance();
  }
  __device__ __forceinline__ void release_query() {
    if (lane() == 0) {
      ptx::barrier_arrive(ptx::shared_address(&shared.query_empty[query_ring.stage][group]));
    }
    query_ring.advance();
  }
  // Turns at the tensor cores: every warpgroup takes one per block of the tile, also for blocks
  // that it skips.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (kPingPong && kConsumers > 1) {
      ptx::named_barrier_sync(kTurnBarrier + group, 256);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kPingPong && kConsumers > 1) {
      const int next = group + 1 == kConsumers ? 0 : group + 1;
      ptx::named_barrier_arrive(kTurnBarrier + next, 256);
    }
  }

  // -- products --
  __device__ __forceinline__ void begin_scores(Scores& scores) const {
    ptx::wgmma_fence();
    issue_scores<Element, kHeadDim, kGroupRows, kTileKV>(
        scores, ptx::shared_address(shared.query[query_ring.stage][group]),
        ptx::shared_address(shared.key[key_ring.stage]));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void begin_output(int accumulate) {
    ptx::wgmma_fence();
    issue_output<Element, kTileKV>(output, weights,
                                   ptx::shared_address(shared.value[value_ring.stage]), accumulate);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void begin_last_output(int accumulate) {
    wait_turn();
    begin_output(accumulate);
    pass_turn();
  }
  // After the wait for a block's scores.
  __device__ __forceinline__ void accept_scores() {
    ptx::pin(scores);
    if constexpr (kHasSegments) {
      block = ptx::uniform(shared.block_list[key_ring.stage]);
    }
  }
  // Gives the operands of the scores back.
  __device__ __forceinline__ void release_scores() {
    release_key();
    if (is_last()) release_query();
  }
  __device__ __forceinline__ bool is_last() const { return block == own.begin; }

  // -- scores to weights --
  __device__ __forceinline__ void mask_scores(Scores& scores) const {
    const TileInfo& t = tile();
    const int first_key = block * kTileKV;
    const int lane_column = 2 * (lane() % 4);
    int ids[kIdWords];  // of the keys first_key + 32 * w + lane
    const bool one_segment = block >= t.one.begin && block < t.one.end;
    if (kHasSegments && !one_segment) {
      const int* all = p.key_value_segments + static_cast<int64>(t.batch) * p.kv_len;
#pragma unroll
      for (int w = 0; w < kIdWords; ++w) {
        const int key = first_key + 32 * w + lane();
        ids[w] = key < t.kv_length ? all[key] : 0;
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int query = packed_row(t, row) / kPackedHeads;
      Range columns = row_columns<kWindowLeft, kWindowRight>(seen(t), query, first_key);
      if constexpr (kHasSegments) {
        uint32 words[kIdWords];  // the columns that the row sees, a bit each
#pragma unroll
        for (int w = 0; w < kIdWords; ++w) words[w] = 0xffffffffu;
        if (!one_segment) {
          const bool valid = query < t.query_length;
          match_segment(
              valid ? p.query_segments[static_cast<int64>(t.batch) * p.query_len + query] : 0, ids,
              words);
        }
#pragma unroll
        for (int w = 0; w < kIdWords; ++w) {
          words[w] &= ptx::low_bits(columns.end - 32 * w);
          if constexpr (kWindowLeft) words[w] &= ~ptx::low_bits(columns.begin - 32 * w);
          words[w] >>= lane_column;
        }
#pragma unroll
        for (int i = 0; i < kTileKV / 2; i += 4) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int column = 2 * i + j;
            float& score = scores[i + 2 * row + j];
            score = words[column / 32] >> column % 32 & 1 ? score : kNegativeInfinity;
          }
        }
      } else {
        columns.begin -= lane_column;
        columns.end -= lane_column;
#pragma unroll
        for (int i = 0; i < kTileKV / 2; i += 4) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int column = 2 * i + j;
            float& score = scores[i + 2 * row + j];
            bool visible = column < columns.end;
            if constexpr (kWindowLeft) visible = visible && column >= columns.begin;
            score = visible ? score : kNegativeInfinity;
          }
        }
      }
    }
  }
  // Bit c of word w: key 32 * w + c has the segment `mine` of this lane's row. A round for each
  // segment that the warp's rows have, most often one or two.
  __device__ __forceinline__ void match_segment(int mine, const int (&ids)[kIdWords],
                                                uint32 (&words)[kIdWords]) const {
    uint32 left = 0xffffffffu;
    while (left != 0) {
      const int id = __shfl_sync(0xffffffffu, mine, __ffs(left) - 1);
      left &= ~__ballot_sync(0xffffffffu, mine == id);
#pragma unroll
      for (int w = 0; w < kIdWords; ++w) {
        const uint32 same = __ballot_sync(0xffffffffu, ids[w] == id);
        if (mine == id) words[w] = same;
      }
    }
  }
  // Score function and mask.
  __device__ __forceinline__ void finish_scores(Scores& scores) const {
    if constexpr (kSoftcap) {
      apply_softcap(scores, p.scale, p.softcap);
    } else if constexpr (kPreScale) {
      apply_scale(scores, p.scale);
    }
    // With segments there is no register left to hold the range at wide heads.
    const Range untested = kHasSegments ? tile().full : full;
    const bool is_full = block < untested.end && (!kBoundedBegin || block >= untested.begin);
    if (!is_full) mask_scores(scores);
  }
  // Exponentials of a later block. True: `correction` has to be applied to the output.
  __device__ __forceinline__ bool extend_softmax(Scores& scores) {
    if (softmax.is_started()) {
      return softmax.extend<Element, kPolynomial>(scores, scale_log2(), kHeadroom, kSumLimit,
                                                  correction);
    }
    softmax.start<false, kPolynomial>(scores, scale_log2(), kHeadroom, correction);
    return true;
  }
  __device__ __forceinline__ void pack_weights(const Scores& scores) {
#pragma unroll
    for (int i = 0; i < kTileKV / 4; ++i) {
      weights[i] = ptx::pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kValueColumns / 2; ++i) output[i] = 0.0f;
  }
  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int i = 0; i < kValueColumns / 2; ++i) output[i] *= correction[i / 2 % 2];
  }
  // V rows past the length may hold NaN, and 0 * NaN is NaN: zero them where they were loaded. (NaN
  // among other masked values shows in the result, and repeat_rows takes it out again.)
  __device__ __forceinline__ void sanitise_value(int value_block) {
    if constexpr (kHasKeyValueLengths) {
      const int valid = tile().kv_length - value_block * kTileKV;
      if (valid >= kTileKV) return;
      const uint32 base = ptx::shared_address(shared.value[value_ring.stage]);
      const int pieces = (kTileKV - valid) * (kBoxRowBytes / 16);
      for (int i = threadIdx.x % 128; i < pieces * kValueBoxes; i += 128) {
        const int box = i / pieces;
        ptx::store_shared_x4(
            base + (box * kTileKV + valid) * kBoxRowBytes + (i - box * pieces) * 16, 0, 0, 0, 0);
      }
      ptx::fence_async_proxy();
      ptx::named_barrier_sync(kGroupBarrier + group, 128);
    }
  }

  // -- results --
  // Stores the tile. Returns the warp's rows that came out with NaN or infinity, bit 4 * quad + row
  // for each. A NaN lse is right, and the row with it: masked scores never reach the sum of the
  // weights.
  __device__ __forceinline__ uint32 finish_tile(const TileInfo& t,
                                                const SoftmaxState& softmax) const {
    uint32 nonfinite = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = packed_row(t, row);
      const int query = packed / kPackedHeads;
      const int head = t.head * kPackedHeads + packed % kPackedHeads;
      float sink = 0.0f;
      if constexpr (kHasSinks) {
        sink = p.sinks[t.batch * p.sinks_batch_stride + head] * kLog2E;
      }
      float lse;
      const float factor = softmax.finish<kHasSinks>(row, sink, kHeadroom, lse);
      bool empty = lse == kNegativeInfinity;
      if constexpr (kHasQueryLengths) empty = empty || query >= t.query_length;

      constexpr int kPieces = round_up(kValueColumns, 32) / 8;
      uint32 pieces[kPieces];
      gather_row<Element>(output, row, factor, pieces);
      uint32 flaw = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) flaw = ptx::accumulate_nonfinite<Element>(flaw, pieces[i]);
      const bool stored = query < p.query_len;
      uint32 lanes = __ballot_sync(0xffffffffu, flaw != 0 && stored && !empty && lse == lse);
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      nonfinite |= (lanes & 0x11111111u) << row;
      if (!stored) continue;
      uint16* out = static_cast<uint16*>(p.out) + out_index(t, query, head);
      const int c = lane() % 4;
#pragma unroll
      for (int g = 0; g < kPieces / 4; ++g) {
        const int column = 8 * (4 * g + c);
        if (kValueDim % 32 == 0 || column < kValueDim) {
          store_piece<kValueDim>(out, column,
                                 empty ? make_uint4(0, 0, 0, 0)
                                       : make_uint4(pieces[4 * g], pieces[4 * g + 1],
                                                    pieces[4 * g + 2], pieces[4 * g + 3]));
        }
      }
      if (c == 0) p.lse[lse_index(t, query, head)] = empty ? kNegativeInfinity : lse;
    }
    return nonfinite;
  }
  __device__ __forceinline__ int64 out_index(const TileInfo& t, int query, int head) const {
    const int64 row = static_cast<int64>(t.batch) * p.query_len + query;
    return (row * p.query_heads + head) * kValueDim;
  }
  __device__ __forceinline__ int64 lse_index(const TileInfo& t, int query, int head) const {
    return (static_cast<int64>(t.batch) * p.query_heads + head) * p.query_len + query;
  }
  // A row as repeat_rows sees it; bit = 4 * quad + row of the warp's fragment.
  struct Row {
    int head;
    int64 query_row, first_key;
    Range keys;
    int64 lse;
    uint16* result;
  };
  __device__ __forceinline__ Row row_of(const TileInfo& t, int bit) const {
    const int warp = ptx::opaque(threadIdx.x) % 128 / 32;
    const int packed = t.first_row + group * kGroupRows + 16 * warp + bit / 4 + 8 * (bit % 4);
    const int query = packed / kPackedHeads;
    const int head = t.head * kPackedHeads + packed % kPackedHeads;
    const int kv_head = head / (p.query_heads / p.kv_heads);
    Range keys = row_columns<kWindowLeft, kWindowRight>(seen(t), query, 0);
    keys.begin = max(keys.begin, t.own.begin * kTileKV);
    keys.end = min(keys.end, t.own.end * kTileKV);
    return {head,
            static_cast<int64>(t.batch) * p.query_len + query,
            static_cast<int64>(t.batch) * p.kv_len * p.kv_heads + kv_head,
            keys,
            lse_index(t, query, head),
            static_cast<uint16*>(p.out) + out_index(t, query, head)};
  }
  // Computes these rows (as from finish_tile) again where they are wrong, see exact_row.cuh.
  __device__ __forceinline__ void repeat_rows(const TileInfo& t, uint32 rows) const {
    __syncwarp();  // the first results are stored before these
    constexpr int kColumns = ceil_div(kValueDim, 32);
    const int64 value_stride = static_cast<int64>(p.kv_heads) * kValueDim;
    const int* key_ids = p.key_value_segments + static_cast<int64>(t.batch) * p.kv_len;
    const auto load_result = [&](const Row& row, float (&out)[kColumns]) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = fresh_lane() + 32 * c;
        out[c] = column < kValueDim ? ptx::unpack<Element>(row.result[column]) : 0.0f;
      }
    };
    const auto explain = [&](const float (&result)[kColumns], const Row& row, Range keys,
                             float (&sum)[kColumns]) {
      return explain_nan<Element, kValueDim>(
          result, p.value_data, row.first_key * kValueDim, value_stride, keys,
          [&](int key) { return !kHasSegments || p.query_segments[row.query_row] == key_ids[key]; },
          sum);
    };
    // First the keys that all of these rows see, for the first of them.
    const Row first = row_of(t, __ffs(rows) - 1);
    Range common = first.keys;
#pragma unroll 1
    for (uint32 left = rows; left != 0; left &= left - 1) {
      const Row other = row_of(t, __ffs(left) - 1);
      common.begin = max(common.begin, other.keys.begin);
      common.end = min(common.end, other.keys.end);
      if (kHasSegments && p.query_segments[other.query_row] != p.query_segments[first.query_row]) {
        common.end = common.begin;
      }
    }
    float common_sum[kColumns];  // of its values that are not finite
#pragma unroll
    for (int c = 0; c < kColumns; ++c) common_sum[c] = 0.0f;
    {
      float result[kColumns];
      load_result(first, result);
      explain(result, first, common, common_sum);
    }
#pragma unroll 1
    for (uint32 left = rows; left != 0; left &= left - 1) {
      const Row row = row_of(t, __ffs(left) - 1);
      float out[kColumns], explained[kColumns];
      load_result(row, out);
      if (p.lse[row.lse] < kInfinity) {
        bool open = false;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          explained[c] = common_sum[c];
          open = open || (out[c] != out[c] && explained[c] == explained[c]);
        }
        if (!__any_sync(0xffffffffu, open) || explain(out, row, row.keys, explained)) continue;
      }
      float largest = 0.0f, sum = 0.0f;
      exact_row<Element, kHeadDim, kValueDim>(
          p.query_data, (row.query_row * p.query_heads + row.head) * kHeadDim, p.key_data,
          row.first_key * kHeadDim, static_cast<int64>(p.kv_heads) * kHeadDim, p.value_data,
          row.first_key * kValueDim, value_stride, row.keys,
          [&](int key) { return !kHasSegments || p.query_segments[row.query_row] == key_ids[key]; },
          [&](float dot) {
            float score[1] = {dot};
            if constexpr (kSoftcap) {
              apply_softcap(score, p.scale, p.softcap);
            } else {
              apply_scale(score, p.scale);
            }
            return score[0];
          },
          out, largest, sum);
      if constexpr (kHasSinks) {
        const float sink = p.sinks[t.batch * p.sinks_batch_stride + row.head] * kLog2E;
        __syncwarp();  // the last read of `t`, whose buffer lane 0 may give back soon
        const float with_sink = fmaxf(largest, sink);
        const float factor = ptx::exp2_approx(largest - with_sink);
        sum = sum * factor + ptx::exp2_approx(sink - with_sink);
        largest = with_sink;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] *= factor;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = fresh_lane() + 32 * c;
        if (column < kValueDim) {
          row.result[column] = static_cast<uint16>(ptx::pack<Element>(out[c] / sum, 0.0f));
        }
      }
      if (fresh_lane() == 0) {
        p.lse[row.lse] = (largest + ptx::log2_approx(sum)) * kLn2;
      }
    }
  }
  __device__ __forceinline__ void store_empty() {
    const TileInfo& t = tile();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = packed_row(t, row);
      const int query = packed / kPackedHeads;
      if (query >= p.query_len) continue;
      const int head = t.head * kPackedHeads + packed % kPackedHeads;
      uint16* out = static_cast<uint16*>(p.out) + out_index(t, query, head);
      for (int column = 8 * (lane() % 4); column < kValueDim; column += 32) {
        store_piece<kValueDim>(out, column, make_uint4(0, 0, 0, 0));
      }
      if (lane() % 4 == 0) {
        p.lse[lse_index(t, query, head)] = kNegativeInfinity;
      }
    }
  }

  // -- tiles --
  // Reads the tile whose Q has arrived. False: there is none, the work is done.
  __device__ __forceinline__ bool read_tile() {
    info_ring.advance();
    const TileInfo& t = tile();
    if (ptx::uniform(t.batch) < 0) return false;
    own = {kBoundedBegin ? ptx::uniform(t.own.begin) : 0, ptx::uniform(t.own.end)};
    full = {kBoundedBegin ? ptx::uniform(t.full.begin) : 0, ptx::uniform(t.full.end)};
    block = own.end - 1;
    return true;
  }
  // Blocks that other warpgroups need and this one does not.
  __device__ __forceinline__ void skip_blocks(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_turn();
      pass_turn();
      wait_key();
      release_key();
      wait_value();
      release_value();
    }
  }
  // Takes tiles until one has a block for this warpgroup and starts its first scores. kRead: the
  // first of them has been read already.
  enum Next { kUnread, kNone, kRead, kStarts };  // the tile after this one
  __device__ __forceinline__ bool start_tile(bool is_read) {
    while (true) {
      if (!is_read) {
        wait_query();
        if (!read_tile()) return false;
      }
      is_read = false;
      const Range all = walked();
      if (!own.empty()) {
        skip_blocks(all.end - own.end);
        wait_key();
        begin_scores(scores);
        ptx::wgmma_wait<0>();
        return true;
      }
      release_query();
      skip_blocks(all.end - all.begin);
      store_empty();
    }
  }
  // Blocks of the current tile that the whole cluster walks.
  __device__ __forceinline__ Range walked() const {
    return {ptx::uniform(tile().blocks.begin), ptx::uniform(tile().blocks.end)};
  }

  __device__ __forceinline__ void run() {
    if constexpr (kPingPong && kConsumers > 1) {
      if (group == kConsumers - 1) pass_turn();
    }
#pragma unroll
    for (int i = 0; i < kTileKV / 2; ++i) scores[i] = 0.0f;
    clear_output();

    if (!start_tile(false)) return;
    while (true) {
      // The tile's first block: nothing to rescale.
      accept_scores();
      release_scores();
      finish_scores(scores);
      softmax.start<true, kPolynomial>(scores, scale_log2(), kHeadroom, correction);
      pack_weights(scores);
      int accumulate = 0;

      // Per block: the next block's scores start before this block's output, the exponentials
      // of the next block run beside it.
      while (!is_last()) {
        const int value_block = block;
        wait_key();
        wait_turn();
        begin_scores(scores);
        wait_value();
        sanitise_value(value_block);
        begin_output(accumulate);
        pass_turn();
        accumulate = 1;
        ptx::wgmma_wait<1>();
        --block;
        accept_scores();
        release_scores();
        finish_scores(scores);
        const bool rescale = extend_softmax(scores);
        ptx::wgmma_wait<0>();
        ptx::pin(output);
        release_value();
        if (rescale) rescale_output();
        pack_weights(scores);
      }

      // The last block's output. If the next tile's Q and K are here, its first scores run beside
      // this tile's epilogue. Two whole branches: wgmma in flight where they join would serialise.
      wait_value();
      sanitise_value(block);
      if constexpr (kEarlyOutput) begin_last_output(accumulate);
      const TileInfo& finished = tile();
      const bool ends = !kBoundedBegin || own.begin == walked().begin;  // no blocks to skip
      Next next = kUnread;
      uint32 nonfinite;
      if (ends && query_and_key_are_ready()) {
        next = !read_tile() ? kNone : !own.empty() && own.end == walked().end ? kStarts : kRead;
      }
      if (next == kStarts) {
        if constexpr (!kEarlyOutput) begin_last_output(accumulate);
        begin_scores(scores);
        ptx::wgmma_wait<1>();
        ptx::pin(output);
        release_value();
        nonfinite = finish_tile(finished, softmax);
        ptx::wgmma_wait<0>();
      } else {
        if constexpr (!kEarlyOutput) begin_last_output(accumulate);
        ptx::wgmma_wait<0>();
        ptx::pin(output);
        release_value();
        nonfinite = finish_tile(finished, softmax);
      }
      if (nonfinite != 0) {
        repeat_rows(finished, nonfinite);
        clear_output();  // its registers were free meanwhile
      }
      if (next == kNone) return;
      if (next != kStarts) {
        if (kBoundedBegin && next == kUnread) skip_blocks(own.begin - walked().begin);
        if (!start_tile(next == kRead)) return;
      }
    }
  }
};

}  // namespace forward

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    flash_forward(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  extern __shared__ unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = ptx::warp_index();

  if (threadIdx.x == 0) {
    if constexpr (kTmaLoads) {
      ptx::prefetch_tensor_map(&p.query);
      ptx::prefetch_tensor_map(&p.key);
      ptx::prefetch_tensor_map(&p.value);
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      for (int group = 0; group < kConsumers; ++group) {
        ptx::barrier_init(ptx::shared_address(&shared.query_full[stage][group]), kLoadWarps);
        ptx::barrier_init(ptx::shared_address(&shared.query_empty[stage][group]), 4);
      }
    }
    for (int slot = 0; slot < 2; ++slot) {
      ptx::barrier_init(ptx::shared_address(&shared.number_full[slot]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.number_empty[slot]), 1);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      const int readers = kWarpsOfConsumers * kClusterSize;
      ptx::barrier_init(ptx::shared_address(&shared.key_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.key_empty[stage]), readers);
      ptx::barrier_init(ptx::shared_address(&shared.value_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.value_empty[stage]), readers);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (kClusterSize > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp < 4) {
    ptx::register_decrease<kProducerRegisters>();
    if (warp < kLoadWarps) {
      const uint32 rank = kClusterSize > 1 ? ptx::cluster_rank() : 0;
      Producer producer{p, shared, rank};
      producer.run();
    }
  } else {
    ptx::register_increase<kConsumerRegisters>();
    Consumer consumer{p, shared, warp / 4 - 1};
    consumer.run();
  }
  // No CTA leaves while another may still write to it or arrive at its barriers.
  if constexpr (kClusterSize > 1) ptx::cluster_sync();
}

// With segments, two kernels go ahead, 256 threads each, a warp for each block or group.
//
// Smallest and largest segment id of each block of kTileKV keys, and a fresh tile counter.
// Grid (B, ceil(blocks / 8)).
extern "C" __global__ void segment_ranges(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    const int blocks = ceil_div(p.kv_len, kTileKV);
    const int batch = blockIdx.x;
    const int block = blockIdx.y * 8 + threadIdx.x / 32;
    if (kDynamic && block == 0 && batch == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    if (block >= blocks) return;
    const int end = min((block + 1) * kTileKV, visibility(p, batch).kv_length);
    const int* ids = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
    SegmentRange range;
    for (int key = block * kTileKV + threadIdx.x % 32; key < end; key += 32) {
      range.include(ids[key]);
    }
    range.reduce_warp();
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int2*>(p.segment_ranges)[static_cast<int64>(batch) * blocks + block] =
          make_int2(range.low, range.high);
    }
  }
}

// The plan of each warpgroup of each tile. Grid (B, ceil(query_tiles * kConsumers / 8)).
extern "C" __global__ void segment_plan(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    constexpr int kQueries = kGroupRows / kPackedHeads;
    const int lane = threadIdx.x % 32;
    const int batch = blockIdx.x;
    const int group = blockIdx.y * 8 + threadIdx.x / 32;
    const int groups = p.query_tiles * kConsumers;
    if (group >= groups) return;
    const int end = min((group + 1) * kQueries, visibility(p, batch).query_length);
    const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
    SegmentRange queries;
    for (int query = group * kQueries + lane; query < end; query += 32) {
      queries.include(ids[query]);
    }
    queries.reduce_warp();

    const int blocks = ceil_div(p.kv_len, kTileKV);
    const int2* ranges =
        reinterpret_cast<const int2*>(p.segment_ranges) + static_cast<int64>(batch) * blocks;
    SegmentRange met, one;  // of block numbers
    int met_count = 0, one_count = 0;
#pragma unroll 4
    for (int block = lane; block < blocks; block += 32) {
      const int2 range = ranges[block];
      if (queries.meets(range)) {
        met.include(block);
        ++met_count;
      }
      if (queries.is_one(range)) {
        one.include(block);
        ++one_count;
      }
    }
    met.reduce_warp();
    one.reduce_warp();
    met_count = __reduce_add_sync(0xffffffffu, met_count);
    one_count = __reduce_add_sync(0xffffffffu, one_count);
    if (lane != 0) return;
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (met_count > 0) {
      plan.blocks = {met.low, met.high + 1};
      if (met_count <= met.high - met.low) plan.blocks.begin |= SegmentPlan::kSparse;
    }
    if (one_count > 0 && one_count == one.high + 1 - one.low) plan.one = {one.low, one.high + 1};
    reinterpret_cast<SegmentPlan*>(p.segment_plan)[static_cast<int64>(batch) * groups + group] =
        plan;
  }
}
