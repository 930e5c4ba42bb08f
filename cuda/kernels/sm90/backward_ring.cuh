// The float32 sum of dq in a ring that stays in L2, which the main kernel itself turns into dq.
//
// The schedule walks sets of l2_heads key/value heads (head_block of walk.cuh). The sums of
// p.ring_sets sets have a place at a time, that of set g as number g % ring_sets. Two warps of
// warpgroup 0, idle elsewhere, see to it: `SumFinisher` counts the units whose additions all CTAs
// see, writes beside a unit of set g its part of the dq of set g - ring_lag and clears the place;
// `Planner` hands out units of a set when its place is clear. What the last ring_lag sets leave is
// flash_backward_finish's, as are the rows of tiles that are marked: not all finite.
//
// Everything moves by bulk copies: loads and stores of a warp would queue behind the reductions.
//
// Who waits, waits for units of earlier sets: SumFinisher for all their additions, Planner for all
// their parts. Units are handed out in their order, to CTAs that run; so the first unit that is not
// done, or whose part is not, never waits, however few CTAs of the grid run.
#pragma once

#include "sm90/backward_load.cuh"

namespace backward {

static_assert(!kRing || (kTmaLoads && !kDeterministic && !kCarried && !kDbiasByRows));

// 16 rows of a 64 x 64 tile of the sum, what a warp adds: 4 KB side by side (SumTile).
inline constexpr int kSlabBytes = 16 * 64 * 4;
inline constexpr int kSlabsOfBlock = kQueries / 16 * kHeadBoxes;
inline constexpr int kDqBoxes = 2;  // of 16 rows, of a warp on their way to dq
inline constexpr int kDqBoxBytes = 16 * kBoxRowBytes;
inline constexpr int kZeroBytes = 1024;

struct RingShared : Shared {
  alignas(1024) unsigned char slabs[kFinishers][kSlabsAhead][kSlabBytes];
  unsigned char dq_boxes[kFinishers][kDqBoxes][kDqBoxBytes];
  unsigned char zeros[kZeroBytes];
};
template <bool kExists>
struct ChosenShared {
  using Type = Shared;
};
template <>
struct ChosenShared<true> {
  using Type = RingShared;
};
using SharedWithRing = ChosenShared<kRing>::Type;

// Whole CTAs call. `adders`: warps that add.
__device__ __forceinline__ void set_up_ring(int adders) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnits; ++i) ptx::barrier_init(at(&Shared::sum_added, i), adders);
    for (int i = 0; i < kFinishers * kSlabsAhead; ++i) {
      ptx::barrier_init(at(&Shared::slab_full, i), 1);
    }
  }
  if (threadIdx.x < kZeroBytes / 16) {
    ptx::store_shared_x4(at(&RingShared::zeros) + threadIdx.x * 16, 0, 0, 0, 0);
    ptx::fence_async_proxy();
  }
}

// One of two warps that finish each other slab of a part. The first counts the units that have
// added too, when it is done with the part.
struct SumFinisher {
  const BackwardParams& p;
  const int which;

  __device__ __forceinline__ int slabs_of_head() const { return query_blocks(p) * kSlabsOfBlock; }
  __device__ __forceinline__ int head_of(const volatile UnitRecord& u) const {
    if constexpr (kSharesKeys)
      return static_cast<uint32>(u.batch * p.query_heads + u.head) / kUnitHeads;
    return u.batch * p.kv_heads + u.kv_head;
  }
  __device__ __forceinline__ int set_of(const volatile UnitRecord& u) const {
    return head_of(u) / p.l2_heads;
  }
  __device__ __forceinline__ uint32 slab_full(uint32 taken) const {
    return at(&Shared::slab_full, which * kSlabsAhead + taken % kSlabsAhead);
  }
  __device__ __forceinline__ uint32 buffer(uint32 taken) const {
    return at(&RingShared::slabs) + (which * kSlabsAhead + taken % kSlabsAhead) * kSlabBytes;
  }
  // The sum of a slab, by bytes from the first one.
  __device__ __forceinline__ char* sum(uint32 offset) const {
    return reinterpret_cast<char*>(p.dq_sum) + offset;
  }
  // Starts the copy of a slab, the `taken`-th of this warp. One lane calls.
  __device__ __forceinline__ void fetch(uint32 offset, uint32 taken) {
    ptx::barrier_arrive_expect(slab_full(taken), kSlabBytes);
    ptx::bulk_load(buffer(taken), sum(offset), kSlabBytes, slab_full(taken));
  }

  // Scales and rounds a slab in shared memory and writes it to a box. Is it finite?
  __device__ __forceinline__ bool round_slab(uint32 from, uint32 box) {
    const uint32 lane = ptx::fresh_lane(), row = lane % 16;  // nothing kept from slab to slab
    const float scale = query_key_scale(p);
    const uint32 to = box + row * kBoxRowBytes + swizzled(lane / 16, row);
    from += lane * 16;
    uint32 flaw = 0;
#pragma unroll kSharesKeys ? 2 : 4  // a register less
    for (int j = 0; j < 8; j += 2) {
      const float4 x = ptx::load_shared_f4(from + j * 512);
      const float4 y = ptx::load_shared_f4(from + j * 512 + 512);
      const uint32 pairs[4] = {
          Element::pack(x.x * scale, x.y * scale), Element::pack(x.z * scale, x.w * scale),
          Element::pack(y.x * scale, y.y * scale), Element::pack(y.z * scale, y.w * scale)};
#pragma unroll
      for (uint32 pair : pairs) flaw = Element::accumulate_nonfinite(flaw, pair);
      ptx::store_matrix_x4(to ^ j * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    ptx::fence_async_proxy();
    return flaw == 0;
  }

  // This warp's share of the part of an earlier set's dq that goes with the unit.
  __device__ __forceinline__ void finish_part(const volatile UnitRecord& u, uint32& taken) {
    const bool leader = threadIdx.x % 32 == 0;
    int set = set_of(u);
    if (set < p.ring_lag) return;
    const int slabs = p.l2_heads * unit_heads(p) * slabs_of_head();  // of a set
    int slab, head, batch;  // the next one: of its head, its head, batch row,
    uint32 offset;          // bytes to its sum;
    int left;               // slabs to come
    {
      const int first = set * p.l2_heads, heads = min(p.l2_heads, p.batch * head_parts(p) - first);
      const int unit = u.key0 / kKeys * heads + head_of(u) - first, units = key_blocks(p) * heads;
      set -= p.ring_lag;
      slab = unit * slabs / units + which;
      left = ptx::uniform(ceil_div((unit + 1) * slabs / units - slab, kFinishers));
      offset = static_cast<uint32>(set % p.ring_sets * slabs + slab) * kSlabBytes;
      head = slab / slabs_of_head();
      slab -= head * slabs_of_head();
      head += set * p.l2_heads * unit_heads(p);
      batch = head / p.query_heads;
      head -= batch * p.query_heads;
    }
    while (ptx::load_acquire(p.ring_counts + 2 * set) != key_blocks(p) * p.l2_heads) {
    }
    __syncwarp();
    ptx::fence_async_proxy_global();
    if (leader) {
      if (left > 0) fetch(offset, taken);
      if (left > 1) fetch(offset + kFinishers * kSlabBytes, taken + 1);
    }
#pragma unroll 1
    for (; left > 0; --left) {
      __syncwarp();  // the buffer of the slab before has been read
      if (leader) {
        if (left > 2) fetch(offset + 2 * kFinishers * kSlabBytes, taken + 2);
        ptx::bulk_wait_read<kDqBoxes - 1>();  // what the box held
      }
      ptx::barrier_wait(slab_full(taken), taken / kSlabsAhead % 2);
      __syncwarp();
      const uint32 box =
          at(&RingShared::dq_boxes) + (which * kDqBoxes + taken % kDqBoxes) * kDqBoxBytes;
      if (!round_slab(buffer(taken), box)) {
        p.dq_marks[((batch * p.query_heads + head) * slabs_of_head() + slab) / 4] = 1;
      }
      __syncwarp();
      if (leader) {
        ptx::tma_store(&p.dquery_map, box, slab / 4 % kHeadBoxes * 64, head,
                       slab / 4 / kHeadBoxes * 64 + slab % 4 * 16, batch);
#pragma unroll
        for (int i = 0; i < kSlabBytes; i += kZeroBytes) {
          ptx::bulk_store(sum(offset) + i, at(&RingShared::zeros), kZeroBytes);
        }
        ptx::bulk_commit();
      }
      ++taken;
      offset += kFinishers * kSlabBytes;
      slab += kFinishers;
      if (slab >= slabs_of_head()) {
        slab -= slabs_of_head();
        if (++head == p.query_heads) {
          head = 0;
          ++batch;
        }
      }
    }
    if (leader) {
      ptx::bulk_wait<0>();  // what has ended is seen outside of the asynchronous proxy too
      ptx::fence_gpu();
      ptx::add_relaxed(p.ring_counts + 2 * set + 1, 1);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    uint32 taken = 0;
    for (uint32 received = 0;; ++received) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      finish_part(u, taken);
      if (which == 0) {
        wait_together(at(&Shared::sum_added, stage_of<kUnits>(received)),
                      parity_of<kUnits>(received));
        if (threadIdx.x % 32 == 0) {
          ptx::fence_gpu();
          ptx::add_relaxed(p.ring_counts + 2 * set_of(u), 1);
        }
      }
      return_unit(received);
    }
  }
};

}  // namespace backward
