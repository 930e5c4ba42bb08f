// Decoding: what a CTA does. One warp feeds blocks of keys and values to four that multiply by
// mma.sync: a block meets few rows, and memory is what all wait for. decode_schedule.cuh tells
// which CTA has which blocks, and an architecture's `Loader` how they come.
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16            element type: bfloat16, else float16
//   bool kFloat32             or float32, by cp.async alone
//   int kParts                bfloat16 that a float32 is split into, 2 or 3; else 1
//   int kHeadDim, kValueDim   exact sizes; for TMA multiples of 8
//   bool kValuesInKeys        the values are the first kValueDim features of the keys
//   int kHeads                kv heads of a CTA, a divisor of all
//   int kRowTiles             16 query rows each, of a kv head; kHeads * kRowTiles: 1, 2 or 4
//   int kBlockKV              positions of a block, a multiple of 64 / (kHeads * kRowTiles), or of
//                             half as many in float32
//   int kStages               blocks in flight
//   int kResident             CTAs of a multiprocessor
//   int kCluster              CTAs that share a unit in a cluster (sm_90); 1: parts of the line
//   bool kPaged               there is a page table
//   int kBoxRows              positions that lie in one page for sure, a divisor of kBlockKV
//   bool kAppends             there are new keys and values
//   bool kRotates             queries and new keys are rotated here
//   bool kOverlaps            flash_decode_merge starts before flash_decode ends (sm_90)
//   bool kWindowLeft, kHasSinks, kSoftcap   as for the forward; other terms are off
#pragma once

#include "decode_attend.cuh"
#include "decode_pieces.cuh"
#include "ptx_barriers.cuh"
#include "ring.cuh"

namespace decode {

inline constexpr int kThreads = 32 * (kWarps + 1);

template <bool kIsFloat32>
struct SharedOf {
  unsigned char stages[kStages][kStageBytes];  // at multiples of 1024 bytes
  unsigned char queries[kQueryPlane];
  Sums sums;
  Exchange exchange;  // only with kSplitsColumns in use
  Barrier full[kStages], empty[kStages];
  int spoiled[kStages];
};
// Sums take the place of the queries, which are wide in parts.
template <>
struct SharedOf<true> {
  unsigned char stages[kStages][kStageBytes];
  union {
    unsigned char queries[kParts * kQueryPlane];
    Sums sums;
    Exchange exchange;
  };
  Barrier full[kStages], empty[kStages];
  int spoiled[kStages];
};
using Shared = SharedOf<kFloat32>;

// The four warps that compute.
template <class Loader>
struct Consumer {
  const DecodeParams& p;
  const Share& share;
  Shared& shared;
  Ring<kStages> ring{};

  template <class AnyLine>
  __device__ __forceinline__ void run(const AnyLine& line, int warp) {
    line.walk(share, [&](const Unit& unit, const Range& blocks) {
      if constexpr (kFloat32) meet();  // all have read the sums of the unit before
      load_queries(unit);
      meet();
      Attend attend{p,
                    unit,
                    share,
                    ptx::shared_address(shared.queries),
                    &shared.exchange,
                    warp / kKeyParts,
                    warp % kKeyParts};
      attend.start();
      for (int block = blocks.begin; block < blocks.end; ++block) add(attend, block);
      if (kCluster > 1 && is_refused(p, unit.length)) attend.spoil();
      if constexpr (kFloat32) meet();  // and its queries
      attend.leave(shared.sums);
      if constexpr (kCluster > 1) {
        write_together(p, unit, share, shared.sums, threadIdx.x);
      } else {
        const bool is_whole = blocks.begin == unit.blocks.begin && blocks.end == unit.blocks.end;
        const int at = unit.start + blocks.begin - unit.blocks.begin;
        write(p, unit, share, shared.sums, threadIdx.x, is_whole, at == line.begin_of(share.part));
      }
    });
  }

  __device__ __forceinline__ void load_queries(const Unit& unit) {
    constexpr int kChunks = ceil_div(kHeadDim, kBoxColumns) * 8;
    constexpr int kHalf = kRotates ? kHeadDim / 16 : 0;  // chunks whose pairs are as many further
    const uint32 tile = ptx::shared_address(shared.queries);
    for (int i = threadIdx.x; i < kShareRows * kChunks; i += 32 * kWarps) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (chunk >= kHalf && chunk < 2 * kHalf) continue;
      const Place place(p, share, row);
      const bool exists = place.exists(p);
      const RowPieces<kHeadDim> query(
          p.query, ((static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads +
                    place.head) *
                       RowPieces<kHeadDim>::kStride);
      const auto load = [&](int at) {
        return exists && at * 8 < kHeadDim ? query.load(at) : Piece{};
      };
      const auto store = [&](int at, const Piece& piece) {
        store_parts<kQueryPlane>(chunk_address<kShareRows>(tile, row, at), piece);
      };
      Piece piece = load(chunk);
      if (chunk < kHalf) {
        Piece other = load(chunk + kHalf);
        rotary::turn<Element>(p.frequencies, chunk, unit.length - p.query_len + place.query, piece,
                              other);
        store(chunk + kHalf, other);
      }
      store(chunk, piece);
    }
  }

  __device__ __forceinline__ void add(Attend& attend, int block) {
    const uint32 full = ptx::shared_address(shared.full) + ring.barrier_offset();
    const uint32 empty = ptx::shared_address(shared.empty) + ring.barrier_offset();
    const uint32 stage = ptx::shared_address(shared.stages[ring.stage()]);
    const int head = attend.tile / kRowTiles;
    const uint32 keys = stage + head * kKeyBytes;
    const uint32 values = kValuesInKeys ? keys : stage + kHeads * kKeyBytes + head * kValueBytes;
    Loader::wait(full, ring.parity());
    if (shared.spoiled[ring.stage()]) attend.spoil();
    if constexpr (kAppends) patch(attend, keys, values, block);
    attend.add_block(keys, values, block * kBlockKV);
    __syncwarp();
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::lane_arrive(empty);
    ring.advance();
  }

  // New keys and values in the places of what the cache had there. flash_decode_merge writes them
  // to the cache, or in a cluster, where no other CTA reads them, this. Warps of other rows write
  // the same.
  __device__ __forceinline__ void patch(const Attend& attend, uint32 keys, uint32 values,
                                        int block) {
    const int first = block * kBlockKV + attend.part * kPartKeys;
    const int begin = max(attend.unit.length - p.query_len, max(first, 0));
    const int end = min(attend.unit.length, first + kPartKeys);
    if (begin >= end) return;
    const int first_new = attend.unit.length - p.query_len;
    const int kv_head = share.kv_head + attend.tile / kRowTiles;
    for (int position = begin; position < end; ++position) {
      const int64 row =
          (static_cast<int64>(attend.unit.batch) * p.query_len + position - first_new) *
              p.kv_heads +
          kv_head;
      const int slot = position - block * kBlockKV;
      const int batch = attend.unit.batch;
      copy_new<kHeadDim, kRotates>(p.new_key, row, keys, slot, position, p.key_cache,
                                   place_of<kHeadDim>(p, batch, position, kv_head));
      if constexpr (!kValuesInKeys) {
        copy_new<kValueDim, false>(p.new_value, row, values, slot, 0, p.value_cache,
                                   place_of<kValueDim>(p, batch, position, kv_head));
      }
    }
    Loader::fence_writes();  // before it writes here again
    __syncwarp();
  }
  template <int kDim, bool kTurns>
  __device__ __forceinline__ void copy_new(const void* from, int64 row, uint32 tile, int slot,
                                           int position, void* cache, int64 place) {
    for_pieces<kDim, kTurns>(p, RowPieces<kDim>(from, row * RowPieces<kDim>::kStride), position,
                             threadIdx.x % 32, 32, [&](int i, const Piece& piece) {
                               if (kCluster > 1 && place >= 0) {
                                 RowPieces<kDim>(cache, place).store(i, piece);
                               }
                               store_in_tile(tile, slot, i, piece);
                             });
  }
};

template <class Loader>
__device__ __forceinline__ void attend(const DecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = ptx::warp_index();
  if (threadIdx.x == 0) {
    Loader::begin(p);
    for (int stage = 0; stage < kStages; ++stage) {
      Loader::init_full(ptx::shared_address(&shared.full[stage]));
      ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), kWarps);
    }
    Loader::fence_barriers();
  }
  __syncthreads();
  const OwnLine line(p);
  const Share share(p);
  if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
  if (warp == kWarps) {
    Loader loader{p,
                  share,
                  ptx::shared_address(shared.stages),
                  ptx::shared_address(shared.full),
                  ptx::shared_address(shared.empty),
                  shared.spoiled};
    loader.run(line);
  } else {
    Consumer<Loader> consumer{p, share, shared};
    consumer.run(line, warp);
  }
}

}  // namespace decode
