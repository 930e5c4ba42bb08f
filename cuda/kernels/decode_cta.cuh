// Decoding: what a CTA does. One warp feeds blocks of keys and values to four that multiply by
// mma.sync: a block meets few rows, and memory is what all wait for. decode_schedule.cuh tells
// which CTA has which blocks, and an architecture's `Loader` how they come.
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16            element type: bfloat16, else float16
//   bool kFloat32             or float32, by cp.async alone
//   bool kJoins               sums lie where queries did: where these are wide, or CTAs are many
//   bool kQuantized           the cache has eight bits and scales: float8_e4m3fn if kFloat8, else
//                             int8; kScalesOfPages: those of pages differ
//   int kParts                bfloat16 that a float32 is split into, 2 or 3; else 1
//   int kHeadDim, kValueDim   exact sizes; for TMA multiples of 8
//   bool kValuesInKeys        the values are the first kValueDim features of the keys
//   int kHeads                kv heads of a CTA, a divisor of all
//   int kRowTiles             16 query rows each, of a kv head; kHeads * kRowTiles: 1, 2 or 4
//   int kBlockKV              positions of a block, a multiple of 64 / (kHeads * kRowTiles), or of
//                             half as many in float32
//   int kRowSteps             blocks that a batch row counts for beside its own, in the line
//   int kStages               blocks in flight
//   int kResident             CTAs of a multiprocessor
//   int kCluster              CTAs that share a unit in a cluster (sm_90); 1: parts of the line
//   bool kAsksAhead           the next batch row's length and queries come while one is walked
//   int kTeams                of four warps that take blocks in turn; 1 but in a cluster
//   bool kSplitsColumns       warps that share a block have a part of the values' columns each
//   int kScoreSums            sums of a warp's scores, to which products go in turn
//   bool kFiniteApart         of float32, finite values have products of their own
//   bool kPaged               there is a page table
//   int kBoxRows              positions that lie in one page for sure, a divisor of kBlockKV
//   bool kAppends             there are new keys and values
//   int kNewTokens            of a batch row, whose rows are prepared (decode_new_rows.cuh); else 0
//   bool kRotates             queries and new keys are rotated here
//   int kMergeThreads         threads of flash_decode_merge
//   bool kOverlaps            flash_decode_merge starts before flash_decode ends (sm_90)
//   bool kFollows             of sm90_latent alone: flash_decode starts before flash_chosen ends
//   bool kTakesPlaces         of sm90_latent alone is true: tables have places that are not read
//   bool kWindowLeft, kHasSinks, kSoftcap   as for the forward; other terms are off
#pragma once

#include "decode_attend.cuh"
#include "decode_cluster.cuh"
#include "decode_pieces.cuh"
#include "decode_queries.cuh"
#include "ptx_barriers.cuh"
#include "ring.cuh"

namespace decode {

inline constexpr int kThreads = 32 * (kWarps + 1);
inline constexpr int kBeginBarrier = 15;  // the last one: patch() counts from the first ones on

enum class Kind { kPlain, kJoined, kCluster };

template <Kind kKind>
struct SharedOf {
  unsigned char stages[kStages][kStageBytes];  // at multiples of 1024 bytes
  unsigned char queries[kQueryPlane];
  Sums sums;
  Exchange exchange;  // only with kSplitsColumns in use
  Barrier full[kStages], empty[kStages];
  Note notes[kStages];
};
// Sums take the place of the queries.
template <>
struct SharedOf<Kind::kJoined> {
  unsigned char stages[kStages][kStageBytes];
  union {
    unsigned char queries[kParts * kQueryPlane];
    Sums sums;
    Exchange exchange;
  };
  Barrier full[kStages], empty[kStages];
  Note notes[kStages];
};
// What warps find takes the place of the blocks, of which there are no more then.
template <>
struct SharedOf<Kind::kCluster> {
  union {
    unsigned char stages[kStages][kStageBytes];
    Found found;
  };
  unsigned char queries[kQueryPlane];
  Gathered gathered;
  Exchange exchange;
  Barrier full[kStages], empty[kStages];
  Note notes[kStages];
};
using Shared = SharedOf<kJoins ? Kind::kJoined : (kCluster > 1) ? Kind::kCluster : Kind::kPlain>;

// The warps that compute. `OwnShared` is Shared: kinds have other members.
template <class Loader, class OwnShared>
struct Consumer {
  const DecodeParams& p;
  const Share& share;
  OwnShared& shared;
  Ring<kStages> ring{};
  Queries queries;
  RowScales scales;
  PreparedRows<kNewTokens> new_rows;

  // What depends on no length, where the batch row is known without: it comes while lengths do.
  __device__ __forceinline__ void ask_first() {
    if constexpr (kCluster > 1) {
      if constexpr (kQuantized) scales = RowScales(p, share.batch, share.kv_head);
      queries.ask_first(p, share);
      new_rows.ask(p, share);
    }
  }

  template <class AnyLine>
  __device__ __forceinline__ void run(const AnyLine& line, int warp) {
    line.walk(share, [&](const Unit& unit, const Range& blocks) {
      if constexpr (kJoins) meet();  // all have read the sums of the unit before
      Attend attend{p,
                    unit,
                    share,
                    ptx::shared_address(shared.queries),
                    &shared.exchange,
                    warp % kTeamWarps / kKeyParts,
                    warp % kKeyParts};
      if constexpr (kQuantized) {
        const int kv_head = share.kv_head + attend.tile / kRowTiles;
        if constexpr (kCluster == 1) scales = RowScales(p, unit.batch, kv_head);
        attend.take_scales(scales);
      }
      queries.load(p, share, unit, ptx::shared_address(shared.queries), shared.exchange);
      new_rows.store(p, share, unit, blocks, scales, shared.exchange);
      meet();
      attend.start();
      const int team = warp / kTeamWarps;
      int next = 0;  // team
      for (int block = blocks.begin; block < blocks.end; ++block) {
        const bool is_own = kTeams == 1 || team == next;
        next = next + 1 == kTeams ? 0 : next + 1;
        if (is_own) {
          add(attend, block);
        } else {
          pass();
        }
      }
      if constexpr (kJoins) meet();  // and its queries
      if constexpr (kQuantized) attend.settle();
      if constexpr (kCluster > 1) {
        if (is_refused(p, unit.length)) attend.spoil();
        const ClusterMerge<Loader> merge(p, share, shared.gathered);
        meet();  // all have read the blocks
        attend.leave(shared.found, warp, merge.rows);
        ptx::cluster_wait();
        meet();
        const float factor = kQuantized && !kScalesOfPages ? scales.value : 1.0f;
        merge.write(unit, shared.found, factor, threadIdx.x);
      } else {
        attend.leave(shared.sums);
        const bool is_whole = blocks.begin == unit.blocks.begin && blocks.end == unit.blocks.end;
        const int at = unit.start + blocks.begin - unit.blocks.begin;
        const bool is_first = !is_whole && at == line.begin_of(share.part);
        write(p, unit, share, shared.sums, threadIdx.x, is_whole, is_first);
      }
    });
  }

  __device__ __forceinline__ void add(Attend& attend, int block) {
    const uint32 full = ptx::shared_address(shared.full) + ring.barrier_offset();
    const uint32 empty = ptx::shared_address(shared.empty) + ring.barrier_offset();
    const uint32 stage = ptx::shared_address(shared.stages[ring.stage()]);
    const int head = attend.tile / kRowTiles;
    const uint32 keys = stage + head * kKeyBytes;
    const uint32 values = kValuesInKeys ? keys : stage + kHeads * kKeyBytes + head * kValueBytes;
    const auto wait = [&] { Loader::wait(full, ring.parity()); };
    if constexpr (kAppends) {
      patch(attend, keys, values, block, wait);
    } else {
      wait();
    }
    const Note& note = shared.notes[ring.stage()];
    if (note.spoiled) attend.spoil();
    attend.add_block(keys, values, block * kBlockKV, note);
    give_back(empty);
  }

  // Another team's block. Boxes may come out of order: a team that did not see it come could take
  // it, by the parity, for the one behind it in the same stage.
  __device__ __forceinline__ void pass() {
    Loader::wait(ptx::shared_address(shared.full) + ring.barrier_offset(), ring.parity());
    give_back(ptx::shared_address(shared.empty) + ring.barrier_offset());
  }
  __device__ __forceinline__ void give_back(uint32 empty) {
    __syncwarp();
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::lane_arrive(empty);
    ring.advance();
  }

  // New keys and values in the places of what the cache had there, once wait() has it; they are
  // loaded before. One of the warps with these keys writes, the others have other rows.
  // flash_decode_merge writes them to the cache, or in a cluster, where no other CTA reads them,
  // this.
  template <class Wait>
  __device__ __forceinline__ void patch(const Attend& attend, uint32 keys, uint32 values, int block,
                                        Wait wait) {
    const Unit& unit = attend.unit;
    const int first = block * kBlockKV, first_of_part = first + attend.part * kPartKeys;
    const Range positions = {max(unit.length - p.query_len, max(first_of_part, 0)),
                             min(unit.length, first_of_part + kPartKeys)};
    if (positions.empty()) return wait();
    const int head = attend.tile / kRowTiles;
    if constexpr (kNewTokens > 0) {
      new_rows.place(p, share, unit, positions, first, keys, values, shared.exchange, wait);
      Loader::fence_writes();
    } else if (attend.tile % kRowTiles == 0) {
      write_new(unit, share.kv_head + head, positions, keys, values, first, wait);
      Loader::fence_writes();  // before it writes here again
    } else {
      wait();
    }
    __syncwarp();
    if constexpr (kRowTiles > 1) {
      const int team = ptx::warp_index() / kTeamWarps;
      const int id = 2 + (team * kHeads + head) * kKeyParts + attend.part;  // 1 is meet()'s
      ptx::named_barrier_sync(id, 32 * kRowTiles);
    }
  }
  template <class Wait>
  __device__ __forceinline__ void write_new(const Unit& unit, int kv_head, const Range& positions,
                                            uint32 keys, uint32 values, int first, Wait wait) {
    if constexpr (kFloat32) {  // whose wide heads leave no registers to load ahead
      wait();
      for (int position = positions.begin; position < positions.end; ++position) {
        const int query = position - (unit.length - p.query_len);
        const int64 row =
            (static_cast<int64>(unit.batch) * p.query_len + query) * p.kv_heads + kv_head;
        copy<kHeadDim, kRotates>(p.new_key, row, keys, position - first, position);
        if constexpr (!kValuesInKeys) {
          copy<kValueDim, false>(p.new_value, row, values, position - first, position);
        }
      }
    } else {
      const NewScales key_scales(p, p.key_scale, unit.batch, kv_head);
      NewRows<kHeadDim, kRotates> new_keys(p, p.new_key, unit, kv_head, positions);
      if constexpr (kValuesInKeys) {
        wait();
      } else {
        const NewScales value_scales(p, p.value_scale, unit.batch, kv_head);
        NewRows<kValueDim, false> new_values(p, p.new_value, unit, kv_head, positions);
        wait();
        replace<kValueDim>(new_values, unit, kv_head, values, first, p.value_cache, value_scales);
      }
      replace<kHeadDim>(new_keys, unit, kv_head, keys, first, p.key_cache, key_scales);
    }
  }
  template <int kDim, bool kTurns>
  __device__ __forceinline__ void copy(const void* from, int64 row, uint32 tile, int slot,
                                       int position) {
    for_pieces<kDim, kTurns>(
        p, RowPieces<kDim>(from, row * RowPieces<kDim>::kStride), position, threadIdx.x % 32, 32,
        [&](int i, const Piece& piece) { store_in_tile(tile, slot, i, piece); });
  }
  template <int kDim, class Rows>
  __device__ __forceinline__ void replace(Rows& rows, const Unit& unit, int kv_head, uint32 tile,
                                          int first, void* cache, const NewScales& scales) {
    rows.store([&](int position, int i, const Piece& new_piece) {
      const auto piece = cache_piece(new_piece, scales.at(position));
      store_in_tile(tile, position - first, i, piece);
      if constexpr (kCluster > 1) {
        const int64 place = place_of<kDim>(p, unit.batch, position, kv_head);
        if (place >= 0) CachePieces<kDim>(cache, place).store(i, piece);
      }
    });
  }
};

template <class Loader, class OwnShared = Shared>
__device__ __forceinline__ void attend(const DecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  OwnShared& shared = *reinterpret_cast<OwnShared*>(dynamic_shared);
  const int warp = ptx::warp_index();
  if (threadIdx.x == 32 * kWarps) Loader::begin(p);
  const Share share(p);
  const OwnLine line(p, share);  // lengths come while barriers are made
  if (warp == kWarps) {
    // It makes the barriers and waits for nobody: its first load is what all wait for.
    if (threadIdx.x % 32 == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        Loader::init_full(ptx::shared_address(&shared.full[stage]));
        ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), kWarps);
      }
      if constexpr (kCluster > 1) ClusterMerge<Loader>(p, share, shared.gathered).expect();
      Loader::fence_barriers();
    }
    __syncwarp();
    if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();
    ptx::named_barrier_arrive(kBeginBarrier, kThreads);
    if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
    Loader loader{p,
                  share,
                  ptx::shared_address(shared.stages),
                  ptx::shared_address(shared.full),
                  ptx::shared_address(shared.empty),
                  shared.notes};
    loader.run(line);
    if constexpr (kCluster > 1) ptx::cluster_wait();
  } else {
    Consumer<Loader, OwnShared> consumer{p, share, shared};
    consumer.ask_first();
    if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();
    ptx::named_barrier_sync(kBeginBarrier, kThreads);
    if constexpr (kOverlaps) ptx::let_the_next_kernel_start();
    consumer.run(line, warp);
  }
}

}  // namespace decode
