// Latent decoding: the warps that load queries and blocks of keys by TMA. Each has every fourth
// box: one that loads all takes some 60 cycles for each box, and for each piece of one. Where a
// piece is one row each has a quarter of all rows, by cp.async: see kByThreads. Packed rows come by
// cp.async too, and are converted: latent_packed.cuh.
#pragma once

#include "sm80/ptx_sm80.cuh"  // copy_async_past_l1
#include "sm90_latent/latent_boxes.cuh"
#include "sm90_latent/latent_packed.cuh"

namespace decode {

struct LatentLoader {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  int warp;                      // of kLoaders
  uint32 blocks = 0, units = 0;  // that were loaded
  bool is_coming = false;        // the last block, by cp.async, of which nobody has been told

  __device__ __forceinline__ void run(const OwnLine& line) {
    line.walk<true>(
        share,
        [&](const Unit& unit, const Range& range) {
          if constexpr (kPackedRows) {
            load_packed(unit, range);
            return;
          }
          load_queries(unit);
          Boxes boxes(p, unit, range);
#pragma unroll 1
          for (boxes.find_pages(); boxes.block < range.end; boxes.find_pages()) {
            if constexpr (kByThreads) {
              load_rows(boxes);
            } else {
              load(boxes);
            }
            ++blocks;
            boxes.move();
          }
          if constexpr (kByThreads) tell_of_last();
        },
        ptx::shared_address(shared.parked + warp));
  }
  __device__ __forceinline__ void load_queries(const Unit& unit) {
    if (threadIdx.x % 32 == 0) {
      const uint32 full = ptx::shared_address(&shared.queries_full);
      ptx::barrier_wait(ptx::shared_address(&shared.queries_empty), units % 2 ^ 1);
      ptx::barrier_arrive_expect(full, ceil_div(kKeyBoxes - warp, kLoaders) * kQueryBoxBytes);
#pragma unroll 1
      for (int box = warp; box < kKeyBoxes; box += kLoaders) {
        ptx::tma_load(ptx::shared_address(shared.queries) + box * kQueryBoxBytes, &p.query_rows,
                      full, ptx::kEvictNormal, box * kBoxColumns, 0, share.first_row(), unit.batch);
      }
    }
    __syncwarp();
    ++units;
  }

  __device__ __forceinline__ void load(const Boxes& boxes) {
    const int lane = threadIdx.x % 32;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const int count = boxes.count();
    const bool lacks = boxes.lack();
    if (kPieces > 1 || lane == 0) {  // a block in one page: one lane asks for it
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        ptx::barrier_wait(ptx::shared_address(&shared.empty[stage][half]), parity ^ 1);
        if constexpr (kPieces > 1) __syncwarp();  // all have seen it free before it may be full
        if (half == 0 && warp == 0 && lane == 0) shared.spoiled[stage] = lacks;
        const int end = half == 0 ? kHalfBoxes : kKeyBoxes;
#pragma unroll 1
        for (int box = half * kHalfBoxes + warp; box < end; box += kLoaders) {
          const uint32 full = ptx::shared_address(&shared.full[stage][box]);
          if (lane == 0) ptx::barrier_arrive_expect(full, count * (kBoxBytes / kPieces));
          if constexpr (kPieces > 1) __syncwarp();
          fetch(keys + box * kBoxBytes, full, box, boxes);
        }
      }
    }
    __syncwarp();
  }

  // A warp copies 16 of the rows: eight lanes the 128 bytes that one has of a box.
  __device__ __forceinline__ void load_rows(const Boxes& boxes) {
    constexpr int kRowsAtOnce = 32 / 8, kTurns = kBlockKV / kLoaders / kRowsAtOnce;
    const int lane = threadIdx.x % 32, first = warp * (kBlockKV / kLoaders) + lane / 8;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const bool lacks = boxes.lack();
    uint64 from[kTurns];
    bool is_needed[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int at = first + i * kRowsAtOnce;
      int page, row;
      boxes.find_row(at, page, row);
      is_needed[i] = page >= 0;
      const int64 slot = is_needed[i] ? static_cast<int64>(page) * p.page_size + row : 0;
      from[i] = reinterpret_cast<uint64>(static_cast<const Bits*>(p.key_data) + slot * kHeadDim) +
                lane % 8 * 16;
    }
    const uint32 left = ptx::shared_address(&shared.empty[stage][0]), right = left + 8;
    const bool is_free =
        ptx::barrier_test(left, parity ^ 1) && ptx::barrier_test(right, parity ^ 1);
    if (!__all_sync(0xffffffffu, is_free)) {
      tell_of_last();  // what it waits for may wait for that block
      ptx::barrier_wait(left, parity ^ 1);
      ptx::barrier_wait(right, parity ^ 1);
      __syncwarp();
    }
    if (warp == 0 && lane == 0) shared.spoiled[stage] = lacks;
    if constexpr (kTakesPlaces) {
      const uint32 unread = boxes.unread(warp);
      if (lane == 0) shared.unread[stage][warp] = static_cast<unsigned short>(unread);
    }
#pragma unroll 1
    for (int box = 0; box < kKeyBoxes; ++box) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int at = first + i * kRowsAtOnce;
        ptx::copy_async_past_l1(chunk_address<kBlockKV>(keys + box * kBoxBytes, at, lane % 8),
                                from[i] + box * kBoxRowBytes, is_needed[i]);
      }
    }
    ptx::copy_async_commit();
    if (is_coming) {
      ptx::copy_async_wait_but<1>();
      tell(blocks - 1);
    }
    is_coming = true;
  }
  __device__ __forceinline__ void tell_of_last() {
    if (!is_coming) return;
    ptx::copy_async_wait();
    tell(blocks - 1);
    is_coming = false;
  }
  // This warp's rows of a block are there.
  __device__ __forceinline__ void tell(uint32 number) const {
    const int lane = threadIdx.x % 32;
    ptx::fence_async_proxy();
    __syncwarp();
    const uint32 full = ptx::shared_address(shared.full[stage_of_block(number)]);
    if (lane < kKeyBoxes) ptx::barrier_arrive(full + 8 * lane);
  }

  // All blocks of a unit.
  __device__ __forceinline__ void load_packed(const Unit& unit, const Range& range) {
    constexpr int kSteps = PackedSteps::kSteps, kTurns = PackedSteps::kTurns;
    PackedSteps steps(p, unit, shared, warp);
    int block = ptx::uniform(range.begin);
    const int end = ptx::uniform(range.end);
    int slots = steps.slot(steps.find(block), block);
    int next = steps.slot(steps.find(block + 1), block + 1);
    PackedSteps::Found found = steps.find(block + 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) steps.load(slots, 0, 0, step, true);
    steps.load_scales(slots, steps.scales);
    steps.prefetch(next, true);
    load_queries(unit);
    // No register is left to count them.
    const uint32 counted = ptx::shared_address(shared.counted + warp);
    if (ptx::fresh_lane() == 0) {
      ptx::store_shared(counted, blocks - block);
      ptx::store_shared(counted + 4, units);
    }
    ptx::copy_async_wait_but<kSteps - 1>();
    __syncwarp();
    uint4 now = steps.take(0);
#pragma unroll 1
    for (; block < end; ++block) {
      float scales[2];
      steps.load_scales(next, scales);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const uint32 number = ptx::load_shared(counted) + block, stage = stage_of_block(number);
        const uint32 keys =
            ptx::shared_address(shared.keys[0]) + stage * kKeyBytes + half * kHalfBoxes * kBoxBytes;
        ptx::barrier_wait(ptx::shared_address(&shared.empty[0][0]) + 8 * (2 * stage + half),
                          parity_of_block(number) ^ 1);
        __syncwarp();
        if (half == 0) {
          const bool lacks = __any_sync(0xffffffffu, slots == kNone);
          if (ptx::fresh_lane() == 0) {
            reinterpret_cast<unsigned char*>(&shared.spoiled[stage])[warp] = lacks;
          }
        } else {
          steps.copy_plain(slots, keys + kHalfBoxes * kBoxBytes);
          steps.prefetch(steps.slot(found, block + 2), block + 2 < end);
        }
        const float own = half == 0 ? steps.scales[0] : steps.scales[1];
        const bool asks = half == 0 || block + 1 < end;
        const int coming = half == 0 ? slots : next;
        if (__all_sync(0xffffffffu, (split_scale(own) & 0xffffu) == 0)) {
          convert<true>(steps, own, now, slots, coming, half, asks, keys);
        } else {
          convert<false>(steps, own, now, slots, coming, half, asks, keys);
        }
        if (!steps.is_right(own)) steps.store_slowly(slots, half, keys);
        ptx::fence_async_proxy();
        __syncwarp();
        const int lane = ptx::fresh_lane(), boxes = half == 0 ? kHalfBoxes : kKeyBoxes - kHalfBoxes;
        const uint32 full =
            ptx::shared_address(&shared.full[0][0]) + 8 * (stage * kKeyBoxes + half * kHalfBoxes);
        if (lane < boxes) ptx::barrier_arrive(full + 8 * lane);
      }
      slots = next;
      next = steps.slot(found, block + 2);
      found = steps.find(block + 3);
      steps.scales[0] = scales[0];
      steps.scales[1] = scales[1];
    }
    blocks = ptx::load_shared(counted) + end;
    units = ptx::load_shared(counted + 4);
    __syncwarp();
    ptx::copy_async_wait();
  }

  // A half of a block, whose first step is `now`; `coming` are the rows behind its first turn.
  template <bool kOne>
  __device__ __forceinline__ void convert(PackedSteps& steps, float own, uint4& now, int slots,
                                          int coming, int half, bool asks, uint32 keys) const {
    constexpr int kSteps = PackedSteps::kSteps, kTurns = PackedSteps::kTurns;
    const uint32 scale = split_scale(own);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const bool is_last = turn + 1 == kTurns;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::copy_async_wait_but<kSteps - 2>();
        __syncwarp();
        const uint4 next_step = steps.take((step + 1) % kSteps);
        steps.load(is_last ? coming : slots, is_last ? half ^ 1 : half, (turn + 1) % kTurns, step,
                   !is_last || asks);
        steps.store<kOne>(turn, step, now, steps.spread(scale, turn, step), keys);
        now = next_step;
      }
    }
  }

  // A lane's pieces of a box. Keys leave L2 first, also where CTAs of other query rows read them: 6
  // to 11 % faster, presumably as they do not evict the kernel's instructions (cuda/decode.md).
  __device__ __forceinline__ void fetch(uint32 to, uint32 full, int box, const Boxes& boxes) const {
    boxes.each([&](int piece, int page, int row) {
      ptx::tma_load(to + piece * kBoxRows * kBoxRowBytes, &p.key, full, ptx::kEvictFirst,
                    box * kBoxColumns, 0, row, page);
    });
  }
};

}  // namespace decode
