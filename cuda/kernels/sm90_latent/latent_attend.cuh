// Latent decoding: the two warpgroups that compute, for 64 query rows.
//
// The sums of 64 rows by 512 columns are half of a multiprocessor's registers, so each warpgroup
// has 256 columns of them. Blocks come in pairs. Warpgroup 0 computes the weights of a pair's first
// block, warpgroup 1 those of the second, and each multiplies the weights of both by its half of
// the values: its own from registers, the other's from shared memory. While one computes weights,
// the other's products keep the tensor cores busy. A row's base rises from block to block as in
// any online softmax; what a warpgroup has summed is relative to the last base that it has heard of.
//
// The schedule is the one that FlashMLA calls seesaw (DeepSeek, 2025).
#pragma once

#include "logit.cuh"
#include "sm90/products.cuh"
#include "sm90_latent/latent_shared.cuh"
#include "softmax.cuh"

namespace decode {

inline constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;
static_assert(kGroupThreads * (kLoaderRegisters + 2 * kConsumerRegisters) <= 65536);

// A running maximum of every block.
struct LatentBase {
  static constexpr int kHeadroom = 0;
  static constexpr float kSumLimit = kInfinity;
};

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
  Range seen[2];                     // positions that this thread's rows see
  Range seen_by_all, seen_by_some;   // that every row of the tile sees, that any does

  // ---- units ------------------------------------------------------------------------------------

  __device__ __forceinline__ void run(const Line& line) {
    line.walk(share, [&](const Unit& of, const Range& range) {
      unit = of;
      start();
      ptx::barrier_wait(ptx::shared_address(&shared.queries_full), units % 2);
      const int end = ptx::uniform(range.end);
      int block = ptx::uniform(range.begin);
      for (; block + 1 < end; block += 2) add_pair</*kBoth=*/true>(block, block + 2 >= end);
      if (block < end) add_pair</*kBoth=*/false>(block, true);
      const int at = unit.start + range.begin - unit.blocks.begin;
      const bool is_whole = range.begin == unit.blocks.begin && range.end == unit.blocks.end;
      finish(is_whole, at == line.begin_of(share.part));
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
      const int position = first + query_of(own_row(i));
      seen[i] = {first_seen(p, position), position + 1};
    }
    const int least = first + query_of(0), most = first + query_of(kShareRows - 1);
    seen_by_all = {first_seen(p, most), least + 1};
    seen_by_some = {first_seen(p, least), most + 1};
  }
  // Of rows that are none, the last.
  __device__ __forceinline__ int query_of(int row) const {
    return min(Place(p, share, row).query, p.query_len - 1);
  }
  static __device__ __forceinline__ int own_row(int i) {
    return fragment::first_row(threadIdx.x) + i * fragment::kRowStep;
  }

  // ---- two blocks, or the last one alone --------------------------------------------------------

  template <bool kBoth>
  __device__ __forceinline__ void add_pair(int block, bool is_last) {
    const uint32 first = blocks, second = blocks + 1;
    float correction[2];
    if constexpr (kGroup == 0) {
      begin_scores(block, first);
      if constexpr (kTurns == 2 && kBoth) pass_turn();
      finish_products(scores);
      if constexpr (kTurns == 1 && kBoth) pass_turn();
      if (is_last) release(shared.queries_empty);
      weigh(block, first, correction);
      hand_over(first);
      rescale(correction);
      begin_own_values(first);
      finish_products(output);
      release(shared.empty[stage_of_block(first)][kGroup]);
      if constexpr (kBoth) {
        take_over();
        begin_others_values(second);
        finish_products(output);
        release(shared.empty[stage_of_block(second)][kGroup]);
      }
    } else {
      if constexpr (kBoth) {
        if constexpr (kTurns != 0) ptx::named_barrier_sync(kTurnBarrier, 2 * kGroupThreads);
        begin_scores(block + 1, second);
        finish_products(scores);
      }
      if (is_last) release(shared.queries_empty);
      take_over();
      begin_others_values(first);
      if constexpr (kBoth) {
        weigh(block + 1, second, correction);
        hand_over(second);
      }
      finish_products(output);
      release(shared.empty[stage_of_block(first)][kGroup]);
      if constexpr (kBoth) {
        rescale(correction);
        begin_own_values(second);
        finish_products(output);
        release(shared.empty[stage_of_block(second)][kGroup]);
      }
    }
    blocks += kBoth ? 2 : 1;
  }

  __device__ __forceinline__ void release(Barrier& barrier) const {
    __syncwarp();
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) {
      ptx::lane_arrive(ptx::shared_address(&barrier));
    }
  }
  static __device__ __forceinline__ void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier, 2 * kGroupThreads);
  }
  // The warpgroup's four warps meet.
  static __device__ __forceinline__ void meet_group() {
    ptx::named_barrier_sync(kGroupBarrier + kGroup, kGroupThreads);
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
    if constexpr (kAppends) patch(block, keys, full, parity);
    const ptx::Descriptor query =
                              ptx::descriptor(ptx::shared_address(shared.queries), 0, 0, 1024),
                          key = ptx::descriptor(keys, 0, 0, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int box = 0; box < kKeyBoxes; ++box) {
      ptx::barrier_wait(full + 8 * box, parity);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::wgmma_ss<Element, 0, 0>(scores, query.at(box * kBoxBytes + i * 32),
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
    const ptx::Descriptor others = ptx::descriptor(keys, kWeightsAt, 0, 1024),
                          values = own_values(keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockKV / 16; ++step) {
      ptx::wgmma_ss<Element, 0, 1>(output, others.at(step * 32),
                                   values.at(step * 16 * kBoxRowBytes), 1);
    }
    ptx::wgmma_commit();
  }
  static __device__ __forceinline__ ptx::Descriptor own_values(uint32 keys) {
    return ptx::descriptor(keys, kGroup * kHalfBoxes * kBoxBytes, kBoxBytes, 1024);
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
    if (first < seen_by_all.begin || first + kBlockKV > seen_by_all.end) {
      hide(first, keys_of(number));
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = state.row_maximum<kCount>(scores, row);
      state.rise(row, fmaxf(largest, state.base[row]), correction[row]);
    }
    float added[2][2];
    state.template exponentials<kCount>(scores, OneFactor{1.0f}, added, Alone{});
#pragma unroll
    for (int row = 0; row < 2; ++row) state.sum[row] += added[row][0] + added[row][1];
    if (shared.spoiled[stage_of_block(number)]) {  // every row gives NaN from here on
      state.sum[0] = state.sum[1] = kInfinity - kInfinity;
    }
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
    meet_group();  // all have multiplied the keys that lie there
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
      ptx::store_matrix_x4(chunk_address<kBlockKV>(to, row, 2 * j + lane / 16), weights[4 * j],
                           weights[4 * j + 1], weights[4 * j + 2], weights[4 * j + 3]);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_arrive(kWeightsBarrier + kGroup, 2 * kGroupThreads);
  }
  // Waits for the other's, and brings what was summed to their bases.
  __device__ __forceinline__ void take_over() {
    ptx::named_barrier_sync(kWeightsBarrier + kOther, 2 * kGroupThreads);
    float correction[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      state.rise(row, shared.base[kOther][own_row(row)], correction[row]);
    }
    rescale(correction);
  }

  // ---- positions that not every row sees --------------------------------------------------------

  // Hides scores. Values that no row sees become 0, as does what is not finite of those that some
  // see: a row that sees such a key is NaN by its weight.
  __device__ __forceinline__ void hide(int first, uint32 keys) {
    const int lane = threadIdx.x % 32;
    meet_group();  // all have multiplied these keys
#pragma unroll 1
    for (int row = threadIdx.x / 32 % 4; row < kBlockKV; row += 4) {
      const int at = first + row;
      uint32 found = 0;
      if (at < seen_by_some.begin || at >= seen_by_some.end) {
#pragma unroll
        for (int chunk = lane; chunk < kValueDim / 8; chunk += 32) {
          ptx::store_shared_x4(chunk_address<kBlockKV>(keys, row, chunk), 0, 0, 0, 0);
        }
      } else if (at < seen_by_all.begin || at >= seen_by_all.end) {
        for (int word = lane; word < kValueDim / 2; word += 32) {
          const uint32 from = chunk_address<kBlockKV>(keys, row, word / 4) + word % 4 * 4;
          const uint32 pair = ptx::load_shared(from), clean = finite_halves(pair);
          found |= pair ^ clean;
          if (pair != clean) ptx::store_shared(from, clean);
        }
      }
      const bool is_bad = __any_sync(0xffffffffu, found != 0);
      if (lane == 0) shared.bad[kGroup][row] = is_bad;
    }
    ptx::fence_async_proxy();
    meet_group();
    const int own = fragment::first_column(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) {
      const int column = own + fragment::column(i), at = first + column;
      const Range& range = seen[fragment::row(i)];
      if (at < range.begin || at >= range.end) {
        scores[i] = kNegativeInfinity;
      } else if (shared.bad[kGroup][column]) {
        scores[i] = kNan;
      }
    }
  }

  // New keys in the places of what the cache had there; flash_decode_merge writes them to it.
  __device__ __forceinline__ void patch(int block, uint32 keys, uint32 full, uint32 parity) {
    const int first = block * kBlockKV, oldest = unit.length - p.query_len;
    const int begin = max(max(oldest, 0), first), end = min(unit.length, first + kBlockKV);
    if (begin >= end) return;
    for (int box = 0; box < kKeyBoxes; ++box) ptx::barrier_wait(full + 8 * box, parity);
    const RowPieces<kHeadDim> rows(
        p.new_key, static_cast<int64>(unit.batch) * p.query_len * RowPieces<kHeadDim>::kStride);
    constexpr int kOfRow = kHeadDim / 8;
    for (int i = threadIdx.x % kGroupThreads; i < (end - begin) * kOfRow; i += kGroupThreads) {
      const int position = begin + i / kOfRow, piece = i % kOfRow;
      store_in_tile(keys, position - first, piece, rows.load((position - oldest) * kOfRow + piece));
    }
    ptx::fence_async_proxy();
    meet_group();
  }

  // ---- results ----------------------------------------------------------------------------------

  __device__ __forceinline__ void finish(bool is_whole, bool is_first) {
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = fragment::quad_sum(state.sum[i]);
      if (threadIdx.x % 4 == 0) shared.sums[units % 2][kGroup][own_row(i)] = total[i];
    }
    ptx::named_barrier_sync(kSumsBarrier, 2 * kGroupThreads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row(i);
      total[i] += shared.sums[units % 2][kOther][row];
      const Place place(p, share, row);
      if (is_whole) {
        store(place, i, total[i]);
      } else if (place.exists(p)) {
        leave(partial_row(blockIdx.x, is_first, row), i, total[i]);
      }
    }
  }
  // Whole warps call.
  __device__ __forceinline__ void store(const Place& place, int i, float total) {
    const bool exists = place.exists(p);
    Conclusion end{0.0f, 0.0f};
    if (exists) end = conclude(p, state.base[i], total, unit.batch, place.head);
    uint32 pieces[kHalfColumns / 8];
    fragment::gather_row(output, i, end.factor, pieces);
    if (!exists) return;
    const int64 row =
        (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
    uint4* const to = static_cast<uint4*>(p.out) + (row * kValueDim + kGroup * kHalfColumns) / 8;
#pragma unroll
    for (int g = 0; g < kHalfColumns / 32; ++g) {
      to[4 * g + threadIdx.x % 4] = make_uint4(pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2],
                                               pieces[4 * g + 3]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) store_lse(p, unit, place, end.lse);
  }
  // For latent_merge.cuh.
  __device__ __forceinline__ void leave(int64 at, int i, float total) {
    float* const to = p.partial_out + at * kValueColumns + kGroup * kHalfColumns +
                      fragment::first_column(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kHalfColumns / 8; ++j) {
      const int of = fragment::element(j, i, 0);
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(output[of], output[of + 1]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) {
      reinterpret_cast<float2*>(p.partial_rows)[at] = make_float2(state.base[i], total);
    }
  }
};

}  // namespace decode
