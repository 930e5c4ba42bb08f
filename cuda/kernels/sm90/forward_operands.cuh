// What tensor cores multiply in the forward pass, and how: elements of 16 bits as they are.
// sm90_float32/forward_operands.cuh has it for float32. A program includes one of the two, ahead of
// forward_kernel.cuh. Read next: forward_terms.cuh.
#pragma once

#include "dropout.cuh"
#include "sm90/forward_common.cuh"

namespace forward {

// The operands in a thread's registers, and how products of a block become scores and output.
struct Operands {
  using Weight = Element;                         // the range of the weights
  static constexpr bool kAddsBlocks = false;      // a block's output is a sum of its own
  static constexpr bool kFindsTurn = false;       // a warpgroup's number is not kept for its turns
  static constexpr bool kNanMayBeWrong = kEarly;  // lse is NaN by one of another head
  struct UnitFactor {};
  uint32 weights[kBlockKV / 4];
  uint32 queries[kHoldsQueries ? kHeadDim / 16 : 1][4];

  // With kHoldsQueries: a unit's, from its tile.
  __device__ __forceinline__ void take_queries(uint32 tile) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      ptx::load_matrix_x4(chunk_address<kWarpgroupRows>(tile, row, 2 * i + threadIdx.x % 32 / 16),
                          queries[i]);
    }
  }

  // Factors of a unit's queries, of a block of keys and of a block of values: there are none.
  static __device__ __forceinline__ UnitFactor read_factor(const ForwardParams&, const UnitInfo&,
                                                           int) {
    return {};
  }
  __device__ __forceinline__ void begin_unit(const ForwardParams&, Shared&, const UnitInfo&,
                                             UnitFactor, int) {}
  __device__ __forceinline__ void begin_scores(const ForwardParams&, const Shared&, int, int) {}
  __device__ __forceinline__ void begin_output(const ForwardParams&, const Shared&, int, int) {}
  // From scores to logits in log2 units.
  // Before a softcap what brings scores back.
  __device__ __forceinline__ void scale_capped(Scores&) const {}
  __device__ __forceinline__ float logit_scale(const ForwardParams& p) const {
    return p.scale_log2;
  }
  __device__ __forceinline__ void pack(const Scores& scores,
                                       const DroppedPairs<kBlockKV>& dropped) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      weights[i] = Weight::pack(scores[2 * i], scores[2 * i + 1]);
      if constexpr (kHasDropout) weights[i] = dropped.keep(i, weights[i]);
    }
  }

  // Issue, do not wait: scores[64, N] = q[64, H] k[N, H]^T, both K-major,
  __device__ __forceinline__ void issue_scores(const ForwardParams&, Scores& scores,
                                               ptx::Descriptor query, ptx::Descriptor key) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kHeadTile, 16); ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      const uint64 right = key.at(box * KeyBlock::kBoxBytes + inner);
      if constexpr (kHoldsQueries) {
        const uint32(&left)[4] = queries[i];
        ptx::wgmma_rs<Element, 0>(scores, left[0], left[1], left[2], left[3], right, i > 0);
      } else {
        ptx::wgmma_ss<Element, 0, 0>(scores, query.at(box * kWarpgroupRows * kBoxRowBytes + inner),
                                     right, i > 0);
      }
    }
  }
  // and the output of the block.
  __device__ __forceinline__ void issue_output(const ForwardParams&, const Shared&, int,
                                               Output& output, Scores&, ptx::Descriptor value,
                                               int accumulate) const {
    multiply_rows<kBlockKV, ValueBlock::kGroupBytes>(output, weights, value, accumulate);
  }
  // After the wait for it.
  __device__ __forceinline__ void accept_output(const Shared&, int, Output& output, Scores&) {
    ptx::pin(output);
  }
};

}  // namespace forward
