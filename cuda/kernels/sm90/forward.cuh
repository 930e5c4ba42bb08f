// FlashAttention forward for sm_90a: out = softmax(mask(score(scale * Q K^T))) V, and its lse.
//
// One producer warp feeds Q, K and V by TMA to kConsumers warpgroups of 64 query rows each; CTAs
// are persistent. cuda/README.md has the schedule as a diagram. Dao et al. 2022 (arXiv:2205.14135),
// Shah et al. 2024 (arXiv:2407.08608).
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16            element type of q, k, v, out: bfloat16, else float16
//   int kHeadDim, kValueDim   exact sizes, at most 256
//   bool kTmaLoads            TMA loads (8 divides both dims), else four producer warps do, see
//                             tile.cuh; then static units
//   int kBlockKV               keys per step, a multiple of 16, 32 to 256
//   int kConsumers            consumer warpgroups, 2 or 3
//   int kStages               K and V buffers each
//   int kQueryStages          Q buffers; 2 loads the next unit's Q during this unit
//   int kPackedHeads          query heads of one kv head that share a unit (a divisor of 64), or 1
//   the terms: see terms.cuh
//   bool kPreScale            scale before the maximum (scale <= 0)
//   int kBiasAheadInL2        with kBiasTiles: blocks between its way to L2 and its load, or 0
//   bool kBatchesTogether     units of a head follow each other through the batch rows
//   bool kDynamic             units from an atomic counter, else static
//   bool kPingPong            warpgroups take turns at the tensor cores
//   bool kDrains              the registers of the weights are free before a softmax: the product
//                             with the values is waited for together with the scores
//   int kProducerRegisters, kConsumerRegisters
// Dynamic shared memory: kQueryStages * kConsumers * 64 * 128 * ceil(kHeadDim / 64)
//   + kStages * kBlockKV * 128 * (ceil(kHeadDim / 64) + ceil(kValueDim / 64)) + 2048 bytes,
//   and with kBiasTiles kStages * kConsumers * 64 * kBlockKV elements of the bias.
#pragma once

#include "sm90/forward_load.cuh"
#include "sm90/forward_units.cuh"

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    flash_forward(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  extern __shared__ unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const int warp = ptx::warp_index();

  if (threadIdx.x == 0) {
    if constexpr (kTmaLoads) {
      ptx::prefetch_tensor_map(&p.query);
      ptx::prefetch_tensor_map(&p.key);
      ptx::prefetch_tensor_map(&p.value);
    }
    for (int stage = 0; stage < kQueryStages; ++stage) {
      for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
        ptx::barrier_init(ptx::shared_address(&shared.query_full[stage][warpgroup]), kLoadWarps);
        ptx::barrier_init(ptx::shared_address(&shared.query_empty[stage][warpgroup]), 4);
      }
    }
    ptx::barrier_init(ptx::shared_address(&shared.asked), kWarpsOfConsumers);
    ptx::barrier_init(ptx::shared_address(&shared.finished), kWarpsOfConsumers);
    for (int& slot : shared.repeats) slot = 0;
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(ptx::shared_address(&shared.key_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.key_empty[stage]), kWarpsOfConsumers);
      ptx::barrier_init(ptx::shared_address(&shared.value_full[stage]), kLoadWarps);
      ptx::barrier_init(ptx::shared_address(&shared.value_empty[stage]), kWarpsOfConsumers);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (warp < 4) {
    ptx::register_decrease<kProducerRegisters>();
    if (warp < kLoadWarps) {
      Producer producer{p, shared};
      producer.run();
    }
  } else {
    ptx::register_increase<kConsumerRegisters>();
    Consumer consumer{{{}, {}, {}, {}, p, shared, warp / 4 - 1}};
    consumer.run();
  }
}

// With a mask a kernel goes ahead, see mask.cuh.
extern "C" __global__ void __launch_bounds__(mask::kThreads)
    mask_plan(const __grid_constant__ ForwardParams p) {
  if constexpr (kHasMask) mask::plan_by_query<forward::kWarpgroupRows, kBlockKV>(p);
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

// With segments, two kernels go ahead, 256 threads each, a warp for each block or warpgroup.
//
// Smallest and largest segment id of each block of kBlockKV keys, and a fresh unit counter.
// Grid ceil(B * blocks / 8).
extern "C" __global__ void segment_ranges(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    const int blocks = ceil_div(p.kv_len, kBlockKV);
    const int index = blockIdx.x * 8 + threadIdx.x / 32;
    if (kDynamic && blockIdx.x == 0 && threadIdx.x == 0) *p.unit_counter = 0;
    if (index >= p.batch * blocks) return;
    const int batch = index / blocks, block = index - batch * blocks;
    const int end = min((block + 1) * kBlockKV, visibility(p, batch).kv_length);
    const int* ids = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
    const SegmentRange range = segment_range(ids, block * kBlockKV, end);
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int2*>(p.segment_ranges)[index] = make_int2(range.low, range.high);
    }
  }
}

// The plan of each warpgroup of each unit. Grid ceil(B * query_blocks * kConsumers / 8).
extern "C" __global__ void segment_plan(const __grid_constant__ ForwardParams p) {
  using namespace forward;
  if constexpr (kHasSegments) {
    constexpr int kQueries = kWarpgroupRows / kPackedHeads;
    const int lane = threadIdx.x % 32;
    const int warpgroups = p.query_blocks * kConsumers;
    const int index = blockIdx.x * 8 + threadIdx.x / 32;
    if (index >= p.batch * warpgroups) return;
    const int batch = index / warpgroups, warpgroup = index - batch * warpgroups;
    const int end = min((warpgroup + 1) * kQueries, visibility(p, batch).query_length);
    const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
    const SegmentRange queries = segment_range(ids, warpgroup * kQueries, end);

    const int blocks = ceil_div(p.kv_len, kBlockKV);
    const int2* ranges =
        reinterpret_cast<const int2*>(p.segment_ranges) + static_cast<int64>(batch) * blocks;
    SegmentRange met, one;  // of block numbers
    int met_count = 0, one_count = 0;
#pragma unroll 4
    for (int block = lane; block < blocks; block += 32) {
      const int2 range = ranges[block];
      if (queries.meets(range)) {
        met.include(block);
        ++met_count;
      }
      if (queries.is_one(range)) {
        one.include(block);
        ++one_count;
      }
    }
    met.reduce_warp();
    one.reduce_warp();
    met_count = __reduce_add_sync(0xffffffffu, met_count);
    one_count = __reduce_add_sync(0xffffffffu, one_count);
    if (lane != 0) return;
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (met_count > 0) {
      plan.blocks = {met.low, met.high + 1};
      if (met_count <= met.high - met.low) plan.blocks.begin |= SegmentPlan::kSparse;
    }
    if (one_count > 0 && one_count == one.high + 1 - one.low) plan.one = {one.low, one.high + 1};
    reinterpret_cast<SegmentPlan*>(p.segment_plan)[index] = plan;
  }
}
