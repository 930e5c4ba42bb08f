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
  static constexpr int kColumns = kValueColumns / kOutputs;  // of a part
  float block_output[kColumns / 2];
  float value_factor;  // of block_output
  float query_factor;  // times scale_log2, unless there is a softcap
  float logit_factor;  // the same of the block whose scores are on their way
  int keys;            // of a head of scales: [B, blocks, K] from here on

  // What brings the numbers back of a warpgroup's queries,
  __device__ __forceinline__ void begin_unit(const ForwardParams& p, const UnitInfo& t,
                                             int warpgroup) {
    const int query = min(t.first_row + warpgroup * kWarpgroupRows, p.query_len - 1);
    query_factor = p.query_scales[query_scale_at(p, t.batch, t.head, query)];
    if constexpr (!kSoftcap) query_factor *= p.scale_log2;
    keys = key_scale_at(p, t.batch, kv_head_of(p, t.head), 0);
  }
  // and of a block of keys or values.
  __device__ __forceinline__ void begin_scores(const ForwardParams& p, int block) {
    logit_factor = query_factor * p.key_scales[keys + max(block, 0) * p.kv_heads];
  }
  __device__ __forceinline__ void begin_output(const ForwardParams& p, int block) {
    value_factor = p.value_scales[keys + block * p.kv_heads];
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

  __device__ __forceinline__ void issue_scores(Scores& scores, ptx::Descriptor query,
                                               ptx::Descriptor key) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kHeadDim, 32); ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      ptx::wgmma_ss_float8(scores, query.at(box * kWarpgroupRows * kBoxRowBytes + inner),
                           key.at(box * kBlockKV * kBoxRowBytes + inner), i > 0);
    }
  }
  // All parts but the last have been added then.
  __device__ __forceinline__ void issue_output(Output& output, ptx::Descriptor value, int) {
#pragma unroll
    for (int part = 0; part < kOutputs; ++part) {
      if (part > 0) {
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        add_part(output, part - 1);
        ptx::wgmma_fence();
      }
#pragma unroll
      for (int i = 0; i < kBlockKV / 32; ++i) {
        ptx::wgmma_rs_float8(block_output, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2],
                             weights[4 * i + 3], value.at(part * kColumns * kBoxRowBytes + 32 * i),
                             i > 0);
      }
    }
  }
  __device__ __forceinline__ void accept_output(Output& output) { add_part(output, kOutputs - 1); }
  __device__ __forceinline__ void add_part(Output& output, int part) {
    ptx::pin(block_output);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      float& sum = output[part * (kColumns / 2) + i];
      sum = fmaf(block_output[i], value_factor, sum);
    }
  }
};

}  // namespace forward
