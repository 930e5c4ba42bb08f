// FlashAttention forward by mma.sync, for every GPU since Ampere: out = softmax(mask(score(scale *
// Q K^T))) V, and its lse.
//
// A CTA of four or eight warps has 16 to 128 query rows of one head; cp.async brings keys and
// values. cuda/ampere.md has the schedule. Dao 2023 (arXiv:2307.08691).
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16, kFloat32  element type of q, k, v, out: else float16
//   bool kCarried, kRest      of a call that two programs share (element.cuh)
//   int kParts                that a float32 is split into, 2 or 3; else 1
//   bool kHalves              two float16 (halves.cuh), else bfloat16
//   int kHeadDim, kValueDim   exact sizes, at most 512
//   int kBlockKV              keys per step: 16, 32 or 64
//   int kRowTiles             of 16 query rows a warp has, 1 or 2
//   int kRowWarps, kValueWarps   warps beside each other: with rows of their own, and with the same
//   int kQuerySteps           of 16 columns of its queries that a warp keeps in registers
//   int kStages               buffers each of keys and of values; 0: one for both
//   the terms: see terms.cuh
//   bool kPreScale            scale before the maximum (scale <= 0)
//   bool kListsBlocks         there may be gaps between the blocks of a walk
//   bool kParksSoftmax        bases and sums of the softmax wait in shared memory
//   bool kSumsOf32            a sum of tensor cores is of 32 products of halves, else of 16
//   int kStepsAtOnce          steps of 16 columns of Q K^T that are under way together
//   bool kFromPages           keys in pages of kPageSize, any number, and units of requests
//   int kPackedHeads          query heads of a kv head that share a unit, a power of two, with
//                             kFromPages; else 1
// Dynamic shared memory: forward::Shared.
#pragma once

#include "mask_plan.cuh"
#include "sm80/forward_rows.cuh"

extern "C" __global__ void __launch_bounds__(forward::kThreads, 256 / forward::kThreads)
    flash_forward_sm80(const __grid_constant__ Sm80ForwardParams p) {
  using namespace forward;
  if (is_left_to_other(p)) return;
  if constexpr (kFromPages) {  // there is place for as many units as requests could have
    const int units = *p.unit_count * (p.query_heads / kPackedHeads);
    if (static_cast<int>(blockIdx.x) >= units) return;
  }
  extern __shared__ unsigned char dynamic_shared[];
  Rows rows{p, *reinterpret_cast<Shared*>(dynamic_shared)};
  rows.run();
}

// With kFromPages a kernel goes ahead, one CTA: the units of requests.
extern "C" __global__ void __launch_bounds__(forward::requests::kThreads)
    request_units(const __grid_constant__ Sm80ForwardParams p) {
  if constexpr (kFromPages) {
    __shared__ forward::requests::Shared shared;
    forward::requests::make_units<forward::kUnitRows>(p, shared);
  }
}

// With kHalves a kernel goes ahead, a CTA for 64 rows of a head of queries, keys or values.
extern "C" __global__ void __launch_bounds__(halves::kThreads)
    split_float32(const __grid_constant__ Sm80ForwardParams p) {
  if constexpr (kHalves) {
    halves::Choice choice(blockIdx.x);
    halves::offer_inputs(p, choice);
    choice.split();
  }
}

// With a mask a kernel goes ahead, see mask_plan.cuh.
extern "C" __global__ void __launch_bounds__(mask::kThreads)
    mask_plan(const __grid_constant__ Sm80ForwardParams p) {
  if constexpr (kHasMask) mask::plan_by_query<forward::kUnitRows, kBlockKV>(p);
}

// With segments or positions a kernel goes ahead, 256 threads, a warp for each block of keys.
extern "C" __global__ void key_ranges(const __grid_constant__ Sm80ForwardParams p) {
  const int blocks = ceil_div(p.kv_len, kBlockKV);
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= p.batch * blocks) return;
  const int batch = index / blocks, first = (index - batch * blocks) * kBlockKV;
  const int end = min(first + kBlockKV, visibility(p, batch).kv_length);
  const auto write = [&](const int* numbers, int* ranges) {
    const SegmentRange range =
        segment_range(numbers + static_cast<int64>(batch) * p.kv_len, first, end);
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int2*>(ranges)[index] = make_int2(range.low, range.high);
    }
  };
  if constexpr (kHasSegments) write(p.key_value_segments, p.key_segment_ranges);
  if constexpr (kHasPositions) write(p.key_value_positions, p.key_position_ranges);
}
