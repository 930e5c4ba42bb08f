// Latent decoding: the two warpgroups that compute, for 64 query rows.
//
// The sums of 64 rows by 512 columns are half of a multiprocessor's registers, so each warpgroup
// has 256 columns of them. Blocks come in pairs. Warpgroup 0 computes the weights of a pair's first
// block, warpgroup 1 those of the second, and each multiplies the weights of both by its half of
// the values: its own from registers, the other's from shared memory. While one computes weights,
// the other's products keep the tensor cores busy. A row's base is near its maximum so far; what a
// warpgroup has summed is relative to the last base that it has heard of.
//
// The schedule is the one that FlashMLA calls seesaw (DeepSeek, 2025).
#pragma once

#include "logit.cuh"
#include "sm90/products.cuh"
#include "sm90_latent/latent_hidden.cuh"
#include "sm90_latent/latent_results.cuh"
#include "softmax.cuh"

namespace decode {

inline constexpr int kLoaderRegisters = kByThreads ? 72 : 40;
inline constexpr int kConsumerRegisters = kByThreads ? 216 : 232;
// The kernel starts with 168 for each thread, a multiple of 8; of more, the last warpgroup that
// asks would wait for ever.
static_assert(kLoaderRegisters + 2 * kConsumerRegisters <= 3 * 168);

struct LatentBase {
  static constexpr int kHeadroom = 0;
  static constexpr float kSumLimit = kInfinity;
};
// A row's base rises to a block's maximum if that has a weight of more than 2^8, or of more than a
// fifth of what its row has summed: the rounding of a weight that decides the row would be the
// result's. So it seldom rises behind the first blocks, where to multiply all that was summed took
// 4 % of the time. Compared with a thread's quarter of the row. Keys that come by cp.async are
// what a call waits for: there it rises with every maximum.
inline constexpr float kMostWeight = kByThreads ? 1.0f : 256.0f, kMostOfQuarter = 0.8f;

__device__ __forceinline__ void release(Barrier& barrier) {
  __syncwarp();
  if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) {
    ptx::lane_arrive(ptx::shared_address(&barrier));
  }
}

// Boxes of shared memory. In a cluster the number of the CTA is in front of its addresses, where
// descriptors have something else.
__device__ __forceinline__ ptx::Descriptor tile(uint32 address, uint32 offset,
                                                uint32 leading_bytes) {
  constexpr uint32 kOwn = kCluster > 1 ? 0xffffffu : ~0u;
  return ptx::descriptor(address & kOwn, offset, leading_bytes, 1024);
}

// A unit's scores are there. In a cluster sums come in the place of queries.
__device__ __forceinline__ void leave_queries(const DecodeParams& p, const Share& share,
                                              LatentShared& shared) {
  release(shared.queries_empty);
  if constexpr (kCluster == 1) return;
  if (threadIdx.x == kGroupThreads) expect_sums(p, share, shared);
  ptx::cluster_arrive();
}

template <int kGroup>
struct LatentConsumer {
  static constexpr int kOther = 1 - kGroup;

  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  uint32 blocks = 0, units = 0;  // behind this warpgroup

  Unit unit;
  SoftmaxState<LatentBase> state;
  float output[kHalfColumns / 2];
  float scores[kBlockKV / 2];
  uint32 weights[kBlockKV / 4];
  Sight sight;

  // ---- units ------------------------------------------------------------------------------------

  __device__ __forceinline__ void run(const OwnLine& line) {
    line.walk(share, [&](const Unit& of, const Range& range) {
      unit = of;
      start();
      ptx::barrier_wait(ptx::shared_address(&shared.queries_full), units % 2);
      const int first = ptx::uniform(range.begin), end = ptx::uniform(range.end);
      int block = first;
      for (; block + 1 < end; block += 2) {
        add_pair</*kBoth=*/true>(block, block == first, block + 2 >= end);
      }
      if (block < end) add_pair</*kBoth=*/false>(block, block == first, true);
      if (kCluster > 1 && range.empty()) leave_queries(p, share, shared);
      const bool is_whole = range.begin == unit.blocks.begin && range.end == unit.blocks.end;
      const LatentResults<kGroup> results{p, share, shared, unit, output, state.base};
      results.finish(state.sum, units, kCluster == 1 && is_whole, units == 0);
      ++units;
    });
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (float& x : output) x = 0.0f;
    const int first = unit.length - p.query_len;  // position of query 0
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.base[i] = kNoBase;
      state.sum[i] = 0.0f;
      if constexpr (kTakesPlaces) continue;
      const int position = first + query_of(own_row(i));
      sight.own[i] = {first_seen(p, position), position + 1};
    }
    if constexpr (kTakesPlaces) return;
    const int least = first + query_of(0), most = first + query_of(kShareRows - 1);
    sight.by_all = {first_seen(p, most), least + 1};
    sight.by_some = {first_seen(p, least), most + 1};
  }
  // The last query for rows that are none.
  __device__ __forceinline__ int query_of(int row) const {
    return min(Place(p, share, row).query, p.query_len - 1);
  }

  // ---- two blocks, or the last one alone --------------------------------------------------------

  template <bool kBoth>
  __device__ __forceinline__ void add_pair(int block, bool is_first, bool is_last) {
    const uint32 first = blocks, second = blocks + 1;
    float correction[2];
    if constexpr (kGroup == 0) {
      begin_scores(block, first);
      // The second block's products come behind those of the first.
      if constexpr (kBoth) ptx::named_barrier_arrive(kTurnBarrier, 2 * kGroupThreads);
      finish_products(scores);
      if (is_last) leave_queries(p, share, shared);
      weigh(block, first, correction);
      hand_over(first);
      if (!is_first) rescale(correction);
      begin_own_values(first);
      finish_products(output);
      release_half(first);
      if constexpr (kBoth) {
        take_over(false);
        begin_others_values(second);
        finish_products(output);
        release_half(second);
      }
    } else {
      if constexpr (kBoth) {
        ptx::named_barrier_sync(kTurnBarrier, 2 * kGroupThreads);
        begin_scores(block + 1, second);
        finish_products(scores);
      }
      if (is_last) leave_queries(p, share, shared);
      take_over(is_first);
      begin_others_values(first);
      if constexpr (kBoth) {
        weigh(block + 1, second, correction);
        hand_over(second);
      }
      finish_products(output);
      release_half(first);
      if constexpr (kBoth) {
        rescale(correction);
        begin_own_values(second);
        finish_products(output);
        release_half(second);
      }
    }
    blocks += kBoth ? 2 : 1;
  }

  // Own columns of a block's values.
  __device__ __forceinline__ void release_half(uint32 number) const {
    release(shared.empty[stage_of_block(number)][kGroup]);
  }
  __device__ __forceinline__ uint32 keys_of(uint32 number) const {
    return ptx::shared_address(shared.keys[0]) + stage_of_block(number) * kKeyBytes;
  }

  // ---- products ---------------------------------------------------------------------------------

  // Issue, do not wait: scores[64, 64] = queries[64, H] keys[64, H]^T, box by box as they come.
  __device__ __forceinline__ void begin_scores(int block, uint32 number) {
    const uint32 keys = keys_of(number), stage = stage_of_block(number);
    const uint32 full = ptx::shared_address(&shared.full[0][0]) + 8 * kKeyBoxes * stage;
    const uint32 parity = parity_of_block(number);
    if constexpr (kAppends) patch<kGroup>(p, unit, block, keys, full, parity);
    const ptx::Descriptor query = tile(ptx::shared_address(shared.queries), 0, 0),
                          key = tile(keys, 0, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int box = 0; box < kKeyBoxes; ++box) {
      ptx::barrier_wait(full + 8 * box, parity);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::wgmma_ss<Element, 0, 0>(scores, query.at(box * kQueryBoxBytes + i * 32),
                                     key.at(box * kBoxBytes + i * 32), box + i > 0);
      }
    }
    ptx::wgmma_commit();
  }
  // output[64, 256] += weights[64, 64] values[64, 256], the weights of this warpgroup's block,
  __device__ __forceinline__ void begin_own_values(uint32 number) {
    ptx::wgmma_fence();
    multiply_rows<kBlockKV>(output, weights, own_values(keys_of(number)), 1);
    ptx::wgmma_commit();
  }
  // and of the other's.
  __device__ __forceinline__ void begin_others_values(uint32 number) {
    const uint32 keys = keys_of(number);
    const ptx::Descriptor others = tile(keys, kWeightsAt, 0), values = own_values(keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockKV / 16; ++step) {
      ptx::wgmma_ss<Element, 0, 1>(output, others.at(step * 32),
                                   values.at(step * 16 * kBoxRowBytes), 1);
    }
    ptx::wgmma_commit();
  }
  static __device__ __forceinline__ ptx::Descriptor own_values(uint32 keys) {
    return tile(keys, kGroup * kHalfBoxes * kBoxBytes, kBoxBytes);
  }
  template <int kCount>
  static __device__ __forceinline__ void finish_products(float (&sums)[kCount]) {
    ptx::wgmma_wait<0>();
    ptx::pin(sums);
  }
  __device__ __forceinline__ void rescale(const float (&correction)[2]) {
    if (!__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHalfColumns / 2; ++i) output[i] *= correction[fragment::row(i)];
  }

  // ---- weights ----------------------------------------------------------------------------------

  // Scores become weights, packed as an operand; `correction` is for what was summed before.
  __device__ __forceinline__ void weigh(int block, uint32 number, float (&correction)[2]) {
    constexpr int kCount = kBlockKV / 2;
    const int first = block * kBlockKV;
    score_function(p, scores);
    // Rounded here, not within a fused product: the largest weight is 1 however large scores are.
#pragma unroll
    for (float& x : scores) x = __fmul_rn(x, p.scale_log2);
    if constexpr (kTakesPlaces) {
      hide_unread(shared, stage_of_block(number), scores);
    } else if (first < sight.by_all.begin || first + kBlockKV > sight.by_all.end) {
      hide<kGroup>(shared, sight, first, keys_of(number), scores);
    }
    float largest[2];
    bool rises = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      largest[row] = fragment::row_maximum<kCount>(scores, row);
      correction[row] = 1.0f;
      const float weight = ptx::exp2_approx(largest[row] - state.base[row]);
      const float most = fminf(fmaxf(kMostOfQuarter * state.sum[row], 1.0f), kMostWeight);
      rises = rises || weight > most;
    }
    // Threads of a row have one base.
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        state.rise(row, fmaxf(largest[row], state.base[row]), correction[row]);
      }
    }
    float added[2][2];
    state.template exponentials<kCount>(scores, OneFactor{1.0f}, added, Alone{});
#pragma unroll
    for (int row = 0; row < 2; ++row) state.sum[row] += added[row][0] + added[row][1];
    // Every row gives NaN from here on.
    if (shared.spoiled[stage_of_block(number)]) state.sum[0] = state.sum[1] = kInfinity - kInfinity;
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      weights[i] = Element::pack(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Gives the weights and the bases to the other warpgroup.
  __device__ __forceinline__ void hand_over(uint32 number) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    const uint32 to = keys_of(number) + kWeightsAt;
    if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) shared.base[kGroup][own_row(i)] = state.base[i];
    }
    meet_group<kGroup>();  // all have multiplied the keys that lie there
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
      ptx::store_matrix_x4(chunk_address<kBlockKV>(to, row, 2 * j + lane / 16), weights[4 * j],
                           weights[4 * j + 1], weights[4 * j + 2], weights[4 * j + 3]);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_arrive(kWeightsBarrier + kGroup, 2 * kGroupThreads);
  }
  // Waits for the other's, and brings what was summed to their bases.
  __device__ __forceinline__ void take_over(bool is_first) {
    ptx::named_barrier_sync(kWeightsBarrier + kOther, 2 * kGroupThreads);
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      state.rise(row, shared.base[kOther][own_row(row)], correction[row]);
    }
    if (!is_first) rescale(correction);  // else nothing is summed
  }
};

}  // namespace decode
