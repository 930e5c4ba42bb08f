// Decoding on Hopper: the warp that feeds blocks of keys and values by TMA, from a contiguous cache
// or from pages.
#pragma once

#include "decode_pieces.cuh"
#include "ring.cuh"
#include "sm90/ptx_sm90.cuh"

namespace decode {

struct Loader {
  const DecodeParams& p;
  const Share& share;
  uint32 stages, full, empty;  // tiles, and barriers side by side
  Note* notes;                 // of each stage
  Ring<kStages> ring{};

  static __device__ __forceinline__ void begin(const DecodeParams& p) {
    if (p.pages == 0 || p.page_size == 0) return;
    ptx::prefetch_tensor_map(&p.key);
    if constexpr (!kValuesInKeys) ptx::prefetch_tensor_map(&p.value);
  }
  static __device__ __forceinline__ void init_full(uint32 barrier) {
    ptx::barrier_init(barrier, 1);
  }
  // A barrier at which so many bytes come, once.
  static __device__ __forceinline__ void expect(uint32 barrier, uint32 bytes) {
    ptx::barrier_init(barrier, 1);
    ptx::barrier_arrive_expect(barrier, bytes);
  }
  static __device__ __forceinline__ void fence_barriers() { ptx::barrier_init_fence(); }
  static __device__ __forceinline__ void wait(uint32 barrier, uint32 parity) {
    ptx::barrier_wait(barrier, parity);
  }
  // Ahead of loads to where this thread wrote.
  static __device__ __forceinline__ void fence_writes() { ptx::fence_async_proxy(); }

  template <class AnyLine>
  __device__ __forceinline__ void run(const AnyLine& line) {
    for_blocks(p, line, share, [&](int block, const Pages& pages) { load(block, pages); });
  }

  __device__ __forceinline__ void load(int block, const Pages& pages) {
    if constexpr (kPieces == 1) {
      load_whole(block, pages);
    } else {
      load_pieces(block, pages);
    }
    ring.advance();
  }

  // A block in one page: one lane asks for it, which takes a third of the time.
  __device__ __forceinline__ void load_whole(int block, const Pages& pages) const {
    const int page = pages.of[0];
    const PieceScales<kScalesOfPages> scales(p, share, pages);
    if constexpr (!kScalesOfPages) {
      if (threadIdx.x % 32 != 0) return;
    }
    const uint32 here = full + ring.barrier_offset();
    ptx::barrier_wait(empty + ring.barrier_offset(), ring.parity() ^ 1);
    const bool is_first = threadIdx.x % 32 == 0;
    const uint32 bytes = page >= 0 ? kStageBytes : 0;
    if (is_first) notes[ring.stage()].spoiled = page == kNone;
    if constexpr (kScalesOfPages) {
      __syncwarp();
      scales.store(notes[ring.stage()]);
      ptx::warp_arrive_expect(here, bytes);
    } else {
      ptx::barrier_arrive_expect(here, bytes);
    }
    if (page < 0 || !is_first) return;
    const uint32 keys = stages + ring.stage() * kStageBytes;
    fetch_whole<kHeadDim>(keys, p.key, here, block, page);
    if constexpr (!kValuesInKeys) {
      fetch_whole<kValueDim>(keys + kHeads * kKeyBytes, p.value, here, block, page);
    }
  }
  template <int kDim>
  __device__ __forceinline__ void fetch_whole(uint32 to, const TensorMap& map, uint32 barrier,
                                              int block, int page) const {
    const int row = block * kBlockKV;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int box = 0; box < kBoxes<kDim>; ++box) {
        ptx::tma_load(to + head * kTileBytes<kDim> + box * kBlockKV * kBoxRowBytes, &map, barrier,
                      policy(), box * kCacheColumns, share.kv_head + head,
                      kPaged ? row % p.page_size : row, page);
      }
    }
  }

  __device__ __forceinline__ void load_pieces(int block, const Pages& pages) const {
    const int lane = threadIdx.x % 32;
    const int count = pages.count();
    const bool lacks = pages.lack();
    const PieceScales<kScalesOfPages> scales(p, share, pages);
    const uint32 here = full + ring.barrier_offset();
    ptx::barrier_wait(empty + ring.barrier_offset(), ring.parity() ^ 1);
    // Without a page nothing has to come: the stage may be filled and free again before a lane that
    // is behind has seen it free.
    __syncwarp();
    scales.store(notes[ring.stage()]);
    if (lane == 0) notes[ring.stage()].spoiled = lacks;
    ptx::warp_arrive_expect(here, count * (kStageBytes / kPieces));
    __syncwarp();
    const uint32 keys = stages + ring.stage() * kStageBytes;
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      fetch<kHeadDim>(keys, p.key, here, block, i, pages.of[i]);
      if constexpr (!kValuesInKeys) {
        fetch<kValueDim>(keys + kHeads * kKeyBytes, p.value, here, block, i, pages.of[i]);
      }
    }
  }

  // What is read once leaves L2 first.
  __device__ __forceinline__ uint64 policy() const {
    return p.row_groups > 1 ? ptx::kEvictNormal : ptx::kEvictFirst;
  }

  // Round i of pieces. A lane has one box, of kBoxRows positions and 128 bytes of a head; boxes of
  // the same positions, which lie side by side in memory, are those of neighbours.
  template <int kDim>
  __device__ __forceinline__ void fetch(uint32 to, const TensorMap& map, uint32 barrier, int block,
                                        int i, int own_page) const {
    constexpr int kColumns = kBoxes<kDim>;
#pragma unroll
    for (int first = 0; first < kPiecesOfRound * kHeads * kColumns; first += 32) {
      const int item = first + threadIdx.x % 32;
      const int box = item % kColumns, head = item / kColumns % kHeads;
      const int of_round = item / (kColumns * kHeads), piece = i * 32 + of_round;
      const int page = __shfl_sync(0xffffffffu, own_page, of_round);
      if (of_round >= kPiecesOfRound || page < 0) continue;
      const int row = block * kBlockKV + piece * kBoxRows;
      ptx::tma_load(
          to + head * kTileBytes<kDim> + (box * kBlockKV + piece * kBoxRows) * kBoxRowBytes, &map,
          barrier, policy(), box * kCacheColumns, share.kv_head + head,
          kPaged ? row % p.page_size : row, page);
    }
  }
};

}  // namespace decode
