// A CTA's unit: the products, dk and dv of its keys, and what it adds to the sums of dq.
//
// A warp has 16 keys. Up to 128 columns of dk and dv it has all, and P and dS are register operands
// of their products; beyond, two warps share 16 keys (kColumnWarps = 2), each with half of a step's
// queries until P and dS are in shared memory, and with half of the columns after it.
#pragma once

#include "sm80/backward_scores.cuh"

namespace backward {

// dS^T or P^T in shared memory, rows of keys. Neither stores of 8 rows nor ldmatrix meet in a bank.
struct LaneOfScores {
  static constexpr uint32 kRowBytes = kStepQueries * 2;
  uint32 first;  // address of 8 queries of a key, 0 or 8 queries on

  __device__ __forceinline__ LaneOfScores(uint32 tile, uint32 key, uint32 chunk)
      : first(tile + key * kRowBytes +
              (chunk ^ (kStepQueries == 64 ? key % 8 : key / 2 % 4)) * 16) {}
  // 16 queries on for each unit; `keys`: a multiple of 8.
  __device__ __forceinline__ uint32 at(uint32 unit, uint32 keys) const {
    return (first ^ unit * 32) + keys * kRowBytes;
  }
};

struct Rows {
  static constexpr int kHeadUnits = kHead / 16, kValueUnits = kValue / 16;  // of 16 columns
  static constexpr int kOwnHead = ceil_div(kHeadUnits, kColumnWarps);       // of a warp
  static constexpr int kOwnValue = ceil_div(kValueUnits, kColumnWarps);
  static constexpr uint32 kAll = 0xffffffffu;  // units: none is absent

  const Sm80BackwardParams& p;
  const Walk& walk;
  Shared& shared;
  const int warp = ptx::warp_index();
  float dk[8 * kOwnHead], dv[8 * kOwnValue];

  __device__ __forceinline__ void run() {
#pragma unroll
    for (float& x : dk) x = 0.f;
#pragma unroll
    for (float& x : dv) x = 0.f;
    const Copies copies{p, walk, shared};
    Place at = walk.first();
    if (!walk.is_over(at)) copies.begin(at);
#pragma unroll 1
    while (!walk.is_over(at)) {
      copies.take(at);
      const Place next = walk.after(at);
      step(copies, at, next);
      at = next;
    }
    finish();
  }

 private:
  // The warp's first key, of the block; which of the warps that share it.
  __device__ __forceinline__ int first_key() const { return warp % kRowWarps * 16; }
  __device__ __forceinline__ int share() const { return warp / kRowWarps; }

  __device__ __forceinline__ void step(const Copies& copies, const Place& at, const Place& next) {
    const bool more = !walk.is_over(next);
    if (more) {
      if constexpr (kStages == 2) copies.begin_queries(next);
      if constexpr (kDoutStages == 2) copies.begin_dout(next);
    }
    const uint32 query = copies.query_tile(at), dout = copies.dout_tile(at);
#pragma unroll 1
    for (int part = 0; part < kWarpQueries; part += kFragmentQueries) {
      const int column = share() * kWarpQueries + part;
      const Fragment fragment{p, walk, at, walk.unit.key0 + first_key(),
                              walk.first_query(at) + column};
      Scores x, dp;
      Packed probability, gradient;
      multiply_rows<kHeadDim, kKeys, kStepQueries>(x, copies.key_tile(), first_key(), query,
                                                   column);
      fragment.to_probabilities(x, probability, copies.minus_lse(at));
      if constexpr (kColumnWarps == 1) {
        add_own(dv, probability, dout, column);
      } else {
        store_scores(probability, kColumnWarps - 1, column);
      }
      multiply_rows<kValueDim, kKeys, kStepQueries>(dp, copies.value_tile(), first_key(), dout,
                                                    column);
      fragment.to_gradients(x, dp, gradient, copies.minus_delta(at));
      if constexpr (kHasDbias && kStoresDbias) {
        store_dbias(p, walk.unit.batch, walk.head(at), fragment.first_query, fragment.first_key,
                    gradient);
      }
      store_scores(gradient, 0, column);
      if constexpr (kColumnWarps == 1) add_own(dk, gradient, query, column);
    }
    const int turn = take_turn(at);
    __syncthreads();
    constexpr bool kIsRead = kColumnWarps == 1;  // are all done with these queries?
    if constexpr (kIsRead) begin_late(copies, next, more);
    add_dq(copies, at, turn);
    if constexpr (!kIsRead) {
      add_shared<kValueUnits>(dv, kColumnWarps - 1, dout);
      add_shared<kHeadUnits>(dk, 0, query);
    }
    if constexpr (kDeterministic || (!kIsRead && kStages * kDoutStages < 4)) {
      __syncthreads();
      end_turn(at);
      if constexpr (!kIsRead) begin_late(copies, next, more);
    }
  }
  // What takes the place of what this step has read.
  __device__ __forceinline__ void begin_late(const Copies& copies, const Place& next,
                                             bool more) const {
    if (!more) return;
    if constexpr (kStages == 1) copies.begin_queries(next);
    if constexpr (kDoutStages == 1) copies.begin_dout(next);
  }

  // -- products --
  __device__ __forceinline__ uint32 score_tile(int which) const {
    return ptx::shared_address(shared.scores[which]);
  }
  // A fragment, from a query of the step on.
  __device__ __forceinline__ void store_scores(const Packed& scores, int which, int query) const {
    const uint32 lane = opaque_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of 16 queries
      const LaneOfScores to(score_tile(which), first_key() + lane / 4, half);
#pragma unroll
      for (int i = half * 2; i < kScores / 2; i += i % 2 == 0 ? 1 : 3) {
        ptx::store_shared(to.at(query / 16 + i / 4, i % 2 * fragment::kRowStep) + lane % 4 * 4,
                          scores[i]);
      }
    }
  }

  // dk or dv += dS^T or P^T times rows of Q or dO: of a fragment, all columns,
  template <int kCount>
  __device__ __forceinline__ void add_own(float (&sum)[kCount], const Packed& scores, uint32 rows,
                                          int query) const {
    multiply_columns<kFragmentQueries / 16, kStepQueries>(
        sum,
        [&](int step, uint32(&left)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) left[i] = scores[4 * step + i];
        },
        rows, query, 0, kAll);
  }
  // and of a step, the warp's share of them.
  template <int kUnits, int kCount>
  __device__ __forceinline__ void add_shared(float (&sum)[kCount], int which, uint32 rows) const {
    constexpr int kOwn = kCount / 8;
    const uint32 lane = opaque_lane();
    const LaneOfScores from(score_tile(which), first_key() + lane % 16, lane / 16);
    multiply_columns<kStepQueries / 16, kStepQueries>(
        sum, [&](int step, uint32(&left)[4]) { ptx::load_matrix_x4(from.at(step, 0), left); }, rows,
        0, share() * kOwn, kOwn * kColumnWarps == kUnits ? kAll : kUnits);
  }

  // Adds dQ = dS K: a warp has 16 queries, and a share of the columns, four units at a time.
  __device__ __forceinline__ void add_dq(const Copies& copies, const Place& at, int turn) const {
    constexpr int kRowGroups = kStepQueries / 16, kGroups = kWarps / kRowGroups;
    constexpr int kOwn = ceil_div(kHeadUnits, kGroups);
    static_assert(kWarps % kRowGroups == 0);
    const int index = sum_index(p, walk.unit.batch, walk.head(at), at.m * kQueries);
    const uint32 first = warp / kRowGroups * kOwn;
    add_dq_units<(kOwn < 4 ? kOwn : 4), kOwn * kGroups == kHeadUnits>(copies, at, index, turn,
                                                                      first);
    if constexpr (kOwn > 4) {
      constexpr int kRest = kOwn - 4;
      static_assert(kRest <= 4);
      add_dq_units<kRest, kOwn * kGroups == kHeadUnits>(copies, at, index, turn, first + 4);
    }
  }
  template <int kUnits, bool kAreThere>
  __device__ __forceinline__ void add_dq_units(const Copies& copies, const Place& at, int index,
                                               int turn, uint32 first) const {
    constexpr uint32 kEnd = kAreThere ? kAll : kHeadUnits;
    const uint32 lane = opaque_lane(), row = warp % (kStepQueries / 16);
    const LaneOfScores from(score_tile(0), lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float dq[8 * kUnits];
#pragma unroll
    for (float& x : dq) x = 0.f;
    multiply_columns<kKeys / 16, kKeys>(
        dq,
        [&](int step, uint32(&left)[4]) { ptx::load_transposed_x4(from.at(row, 16 * step), left); },
        copies.key_tile(), 0, first, kEnd);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const uint32 unit = first + i;
      if (unit >= kEnd) continue;
      const SumTile sum(p, index, unit / 4, at.part * (kStepQueries * 2) + row * 32 + lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = dq + 8 * i + 4 * half;
        const float4 piece{x[0], x[1], x[2], x[3]};
        if (kDeterministic && turn == 0) {
          sum.store(unit % 4 * 2 + half, piece);
        } else {
          sum.add(unit % 4 * 2 + half, piece);
        }
      }
    }
  }

  // -- turns of the deterministic mode, of a block's steps together --
  // Waits for this unit's, before a barrier that all meet; returns what there was.
  __device__ __forceinline__ int take_turn(const Place& at) const {
    if constexpr (!kDeterministic) return 1;
    const int turn = walk.turn(at.m);
    if (at.part == 0 && threadIdx.x == 0) {
      while (ptx::load_acquire(walk.counter(at)) != turn) {
      }
    }
    return turn;
  }
  // Past a barrier: all have added.
  __device__ __forceinline__ void end_turn(const Place& at) const {
    if constexpr (kDeterministic) {
      if (at.part + 1 == kParts && threadIdx.x == 0) {
        ptx::fence_gpu();
        ptx::store_relaxed(walk.counter(at), walk.unit.key0 / kKeys + 1);
      }
    }
  }

  // -- results --
  __device__ __forceinline__ void finish() {
    int* flaws = &shared.flaws[0][0];
    const int thread = threadIdx.x;
    if (thread < 2 * kRowWarps) flaws[thread] = 0;
    __syncthreads();
    const int row = first_key() / 16;
    if (!all_finite(dk)) shared.flaws[row][0] = 1;
    if (!all_finite(dv)) shared.flaws[row][1] = 1;
    store<kHeadDim>(p.dkey_data, dk, query_key_scale(p));
    store<kValueDim>(p.dvalue_data, dv, dropout_scale(p));
    __syncthreads();
    if (thread < 2 * kRowWarps) {
      const Unit& unit = walk.unit;
      const int block =
          (unit.batch * p.kv_heads + unit.kv_head) * key_blocks(p) + unit.key0 / kKeys;
      p.marks[block * (2 * kRowWarps) + thread] = flaws[thread];
    }
  }
  template <int kDim, int kCount>
  __device__ __forceinline__ void store(void* array, const float (&sum)[kCount],
                                        float factor) const {
    constexpr int kPieces = round_up(2 * kCount, 32) / 8;
    const int lane = threadIdx.x % 32, first_column = share() * (2 * kCount);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32 pieces[kPieces];
      fragment::gather_row(sum, row, factor, pieces);
      const int key = walk.unit.key0 + first_key() + lane / 4 + fragment::kRowStep * row;
      if (key >= p.kv_len) continue;
      uint16* to =
          static_cast<uint16*>(array) + key_row(p, walk.unit.batch, key, walk.unit.kv_head) * kDim;
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
};

}  // namespace backward
