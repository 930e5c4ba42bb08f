// A CTA's unit: the products, dk and dv of its keys, and what it adds to the sums of dq.
//
// A warp has kRowTiles tiles of 16 keys. With all columns of their dk and dv, P and dS are register
// operands of its products; where kColumnWarps = 2 or 4 warps share keys, each has a part of a
// step's queries until P and dS are in shared memory, and a part of the columns after it.
#pragma once

#include "backward_sums.cuh"
#include "sm80/backward_scores.cuh"

namespace backward {

// dS^T or P^T in shared memory, rows of keys. Neither stores of 8 rows nor ldmatrix meet in a bank.
struct LaneOfScores {
  static constexpr uint32 kRowBytes = kStepQueries * 2;
  uint32 first;  // address of 8 queries of a key, 0 or 8 queries on

  __device__ __forceinline__ LaneOfScores(uint32 tile, uint32 key, uint32 chunk)
      : first(tile + key * kRowBytes +
              (chunk ^ (key / (64 / kStepQueries) % (kStepQueries / 8))) * 16) {}
  // 16 queries on for each unit; `keys`: a multiple of 8.
  __device__ __forceinline__ uint32 at(uint32 unit, uint32 keys) const {
    return (first ^ unit * 32) + keys * kRowBytes;
  }
};

// A warp's columns of one of its rows, from `first_column` on; not `stored`: whole warps call.
template <int kDim, class Of, int kCount>
__device__ __forceinline__ void store_row(typename Of::Bits* to, bool stored, int first_column,
                                          const float (&sum)[kCount], int row, float factor) {
  const int lane = threadIdx.x % 32;
  if constexpr (kSame<Of, Float32>) {
    if (!stored) return;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = first_column + 8 * j + fragment::first_column(lane);
      const float low = sum[fragment::element(j, row, 0)] * factor;
      const float high = sum[fragment::element(j, row, 1)] * factor;
      if (column >= kDim) continue;
      if constexpr (kDim % 2 == 0) {
        *reinterpret_cast<float2*>(to + column) = make_float2(low, high);
      } else {
        to[column] = low;
        if (column + 1 < kDim) to[column + 1] = high;
      }
    }
  } else {
    constexpr int kPieces = round_up(2 * kCount, 32) / 8;
    uint32 pieces[kPieces];
    fragment::gather_row<kCount, kPieces, Of>(sum, row, factor, pieces);
    if (!stored) return;
#pragma unroll
    for (int g = 0; g < kPieces / 4; ++g) {
      const int own = 8 * (4 * g + lane % 4), column = first_column + own;
      if (own < 2 * kCount && column < kDim) {
        store_piece<kDim>(
            to, column,
            make_uint4(pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]));
      }
    }
  }
}

// Of a warp's tiles.
using TileScores = Scores[kRowTiles];

template <int kCount>
__device__ __forceinline__ void set_zero(float (&sum)[kRowTiles][kCount]) {
#pragma unroll
  for (auto& tile : sum) {
#pragma unroll
    for (float& x : tile) x = 0.f;
  }
}

// A warp's rows of keys or values, operands of all steps.
template <int kDim, bool kKept>
struct KeptRows {
  __device__ __forceinline__ void load(uint32, uint32) {}
  __device__ __forceinline__ void multiply(TileScores& d, uint32 tile, uint32 row, uint32 b,
                                           uint32 row_b, float factor) const {
    set_zero(d);
    add_rows_of<kDim, kStepQueries>(d, LeftRows<kDim, kKeys>(tile, row, opaque_lane()), b, row_b,
                                    factor);
  }
};
template <int kDim>
struct KeptRows<kDim, true> {
  uint32 units[ceil_div(kDim, 16)][kRowTiles][4];

  __device__ __forceinline__ void load(uint32 tile, uint32 row) {
    const LeftRows<kDim, kKeys> from(tile, row, opaque_lane());
#pragma unroll
    for (int i = 0; i < ceil_div(kDim, 16); ++i) {
      uint32 unit[kRowTiles][kParts][4];
      from(i, unit);
#pragma unroll
      for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
        for (int j = 0; j < 4; ++j) units[i][of][j] = unit[of][0][j];
      }
    }
  }
  __device__ __forceinline__ void multiply(TileScores& d, uint32, uint32, uint32 b, uint32 row_b,
                                           float) const {
    set_zero(d);
    add_rows_of<kDim, kStepQueries>(
        d,
        [&](int step, uint32(&left)[kRowTiles][kParts][4]) {
#pragma unroll
          for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
            for (int j = 0; j < 4; ++j) left[of][0][j] = units[step][of][j];
          }
        },
        b, row_b);
  }
};

struct Rows {
  static constexpr int kHeadUnits = kHead / 16, kValueUnits = kValue / 16;  // of 16 columns
  static constexpr int kOwnHead = ceil_div(kHeadUnits, kColumnWarps);       // of a warp
  static constexpr int kOwnValue = ceil_div(kValueUnits, kColumnWarps);
  static constexpr int kRowGroups = kStepQueries / kOwnKeys;  // of warps, as dq's rows are shared

  const Sm80BackwardParams& p;
  const Walk& walk;
  Shared& shared;
  const int warp = ptx::warp_index();
  float dk[kRowTiles][8 * kOwnHead], dv[kRowTiles][8 * kOwnValue];
  KeptRows<kHeadDim, kKeepsRows> keys;
  KeptRows<kValueDim, kKeepsRows> values;
  float key_factor, value_factor;   // of the warp's rows,
  float query_factor, dout_factor;  // of a step's

  __device__ __forceinline__ void run() {
    set_zero(dk);
    set_zero(dv);
    const Copies copies{p, walk, shared};
    Step at = walk.first();
    Step before = at;
    if (!walk.is_over(at)) copies.begin(at);
    key_factor = copies.factor_of_keys(p.key_factors, walk.unit.key0 + first_key());
    value_factor = copies.factor_of_keys(p.value_factors, walk.unit.key0 + first_key());
#pragma unroll 1
    while (!walk.is_over(at)) {
      query_factor = copies.factor_of_queries(p.query_factors, at);
      dout_factor = copies.factor_of_queries(p.dout_factors, at);
      copies.take(at);
      if (at.number == 0) {
        keys.load(copies.key_tile(), first_key());
        values.load(copies.value_tile(), first_key());
      }
      const Step next = walk.after(at);
      step(copies, at, next, before);
      if constexpr (kDefersDq) before = at;
      at = next;
    }
    if constexpr (kDefersDq) {
      if (at.number > 0) {
        __syncthreads();
        add_dq(copies, before, 1);
      }
    }
    finish();
  }

 private:
  // The warp's first key, of the block; which of the warps that share it.
  __device__ __forceinline__ int first_key() const { return warp % kRowWarps * kOwnKeys; }
  __device__ __forceinline__ int share() const { return warp / kRowWarps; }

  __device__ __forceinline__ void step(const Copies& copies, const Step& at, const Step& next,
                                       const Step& before) {
    const bool more = !walk.is_over(next);
    if (more) {
      if constexpr (kStages == 2) copies.begin_queries(next);
      if constexpr (kDoutStages == 2) copies.begin_dout(next);
    }
    if constexpr (kDefersDq) {
      if (at.number > 0) add_dq(copies, before, 1);
    }
    const uint32 query = copies.query_tile(at), dout = copies.dout_tile(at);
    // Of few queries not all warps have scores.
    const int end = kScoreWarps == kColumnWarps || share() < kScoreWarps ? kWarpQueries : 0;
#pragma unroll 1
    for (int part = 0; part < end; part += kFragmentQueries) {
      const int column = share() * kWarpQueries + part;
      const auto fragment = [&](int tile) -> Fragment {
        return {p, walk, at, walk.unit.key0 + first_key() + 16 * tile,
                walk.first_query(at) + column};
      };
      TileScores x, dp;
      Packed probability[kRowTiles], gradient[kRowTiles];
      keys.multiply(x, copies.key_tile(), first_key(), query, column, key_factor * query_factor);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        fragment(tile).to_probabilities(x[tile], probability[tile], copies.minus_lse(at));
      }
      if constexpr (kColumnWarps == 1) {
        add_own<kValueDim>(dv, probability, dout, column, [&](int, int) { return dout_factor; });
      } else {
        store_scores(probability, 1, column);
      }
      values.multiply(dp, copies.value_tile(), first_key(), dout, column,
                      value_factor * dout_factor);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const Fragment of = fragment(tile);
        of.to_gradients(x[tile], dp[tile], gradient[tile], copies.minus_delta(at));
        if constexpr (kHasDbias && kStoresDbias) {
          gradient[tile].store_dbias(p, walk.unit.batch, walk.head(at), of.first_query,
                                     of.first_key);
        }
      }
      float factors[kRowTiles];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) factors[tile] = gradient[tile].rescale();
      store_factors(factors, column);
      store_scores(gradient, 0, column, at.number);
      if constexpr (kColumnWarps == 1) {
        add_own<kHeadDim>(dk, gradient, query, column,
                          [&](int, int tile) { return factors[tile] * query_factor; });
      }
    }
    if constexpr (kDefersDq) {  // dS of all keys is wanted in the next step
      ptx::named_barrier_sync(1 + warp % kRowWarps, 32 * kColumnWarps);
      add_shared<kValueDim>(dv, 1, dout, [](int, int) { return 1.f; });
      add_shared<kHeadDim>(dk, 0, query, [](int, int) { return 1.f; }, at.number);
      return;
    }
    const int turn = take_turn(at);
    __syncthreads();
    const auto of_dout = [&](int, int) { return dout_factor; };
    const auto of_query = [&](int step, int tile) {
      return shared.score_factor(first_key() / 16 + tile, step).y;
    };
    // What has one stage is copied when all are done with what it replaces, beside what is left.
    if constexpr (kColumnWarps == 1) {
      if (kStages == 1 && more) copies.begin_queries(next);
      if (kDoutStages == 1 && more) copies.begin_dout(next);
      add_dq(copies, at, turn);
    } else if constexpr (kStages == 2 && kDoutStages == 2) {
      add_dq(copies, at, turn);
      add_shared<kValueDim>(dv, 1, dout, of_dout);
      add_shared<kHeadDim>(dk, 0, query, of_query);
    } else {
      add_shared<kValueDim>(dv, 1, dout, of_dout);
      if constexpr (kDoutStages == 1) {
        __syncthreads();
        if (more) copies.begin_dout(next);
      }
      add_shared<kHeadDim>(dk, 0, query, of_query);
      if constexpr (kStages == 1) {
        __syncthreads();
        if (more) copies.begin_queries(next);
      }
      add_dq(copies, at, turn);
    }
    if constexpr (kDeterministic) {
      __syncthreads();
      end_turn(at);
    }
  }

  // -- products --
  // dS^T, which is kept till the step after, or P^T.
  __device__ __forceinline__ uint32 score_tile(int which, int number = 0) const {
    if (kDefersDq && which == 0) return ptx::shared_address(shared.scores[number % 2 * 2]);
    return ptx::shared_address(shared.scores[which]);
  }
  // A fragment, from a query of the step on.
  __device__ __forceinline__ void store_scores(const Packed (&scores)[kRowTiles], int which,
                                               int query, int number = 0) const {
    const uint32 lane = opaque_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of 16 queries
      const LaneOfScores to(score_tile(which, number), first_key() + lane / 4, half);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = half * 2; i < kScores / 2; i += i % 2 == 0 ? 1 : 3) {
          uint32 parts[kParts];
          scores[tile].get(i, parts);
          const uint32 key = 16 * tile + i % 2 * fragment::kRowStep;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            ptx::store_shared(to.at(query / 16 + i / 4, key) + lane % 4 * 4 + part * kScoreBytes,
                              parts[part]);
          }
        }
      }
    }
  }

  // Of dS^T, from a query of the step on.
  __device__ __forceinline__ void store_factors(const float (&factors)[kRowTiles],
                                                int query) const {
    if (!kHalves || threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kFragmentQueries / 16; ++i) {
        shared.set_score_factor(first_key() / 16 + tile, query / 16 + i, factors[tile] * key_factor,
                                factors[tile] * query_factor);
      }
    }
  }

  // dk or dv += dS^T or P^T times rows of Q or dO: of a fragment, all columns,
  template <int kDim, int kCount, class FactorOf>
  __device__ __forceinline__ void add_own(float (&sum)[kRowTiles][kCount],
                                          const Packed (&scores)[kRowTiles], uint32 rows, int query,
                                          FactorOf factor_of) const {
    multiply_columns<kFragmentQueries / 16, kDim, kStepQueries>(
        sum,
        [&](int step, uint32(&left)[kRowTiles][kParts][4]) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32 parts[kParts];
              scores[tile].get(4 * step + i, parts);
#pragma unroll
              for (int part = 0; part < kParts; ++part) left[tile][part][i] = parts[part];
            }
          }
        },
        rows, query, 0, kAllUnits, factor_of);
  }
  // and of a step, the warp's share of them.
  template <int kDim, int kCount, class FactorOf>
  __device__ __forceinline__ void add_shared(float (&sum)[kRowTiles][kCount], int which,
                                             uint32 rows, FactorOf factor_of,
                                             int number = 0) const {
    constexpr int kOwn = kCount / 8, kUnits = ceil_div(kDim, 16);
    const uint32 lane = opaque_lane();
    const LaneOfScores from(score_tile(which, number), first_key() + lane % 16, lane / 16);
    multiply_columns<kStepQueries / 16, kDim, kStepQueries,
                     kKeepsAddresses && (kOwn % 4 == 0 || kOwn <= 2),
                     kHalves ? 1 : kStepQueries / 16>(
        sum,
        [&](int step, uint32(&left)[kRowTiles][kParts][4]) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
              ptx::load_matrix_x4(from.at(step, 16 * tile) + i * kScoreBytes, left[tile][i]);
            }
          }
        },
        rows, 0, share() * kOwn, kOwn * kColumnWarps == kUnits ? kAllUnits : kUnits, factor_of);
  }

  // Adds dQ = dS K: a warp has as many tiles of 16 queries as of keys, and a share of the columns,
  // four units at a time.
  __device__ __forceinline__ void add_dq(const Copies& copies, const Step& at, int turn) const {
    constexpr int kGroups = kWarps / kRowGroups, kOwn = ceil_div(kHeadUnits, kGroups);
    static_assert(kStepQueries % kOwnKeys == 0 && kWarps % kRowGroups == 0);
    const int index = sum_index(p, walk.unit.batch, walk.head(at), at.m * kQueries);
    const uint32 first = warp / kRowGroups * kOwn;
    constexpr bool kAreThere = kOwn * kGroups == kHeadUnits;
    constexpr int kAtOnce = 4 / kRowTiles, kWhole = kOwn / kAtOnce, kRest = kOwn % kAtOnce;
#pragma unroll(kWhole <= 2 && kRowTiles == 1 ? 2 : 1)
    for (int i = 0; i < kWhole; ++i) {
      add_dq_units<kAtOnce, kAreThere, kKeepsAddresses && kOwn % kAtOnce == 0>(
          copies, at, index, turn, first + kAtOnce * i);
    }
    if constexpr (kRest > 0) {
      add_dq_units<kRest, kAreThere, kKeepsAddresses && kOwn <= 2>(copies, at, index, turn,
                                                                   first + kAtOnce * kWhole);
    }
  }
  template <int kUnits, bool kAreThere, bool kAligned>
  __device__ __forceinline__ void add_dq_units(const Copies& copies, const Step& at, int index,
                                               int turn, uint32 first) const {
    constexpr uint32 kEnd = kAreThere ? kAllUnits : kHeadUnits;
    const uint32 lane = opaque_lane(), first_row = warp % kRowGroups * kRowTiles;
    const LaneOfScores from(score_tile(0, at.number), lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float dq[kRowTiles][8 * kUnits];
    set_zero(dq);
    multiply_columns<kKeys / 16, kHeadDim, kKeys, kAligned, kHalves ? 1 : kKeys / 16>(
        dq,
        [&](int step, uint32(&left)[kRowTiles][kParts][4]) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
              ptx::load_transposed_x4(from.at(first_row + tile, 16 * step) + i * kScoreBytes,
                                      left[tile][i]);
            }
          }
        },
        copies.key_tile(), 0, first, kEnd,
        [&](int step, int tile) { return shared.score_factor(step, first_row + tile).x; });
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const uint32 unit = first + i;
      if (!(kAreThere && kKeepsAddresses) && unit >= kEnd) continue;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const SumTile sum(p, index, unit / 4,
                          at.part * (kStepQueries * 2) + (first_row + tile) * 32 + lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = dq[tile] + 8 * i + 4 * half;
          const float4 piece{x[0], x[1], x[2], x[3]};
          if (kDeterministic && turn == 0) {
            sum.store(unit % 4 * 2 + half, piece);
          } else {
            sum.add(unit % 4 * 2 + half, piece);
          }
        }
      }
    }
  }

  // -- turns of the deterministic mode, of a block's steps together --
  // Waits for this unit's, before a barrier that all meet; returns what there was.
  __device__ __forceinline__ int take_turn(const Step& at) const {
    if constexpr (!kDeterministic) return 1;
    const int turn = walk.turn(at.m);
    if (at.part == 0 && threadIdx.x == 0) {
      while (ptx::load_acquire(walk.counter(at)) != turn) {
      }
    }
    return turn;
  }
  // Past a barrier: all have added.
  __device__ __forceinline__ void end_turn(const Step& at) const {
    if constexpr (kDeterministic) {
      if (at.part + 1 == kBlockSteps && threadIdx.x == 0) {
        ptx::fence_gpu();
        ptx::store_relaxed(walk.counter(at), walk.unit.key0 / kKeys + 1);
      }
    }
  }

  // -- results --
  __device__ __forceinline__ void finish() {
    int* flaws = &shared.flaws[0][0];
    const int thread = threadIdx.x;
    constexpr int kFlaws = kKeys / 16 * 2;
    if (thread < kFlaws) flaws[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = first_key() / 16 + tile;
      if (!all_finite(dk[tile])) shared.flaws[row][0] = 1;
      if (!all_finite(dv[tile])) shared.flaws[row][1] = 1;
    }
    store<kHeadDim>(p.dkey_data, dk, query_key_scale(p));
    store<kValueDim>(p.dvalue_data, dv, value_scale(p));
    __syncthreads();
    if (thread < kFlaws) {
      const Unit& unit = walk.unit;
      if (!kCompact || unit.key0 + thread / 2 * kMarkedRows < p.kv_len) {
        p.marks[first_mark(p, unit.batch, unit.kv_head, unit.key0) * 2 + thread] = flaws[thread];
      }
    }
  }
  template <int kDim, int kCount>
  __device__ __forceinline__ void store(void* array, const float (&sum)[kRowTiles][kCount],
                                        float factor) const {
    const int first_column = kColumnWarps == 1 ? 0 : share() * (2 * kCount);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int key = walk.unit.key0 + first_key() + static_cast<int>(threadIdx.x) % 32 / 4 +
                        16 * tile + fragment::kRowStep * row;
        const int64 at = key_row(p, walk.unit.batch, key, walk.unit.kv_head) * kDim;
        store_row<kDim, ResultElement>(static_cast<ResultElement::Bits*>(array) + at,
                                       key < p.kv_len, first_column, sum[tile], row, factor);
      }
    }
  }
};

}  // namespace backward
