// The main backward kernel for head and value dims up to 128: dk, dv and the float32 sum of dq, or
// with kStoresDq dq itself.
//
// A persistent CTA takes blocks of 128 keys. Roles, one warpgroup each:
//   load     one warp fetches units, K, V, and per query block Q, -lse, dO, -delta by TMA
//   score 0  keys 0..63 of the block: S^T = K Q^T, dP^T = V dO^T, P, dS; dV += P^T dO and
//   score 1  keys 64..127             dK += dS^T Q with P and dS as register operands
// dS^T crosses to the other score warpgroup through a ring of shared-memory buffers. Each takes
// half of dQ = dS K one query block late, so that neither waits for the other within a block, and
// adds it to the float32 sum by red.v4 straight from registers.
#pragma once

#include "sm90/backward_dq.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_ring.cuh"
#include "sm90/backward_scores.cuh"

namespace backward {

static_assert(kKeys == 64 * kScoreWarpgroups && kParts == 1, "score warpgroups of 64 keys");
static_assert(kHead <= 128 && kValue <= 128, "wider heads: backward_wide.cuh");
static_assert(!kReadsAhead || kStages > 1, "the next block is loaded before this one is done");

inline constexpr int kThreads = 128 * (1 + kScoreWarpgroups);

// dQ of a query block is one or two tiles of 64 queries by 64 columns: each score warpgroup takes
// one, or 32 columns of the only one. A warpgroup by itself takes what columns there are of one.
inline constexpr int kDqTiles = kQueries / 64 * kHeadBoxes;
static_assert(kDqTiles <= kScoreWarpgroups);
static_assert(!kLastStores || kDqTiles == kScoreWarpgroups);
inline constexpr int kDqValues = kScoreWarpgroups == 1 ? 16 * ceil_div(kHead, 32) : 16 * kDqTiles;

inline constexpr int kOutBoxes = kHeadBoxes > kValueBoxes ? kHeadBoxes : kValueBoxes;
inline constexpr int kOutBytes = kOutBoxes * 64 * kBoxRowBytes;
struct NarrowShared : SharedWithRing {
  unsigned char output[kOutputs][kScoreWarpgroups][kOutBytes];  // [score][box][64][64]
};

// Named barriers.
inline constexpr int kScoreBarrier = 1;  // and 2: one score warpgroup

__device__ __forceinline__ void set_up() {
  if constexpr (kCompact) fill_numbers(blockDim.x);
  if constexpr (kRing) set_up_ring(8);
  if (threadIdx.x == 0) {
    set_up_load(kScoreWarps + (kRing ? 2 : 0), kScoreWarps, kScoreWarps);
    for (int i = 0; i < kScoreStages; ++i) {
      ptx::barrier_init(at(&Shared::gradient_full, i), kScoreWarps);
      ptx::barrier_init(at(&Shared::gradient_empty, i), kScoreWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
}

// The query block before the current one, whose dQ is still to be computed.
struct Last {
  int sum;     // as of `sum_index`
  bool first;  // as of `adds_first`
  bool last;   // as of `adds_last`
};
// What the steps of a warpgroup need of a unit's record with kReadsAhead, in uniform registers.
struct UnitRanges {
  Range full;    // first queries of blocks that see all its keys
  Range met;     // queries that see any of its keys
  Range seeing;  // queries that see any key at all
};
__device__ __forceinline__ Range uniform_range(const Range& range) {
  return {ptx::uniform(range.begin), ptx::uniform(range.end)};
}
// What a score warpgroup hands on, dk and dv of its keys and its half of dQ, and what a step needs
// ahead. What the warpgroup accumulates is handed from function to function: with members in their
// place the compiler computes the addresses and columns of a step in another order.
struct ScorerParts {
  const BackwardParams& p;
  const int which;
  const int slab = 64 * which;  // its first key of the block

  // Writes 64 rows of accumulators through shared memory to a [B, S, K, H] array.
  template <int kColumns>
  __device__ __forceinline__ void write_out(const TensorMap& map,
                                            const float (&values)[kColumns / 2], float scale,
                                            const volatile UnitRecord& u, int buffer) {
    const int place = buffer % kOutputs * kScoreWarpgroups + which;
    const uint32 out = at(&NarrowShared::output) + place * kOutBytes;
    // The previous store has read its shared memory.
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<kOutputs - 1>();
    ptx::named_barrier_sync(kScoreBarrier + which, 128);
    stage_rows(values, scale, out, 64 * kBoxRowBytes);
    ptx::named_barrier_sync(kScoreBarrier + which, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int i = 0; i < ceil_div(kColumns, 64); ++i) {
        ptx::tma_store(&map, out + i * 64 * kBoxRowBytes, 64 * i, u.kv_head, u.key0 + 64 * which,
                       u.batch);
      }
      ptx::bulk_commit();
    }
  }

  // With kSharesKeys: adds 64 rows of dK or dV to their sums, of which `first` is the first tile.
  // In deterministic mode the units of a block of keys add in the order of their query heads; those
  // before this one were handed out before it.
  template <int kColumns>
  __device__ __forceinline__ void add_to_sums(int slab_index, int first, bool stores,
                                              const float (&values)[kColumns / 2]) {
#pragma unroll
    for (int box = 0; box < ceil_div(kColumns, 64); ++box) {
      const KeySumTile sum(p, slab_index, first + box);
#pragma unroll
      for (int i = 0; i < min(8, kColumns / 8 - 8 * box); ++i) {
        const int j = 4 * (8 * box + i);
        const float4 piece{values[j], values[j + 1], values[j + 2], values[j + 3]};
        if (kDeterministic && stores) {
          sum.store(i, piece);
        } else {
          sum.add(i, piece);
        }
      }
    }
  }
  __device__ __forceinline__ void add_keys(const volatile UnitRecord& u,
                                           const float (&dk)[kHead / 2],
                                           const float (&dv)[kValue / 2]) {
    const int block = (u.batch * p.kv_heads + u.kv_head) * key_blocks(p) + u.key0 / kKeys;
    const int slab_index = block * kScoreWarpgroups + which, leader = threadIdx.x % 128 == 0;
    const int part = (u.head - u.kv_head * group_size(p)) / unit_heads(p);
    int* turn = p.key_turns + slab_index;
    if constexpr (kDeterministic) {
      while (leader && ptx::load_acquire(turn) != part) {
      }
      ptx::named_barrier_sync(kScoreBarrier + which, 128);
    }
    add_to_sums<kValue>(slab_index, kHeadBoxes, part == 0, dv);
    add_to_sums<kHead>(slab_index, 0, part == 0, dk);
    if constexpr (kDeterministic) {
      ptx::named_barrier_sync(kScoreBarrier + which, 128);
      if (leader) {
        ptx::fence_gpu();
        ptx::store_relaxed(turn, part + 1);
      }
    }
  }

  // This warpgroup's half of dQ = dS K, from the dS of both.
  __device__ __forceinline__ void issue_dq(float (&dq)[kDqValues], uint32 buffer) {
    const uint32 ds =
        at(&Shared::gradient) + buffer * kGradientBytes + (kQueries == 128 ? which * kBoxK : 0);
    const uint32 k = at(&Shared::key) + (kHeadBoxes == 2 ? which * kBoxK
                                         : kDqTiles == 1 ? which * 64
                                                         : 0);
    const ptx::Descriptor a = ptx::descriptor(ds, 0, kBoxK, 1024),
                          b = ptx::descriptor(k, 0, kBoxK, 1024);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::wgmma_ss<Element, 1, 1>(dq, a.at(i * 2048), b.at(i * 2048), i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ Last last_of(const volatile UnitRecord& u, const Walk& walk) {
    if constexpr (kTurnsShown) {  // not kept: no register
      return {sum_index(p, u.batch, u.head + walk.head, walk.m0), false, false};
    }
    return {walk.sum(), adds_first(p, u, walk.m0), adds_last(p, u, walk.m0)};
  }

  // Adds the half of dQ of the `iteration`-th query block to the sum, or stores it.
  __device__ __forceinline__ void add_dq(const float (&dq)[kDqValues], const volatile UnitRecord& u,
                                         uint32 iteration, Last last) {
    const bool shares = kDqTiles == 1;
    const int tile = shares ? 0 : which, first = shares ? which * kDqValues / 4 : 0;
    if constexpr (kStoresDq) return store_dq(p, u, last.sum, tile, first, dq);
    const Turn turn = take_turn(iteration, which, last.first);
    if (kLastStores && last.last) {
      store_sum(p, u, last.sum, tile, kScoreBarrier + which, dq, turn);
    } else {
      add_fragments(SumTile(p, last.sum, tile), first, dq, turn);
    }
    end_turn(iteration, which);
  }

  // dQ of the `iteration`-th query block with nothing beside it.
  __device__ __forceinline__ void finish_dq(const volatile UnitRecord& u, uint32 iteration,
                                            Last last, bool ends_unit = false) {
    const uint32 buffer = stage_of<kScoreStages>(iteration);
    float dq[kDqValues];
    ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
    ptx::wgmma_fence();
    issue_dq(dq, buffer);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    if (kGivesBackEarly && ends_unit) release(at(&Shared::key_empty));
    release(at(&Shared::gradient_empty, buffer));
    add_dq(dq, u, iteration, last);
  }

  // How far the `iteration`-th block of queries is from the one before, as the loader says.
  __device__ __forceinline__ int shown_step(uint32 iteration, int before) const {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::query_full, slot), parity_of<kStages>(iteration));
    return (ptx::uniform(items(&Shared::first_queries)[slot]) - before) / kQueries;
  }

  __device__ __forceinline__ UnitRanges ranges_of(const volatile UnitRecord& u) {
    if constexpr (!kReadsAhead) return {};
    const int key = u.key0 + slab;
    return {
        uniform_range(full_starts(p, u, slab)),
        uniform_range(visible_queries(sight_of(p, u), key, key + 63)),
        uniform_range(seeing_queries(u)),
    };
  }

  // With kReadsAhead: waits for Q and dO of the `iteration`-th query block and takes -delta, which
  // dP is accumulated onto. Called beside the products of the block before.
  __device__ __forceinline__ void begin_step(uint32 iteration, float (&dp)[kScores]) {
    if constexpr (kReadsAhead) {
      const uint32 slot = stage_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
      ptx::barrier_wait(at(&Shared::query_full, slot), parity);
      ptx::barrier_wait(at(&Shared::dout_full, slot), parity);
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 d = row_numbers(at(&Shared::minus_delta) + slot * kNumberBytes, j);
        dp[4 * j] = dp[4 * j + 2] = d.x;
        dp[4 * j + 1] = dp[4 * j + 3] = d.y;
      }
      ptx::pin(dp);
    }
  }
};

// A score warpgroup.
struct Scorer : ScorerParts {
  // One query block. dQ of the block before it is computed here too, unless this is the unit's
  // first.
  template <bool kFirst>
  __device__ __forceinline__ void score_step(const volatile UnitRecord& u, const UnitRanges& ranges,
                                             uint32 iteration, const Walk& walk, Last last,
                                             float (&begun)[kScores], StepDropped& dropped,
                                             float (&dk)[kHead / 2], float (&dv)[kValue / 2]) {
    const int m0 = walk.m0;
    Step known(p, u, u.head + walk.head, m0, slab);
    const uint32 slot = stage_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
    const uint32 q = at(&Shared::query) + slot * kQueryBytes;
    const uint32 dout = at(&Shared::dout) + slot * kDoutBytes;

    if constexpr (!kReadsAhead) ptx::barrier_wait(at(&Shared::query_full, slot), parity);
    hide_unseen_queries<kHeadTile>(u, ranges.seeing, q, m0, kScoreBarrier + which);
    float x[kScores], fresh[kScores];
    float (&dp)[kScores] = kReadsAhead ? begun : fresh;
    if constexpr (!kReadsAhead) {
      ptx::wgmma_fence();
      keys_times_queries<kHead>(x, at(&Shared::key) + slab * kBoxRowBytes, q);
      ptx::barrier_wait(at(&Shared::dout_full, slot), parity);
    }
    hide_unseen_queries<kValueTile>(u, ranges.seeing, dout, m0, kScoreBarrier + which);
    ptx::wgmma_fence();
    if constexpr (kReadsAhead) {
      keys_times_queries<kHead>(x, at(&Shared::key) + slab * kBoxRowBytes, q);
    }
    keys_times_queries<kValue>(dp, at(&Shared::value) + slab * kBoxRowBytes, dout, kReadsAhead);
    known.bias.read(slot, slab);
    const RowNumbers minus_lse(at(&Shared::minus_lse) + slot * kNumberBytes);
    ptx::wgmma_wait<1>();
    ptx::pin(x);

    uint32 probability[kScores / 2], gradient[kScores / 2];
    score_to_probability(p, u, x, probability, minus_lse, slab, ranges.full, known, dropped);
    const uint32 buffer = stage_of<kScoreStages>(iteration);
    const uint32 before = iteration - 1, buffer_before = stage_of<kScoreStages>(before);
    const auto wait_for_empty = [&] {
      ptx::barrier_wait(at(&Shared::gradient_empty, buffer),
                        parity_of<kScoreStages>(iteration) ^ 1);
    };
    const auto wait_for_before = [&] {
      ptx::barrier_wait(at(&Shared::gradient_full, buffer_before), parity_of<kScoreStages>(before));
    };
    if constexpr (kReadsAhead) {  // while dP is computed
      wait_for_empty();
      if constexpr (!kFirst) wait_for_before();
    }
    const auto gradient_of = [&](int i, float minus_delta) {
      if constexpr (kHasDropout && !kMarksDropped) {
        return x[i] * ((dropped.drops(i) ? 0.f : dp[i]) + minus_delta);
      } else {
        return score_gradient(x[i], dp[i], minus_delta);
      }
    };
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      float2 d{0.f, 0.f};
      if constexpr (!kReadsAhead || kHasDropout) {
        d = row_numbers(at(&Shared::minus_delta) + slot * kNumberBytes, j);
      }
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        if constexpr (!kHasSlope && kMarksDropped) {
          probability[i / 2] = pack_probability(x[i], x[i + 1]);
        }
        if constexpr (kReadsAhead && kHasDropout) {
          // A dropped pair has delta alone. Each bit is asked for twice: a bool takes a shift more.
          const float low = dropped.drops(i) ? d.x : dp[i];
          const float high = dropped.drops(i + 1) ? d.y : dp[i + 1];
          gradient[i / 2] = Element::pack(x[i] * low, x[i + 1] * high);
          probability[i / 2] =
              Element::pack(dropped.drops(i) ? 0.f : x[i], dropped.drops(i + 1) ? 0.f : x[i + 1]);
        } else if constexpr (kReadsAhead) {
          gradient[i / 2] = Element::pack(x[i] * dp[i], x[i + 1] * dp[i + 1]);
        } else {
          float low = gradient_of(i, d.x), high = gradient_of(i + 1, d.y);
          if constexpr (kHasDbias && kStoresDbias) {  // what is hidden may hold NaN
            low = x[i] == 0.f ? 0.f : low;
            high = x[i + 1] == 0.f ? 0.f : high;
          }
          gradient[i / 2] = Element::pack(low, high);
        }
      }
    }

    if constexpr (!kReadsAhead) wait_for_empty();
    store_gradient(gradient, at(&Shared::gradient) + buffer * kGradientBytes, slab);
    release(at(&Shared::gradient_full, buffer));

    if constexpr (kFirst) {
      ptx::pin(dk);  // the zeros are in place before the fence
      ptx::pin(dv);
      ptx::wgmma_fence();
      issue_accumulate(dv, probability, dout);
      ptx::wgmma_commit();
      issue_accumulate(dk, gradient, q);
      ptx::wgmma_commit();
    } else {
      float dq[kDqValues];
      if constexpr (!kReadsAhead) wait_for_before();
      ptx::wgmma_fence();
      issue_dq(dq, buffer_before);
      issue_accumulate(dv, probability, dout);
      ptx::wgmma_commit();
      issue_accumulate(dk, gradient, q);
      ptx::wgmma_commit();
      ptx::wgmma_wait<2>();
      ptx::pin(dq);
      release(at(&Shared::gradient_empty, buffer_before));
      add_dq(dq, u, before, last);
    }
    if constexpr (kHasDbias && kStoresDbias) {
      store_dbias(p, u.batch, known.head, m0, u.key0 + slab + ptx::warp_index() % 4 * 16, gradient);
    }
    draw_next(p, u, slab, walk, dropped);
    ptx::wgmma_wait<1>();
    // Without a next block, once more this one's: a branch here makes ptxas serialise.
    begin_step(iteration + (walk.left > 1), dp);
    release(at(&Shared::dout_empty, slot));
    ptx::wgmma_wait<0>();
    release(at(&Shared::query_empty, slot));
    ptx::pin(dk);
    ptx::pin(dv);
  }

  // The same for a block none of whose queries sees any of this warpgroup's keys, although some see
  // the other warpgroup's: dS is zero, only dQ of the block before is left to do.
  template <bool kFirst>
  __device__ __forceinline__ void hidden_step(const volatile UnitRecord& u, uint32 iteration,
                                              const Walk& walk, Last last, float (&dp)[kScores],
                                              StepDropped& dropped) {
    const uint32 slot = stage_of<kStages>(iteration), buffer = stage_of<kScoreStages>(iteration);
    ptx::barrier_wait(at(&Shared::gradient_empty, buffer), parity_of<kScoreStages>(iteration) ^ 1);
    const uint32 gradient[kScores / 2] = {};
    store_gradient(gradient, at(&Shared::gradient) + buffer * kGradientBytes, 64 * which);
    release(at(&Shared::gradient_full, buffer));
    ptx::barrier_wait(at(&Shared::query_full, slot), parity_of<kStages>(iteration));
    release(at(&Shared::query_empty, slot));
    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    release(at(&Shared::dout_empty, slot));
    if constexpr (!kFirst) finish_dq(u, iteration - 1, last);
    if (walk.left > 1) {
      begin_step(iteration + 1, dp);
      draw_next(p, u, 64 * which, walk, dropped);
    }
  }

  // One query block, one way or the other.
  template <bool kFirst>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, const UnitRanges& ranges,
                                       uint32 iteration, const Walk& walk, Last last,
                                       float (&dp)[kScores], StepDropped& dropped,
                                       float (&dk)[kHead / 2], float (&dv)[kValue / 2]) {
    const int m0 = walk.m0;
    // Two branches: joined, ptxas spills (d128 causal, 16 bytes; deterministic, 60).
    if constexpr (kSkipsHidden && kReadsAhead) {
      if (m0 + kQueries <= ranges.met.begin || m0 >= ranges.met.end) {
        return hidden_step<kFirst>(u, iteration, walk, last, dp, dropped);
      }
    } else if constexpr (kSkipsHidden) {
      const int key = u.key0 + slab;
      const Range met = visible_queries(sight_of(p, u), key, key + 63);
      if (ptx::uniform(m0 + kQueries <= met.begin || m0 >= met.end)) {
        return hidden_step<kFirst>(u, iteration, walk, last, dp, dropped);
      }
    }
    score_step<kFirst>(u, ranges, iteration, walk, last, dp, dropped, dk, dv);
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      float dk[kHead / 2], dv[kValue / 2];
#pragma unroll
      for (int i = 0; i < kHead / 2; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kValue / 2; ++i) dv[i] = 0.f;

      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      ptx::barrier_wait(at(&Shared::value_full), parity_of<1>(received));
      if (has_unseen_keys(u)) {
        hide_unseen_keys<kHeadTile>(u, at(&Shared::key), 64 * which);
        hide_unseen_keys<kValueTile>(u, at(&Shared::value), 64 * which);
        ptx::named_barrier_sync(kScoreBarrier + which, 128);
      }
      if (u.total > 0) {
        const UnitRanges ranges = ranges_of(u);
        Walk walk(p, u);
        prefetch_bias(p, u, walk, 64 * which);
        float dp[kScores];
        StepDropped dropped;
        dropped.begin_unit(p, u, 64 * which);
        begin_step(iteration, dp);
        draw_dropped(p, u, 64 * which, walk, dropped);
        step<true>(u, ranges, iteration, walk, {}, dp, dropped, dk, dv);
        ++iteration;
        while (walk.left > 1) {
          const Last last = last_of(u, walk);
          if constexpr (kFollowsShown) {
            walk.follow(p, u, [&] { return shown_step(iteration, walk.m0); });
          } else {
            walk.next(p, u);
          }
          prefetch_bias(p, u, walk, 64 * which);
          step<false>(u, ranges, iteration, walk, last, dp, dropped, dk, dv);
          ++iteration;
        }
        if (kGivesBackEarly) release(at(&Shared::value_empty));
        finish_dq(u, iteration - 1, last_of(u, walk), true);
      }
      if (!kGivesBackEarly || u.total == 0) {
        release(at(&Shared::key_empty));
        release(at(&Shared::value_empty));
      }
      if constexpr (kRing) release(at(&Shared::sum_added, stage_of<kUnits>(received)));
      if constexpr (kSharesKeys) {
        add_keys(u, dk, dv);
      } else {
        const int row = 64 * which + threadIdx.x % 128 / 32 * 16;
        mark_rows(p, u.batch, u.kv_head, u.key0, row, 0, all_finite(dk));
        mark_rows(p, u.batch, u.kv_head, u.key0, row, 1, all_finite(dv));
        if constexpr (kTmaStores) {
          write_out<kValue>(p.dvalue, dv, dropout_scale(p), u, 0);
          write_out<kHead>(p.dkey, dk, query_key_scale(p), u, 1);
        } else {
          store_columns<kValueDim>(p, p.dvalue_data, dv, 0, value_scale(p), u, 64 * which);
          store_columns<kHeadDim>(p, p.dkey_data, dk, 0, query_key_scale(p), u, 64 * which);
        }
      }
      return_unit(received);
      ++received;
    }
    // Shared memory outlives the last store that reads it.
    if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
  }
};

__device__ __forceinline__ void main_kernel(const BackwardParams& p) {
  set_up();
  ptx::wait_for_the_kernel_ahead();
  ptx::let_the_next_kernel_start();
  if (ptx::warp_index() / 4 == 0) {
    ptx::register_decrease<kLoadRegisters>();
    if (kRing && (ptx::warp_index() == 1 || ptx::warp_index() == 2)) {
      SumFinisher{p, ptx::warp_index() - 1}.run();
    } else {
      feed(p);
    }
  } else {
    ptx::register_increase<kScoreRegisters>();
    Scorer{p, ptx::warp_index() / 4 - 1}.run();
  }
}

}  // namespace backward
