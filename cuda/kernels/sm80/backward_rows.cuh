// A CTA's unit: its steps, the turns of the deterministic mode, dk and dv of its keys.
//
// A warp has kRowTiles tiles of 16 keys. With all columns of their dk and dv, P and dS are register
// operands of its products; where kColumnWarps = 2 or 4 warps share keys, each has a part of a
// step's queries until P and dS are in shared memory, and a part of the columns after it.
#pragma once

#include "fragment.cuh"
#include "sm80/backward_products.cuh"

namespace backward {

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

struct Rows : RowProducts {
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
    // With few queries not all warps have scores.
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
