// The roles of warpgroup 0 of the main kernels. The load role feeds the others: K and V once a
// unit, Q, -lse, dO and -delta per query block. Tiles are boxes of 64 columns in 128-byte-swizzled
// shared memory.
#pragma once

#include "sm90/backward_turns.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/products.cuh"

namespace backward {

// One box of 64 columns after the other; two planes are two heads side by side.
template <int kBoxes, int kBoxBytes, int kPlanes = 1>
__device__ __forceinline__ void load_tile(uint32 tile, const TensorMap& map, uint32 full,
                                          uint64 policy, int head, int row, int batch,
                                          int column = 0) {
#pragma unroll
  for (int i = 0; i < kPlanes * kBoxes; ++i) {
    ptx::tma_load(tile + i * kBoxBytes, &map, full, policy, column + 64 * (i % kBoxes),
                  kPlanes * head + i / kBoxes, row, batch);
  }
}

// The load role.
struct Loader {
  const BackwardParams& p;

  // K or V of a unit.
  template <int kDim>
  __device__ __forceinline__ void load_keys(const volatile UnitRecord& u, uint32 tile,
                                            const TensorMap& map, const void* array, uint32 full,
                                            uint32 more_bytes = 0) {
    if constexpr (!kTmaLoads) {
      const KeyRows<kDim> rows(p, key_row(p, u.batch, u.key0, u.kv_head));
      copy_key_block<kKeys, kLoadWarps>(rows, array, tile, p.kv_len - u.key0);
      release(full);
    } else if (threadIdx.x == 0) {
      constexpr int kColumns = kTileColumns<kDim>;
      ptx::barrier_arrive_expect(full, kKeyBlockBytes<kColumns, kKeys, kParts> + more_bytes);
      const int head = u.kv_head;
      fetch_key_block<kColumns, kKeys, kParts>(tile, map, full, ptx::kEvictNormal, box_head(head),
                                               u.key0, u.batch, box_column<kDim>(head));
    }
  }
  // Where K or V arrives by TMA: with kEarly this warp hands it on when others' columns are zeroed.
  template <int kDim>
  static __device__ __forceinline__ uint32 arrives_at(uint32 full, int which) {
    if constexpr (kEarlyColumns<kDim> > 0) return at(&EarlyShared<true>::landed, which);
    return full;
  }
  template <int kDim>
  __device__ __forceinline__ void hand_on(const volatile UnitRecord& u, uint32 tile, uint32 full,
                                          int which, uint32 received) const {
    if constexpr (kEarlyColumns<kDim> > 0) {
      wait_together(at(&EarlyShared<true>::landed, which), parity_of<1>(received));
      clear_others<kDim, kKeys, 32>(tile, columns_before<kDim>(u.kv_head), threadIdx.x % 32);
      ptx::fence_async_proxy();
      release(full);
    }
  }
  // With kPairs: the boxes of the other CTA's keys that this one reads, at the barrier of its own.
  __device__ __forceinline__ void load_keys_of_other(const volatile UnitRecord& u) {
    if (!kPairs || threadIdx.x != 0) return;
    for (int i = 0; i < kPairBoxes; ++i) {
      ptx::tma_load(at(&Shared::key) + (kHeadTile + i) * kBoxK, &p.key, at(&Shared::key_full),
                    ptx::kEvictNormal, 64 * (pair_rank() * (kHeadBoxes / 2) + i), u.kv_head,
                    u.key0 ^ kKeys, u.batch);
    }
  }

  // Q or dO of a query block, and the number that goes with each row: -lse or -delta.
  template <int kDim>
  __device__ __forceinline__ void load_queries(uint32 tile, const TensorMap& map, const void* array,
                                               uint32 numbers, const float* source, uint32 full,
                                               int head, int row, int batch,
                                               uint32 more_bytes = 0) {
    constexpr int kBoxes = ceil_div(kTileColumns<kDim>, kBoxColumns);  // of a plane
    if (threadIdx.x == 0) {
      const uint32 number_bytes = kCompact ? min(stored_rows(p), kQueries) * 4 : kQueries * 4;
      ptx::barrier_arrive_expect(
          full, (kTmaLoads ? kParts * kBoxes * kBoxQ : 0) + number_bytes + more_bytes);
      if constexpr (kTmaLoads) {
        load_tile<kBoxes, kBoxQ, kParts>(tile, map, full, ptx::kEvictLast, box_head(head), row,
                                         batch, box_column<kDim>(head));
      }
      ptx::bulk_load(numbers, source, number_bytes, full);
    }
    if constexpr (!kTmaLoads) {
      const int64 at = query_row(p, batch, row, head);
      fill_tile<kDim, kQueries, kLoadWarps>(tile, static_cast<const uint16*>(array) + at * kDim,
                                            static_cast<int64>(p.query_heads) * kDim,
                                            p.query_len - row);
      release(full);
    }
  }

  // To the barrier of Q.
  __device__ __forceinline__ void load_bias(const volatile UnitRecord& u, uint32 slot, int head,
                                            int m0) {
    if (threadIdx.x != 0) return;
    const uint32 tile = Shared::bias_tile(ptx::shared_address(shared_memory), slot);
    // A bias with an element for each score is not read again.
    const bool own = p.bias.batch != 0 && p.bias.head != 0;
#pragma unroll 1
    for (int box = 0; box < kKeys / bias::kBoxKeys; ++box) {
      ptx::tma_load(tile + box * kBoxQ, &p.bias_map, at(&Shared::query_full, slot),
                    own ? ptx::kEvictFirst : ptx::kEvictNormal, u.key0 + box * bias::kBoxKeys, m0,
                    p.bias.head != 0 ? head : 0, p.bias.batch != 0 ? u.batch : 0);
    }
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0, handed = 0;  // handed: units with keys
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      const uint32 free = parity_of<1>(received) ^ 1;
      if (u.total == 0) {
        wait_together(at(&Shared::key_empty), free);
        wait_together(at(&Shared::value_empty), free);
        if (threadIdx.x % 32 == 0) {
          ptx::barrier_arrive(at(&Shared::key_full));
          ptx::barrier_arrive(at(&Shared::value_full));
        }
      }
      bool first = true;
      if (u.total < kAskAhead) ask_for_unit();
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        if (walk.left == kAskAhead) ask_for_unit();
        const int head = u.head + walk.head, m0 = walk.m0, block = walk.query_block(p, u);
        const uint32 slot = stage_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
        wait_together(at(&Shared::query_empty, slot), parity ^ 1);
        if constexpr (kSkipsMasked) {
          if (threadIdx.x == 0) items(&Shared::first_queries)[slot] = m0;
        }
        load_queries<kHeadDim>(at(&Shared::query) + slot * kQueryBytes, p.query, p.query_data,
                               at(&Shared::minus_lse) + slot * kNumberBytes,
                               p.lse_log2 + numbers_of(p, block), at(&Shared::query_full, slot),
                               head, m0, u.batch, kBiasBytes);
        if constexpr (kBiasTiles) load_bias(u, slot, head, m0);
        // K and V come after the first Q and dO, whose buffers the unit before gives back earlier.
        if (first && !kGivesBackEarly) {
          wait_together(at(&Shared::key_empty), free);
          load_keys<kHeadDim>(u, at(&Shared::key), p.key, p.key_data,
                              arrives_at<kHeadDim>(at(&Shared::key_full), 0), kPairBoxes * kBoxK);
          load_keys_of_other(u);
        }
        const uint32 dout_slot = stage_of<kDoutStages>(iteration);
        wait_together(at(&Shared::dout_empty, dout_slot), parity_of<kDoutStages>(iteration) ^ 1);
        load_queries<kValueDim>(at(&Shared::dout) + dout_slot * kDoutBytes, p.dout, p.dout_data,
                                at(&Shared::minus_delta) + dout_slot * kNumberBytes,
                                p.minus_delta + numbers_of(p, block),
                                at(&Shared::dout_full, dout_slot), head, m0, u.batch);
        if (first) {
          first = false;
          wait_together(at(&Shared::value_empty), free);
          load_keys<kValueDim>(u, at(&Shared::value), p.value, p.value_data,
                               arrives_at<kValueDim>(at(&Shared::value_full), 1));
          if (kGivesBackEarly) {
            wait_together(at(&Shared::key_empty), free);
            load_keys<kHeadDim>(u, at(&Shared::key), p.key, p.key_data,
                                arrives_at<kHeadDim>(at(&Shared::key_full), 0));
          }
          hand_on<kHeadDim>(u, at(&Shared::key), at(&Shared::key_full), 0, handed);
          hand_on<kValueDim>(u, at(&Shared::value), at(&Shared::value_full), 1, handed);
          ++handed;
        }
        ++iteration;
      }
      return_unit(received);
      ++received;
    }
  }
};

// The roles of warpgroup 0.
__device__ __forceinline__ void feed(const BackwardParams& p) {
  const int warp = ptx::warp_index();
  if (warp < kLoadWarps) {
    Loader{p}.run();
  } else if (warp == 3) {
    Planner{p}.run();
  } else if (kDeterministic && warp == 1) {
    TurnWaiter{p}.run();
  } else if (kDeterministic && warp == 2) {
    TurnPasser{p}.run();
  }
}

}  // namespace backward
