// From scores to P in the main kernels, on S^T tiles of 64 keys by kQueries: bias, functions,
// masks, dropout; which keys and queries of a tile nobody sees.
#pragma once

#include "fragment.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_units.cuh"
#include "terms.cuh"

namespace backward {

// -lse or -delta of the two queries to which a thread's elements 4j..4j+3 of S^T belong.
__device__ __forceinline__ float2 row_numbers(uint32 numbers, int j) {
  // Opaque beside a slope, which leaves no register for what it takes from step to step.
  const int thread = kHasSlope ? ptx::opaque(threadIdx.x) : threadIdx.x;
  return ptx::load_shared_f2(numbers + (8 * j + fragment::first_column(thread)) * 4);
}
// The numbers of a query block, with kReadsAhead read at once. While wgmma reads shared memory
// another access to it takes 100 to 250 cycles: a sixth of a step, for -lse, -delta, barriers and
// the record.
struct RowNumbers {
  uint32 numbers;
  float2 ahead[kQueries / 8];
  __device__ __forceinline__ explicit RowNumbers(uint32 numbers) : numbers(numbers) {
    if constexpr (kReadsAhead) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) ahead[j] = row_numbers(numbers, j);
    }
  }
  __device__ __forceinline__ float2 at(int j) const {
    if constexpr (kReadsAhead) return ahead[j];
    return row_numbers(numbers, j);
  }
};

// The bias of a warp's 16 keys and a query block: loaded before its scores are computed, or in
// parts where it is added.
template <bool kFromTile>
struct StepBias {
  using Tile = bias::ColumnTile<kQueries / kBiasParts>;
  Tile tile;
  __device__ __forceinline__ void load(const BackwardParams& p, const volatile UnitRecord& u,
                                       int head, int m0, int slab) {
    if constexpr (kHasBias && kBiasParts == 1) {
      tile.load(p, u.batch, head, m0, u.key0 + slab + ptx::warp_index() % 4 * 16);
    }
  }
  __device__ __forceinline__ void read(uint32, int) {}
  __device__ __forceinline__ void add(const BackwardParams& p, const volatile UnitRecord& u,
                                      float (&x)[kScores], int slab, int head, int m0) const {
#pragma unroll
    for (int part = 0; part < kBiasParts; ++part) {
      Tile now = tile;
      if constexpr (kBiasParts > 1) {
        now.load(p, u.batch, head, m0 + part * (kQueries / kBiasParts),
                 u.key0 + slab + ptx::warp_index() % 4 * 16);
      }
      constexpr int kCount = kScores / kBiasParts;
      now.visit([&](int i, float bias) {
        x[part * kCount + i] = with_bias(p, x[part * kCount + i], bias);
      });
    }
  }
};
// A step's bias that came with Q, read beside the products.
template <>
struct StepBias<true> {
  bias::StagedColumns<kQueries> tile;
  __device__ __forceinline__ void load(const BackwardParams&, const volatile UnitRecord&, int, int,
                                       int) {}
  __device__ __forceinline__ void read(uint32 slot, int slab) {
    tile.load(Shared::bias_tile(ptx::shared_address(shared_memory), slot),
              slab + ptx::warp_index() % 4 * 16);
  }
  __device__ __forceinline__ void add(const BackwardParams& p, const volatile UnitRecord&,
                                      float (&x)[kScores], int, int, int) const {
    tile.visit([&](int i, float bias) { x[i] = with_bias(p, x[i], bias); });
  }
};

// What a step knows before its scores are there.
struct Step : MetBlock {
  StepBias<kBiasTiles> bias;

  __device__ __forceinline__ Step(const BackwardParams& p, const volatile UnitRecord& u, int head,
                                  int m0, int slab)
      : MetBlock{head, m0} {
    // The block of a layout may be seen by other heads of the group.
    if constexpr (kHasMask) {
      if (!kShowsLayout || (mask::varies_by_head(p) && u.heads > 1)) {
        const int flag =
            mask::flag_by_key<kQueries, kKeys>(p, u.batch, head, m0 / kQueries, u.key0 / kKeys);
        whole = (flag & mask::kSeesAll << slab / 64) != 0;
      }
    }
    bias.load(p, u, head, m0, slab);
  }
  // From scores to logits in log2 units.
  __device__ __forceinline__ float scale_of(const BackwardParams& p) const { return p.scale_log2; }
};

// A function of the scores of a thread's elements of S^T, of which the first is that of `query` and
// keys[0].
struct FunctionOfKeys {
  ScoreFunctionAndSlope<BackwardParams> function;
  Place query, keys[2];
  __device__ __forceinline__ FunctionOfKeys(const BackwardParams& p, int batch, int head,
                                            int first_query, int first_key)
      : query(place(first_query)), keys{place(first_key), place(first_key + fragment::kRowStep)} {
    function.read(p, batch, head);
  }
  __device__ __forceinline__ float apply(const BackwardParams& p, float score, int i,
                                         float& slope) const {
    return function.value(p, score, column_after<kQueries>(query, fragment::column(i)),
                          fragment::row(i) == 0 ? keys[0] : keys[1], slope);
  }
};

// With kScoreIsLine: the line along the queries, of which `first_query` and `first_key` are those
// of the thread's first element of S^T.
struct LineOfKeys {
  float factor, step, start[2];  // score * factor + start + step * column, log2 units
  __device__ __forceinline__ LineOfKeys(const BackwardParams& p, int batch, int head, bool after,
                                        int first_query, int first_key)
      : factor(line_factor(p)) {
    ScoreLine<BackwardParams> of;
    of.read(p, batch, head);
    const Line line = of.of_side(after);
    step = -line.slope;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      start[row] = line.at(first_key + fragment::kRowStep * row - first_query);
    }
  }
  // The exponent of an element; `shift` is what is added to its column.
  __device__ __forceinline__ float exponent(float score, int i, float shift) const {
    const float column = static_cast<float>(fragment::column(i));
    const float along = kScoreIsLevel ? shift : fmaf(step, column, shift);
    return fmaf(score, factor, start[fragment::row(i)] + along);
  }
};
// Do all keys [key0, key0 + 64) stand beyond the reach on one side of all queries of the block?
__device__ __forceinline__ bool is_straight(int key0, int m0) {
  return ScoreLine<BackwardParams>::is_straight(key0, key0 + 63, m0, m0 + kQueries - 1);
}

// P = exp2(scale * S - lse) in place; `row` is the first of the thread's two keys. With a softcap S
// is tanh(scale * S / cap): P goes to `probability`, rounded, and S becomes P times the cap's
// slope. So it does with a function of the scores that has a slope; each function is applied here.
// With kScoreIsLine a block that is not partial has one line. `step` is a Step.
template <bool kPartial, class StepOf>
__device__ __forceinline__ void probabilities(const BackwardParams& p, const volatile UnitRecord& u,
                                              float (&score)[kScores],
                                              uint32 (&probability)[kScores / 2],
                                              const RowNumbers& minus_lse, int row,
                                              const StepOf& step) {
  // The record is volatile: it is read for a function alone.
  constexpr bool kStraight = kScoreIsLine && !kPartial;
  const auto function = [&] {
    if constexpr (kStraight) {
      return LineOfKeys(p, u.batch, step.head, u.key0 + row / 64 * 64 > step.m0,
                        step.m0 + fragment::first_column(threadIdx.x), u.key0 + row);
    } else if constexpr (kHasScoreFunction) {
      return FunctionOfKeys(p, u.batch, step.head, step.m0 + fragment::first_column(threadIdx.x),
                            u.key0 + row);
    } else {
      return 0;
    }
  }();
  const auto apply = [&](float x, int i, float& slope) {
    if constexpr (kHasScoreFunction && !kStraight) return function.apply(p, x, i, slope);
    return x;
  };
  constexpr int kTogether = kStraight ? 0 : ScoreFunctionAndSlope<BackwardParams>::kTogether;
  FunctionOfScores<kTogether, kScores> made;
  made.begin(score, apply);
  const auto finish = [&](int j, const bool (&seen)[4]) {
    // Else the numbers of many queries are under way, and up to 36 bytes are spilled.
    if (kHasScoreFunction && !kStraight ? j % 2 == 0 : kSoftcap && kPartial) __syncwarp();
    const float2 shifts = minus_lse.at(j);
    float slopes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = score[4 * j + i];
      const float shift = i % 2 == 0 ? shifts.x : shifts.y;
      if constexpr (kStraight) {
        x = ptx::exp2_approx(function.exponent(x, 4 * j + i, shift));
        slopes[i] = 1.0f;  // of the score itself
      } else {
        if constexpr (kHasScoreFunction) {
          x = made.value(x, 4 * j + i, slopes[i], apply);
        } else {
          slopes[i] = score_slope(x);
        }
        x = probability_of(fmaf(x, step.scale_of(p), shift));
      }
      x = seen[i] ? x : 0.f;
    }
    if constexpr (kHasSlope) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        probability[2 * j + i / 2] = Multiplied::pack(score[4 * j + i], score[4 * j + i + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = score[4 * j + i];
        // The slope of a hidden pair may be NaN.
        x = kZeroesHidden && x == 0.f ? 0.f : x * slopes[i];
      }
    }
  };
  if constexpr (kPartial) {
    const SeenPairs<kQueries> pairs(p, u.batch, step.head, sight_of(p, u), u.key0 + row, step.m0);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      bool seen[4];
      pairs.see(j, seen);
      finish(j, seen);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) finish(j, {true, true, true, true});
  }
}

__device__ __forceinline__ void zero_row(uint32 tile, int boxes, int box_bytes, int row,
                                         int column_chunk) {
  for (int i = 0; i < boxes; ++i) {
    ptx::store_shared_x4(tile + i * box_bytes + row * 128 + column_chunk * 16, 0, 0, 0, 0);
  }
}

// Zeroes those of the keys [slab, slab + 64) that nobody sees, by one warpgroup: they may hold
// anything and must not meet a zero in a product.
template <int kBoxes>
__device__ __forceinline__ void hide_unseen_keys(const volatile UnitRecord& u, uint32 tile,
                                                 int slab) {
  const int low = u.seen_keys.begin, high = u.seen_keys.end;
  for (int row = slab + threadIdx.x % 128 / 8; row < slab + 64; row += 16) {
    if (row < low || row >= high) zero_row(tile, kBoxes, kBoxK, row, threadIdx.x % 8);
  }
  ptx::fence_async_proxy();
}
__device__ __forceinline__ bool has_unseen_keys(const volatile UnitRecord& u) {
  return u.seen_keys.begin > 0 || u.seen_keys.end < kKeys;
}

// With kPairs: those of the other CTA's keys, by one warpgroup that has no barrier to wait for: who
// reads the tile waits for what this warpgroup does next.
__device__ __forceinline__ void hide_unseen_keys_of_other(const volatile UnitRecord& u) {
  const int first = (u.key0 ^ kKeys) - u.key0;
  if (u.seen_keys.begin <= first && u.seen_keys.end >= first + kKeys) return;
  const uint32 tile = at(&Shared::key) + kHeadTile * kBoxK;
  hide_unseen_keys<kPairBoxes>(u, tile - first * kBoxRowBytes, first);
}

// Likewise the queries of a block that see no key, in a tile of Q or dO. Every warpgroup that reads
// the tile calls, before its first product with it: rows that another one zeroed stay zero.
// With kReadsAhead the caller has read seeing_queries.
inline constexpr bool kHidesQueries = kHasQueryLengths || kWindowLeft || kWindowRight;
__device__ __forceinline__ Range seeing_queries(const volatile UnitRecord& u) {
  if constexpr (!kHidesQueries) return {0, 0};
  return {u.seen_queries.begin, u.seen_queries.end};
}
template <int kBoxes>
__device__ __forceinline__ void hide_unseen_queries(const volatile UnitRecord& u,
                                                    const Range& ahead, uint32 tile, int m0,
                                                    int named_barrier) {
  if constexpr (kHidesQueries) {
    const Range seeing = kReadsAhead ? ahead : seeing_queries(u);
    if (m0 >= seeing.begin && m0 + kQueries <= seeing.end) return;
    for (int row = threadIdx.x % 128 / 8; row < kQueries; row += 16) {
      if (m0 + row < seeing.begin || m0 + row >= seeing.end)
        zero_row(tile, kBoxes, kBoxQ, row, threadIdx.x % 8);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(named_barrier, 128);
  }
}

// Most likely the bias of the step after that of the walk, for the keys [slab, slab + 64).
__device__ __forceinline__ void prefetch_bias(const BackwardParams& p, const volatile UnitRecord& u,
                                              const Walk& walk, int slab) {
  if constexpr (kHasBias && !kBiasTiles) {
    const bool same = walk.head + 1 < u.heads;  // query block
    const int m0 = max(walk.m0 + (same ? 0 : kDirection * kQueries), 0);
    bias::prefetch(p, u.batch, u.head + (same ? walk.head + 1 : 0), m0, u.key0 + slab);
  }
}

// What a thread draws with for a query head of the group and the keys [slab, slab + 64), from query
// 0 on: found for each step, or with kHoldsDraws, where the group is one head, once a unit.
__device__ __forceinline__ ColumnDraws find_draws(const BackwardParams& p,
                                                  const volatile UnitRecord& u, int slab, int head,
                                                  int lane) {
  const Draws draws(p, ptx::uniform(u.batch), ptx::uniform(u.head + head));
  const int key = u.key0 + slab + threadIdx.x / 32 % 4 * 16 + fragment::first_column(lane);
  return {draws, static_cast<uint32>(lane / 4), static_cast<uint32>(key)};
}
template <bool kHeld>
struct UnitDraws {  // not held
  __device__ __forceinline__ void begin_unit(const BackwardParams&, const volatile UnitRecord&,
                                             int) {}
  __device__ __forceinline__ ColumnDraws draws(const BackwardParams& p,
                                               const volatile UnitRecord& u, int slab,
                                               int head) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;  // read again, not kept in a register
    return find_draws(p, u, slab, head, lane);
  }
};
template <>
struct UnitDraws<true> {
  ColumnDraws held;
  __device__ __forceinline__ void begin_unit(const BackwardParams& p, const volatile UnitRecord& u,
                                             int slab) {
    held = find_draws(p, u, slab, 0, threadIdx.x % 32);
  }
  __device__ __forceinline__ const ColumnDraws& draws(const BackwardParams&,
                                                      const volatile UnitRecord&, int, int) const {
    return held;
  }
};

// What dropout drops of the keys [slab, slab + 64) and a query block.
struct StepDropped : Dropped<kScores>, UnitDraws<kHoldsDraws> {};
__device__ __forceinline__ void draw_dropped(const BackwardParams& p, const volatile UnitRecord& u,
                                             int slab, const Walk& walk, StepDropped& dropped) {
  if constexpr (kHasDropout) dropped.draw(p, dropped.draws(p, u, slab, walk.head), walk.m0);
}

// Draws for the query block after this one beside products of this one: there are registers.
__device__ __forceinline__ void draw_next(const BackwardParams& p, const volatile UnitRecord& u,
                                          int slab, Walk walk, StepDropped& dropped) {
  if constexpr (kHasDropout) {
    walk.next(p, u);
    draw_dropped(p, u, slab, walk, dropped);
  }
}

// A mask of the dropped ones of two marked weights, as these are packed.
__device__ __forceinline__ uint32 dropped_pair(float low, float high) {
  if constexpr (kScoreHasSlope) {
    return (__float_as_uint(low) & 1 ? 0xffffu : 0u) |
           (__float_as_uint(high) & 1 ? 0xffff0000u : 0u);
  }
  return ptx::sign_halves(low, high);
}

// From S^T to P, as `probabilities` has it. With dropout the dropped elements get a mark, with
// kMarksDropped, and zero is what they are in `probability`.
template <class StepOf>
__device__ __forceinline__ void score_to_probability(
    const BackwardParams& p, const volatile UnitRecord& u, float (&x)[kScores],
    uint32 (&probability)[kScores / 2], const RowNumbers& minus_lse, int slab, const Range& full,
    const StepOf& step, const StepDropped& dropped) {
  if constexpr (kHasBias) step.bias.add(p, u, x, slab, step.head, step.m0);
  score_function(p, x);
  const int row = slab + fragment::first_row(threadIdx.x);
  if (is_full(p, u, full, slab, step) && (!kScoreIsLine || is_straight(u.key0 + slab, step.m0))) {
    probabilities<false>(p, u, x, probability, minus_lse, row, step);
  } else {
    probabilities<true>(p, u, x, probability, minus_lse, row, step);
  }
  if constexpr (kHasDropout) {
    if constexpr (kMarksDropped) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) x[i] = dropped.mark(i, x[i]);
    }
    if constexpr (kHasSlope) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        probability[i] &=
            ~(kMarksDropped ? dropped_pair(x[2 * i], x[2 * i + 1]) : dropped.pair_mask(i));
      }
    }
  }
}

// What is dropped of P enters dV as zero.
__device__ __forceinline__ uint32 pack_probability(float low, float high) {
  return kHasDropout ? Multiplied::pack_positive(low, high) : Multiplied::pack(low, high);
}

}  // namespace backward
