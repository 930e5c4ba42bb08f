// What tensor cores multiply in the forward pass of float32, and how: numbers in two float16
// (halves.cuh), a plane of a tile each. sm90/forward_operands.cuh has it for 16 bits.
#pragma once

#include "halves.cuh"
#include "sm90/forward_common.cuh"
#include "sm90_float32/products.cuh"

namespace forward {

static_assert(halves::kRows % kBlockKV == 0 && kPackedHeads == 1 && kTmaLoads,
              "a factor is that of a head's 64 rows");

// Tensor cores cut off the last bits of a sum: those of one block start at zero, and are added to
// the others by `fma`, which rounds.
struct Operands {
  // The second half of a weight of 2^-12 is no normal number: with the maxima at 2^4 what is lost
  // of any is 2^-29 of the largest; further above zero exponents are less exact.
  struct Weight : Float16 {
    static constexpr int kHeadroom = -4;
  };
  static constexpr bool kAddsBlocks = true;
  static constexpr bool kFindsTurn = true;      // numbers of barriers took registers
  static constexpr bool kNanMayBeWrong = true;  // numbers of a tile may be too far apart
  struct UnitFactor {};
  uint32 weights[2][kBlockKV / 4];
  float block_output[kValueColumns / 2];
  float value_factor;  // of block_output
  float query_factor;  // times scale_log2
  float logit_factor;  // the same of the block whose scores are on their way
  int first_tile;      // of 64 keys, of the head

  // What brings the numbers back of a warpgroup's queries,
  static __device__ __forceinline__ UnitFactor read_factor(const ForwardParams&, const UnitInfo&,
                                                           int) {
    return {};
  }
  __device__ __forceinline__ void begin_unit(const ForwardParams& p, Shared&, const UnitInfo& t,
                                             UnitFactor, int warpgroup) {
    const float factor = halves::factor_of(p.query_factors, t.batch * p.query_heads + t.head,
                                           p.query_len, t.first_row + warpgroup * kWarpgroupRows);
    const int keys = t.batch * p.kv_heads + kv_head_of(p, t.head);
    query_factor = p.scale_log2 * factor;
    first_tile = keys * ceil_div(p.kv_len, halves::kRows);
  }
  // and of a block of keys or values.
  __device__ __forceinline__ float factor_of(const float* factors, int block) const {
    return halves::factor_of(factors, first_tile + block * kBlockKV / halves::kRows);
  }
  __device__ __forceinline__ void begin_scores(const ForwardParams& p, const Shared&, int,
                                               int block) {
    logit_factor = query_factor * factor_of(p.key_factors, block);
  }
  __device__ __forceinline__ void begin_output(const ForwardParams& p, const Shared&, int,
                                               int block) {
    value_factor = factor_of(p.value_factors, block);
  }
  // Before a softcap what brings scores back.
  __device__ __forceinline__ void scale_capped(Scores&) const {}
  __device__ __forceinline__ float logit_scale(const ForwardParams&) const { return logit_factor; }
  template <class Dropped>
  __device__ __forceinline__ void pack(const Scores& scores, const Dropped&) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      uint32 parts[2];
      split_pair(scores[2 * i], scores[2 * i + 1], parts, 1.0f);
      weights[0][i] = parts[0];
      weights[1][i] = parts[1];
    }
  }

  __device__ __forceinline__ void issue_scores(const ForwardParams&, Scores& scores,
                                               ptx::Descriptor query, ptx::Descriptor key) const {
    constexpr int kSteps = ceil_div(kHeadDim, 16), kBoxes = ceil_div(kHeadDim, kBoxColumns);
#pragma unroll
    for (int i = 0; i < kProducts * kSteps; ++i) {
      const Planes planes = planes_of(i / kSteps);
      const int box = i % kSteps / 4, inner = i % kSteps % 4 * 32;
      ptx::wgmma_ss<Float16, 0, 0>(
          scores, query.at((planes.left * kBoxes + box) * kWarpgroupRows * kBoxRowBytes + inner),
          key.at((planes.right * kBoxes + box) * kBlockKV * kBoxRowBytes + inner), i > 0);
    }
  }
  __device__ __forceinline__ void issue_output(const ForwardParams&, const Shared&, int, Output&,
                                               Scores&, ptx::Descriptor value, int) {
    constexpr int kPlane = ceil_div(kValueDim, kBoxColumns) * kBlockKV * kBoxRowBytes;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const Planes planes = planes_of(product);
      multiply_rows<kBlockKV>(block_output, weights[planes.left],
                              ptx::Descriptor{value.at(planes.right * kPlane)}, product > 0);
    }
  }
  __device__ __forceinline__ void accept_output(const Shared&, int, Output& output, Scores&) {
    ptx::pin(block_output);
#pragma unroll
    for (int i = 0; i < kValueColumns / 2; ++i) {
      output[i] = fmaf(block_output[i], value_factor, output[i]);
    }
  }
};

}  // namespace forward
