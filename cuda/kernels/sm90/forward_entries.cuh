// The kernels beside the main one of the forward pass, a program of their own: NVRTC compiles both
// at once. Its constants are those of forward.cuh.
#pragma once

#include "forward_exact.cuh"
#include "mask_plan.cuh"
#include "sm90/forward_documents.cuh"
#include "sm90/forward_fading.cuh"
#include "sm90/forward_merge.cuh"

// With a mask a kernel goes ahead, see mask_plan.cuh: the last one, unless there are segments or
// positions, so it zeroes the counter of units.
extern "C" __global__ void __launch_bounds__(mask::kThreads)
    mask_plan(const __grid_constant__ ForwardParams p) {
  if constexpr (kHasMask) {
    ptx::let_the_next_kernel_start();
    if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
    mask::plan_by_query<forward::kWarpgroupRows, kBlockKV>(p);
  }
}

// With kFades a kernel goes ahead, a warp for 64 rows of queries, or of keys and values. It zeroes
// the counter of units.
extern "C" __global__ void __launch_bounds__(fading::kThreads)
    row_norms(const __grid_constant__ ForwardParams p) {
  if constexpr (kFades) {
    ptx::let_the_next_kernel_start();
    if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
    fading::measure<Element>(p);
  }
}

// With positions a kernel goes ahead, 256 threads, a warp for each block of keys and then for each
// warpgroup: their smallest and largest position. Grid ceil(B * (blocks + warpgroups) / 8).
extern "C" __global__ void position_ranges(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasPositions) {
    constexpr int kQueries = kWarpgroupRows / kPackedHeads;
    const int blocks = ceil_div(p.kv_len, kBlockKV), warpgroups = p.query_blocks * kConsumers;
    int index = blockIdx.x * 8 + threadIdx.x / 32;
    const bool of_keys = index < p.batch * blocks;
    if (!of_keys) index -= p.batch * blocks;
    const int count = of_keys ? blocks : warpgroups;
    const int batch = index / count, part = index - batch * count;
    if (batch >= p.batch) return;
    const Visibility sight = visibility(p, batch);
    const int size = of_keys ? kBlockKV : kQueries;
    const int end = min((part + 1) * size, of_keys ? sight.kv_length : sight.query_length);
    const int* positions = of_keys ? p.key_value_positions + static_cast<int64>(batch) * p.kv_len
                                   : p.query_positions + static_cast<int64>(batch) * p.query_len;
    const SegmentRange range = segment_range(positions, part * size, end);
    int* ranges = of_keys ? p.key_position_ranges : p.query_position_ranges;
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int2*>(ranges)[index] = make_int2(range.low, range.high);
    }
  }
}

// With segments, two kernels go ahead, 256 threads each, a warp for each block or warpgroup. The
// second one and the main kernel start while the one ahead of each runs.
//
// Smallest and largest segment id of each block of kBlockKV keys, and fresh counters of units. With
// kCutsUnits the starts of documents among 256 queries, by warps behind these.
// Grid ceil(B * blocks / 8), with kCutsUnits ceil(B * (blocks + ceil(T / 256)) / 8).
extern "C" __global__ void segment_ranges(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    ptx::let_the_next_kernel_start();
    const int blocks = ceil_div(p.kv_len, kBlockKV);
    const int index = blockIdx.x * 8 + threadIdx.x / 32;
    if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
    if (kCutsUnits && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_count = 0;
    if (index >= p.batch * blocks) {
      if constexpr (kCutsUnits) documents::mark_starts(p, index - p.batch * blocks);
      return;
    }
    const int batch = index / blocks, block = index - batch * blocks;
    const int end = min((block + 1) * kBlockKV, visibility(p, batch).kv_length);
    const int* ids = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
    const SegmentRange range = segment_range(ids, block * kBlockKV, end);
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int2*>(p.segment_ranges)[index] = make_int2(range.low, range.high);
    }
  }
}

// The plan of each warpgroup of each unit. Grid ceil(B * query_blocks * kConsumers / 8), with
// kCutsUnits B * ceil(query_blocks / kUnitsOfCta).
extern "C" __global__ void segment_plan(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    ptx::let_the_next_kernel_start();
    if constexpr (kCutsUnits) {
      __shared__ documents::Shared shared;
      documents::plan_units(p, shared);
      return;
    }
    constexpr int kQueries = kWarpgroupRows / kPackedHeads;
    const int warpgroups = p.query_blocks * kConsumers;
    const int index = blockIdx.x * 8 + threadIdx.x / 32;
    if (index >= p.batch * warpgroups) return;
    const int batch = index / warpgroups, warpgroup = index - batch * warpgroups;
    const int end = min((warpgroup + 1) * kQueries, visibility(p, batch).query_length);
    const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
    const SegmentRange queries = segment_range(ids, warpgroup * kQueries, end);

    ptx::wait_for_the_kernel_ahead();  // which makes the ranges
    const documents::MetBlocks met(p, batch, queries);
    if (threadIdx.x % 32 == 0) reinterpret_cast<SegmentPlan*>(p.segment_plan)[index] = met.plan();
  }
}

// With kFromPages a kernel goes ahead, one CTA: the units of requests, and the counter of units.
extern "C" __global__ void __launch_bounds__(forward::requests::kThreads)
    request_units(const __grid_constant__ ForwardParams p) {
  if constexpr (kFromPages && !kInCommon) {
    ptx::let_the_next_kernel_start();
    __shared__ forward::requests::Shared shared;
    forward::requests::make_units<forward::kUnitRows>(p, shared);
    if (threadIdx.x == 0) *p.unit_counter = 0;
  }
}

// Zeroes the counter of units while the main kernel is being launched. One warp.
extern "C" __global__ void flash_forward_begin(const __grid_constant__ ForwardParams p) {
  ptx::let_the_next_kernel_start();
  if (threadIdx.x == 0) *p.unit_counter = 0;
}

// Last, rows that the main kernel has marked: as many CTAs as run at once. Tiles of 16 rows are
// dealt out in turns, eight to the warps of a CTA: those of a unit walk the same keys.
namespace forward {

inline constexpr int kExactWarps = 8;

// 16 packed rows of a head, as a warp of the main kernel has them.
struct RowTile {
  const ForwardParams& p;
  int batch, head;  // of N / kPackedHeads
  int first_row;
  const SegmentPlan* plan;  // of its warpgroup, with segments
  RequestUnit own;          // with kFromPages
  int own_key = 0;          // likewise, the first of its keys

  __device__ __forceinline__ RowTile(const ForwardParams& p, int mark) : p(p) {
    const UnitIndex unit = marked_unit(p, mark / kWarpsOfConsumers);
    batch = unit.batch;
    head = unit.head;
    first_row = unit.query_block * kUnitRows + mark % kWarpsOfConsumers * 16;
    if constexpr (kHasSegments) {
      const SegmentPlan* plans = plans_of(p, batch, unit.query_block);
      plan = plans + mark % kWarpsOfConsumers / 4;
      if constexpr (kCutsUnits) {
        first_row = plans[kConsumers].blocks.begin + mark % kWarpsOfConsumers * 16;
      }
    }
    if constexpr (kFromPages) {
      const KeysOfUnit keys(p, unit);
      own = keys.own;
      own_key = keys.first_key();
      first_row = own.first_row + mark % kWarpsOfConsumers * 16;
    }
  }
  // bit = 4 * quad + row of the fragment.
  __device__ __forceinline__ Row row_of(int bit) const {
    const int packed = first_row + bit / 4 + fragment::kRowStep * (bit % 4);
    const int query = packed / kPackedHeads, of = head * kPackedHeads + packed % kPackedHeads;
    Visibility sight = visibility(p, batch);
    if constexpr (kFromPages) sight = own.sight(p);
    Range keys = row_columns(sight, query, 0);
    keys.begin = max(keys.begin, 0);
    if constexpr (kHasSegments) {
      keys.begin = max(keys.begin, (plan->blocks.begin & ~SegmentPlan::kSparse) * kBlockKV);
      keys.end = min(keys.end, plan->blocks.end * kBlockKV);
    }
    int64 first_key = key_row(p, batch, 0, kv_head_of(p, of));
    if constexpr (kFromPages) {
      first_key = static_cast<int64>(own.request) * p.kv_heads + kv_head_of(p, of);
      keys = {keys.begin + own_key, keys.end + own_key};
    }
    return {query, of, first_key, keys};
  }
};

}  // namespace forward

extern "C" __global__ void __launch_bounds__(32 * forward::kExactWarps, 1)
    flash_forward_exact(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = gridDim.x * kExactWarps;
  if constexpr (kTails) return;  // flash_forward_merge is instead of it
  ptx::wait_for_the_kernel_ahead();
  if (is_left_to_other(p)) return;  // then there are no marks
  const int tiles = numbers_of(p) * kWarpsOfConsumers;
  const int warps_first = blockIdx.x * kExactWarps + warp;
  // Most often there are no marks. To see so takes no step across the repair's 40 KB of code, which
  // no cache holds by then: an H100's calls took 1 to 3 us longer with such a step.
  uint32 any = 0;
#pragma unroll 1
  for (int mine = warps_first + lane * stride; mine < tiles; mine += 32 * stride) {
    any |= p.marks[mine];
  }
  if (!__any_sync(0xffffffffu, any != 0)) return;
#pragma unroll 1
  for (int first = warps_first; first < tiles; first += 32 * stride) {
    const int mine = first + lane * stride;
    const uint32 marks = mine < tiles ? p.marks[mine] : 0;
#pragma unroll 1
    for (uint32 left = __ballot_sync(0xffffffffu, marks != 0); left != 0; left &= left - 1) {
      const int of = __ffs(left) - 1;
      const RowTile tile(p, first + of * stride);
      const uint32 rows = __shfl_sync(0xffffffffu, marks, of);
      repair_rows(p, tile.batch, rows, [&](int bit) { return tile.row_of(bit); });
    }
  }
}

// With kTails the last one: as many CTAs as there are 16 rows.
extern "C" __global__ void __launch_bounds__(forward::kMergeThreads)
    flash_forward_merge(const __grid_constant__ ForwardParams p) {
  if constexpr (forward::kTails) forward::merge_parts(p);
}
