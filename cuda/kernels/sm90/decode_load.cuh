// Decoding on Hopper: the warp that feeds blocks of keys and values by TMA, from a contiguous cache
// or from pages.
#pragma once

#include "decode_schedule.cuh"
#include "sm90/key_blocks.cuh"
#include "sm90/ring.cuh"

namespace decode {

inline constexpr int kKeyBytes = kKeyBlockBytes<kHeadDim, kBlockKV>;  // of a head
inline constexpr int kValueBytes = kValuesInKeys ? 0 : kKeyBlockBytes<kValueDim, kBlockKV>;
inline constexpr int kStageBytes = kHeads * (kKeyBytes + kValueBytes);  // keys, then values
inline constexpr int kPieces = kBlockKV / kBoxRows;  // of a block: boxes of positions
inline constexpr int kPiecesOfLane = ceil_div(kPieces, 32);
static_assert(kBlockKV % kBoxRows == 0 && kBoxRows <= 256);

struct Loader {
  const DecodeParams& p;
  const Share& share;
  uint32 stages, full, empty;  // tiles, and barriers side by side
  int* spoiled;                // of each stage: a page that is needed is none
  Ring<kStages> ring{};

  // The pages of this lane's pieces of a block, or -1 for one that is not needed, -2 for none.
  struct Pages {
    int of[kPiecesOfLane];
  };
  __device__ __forceinline__ Pages find_pages(const Unit& unit, int block) const {
    const Range seen = positions_of(p, unit.length);
    Pages pages;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = i * 32 + threadIdx.x % 32;
      const int first = block * kBlockKV + piece * kBoxRows;
      pages.of[i] = -1;
      if (piece >= kPieces || first >= seen.end || first + kBoxRows <= seen.begin) continue;
      if constexpr (kPaged) {
        const int page =
            p.page_table[static_cast<int64>(unit.batch) * p.columns + first / p.page_size];
        pages.of[i] = page >= 0 && page < p.pages ? page : -2;
      } else {
        pages.of[i] = unit.batch;
      }
    }
    return pages;
  }

  __device__ __forceinline__ void run(const Line& line) {
    line.walk(share.part, [&](const Unit& unit, const Range& blocks) {
      Pages pages = find_pages(unit, blocks.begin);
      for (int block = blocks.begin; block < blocks.end; ++block) {
        load(unit, block, pages);
        // Ahead of the wait for a free stage.
        if (block + 1 < blocks.end) pages = find_pages(unit, block + 1);
      }
    });
  }

  __device__ __forceinline__ void load(const Unit& unit, int block, const Pages& pages) {
    const int lane = threadIdx.x % 32;
    int count = 0;
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      count += pages.of[i] >= 0 ? 1 : 0;
      lacks = lacks || pages.of[i] == -2;
    }
    count = __reduce_add_sync(0xffffffffu, count);
    lacks = __any_sync(0xffffffffu, lacks);
    const uint32 here = full + ring.barrier_offset();
    ptx::barrier_wait(empty + ring.barrier_offset(), ring.parity() ^ 1);
    // Without a page nothing has to come: the stage may be filled and free again before a lane that
    // is behind has seen it free.
    __syncwarp();
    if (lane == 0) {
      spoiled[ring.stage()] = lacks;
      ptx::barrier_arrive_expect(here, count * (kStageBytes / kPieces));
    }
    __syncwarp();
    const uint32 keys = stages + ring.stage() * kStageBytes;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      fetch<kHeadDim>(keys, kKeyBytes, p.key, here, block, i, pages.of[i]);
      if constexpr (!kValuesInKeys) {
        fetch<kValueDim>(keys + kHeads * kKeyBytes, kValueBytes, p.value, here, block, i,
                         pages.of[i]);
      }
    }
    ring.advance();
  }

  // Round i of pieces. A lane has one box, of kBoxRows positions and 64 columns of a head; boxes of
  // the same positions, which lie side by side in memory, are those of neighbours.
  template <int kDim>
  __device__ __forceinline__ void fetch(uint32 to, int head_bytes, const TensorMap& map,
                                        uint32 barrier, int block, int i, int own_page) const {
    constexpr int kColumns = ceil_div(kDim, kBoxColumns);
    constexpr int kRound = kPieces < 32 ? kPieces : 32;
    // What is read once leaves L2 first.
    const uint64 policy = p.row_groups > 1 ? ptx::kEvictNormal : ptx::kEvictFirst;
#pragma unroll
    for (int first = 0; first < kRound * kHeads * kColumns; first += 32) {
      const int item = first + threadIdx.x % 32;
      const int box = item % kColumns, head = item / kColumns % kHeads;
      const int of_round = item / (kColumns * kHeads), piece = i * 32 + of_round;
      const int page = __shfl_sync(0xffffffffu, own_page, of_round);
      if (of_round >= kRound || page < 0) continue;
      const int row = block * kBlockKV + piece * kBoxRows;
      ptx::tma_load(to + head * head_bytes + (box * kBlockKV + piece * kBoxRows) * kBoxRowBytes,
                    &map, barrier, policy, box * kBoxColumns, share.kv_head + head,
                    kPaged ? row % p.page_size : row, page);
    }
  }
};

}  // namespace decode
