// Latent decoding: the warp that loads queries and blocks of keys by TMA, box by box.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

struct LatentLoader {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  uint32 blocks = 0, units = 0;  // that were loaded

  __device__ __forceinline__ void run(const Line& line) {
    line.walk(share, [&](const Unit& unit, const Range& range) {
      load_queries(unit);
      Pages pages(p, unit, range.begin);
      for (int block = range.begin; block < range.end; ++block) {
        load(block, pages);
        ++blocks;
        // Ahead of the wait for a free stage.
        if (block + 1 < range.end) pages = Pages(p, unit, block + 1);
      }
    });
  }

  __device__ __forceinline__ void load_queries(const Unit& unit) {
    if (threadIdx.x % 32 == 0) {
      const uint32 full = ptx::shared_address(&shared.queries_full);
      ptx::barrier_wait(ptx::shared_address(&shared.queries_empty), units % 2 ^ 1);
      ptx::barrier_arrive_expect(full, kKeyBytes);
#pragma unroll 1
      for (int box = 0; box < kKeyBoxes; ++box) {
        ptx::tma_load(ptx::shared_address(shared.queries) + box * kBoxBytes, &p.query_rows, full,
                      ptx::kEvictNormal, box * kBoxColumns, 0, share.first_row(), unit.batch);
      }
    }
    __syncwarp();
    ++units;
  }

  __device__ __forceinline__ void load(int block, const Pages& pages) {
    const int lane = threadIdx.x % 32;
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 keys = ptx::shared_address(shared.keys[stage]);
    const int count = kPieces == 1 ? pages.of[0] >= 0 : pages.count();
    const bool lacks = kPieces == 1 ? pages.of[0] == kNone : pages.lack();
    if (kPieces == 1 && lane != 0) return;  // a block in one page: one lane asks for it
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      ptx::barrier_wait(ptx::shared_address(&shared.empty[stage][half]), parity ^ 1);
      if constexpr (kPieces > 1) __syncwarp();  // all have seen it free before it may be full
      if (half == 0 && lane == 0) shared.spoiled[stage] = lacks;
      const int end = half == 0 ? kHalfBoxes : kKeyBoxes;
#pragma unroll 1
      for (int box = half * kHalfBoxes; box < end; ++box) {
        const uint32 full = ptx::shared_address(&shared.full[stage][box]);
        if (lane == 0) ptx::barrier_arrive_expect(full, count * (kBoxBytes / kPieces));
        if constexpr (kPieces > 1) __syncwarp();
        fetch(keys + box * kBoxBytes, full, block, box, pages);
      }
    }
    if constexpr (kPieces > 1) __syncwarp();
  }

  // A lane's pieces of a box.
  __device__ __forceinline__ void fetch(uint32 to, uint32 full, int block, int box,
                                        const Pages& pages) const {
    const uint64 policy =
        kKeysLeaveFirst || p.row_groups == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      if (pages.of[i] < 0) continue;
      const int piece = i * 32 + (kPieces == 1 ? 0 : threadIdx.x % 32);
      const int row = block * kBlockKV + piece * kBoxRows;
      ptx::tma_load(to + piece * kBoxRows * kBoxRowBytes, &p.key, full, policy, box * kBoxColumns,
                    0, kPaged ? row % p.page_size : row, pages.of[i]);
    }
  }
};

}  // namespace decode
