// The producer of the forward kernel: one warp that takes units and loads by TMA; four where TMA
// does not load. Read forward_terms.cuh next.
#pragma once

#include "sm90/forward_pages.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/forward_walk.cuh"

namespace forward {

// What a unit loads: its queries, with which it is handed to consumers, and blocks of keys and
// values.
struct Loads {
  const ForwardParams& p;
  Shared& shared;
  Ring<kStages, false> ring;  // of K and V alike: each block takes one stage of both
  uint32 units = 0;           // handed over: one register for the positions in two rings
  int next_number = 0;
  PagePieces pieces;

  // Read at each use: what depends on it would be kept in registers that are not there.
  __device__ __forceinline__ int lane() const { return ptx::fresh_lane(); }
  // The lane that talks to barriers and TMA.
  __device__ __forceinline__ bool is_leader() const {
    return kTeams == 1 ? threadIdx.x == 0 : lane() == 0;
  }

  // Who loads and waits for empty buffers.
  __device__ __forceinline__ bool loads() const { return !kTmaLoads || is_leader(); }
  // A warp's part has been copied.
  __device__ __forceinline__ void arrive(uint32 barrier) const {
    __syncwarp();
    if (ptx::kEveryLaneArrives || lane() == 0) ptx::lane_arrive(barrier);
  }
  template <int kDim>
  __device__ __forceinline__ void load_block(const TensorMap& map, const void* data,
                                             unsigned char* buffer, unsigned long long* full,
                                             int head, int block, int batch, int origin,
                                             uint32 more_bytes = 0) {
    const uint32 barrier = ptx::shared_address(full);
    if constexpr (!kTmaLoads) {
      const int first_key = block * kBlockKV;
      // Opaque, so that the compiler computes the address anew for each block: kept from block to
      // block it would take registers that are not there.
      const KeyRows<kDim> rows(p, key_row(p, ptx::opaque(batch), first_key, ptx::opaque(head)));
      copy_key_block<kBlockKV, kLoadWarps>(rows, data, ptx::shared_address(buffer),
                                           p.kv_len - first_key);
      arrive(barrier);
    } else {
      constexpr int kColumns = kTileColumns<kDim>;
      ptx::barrier_arrive_expect(barrier, kKeyBlockBytes<kColumns, kBlockKV, kParts> + more_bytes);
      fetch_key_block<kColumns, kBlockKV, kParts>(
          ptx::shared_address(buffer), map, barrier, ptx::kEvictLast, box_head(head),
          block * kBlockKV + origin, batch, box_column<kDim>(head));
    }
  }
  __device__ __forceinline__ void wait_empty(unsigned long long* barrier, uint32 parity) {
    ptx::barrier_wait(ptx::shared_address(barrier), parity ^ 1);
  }
  __device__ __forceinline__ void load_key(const UnitWalk& walk, const UnitInfo& unit, int head,
                                           int block) {
    const int stage = ring.stage();
    if constexpr (kFromPages) {
      pieces.find(p, block, lane());
      load_pieces<kHeadDim>(p.key, shared.key[stage], &shared.key_full[stage],
                            &shared.key_empty[stage], head, block);
      return;
    }
    ListedBlock listed{block};
    if constexpr (kListsWhole) listed.add_whole(walk.whole_rows(unit, block));
    if (loads()) {
      float factor;  // on its way while the buffer is in use
      if constexpr (kFloat8) factor = key_scale(p, unit.batch, head, block);
      wait_empty(&shared.key_empty[stage], ring.parity());
      if constexpr (kFloat8) shared.key_factors[stage] = factor;
      if constexpr (kListsBlocks) {
        if (kTmaLoads || is_leader()) shared.block_list[stage] = listed.bits;
      }
      load_block<kFloat8 ? kHeadColumns : kHeadDim>(p.key, p.key_data, shared.key[stage],
                                                    &shared.key_full[stage], head, block,
                                                    unit.batch, walk.origin(), kBiasBytes);
      if constexpr (kBiasTiles) load_bias(unit, stage, block);
    }
  }
  // The scales of a block of float8. Templates: others have none.
  template <class Params>
  static __device__ __forceinline__ float key_scale(const Params& p, int batch, int head,
                                                    int block) {
    return p.key_scales[key_scale_at(p, batch, head, block * kBlockKV)];
  }
  template <class Params>
  static __device__ __forceinline__ float value_scale(const Params& p, int batch, int head,
                                                      int block) {
    return p.value_scales[key_scale_at(p, batch, head, block * kBlockKV)];
  }
  // With kFromPages: the block by all lanes, which have found its pages.
  template <int kDim>
  __device__ __forceinline__ void load_pieces(const TensorMap& map, unsigned char* buffer,
                                              unsigned long long* full, unsigned long long* empty,
                                              int head, int block) {
    const uint32 barrier = ptx::shared_address(full);
    if (is_leader()) {
      wait_empty(empty, ring.parity());
      ptx::barrier_arrive_expect(barrier, kKeyBlockBytes<kDim, kBlockKV>);
    }
    __syncwarp();
    pieces.load<kDim>(map, ptx::shared_address(buffer), barrier, head, block, lane());
    __syncwarp();
  }
  // The bias comes to the same barrier.
  __device__ __forceinline__ void load_bias(const UnitInfo& unit, int stage, int block) {
    const uint32 tile = Shared::bias_tile(ptx::shared_address(&shared), stage);
    const uint32 barrier = ptx::shared_address(&shared.key_full[stage]);
    // A bias of each score alone is not read again.
    const bool own = p.bias.batch != 0 && p.bias.head != 0;
    const int head = p.bias.head != 0 ? unit.head : 0, batch = p.bias.batch != 0 ? unit.batch : 0;
#pragma unroll
    for (int box = 0; box < kBlockKV / bias::kBoxKeys; ++box) {
      ptx::tma_load(tile + box * kUnitRows * kBoxRowBytes, &p.bias_map, barrier,
                    own ? ptx::kEvictFirst : ptx::kEvictNormal,
                    block * kBlockKV + box * bias::kBoxKeys, unit.first_row, head, batch);
    }
    if constexpr (kBiasAheadInL2 > 0) {
      const int ahead = block - kBiasAheadInL2;
      if (ahead < unit.blocks.begin) return;
#pragma unroll
      for (int box = 0; box < kBlockKV / bias::kBoxKeys; ++box) {
        ptx::tma_prefetch(&p.bias_map, ahead * kBlockKV + box * bias::kBoxKeys, unit.first_row,
                          head, batch);
      }
    }
  }
  __device__ __forceinline__ void load_value(const UnitWalk& walk, int head, int block, int batch) {
    const int stage = ring.stage();
    if constexpr (kFromPages) {
      load_pieces<kValueDim>(p.value, shared.value[stage], &shared.value_full[stage],
                             &shared.value_empty[stage], head, block);
    } else if (loads()) {
      float factor;
      if constexpr (kFloat8) factor = value_scale(p, batch, head, block);
      wait_empty(&shared.value_empty[stage], ring.parity());
      if constexpr (kFloat8) {
        shared.value_factors[stage] = factor;
        load_columns(head, block, batch, stage);
      } else {
        load_block<kValueDim>(p.value, p.value_data, shared.value[stage], &shared.value_full[stage],
                              head, block, batch, walk.origin());
      }
    }
    ring.advance();
  }

  // The columns of float8 values: 64 of 16 bits are the keys of a block.
  __device__ __forceinline__ void load_columns(int head, int block, int batch, int stage) {
    const uint32 barrier = ptx::shared_address(&shared.value_full[stage]);
    ptx::barrier_arrive_expect(barrier, kValueBytes);
    ptx::tma_load(ptx::shared_address(shared.value[stage]), &p.value, barrier, ptx::kEvictLast,
                  block * kBoxColumns, 0, head * kValueDim, batch);
  }

  // Hands the unit to warpgroup `lane`.
  __device__ __forceinline__ void hand_over(const UnitInfo& unit) {
    UnitInfo info = unit;
    if constexpr (!kHasSegments) UnitWalk{p}.describe_rows(info);
    if constexpr (kListsWhole) info.own = kListsOwn ? unit.own : info.blocks;
    // Word by word: a store of 16 bytes needs four consecutive registers, which are not free here.
    struct Words {
      int word[sizeof(UnitInfo) / 4];
    };
    const Words words = __builtin_bit_cast(Words, info);
    const uint32 slot = ptx::shared_address(&shared.units[units % kInfoStages][lane()]);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(UnitInfo) / 4); ++i) {
      ptx::store_shared(slot + 4 * i, words.word[i]);
    }
  }
  // Hands the unit and its Q rows to each warpgroup, by ordinary loads of four warps.
  __device__ __forceinline__ void copy_query(const UnitInfo& unit) {
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      const int stage = units % kQueryStages;
      const uint32 barrier = ptx::shared_address(&shared.query_full[stage][warpgroup]);
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][warpgroup]),
                        ~(units / kQueryStages) & 1);
      if (threadIdx.x == warpgroup) hand_over(unit);
      if (unit.batch != kNoUnit && !unit.blocks.empty()) {
        const int first_query = (unit.first_row + warpgroup * kWarpgroupRows) / kPackedHeads;
        const int64 row = query_row(p, ptx::opaque(unit.batch), first_query,
                                    ptx::opaque(unit.head) * kPackedHeads);
        fill_tile<kHeadDim, kWarpgroupRows, kLoadWarps, kPackedHeads>(
            ptx::shared_address(shared.query[stage][warpgroup]),
            static_cast<const uint16*>(p.query_data) + row * kHeadDim,
            static_cast<int64>(p.query_heads) * kHeadDim,
            (p.query_len - first_query) * kPackedHeads);
      }
      arrive(barrier);
    }
  }
  // The same by TMA: a lane for each.
  __device__ __forceinline__ void load_query(UnitWalk& walk, UnitInfo& unit) {
    const int warpgroup = lane();
    if constexpr (kListsOwn) walk.find_own(unit);
    unit.offset -= walk.origin();
    if constexpr (!kTmaLoads) {
      copy_query(unit);
    } else if constexpr (kQueriesInTurn) {
#pragma unroll 1
      for (int i = 0; i < kConsumers; ++i) {
        send_query(unit, i == warpgroup ? i : kConsumers);
        __syncwarp();
      }
    } else {
      send_query(unit, warpgroup);
    }
    __syncwarp();
    ++units;
  }
  // Where a box of queries lies: two planes are two heads side by side.
  static constexpr int kPlaneBoxes = kHeadBoxes / kParts;
  static __device__ __forceinline__ int column_of(int head, int box) {
    return box_column<kHeadDim>(head) + (kParts > 1 ? box % kPlaneBoxes : box) * kBoxColumns;
  }
  static __device__ __forceinline__ int head_of(int head, int box) {
    return kParts > 1 ? kParts * head + box / kPlaneBoxes : box_head(head * kPackedHeads);
  }
  __device__ __forceinline__ void send_query(const UnitInfo& unit, int warpgroup) {
    if (warpgroup < kConsumers) {
      const int stage = units % kQueryStages;
      ptx::barrier_wait(ptx::shared_address(&shared.query_empty[stage][warpgroup]),
                        ~(units / kQueryStages) & 1);
      hand_over(unit);
      const uint32 barrier = ptx::shared_address(&shared.query_full[stage][warpgroup]);
      if (unit.batch == kNoUnit || unit.blocks.empty()) {
        ptx::barrier_arrive(barrier);
      } else {
        ptx::barrier_arrive_expect(barrier, kQueryBytes);
        const uint32 target = ptx::shared_address(shared.query[stage][warpgroup]);
#pragma unroll 1
        for (int box = 0; box < kHeadBoxes; ++box) {
          ptx::tma_load(target + box * kWarpgroupRows * kBoxRowBytes, &p.query, barrier,
                        ptx::kEvictFirst, column_of(unit.head, box), head_of(unit.head, box),
                        (unit.first_row + warpgroup * kWarpgroupRows) / kPackedHeads,
                        query_batch(p, unit.batch));
        }
      }
    }
  }
};

// Takes units and walks their blocks.
struct Producer : Loads {
  // Asks the counter for the unit after this one.
  __device__ __forceinline__ void request_number(int number) {
    if (is_again(number)) return;  // the next number has been asked for
    const int stride = kTeams * gridDim.x;
    if constexpr (!kDynamic) {
      next_number = number + stride;
    } else if (is_leader()) {
      if (number < stride) ptx::wait_for_the_kernel_ahead();  // which zeroes the counter
      next_number = stride + atomicAdd(p.unit_counter, 1);
    }
  }
  // The answer, in all lanes.
  __device__ __forceinline__ int receive_number() const { return ptx::uniform(next_number); }

  // The next unit: one to walk again, or the one that was asked for last.
  __device__ __forceinline__ int next_unit() {
    if constexpr (kRepeats) {
      int mine;
      const uint32 asked = shared.units_to_repeat(lane(), mine);
      if (asked != 0) {
        const int slot = __ffs(asked) - 1;
        if (lane() == slot) shared.repeats[slot] = 0;
        return __shfl_sync(0xffffffffu, mine, slot);
      }
    }
    return receive_number();
  }
  // Whether units are to be walked again after the last one; if so, the next number is the end of
  // these.
  __device__ __forceinline__ bool repeats_remain(int number) {
    if (!kRepeats || is_again(number)) return false;
    next_number = again(number);
    ptx::barrier_wait(ptx::shared_address(&shared.finished), 0);
    int mine;
    return shared.units_to_repeat(lane(), mine) != 0;
  }
  // The blocks of a unit of a layout. The next unit's number is asked for when few are left.
  __device__ __forceinline__ void load_layout(UnitWalk& walk, UnitInfo& unit, int kv_head) {
    int block = unit.blocks.end - 1;
    bool asks = true, sends = true, sends_now = !kQueriesLate;
#pragma unroll 1
    while (true) {
      const bool is_last = block == unit.blocks.begin;
      load_key(walk, unit, kv_head, block);
      if (sends && (sends_now || is_last)) {
        load_query(walk, unit);
        sends = false;
      }
      if (asks && walk.nears_end(unit)) {
        request_number(unit.number);
        asks = false;
      }
      load_value(walk, kv_head, block, unit.batch);
      if (is_last) return;
      sends_now = true;
      block = walk.next(unit, block);
      if (block == unit.blocks.begin) foresee(walk, unit.number);
    }
  }
  // The next unit, whose number has been asked for: what is read of it first is on its way.
  __device__ __forceinline__ void foresee(const UnitWalk& walk, int number) {
    if (is_again(number)) return;
    const UnitIndex next = unit_at(p, receive_number());
    if (next.batch == kNoUnit) return;
    walk.prefetch(next);
    if (lane() < kConsumers) {
#pragma unroll 1
      for (int box = 0; box < kHeadBoxes; ++box) {
        ptx::tma_prefetch(&p.query, column_of(next.head, box), head_of(next.head, box),
                          (next.query_block * kUnitRows + lane() * kWarpgroupRows) / kPackedHeads,
                          next.batch);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    // The kernel ahead makes flags and bits, norms, the walks of segments, or requests' units.
    if constexpr (kHasMask || kFades || kHasSegments || (kFromPages && !kInCommon) || kFloat8) {
      ptx::wait_for_the_kernel_ahead();
    }
    int number = blockIdx.x;
    if constexpr (kTeams > 1) number += ptx::warp_index() * gridDim.x;
    while (true) {
      const UnitIndex taken = unit_at(p, number);
      if (!kAsksLate) request_number(number);
      UnitInfo unit{0, taken.head, taken.batch, 0, 0, 0, {0, 0}};
      unit.number = number;
      UnitWalk walk{p};
      if (taken.batch == kNoUnit) {
        load_query(walk, unit);
        if (!repeats_remain(number)) return;
        number = next_unit();
        continue;
      }
      Visibility seen = visibility(p, taken.batch);
      unit.first_row = taken.query_block * kUnitRows;
      if constexpr (kFromPages) {
        const KeysOfUnit keys(p, taken);
        seen = keys.own.sight(p);
        unit.first_row = keys.own.first_row;
        pieces.request = keys.own.request;
        pieces.first_block = keys.first_block;
      }
      // Keys of a part count from its first.
      const int first_block = kSplits ? narrow_to_part(p, number, seen) : 0;
      unit.query_length = seen.query_length;
      unit.kv_length = seen.kv_length;
      unit.offset = seen.offset;
      // With pages heads that share a unit may be a part of those that read a kv head.
      const int kv_head = kFromPages         ? kv_head_of(p, taken.head * kPackedHeads)
                          : kPackedHeads > 1 ? taken.head
                                             : kv_head_of(p, taken.head);
      walk.plan(unit, taken, seen);

      if (kCutsUnits && unit.first_row == unit.query_length) {  // this batch row has fewer units
        if (lane() < kWarpsOfConsumers) p.marks[number * kWarpsOfConsumers + lane()] = 0;
      } else if (unit.blocks.empty()) {
        if (kAsksLate) request_number(number);
        load_query(walk, unit);
      } else if constexpr (kListsLayout) {
        load_layout(walk, unit, kv_head);
      } else {
        int block = first_of_walk(unit, unit.blocks);
        // Without kBeginsNear unit.blocks.begin, but plain kernels would be other ones.
        const int last = kBeginsNear ? last_of_walk(unit.blocks, block) : 0;
        const auto is_last = [&] { return block == (kBeginsNear ? last : unit.blocks.begin); };
        load_key(walk, unit, kv_head, first_block + block);
        load_query(walk, unit);
        if (kAsksLate && is_last()) request_number(number);
        load_value(walk, kv_head, first_block + block, unit.batch);
        if constexpr (kHasSegments) {  // the next unit's plan on its way into L1
          const UnitIndex next = unit_at(p, receive_number());
          if (next.batch != kNoUnit && lane() < kUnitPlans) ptx::prefetch(walk.plan_of(next));
        }
#pragma unroll 1
        while (kBeginsNear ? block != last : block > unit.blocks.begin) {
          block = walk.next(unit, block);
          load_key(walk, unit, kv_head, first_block + block);
          if (kAsksLate && is_last()) request_number(number);
          load_value(walk, kv_head, first_block + block, unit.batch);
        }
      }
      number = next_unit();
    }
  }
};

}  // namespace forward
