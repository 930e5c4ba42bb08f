// What tensor cores multiply in the forward pass of float8, and how. sm90/forward_operands.cuh has
// it for 16 bits.
//
// Both operands of a product of float8 have the contraction side by side in memory. Queries and
// keys do; of values there are columns, which flash_quantise or flash_forward_columns makes ahead.
// A thread has weights of keys two by two, and a product takes four by four: the keys of a column
// lie in the order in which threads have them (`key_of_slot`), so weights stay where they are.
// Micikevicius et al. (arXiv:2209.05433).
#pragma once

#include "dropout.cuh"
#include "forward_exact.cuh"
#include "sm90/forward_common.cuh"
#include "sm90_float8/slots.cuh"

namespace forward {

static_assert(kBlockKV == kKeysOfScale && kWarpgroupRows == kQueriesOfScale);

// Tensor cores keep 14 bits of a sum of float8: those of one block start at zero, and are added to
// the others by `fma`, with the factor of the block's values.
struct Operands {
  // Up to 448. The largest weight of the first block is 64; a sum of a thread's 32 up to the limit
  // leaves none beyond it. From 16 on few bits are left of small ones: 1.5 % more error.
  struct Weight {
    static constexpr int kHeadroom = -6;
    static constexpr float kSumLimit = 448.0f;
  };
  static constexpr bool kAddsBlocks = true;
  static constexpr bool kFindsTurn = false;
  static constexpr bool kNanMayBeWrong = false;
  uint32 weights[kBlockKV / 8];
  // Columns of a part of a block's output.
  static __device__ __forceinline__ constexpr int columns_of(int part) {
    constexpr int kFirst = round_up(ceil_div(kValueColumns, kOutputs), 16);
    return part == 0 ? kFirst : kValueColumns - kFirst;
  }
  float block_output[kApart ? 1 : kValueColumns / 2];
  // False, which the compiler does not know.
  static __device__ __forceinline__ bool never(const ForwardParams& p) {
    return kApart && ptx::opaque(p.query_len) < 0;
  }
  float value_factor;  // of block_output
  float logit_factor;  // the same of the block whose scores are on their way

  __device__ __forceinline__ void begin_unit(const ForwardParams& p, Shared& shared,
                                             const UnitInfo& t, int warpgroup) {
    const int query = min(t.first_row + warpgroup * kWarpgroupRows, p.query_len - 1);
    float factor = p.query_scales[query_scale_at(p, t.batch, t.head, query)];
    if constexpr (!kSoftcap) factor *= p.scale_log2;
    shared.query_factors[ptx::opaque(threadIdx.x) / 32 - 4] = factor;
    __syncwarp();
  }
  // What brings the numbers back of a block of keys, and of values.
  __device__ __forceinline__ void begin_scores(const ForwardParams&, const Shared& shared,
                                               int stage, int) {
    const int warp = ptx::opaque(threadIdx.x) / 32 - 4;
    logit_factor = shared.query_factors[warp] * shared.key_factors[stage];
  }
  __device__ __forceinline__ void begin_output(const ForwardParams&, const Shared& shared,
                                               int stage, int) {
    if constexpr (!kApart) value_factor = shared.value_factors[stage];
  }
  // Before a softcap what brings scores back.
  __device__ __forceinline__ void scale_capped(Scores& scores) const {
    if constexpr (kSoftcap) {
#pragma unroll
      for (float& score : scores) score *= logit_factor;
    }
  }
  __device__ __forceinline__ float logit_scale(const ForwardParams& p) const {
    return kSoftcap ? p.scale_log2 : logit_factor;
  }
  template <class Dropped>
  __device__ __forceinline__ void pack(const Scores& scores, const Dropped&) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 8; ++i) {
      const int j = i / 2 * 2, row = i % 2;  // of 16 keys, the thread's four in one of its rows
      const int first = fragment::element(j, row, 0), second = fragment::element(j + 1, row, 0);
      weights[i] =
          ptx::pack_float8(scores[first], scores[first + 1], scores[second], scores[second + 1]);
    }
  }

  __device__ __forceinline__ void issue_scores(const ForwardParams& p, Scores& scores, ptx::Descriptor query,
                                               ptx::Descriptor key) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kHeadDim, 32); ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      ptx::wgmma_ss_float8(scores, query.at(box * kWarpgroupRows * kBoxRowBytes + inner),
                           key.at(box * kBlockKV * kBoxRowBytes + inner), i > 0 || never(p));
    }
  }
  template <int kPart>
  static __device__ __forceinline__ auto& scores_of(Scores& scores) {
    return reinterpret_cast<float(&)[columns_of(kPart) / 2]>(scores);
  }
  // All parts but the last have been added then.
  __device__ __forceinline__ void issue_output(const ForwardParams& p, const Shared& shared, int stage,
                                               Output& output, Scores& scores, ptx::Descriptor value,
                                               int) {
    if constexpr (kApart) {
      issue_parts<0>(p, shared, stage, output, scores, value);
    } else {
      issue_part<0>(p, block_output, value);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void issue_parts(const ForwardParams& p, const Shared& shared, int stage,
                                              Output& output, Scores& scores,
                                              ptx::Descriptor value) {
    issue_part<kPart>(p, scores_of<kPart>(scores), value);
    if constexpr (kPart + 1 < kOutputs) {
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      add_part<kPart>(shared, stage, output, scores_of<kPart>(scores));
      ptx::wgmma_fence();
      issue_parts<kPart + 1>(p, shared, stage, output, scores, value);
    }
  }
  __device__ __forceinline__ void accept_output(const Shared& shared, int stage, Output& output,
                                                Scores& scores) {
    if constexpr (kApart) {
      add_part<kOutputs - 1>(shared, stage, output, scores_of<kOutputs - 1>(scores));
    } else {
      add_part<0>(shared, stage, output, block_output);
    }
  }
  template <int kPart, int kCount>
  __device__ __forceinline__ void issue_part(const ForwardParams& p, float (&sums)[kCount], ptx::Descriptor value) const {
#pragma unroll
    for (int i = 0; i < kBlockKV / 32; ++i) {
      ptx::wgmma_rs_float8(sums, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2],
                           weights[4 * i + 3], value.at(kPart * columns_of(0) * kBoxRowBytes + 32 * i),
                           i > 0 || never(p));
    }
  }
  template <int kPart, int kCount>
  __device__ __forceinline__ void add_part(const Shared& shared, int stage, Output& output,
                                           float (&sums)[kCount]) const {
    ptx::pin(sums);
    const float factor = kApart ? shared.value_factors[stage] : value_factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& sum = output[kPart * (columns_of(0) / 2) + i];
      sum = fmaf(sums[i], factor, sum);
    }
  }
};

}  // namespace forward
