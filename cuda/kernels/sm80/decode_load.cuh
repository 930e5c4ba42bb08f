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
  Note* notes;                 // of each stage
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
    const PieceScales<kScalesOfPages> scales(p, share, pages);
    const uint32 here = full + ring.barrier_offset();
    ptx::barrier_poll(empty + ring.barrier_offset(), ring.parity() ^ 1);
    // A stage may be filled and free again before a lane that is behind has seen it free.
    __syncwarp();
    scales.store(notes[ring.stage()]);
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
      notes[ring.stage()].spoiled = lacks;
      ptx::lane_arrive(here);
    }
    ring.advance();
  }

  // Every other row of an odd dim in 16 bits starts in the middle of 4 bytes, the least that
  // cp.async copies: such rows come through registers.
  static constexpr bool kInPieces = kElementBytes == 2 && (kHeadDim % 2 != 0 || kValueDim % 2 != 0);
  // Bytes that a lane copies at a time, by the alignment of rows.
  template <int kDim>
  static constexpr int kWord = kInPieces    ? 16
                               : kQuantized ? (kDim % 16 == 0 ? 16 : 8)
                               : kFloat32   ? kFloatRowAlignment<kDim>
                                            : kRowAlignment<kDim>;

  // Lanes have the words of a position side by side, of its heads one after the other, and of as
  // many positions as there are lanes for. What takes instructions, a lane finds once for kRun
  // positions, which lie in one page: one warp copies what all of a multiprocessor read.
  template <int kDim>
  __device__ __forceinline__ void fetch(uint32 to, const void* array, int block,
                                        const Pages& pages) const {
    constexpr int kBytes = kWord<kDim>;
    constexpr int kWords = kBoxes<kDim> * (kBoxRowBytes / kBytes);  // zeros behind a row's end
    constexpr int kOfRow = ceil_div(kDim * kElementBytes, kBytes);
    constexpr int kColumns = kWords * kHeads;
    constexpr int kAtOnce = kColumns < 32 ? 32 / kColumns : 1;
    constexpr int kRun = kBoxRows > kAtOnce ? kBoxRows : kAtOnce;
    constexpr int kRunsOfRound = kPiecesOfRound * kBoxRows / kRun;
    static_assert(kBlockKV % kRun == 0 && kRunsOfRound > 0);
    const int lane = threadIdx.x % 32;
    const int64 pitch = static_cast<int64>(p.kv_heads) * kDim * kElementBytes;  // of a position
#pragma unroll
    for (int first = 0; first < kColumns; first += 32) {
      const int column = first + (kColumns < 32 ? lane % kColumns : lane);
      const int own_row = kColumns < 32 ? lane / kColumns : 0;
      const int head = column / kWords, word = column % kWords, chunk = word * kBytes / 16;
      const uint32 tile =
          to + head * kTileBytes<kDim> + chunk / 8 * kBlockKV * kBoxRowBytes + word * kBytes % 16;
      const int of_piece = own_row % kBoxRows;
      const uint64 data = reinterpret_cast<uint64>(array) + of_piece * pitch +
                          (share.kv_head + head) * (kDim * kElementBytes) + word * kBytes;
#pragma unroll
      for (int i = 0; i < kPiecesOfLane; ++i) {
        const int slot = own_slot(block, i);
        const uint64 own_offset = (static_cast<int64>(pages.of[i]) * p.page_size + slot) * pitch;
        const int own_count = pages.of[i] < 0 ? 0 : p.page_size - slot;
#pragma unroll 2
        for (int run = 0; run < kRunsOfRound; ++run) {
          const int of_round = run * kRun + own_row, piece = of_round / kBoxRows % 32;
          uint64 from = data + shuffle(own_offset, piece);
          int count = __shfl_sync(0xffffffffu, own_count, piece);
          if (count <= 0 || column >= kColumns || own_row >= kAtOnce) continue;
          const int row = i * 32 * kBoxRows + of_round;
          count = word < kOfRow ? count - of_piece : 0;  // a cache ends within a block
#pragma unroll 1
          for (int eight = 0; eight < kRun; eight += 8) {
#pragma unroll
            for (int j = 0; j < kRun && j < 8; j += kAtOnce) {
              // row and j have no bit in common.
              const uint32 swizzle = swizzled(static_cast<uint32>(chunk % 8 ^ j), row);
              copy<kDim>(tile + (row + eight) * kBoxRowBytes + swizzle + j * kBoxRowBytes, from,
                         word, eight + j < count);
              from += kAtOnce * pitch;
            }
          }
        }
      }
    }
  }

  // Where piece 32 * i of a block, and the lane's further on, begins in its page.
  __device__ __forceinline__ int own_slot(int block, int i) const {
    const int first = block * kBlockKV + (i * 32 + threadIdx.x % 32) * kBoxRows;
    return kPaged ? first % p.page_size : first;
  }
  static __device__ __forceinline__ uint64 shuffle(uint64 value, int lane) {
    const uint32 low = __shfl_sync(0xffffffffu, static_cast<uint32>(value), lane);
    const uint32 high = __shfl_sync(0xffffffffu, static_cast<uint32>(value >> 32), lane);
    return static_cast<uint64>(high) << 32 | low;
  }

  // A word of a row, or zeros.
  template <int kDim>
  static __device__ __forceinline__ void copy(uint32 target, uint64 from, int word, bool exists) {
    if constexpr (kInPieces) {
      const auto* const row = reinterpret_cast<const uint16*>(from) - 8 * word;
      const uint4 piece = exists ? load_piece<kDim>(row, 8 * word) : uint4{};
      ptx::store_shared_x4(target, piece.x, piece.y, piece.z, piece.w);
    } else if constexpr (kWord<kDim> == 16) {
      ptx::copy_async_past_l1(target, from, exists);
    } else {
      ptx::copy_async<kWord<kDim>>(target, from, exists);
    }
  }
};

}  // namespace decode
