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

static_assert(kBlockKV == kKeysOfScale && kWarpgroupRows == kQueriesOfScale && kApart);

// The scale of a block's values: read beside their product, where a register is left, or behind it.
template <bool kIsAhead>
struct ValueFactor {
  __device__ __forceinline__ void read_value_factor(const Shared&, int) {}
  __device__ __forceinline__ float value_factor(const Shared& shared, int stage) const {
    return shared.value_factors[stage];
  }
};
template <>
struct ValueFactor<true> {
  float held;
  __device__ __forceinline__ void read_value_factor(const Shared& shared, int stage) {
    held = shared.value_factors[stage];
  }
  __device__ __forceinline__ float value_factor(const Shared&, int) const { return held; }
};

// Tensor cores keep 14 bits of a sum of float8: those of one block start at zero, and are added to
// the others by `fma`, with the factor of the block's values. They take the registers of its
// scores, which are weights then: three warpgroups of 128 columns have no others. So `Scores` are
// what a product adds to even where it begins at zero (`never`), or ptxas lets the sums of one
// product and the next one live side by side, and spills 1,300 bytes.
struct Operands : ValueFactor<kLanesTogether> {
  // Up to 448. The largest weight of the first block is 44, which float8 has: later ones may be ten
  // times as large before a base rises. A sum of a thread's 16 up to the limit leaves none beyond
  // it.
  struct Weight {
    static constexpr float kHeadroom = -5.4594316f;  // -log2(44)
    static constexpr float kSumLimit = 448.0f;
  };
  static constexpr bool kAddsBlocks = true;
  static constexpr bool kFindsTurn = false;
  static constexpr bool kNanMayBeWrong = false;
  using UnitFactor = float;
  uint32 weights[kBlockKV / 8];
  float logit_factor;  // what brings scores back that are on their way

  // Columns of a part of a block's output, no more than a block has keys.
  static __device__ __forceinline__ constexpr int columns_of(int part) {
    constexpr int kFirst = round_up(ceil_div(kValueColumns, kOutputs), 16);
    static_assert(kFirst <= kBlockKV && kOutputs <= 2);
    return part == 0 ? kFirst : kValueColumns - kFirst;
  }
  template <int kPart>
  static __device__ __forceinline__ auto& sums_of(Scores& scores) {
    return reinterpret_cast<float (&)[columns_of(kPart) / 2]>(scores);
  }
  // -- with kSumsByProduct --
  // Scores become weights. True: bases rose, and `correction` is for the output.
  template <class State>
  __device__ __forceinline__ bool weigh(Scores& scores, State& softmax, float scale, bool searches,
                                        float (&correction)[2]) {
    softmax.weigh_unsummed(scores, scale);
    pack_part<0>(scores);
    pack_part<1>(scores);
    if (!__any_sync(0xffffffffu, may_overflow() && !searches)) return false;
    softmax.template raise<true>(scores, correction);
    pack_part<0>(scores);
    pack_part<1>(scores);
    return true;
  }
  // May a weight have been beyond 448, as which those from 432 on are stored?
  __device__ __forceinline__ bool may_overflow() const {
    uint32 any = 0;
#pragma unroll
    for (int i = 0; i < kBlockKV / 8; i += 2) {
      any |= (weights[i] + 0x02020202) | (weights[i + 1] + 0x02020202);
    }
    return (any & 0x80808080) != 0;
  }
  // The sums of rows, in two columns each: a product's registers are side by side.
  static __device__ __forceinline__ float (&row_sums(Scores& scores))[4] {
    return reinterpret_cast<float (&)[4]>(scores[kSumsByProduct ? kValueColumns / 2 : 0]);
  }
  // False, which the compiler does not know.
  static __device__ __forceinline__ bool never(const ForwardParams& p) {
    return ptx::opaque(p.query_len) < 0;
  }

  // The factor of a unit's queries is read of shared memory for each block: held, it is spilled.
  static __device__ __forceinline__ float read_factor(const ForwardParams& p, const UnitInfo& t,
                                                      int warpgroup) {
    const int query = min(t.first_row + warpgroup * kWarpgroupRows, p.query_len - 1);
    const float factor = p.query_scales[query_scale_at(p, t.batch, t.head, query)];
    return kSoftcap ? factor : factor * p.scale_log2;
  }
  __device__ __forceinline__ void begin_unit(const ForwardParams&, Shared& shared, const UnitInfo&,
                                             float factor, int) {
    shared.query_factors[warp()] = factor;
    __syncwarp();
  }
  __device__ __forceinline__ void begin_scores(const ForwardParams&, const Shared& shared,
                                               int stage, int) {
    logit_factor = shared.query_factors[warp()] * shared.key_factors[stage];
  }
  __device__ __forceinline__ void begin_output(const ForwardParams&, const Shared& shared,
                                               int stage, int) {
    read_value_factor(shared, stage);
  }
  // This one's number among the consumers'.
  static __device__ __forceinline__ uint32 warp() {
    return static_cast<uint32>(ptx::opaque(threadIdx.x)) / 32 - 4;
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
    pack_part<0>(scores);
    pack_part<1>(scores);
  }
  // A half of the block.
  template <int kPart>
  __device__ __forceinline__ void pack_part(const Scores& scores) {
#pragma unroll
    for (int i = kPart * kBlockKV / 16; i < (kPart + 1) * kBlockKV / 16; ++i) {
      const int j = i / 2 * 2, row = i % 2;  // of 16 keys, the thread's four in one of its rows
      const int first = fragment::element(j, row, 0), second = fragment::element(j + 1, row, 0);
      weights[i] =
          ptx::pack_float8(scores[first], scores[first + 1], scores[second], scores[second + 1]);
    }
  }

  __device__ __forceinline__ void issue_scores(const ForwardParams& p, Scores& scores,
                                               ptx::Descriptor query, ptx::Descriptor key) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kHeadDim, 32); ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      ptx::wgmma_ss_float8(scores, query.at(box * kWarpgroupRows * kBoxRowBytes + inner),
                           key.at(box * kBlockKV * kBoxRowBytes + inner), i > 0 || never(p));
    }
  }
  // All parts but the last have been added then. `stage`: the buffer of the values.
  __device__ __forceinline__ void issue_output(const ForwardParams& p, const Shared& shared,
                                               int stage, Output& output, Scores& scores,
                                               ptx::Descriptor value, int) const {
    issue_from<0>(p, shared, stage, output, scores, value);
  }
  template <int kPart>
  __device__ __forceinline__ void issue_from(const ForwardParams& p, const Shared& shared,
                                             int stage, Output& output, Scores& scores,
                                             ptx::Descriptor value) const {
#pragma unroll
    for (int i = 0; i < kBlockKV / 32; ++i) {
      const uint32(&w)[4] = reinterpret_cast<const uint32(&)[4]>(weights[4 * i]);
      const uint64 tile = value.at(kPart * columns_of(0) * kBoxRowBytes + 32 * i);
      if constexpr (kSumsByProduct) {
        ptx::wgmma_rs_float8(sums_of<kPart>(scores), row_sums(scores), w[0], w[1], w[2], w[3], tile,
                             i > 0 || never(p));
      } else {
        ptx::wgmma_rs_float8(sums_of<kPart>(scores), w[0], w[1], w[2], w[3], tile,
                             i > 0 || never(p));
      }
    }
    if constexpr (kPart + 1 < kOutputs) {
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      add_part<kPart>(shared, stage, output, scores);
      ptx::wgmma_fence();
      issue_from<kPart + 1>(p, shared, stage, output, scores, value);
    }
  }
  __device__ __forceinline__ void accept_output(const Shared& shared, int stage, Output& output,
                                                Scores& scores) const {
    if constexpr (kSumsByProduct) ptx::pin(row_sums(scores));
    add_part<kOutputs - 1>(shared, stage, output, scores);
  }
  template <int kPart>
  __device__ __forceinline__ void add_part(const Shared& shared, int stage, Output& output,
                                           Scores& scores) const {
    auto& sums = sums_of<kPart>(scores);
    ptx::pin(sums);
    const float factor = value_factor(shared, stage);
#pragma unroll
    for (int i = 0; i < columns_of(kPart) / 2; ++i) {
      float& sum = output[kPart * columns_of(0) / 2 + i];
      sum = fmaf(sums[i], factor, sum);
    }
  }
};

}  // namespace forward
