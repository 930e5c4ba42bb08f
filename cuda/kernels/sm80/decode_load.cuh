// Decoding since Ampere: the warp that feeds blocks of keys and values by cp.async, from a
// contiguous cache or from pages.
#pragma once

#include "decode_pieces.cuh"
#include "ring.cuh"
#include "sm80/ptx_sm80.cuh"

namespace decode {

struct Loader {
  const DecodeParams& p;
  const Share& share;
  uint32 stages, full, empty;  // tiles, and barriers side by side
  int* spoiled;                // of each stage: a page that is needed is none
  Ring<kStages> ring{};

  static __device__ __forceinline__ void begin(const DecodeParams&) {}
  // 32 lanes when their copies are there, and the one that says whether a page is none.
  static __device__ __forceinline__ void init_full(uint32 barrier) {
    ptx::barrier_init_lanes(barrier, 33);
  }
  static __device__ __forceinline__ void fence_barriers() {}
  static __device__ __forceinline__ void wait(uint32 barrier, uint32 parity) {
    ptx::barrier_poll(barrier, parity);
  }
  static __device__ __forceinline__ void fence_writes() {}

  template <class AnyLine>
  __device__ __forceinline__ void run(const AnyLine& line) {
    for_blocks(p, line, share, [&](int block, const Pages& pages) { load(block, pages); });
    ptx::copy_async_wait();
  }

  __device__ __forceinline__ void load(int block, const Pages& pages) {
    const bool lacks = pages.lack();
    const uint32 here = full + ring.barrier_offset();
    ptx::barrier_poll(empty + ring.barrier_offset(), ring.parity() ^ 1);
    // A stage may be filled and free again before a lane that is behind has seen it free.
    __syncwarp();
    const uint32 keys = stages + ring.stage() * kStageBytes;
    fetch<kHeadDim>(keys, p.key_data, block, pages);
    if constexpr (!kValuesInKeys) {
      fetch<kValueDim>(keys + kHeads * kKeyBytes, p.value_data, block, pages);
    }
    if constexpr (kInPieces) {
      ptx::lane_arrive(here);
    } else {
      ptx::copies_arrive(here);
    }
    if (threadIdx.x % 32 == 0) {
      spoiled[ring.stage()] = lacks;
      ptx::lane_arrive(here);
    }
    ring.advance();
  }

  // Every other row of an odd dim in 16 bits starts in the middle of 4 bytes, the least that
  // cp.async copies: such rows come through registers.
  static constexpr bool kInPieces = kElementBytes == 2 && (kHeadDim % 2 != 0 || kValueDim % 2 != 0);
  // Bytes that a lane copies at a time, by the alignment of rows.
  template <int kDim>
  static constexpr int kWord = kInPieces  ? 16
                               : kFloat32 ? kFloatRowAlignment<kDim>
                                          : kRowAlignment<kDim>;

  // Neighbours have what lies beside it: of a row, of the heads of a position, of the next
  // position.
  template <int kDim>
  __device__ __forceinline__ void fetch(uint32 to, const void* array, int block,
                                        const Pages& pages) const {
    constexpr int kWords =
        kBoxes<kDim> * (kBoxRowBytes / kWord<kDim>);  // of a row, zeros behind its end
    constexpr int kOfRow = ceil_div(kDim * kElementBytes, kWord<kDim>);
    constexpr int kRows = kPiecesOfRound * kBoxRows;
    const auto* const data = static_cast<const typename Word<kWord<kDim>>::Type*>(array);
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int own = block * kBlockKV + (i * 32 + threadIdx.x % 32) * kBoxRows;
      const int own_slot = kPaged ? own % p.page_size : own;
#pragma unroll 2
      for (int first = 0; first < kRows * kHeads * kWords; first += 32) {
        const int item = first + threadIdx.x % 32;
        const int word = item % kWords, head = item / kWords % kHeads;
        const int of_round = item / (kWords * kHeads), piece = of_round / kBoxRows;
        const int page = __shfl_sync(0xffffffffu, pages.of[i], piece);
        const int slot = __shfl_sync(0xffffffffu, own_slot, piece) + of_round % kBoxRows;
        if (page < 0) continue;
        const int row = i * 32 * kBoxRows + of_round;
        const int64 at =
            (static_cast<int64>(page) * p.page_size + slot) * p.kv_heads + share.kv_head + head;
        const bool exists = word < kOfRow && slot < p.page_size;  // a cache ends within a block
        const uint32 target =
            chunk_address<kBlockKV>(to + head * kTileBytes<kDim>, row, word * kWord<kDim> / 16) +
            word * kWord<kDim> % 16;
        if constexpr (kInPieces) {
          const uint16* from = static_cast<const uint16*>(array) + at * kDim;
          const uint4 piece = exists ? load_piece<kDim>(from, 8 * word) : uint4{};
          ptx::store_shared_x4(target, piece.x, piece.y, piece.z, piece.w);
        } else {
          const auto* from = data + (exists ? at * kOfRow + word : 0);
          if constexpr (kWord<kDim> == 16) {
            ptx::copy_async_once(target, reinterpret_cast<uint64>(from), exists);
          } else {
            ptx::copy_async<kWord<kDim>>(target, reinterpret_cast<uint64>(from), exists);
          }
        }
      }
    }
  }
};

}  // namespace decode
