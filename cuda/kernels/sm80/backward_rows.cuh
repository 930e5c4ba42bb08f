// A CTA's unit: the products, dk and dv of its keys, and what it adds to the sums of dq.
//
// A warp has 16 keys. Up to 128 columns of dk and dv it has all, and P and dS are register operands
// of their products; beyond, two warps share 16 keys (kColumnWarps = 2), each with half of a step's
// queries until P and dS are in shared memory, and with half of the columns after it.
#pragma once

#include "sm80/backward_scores.cuh"

namespace backward {

// dS^T or P^T in shared memory, rows of keys: the address of 8 queries' 16 bytes. Neither stores of
// 8 rows nor ldmatrix meet in a bank.
__device__ __forceinline__ uint32 score_address(uint32 tile, int key, int chunk) {
  if constexpr (kStepQueries == 64) return chunk_address<kKeys>(tile, key, chunk);
  return tile + key * (kStepQueries * 2) + (chunk ^ key / 2 % 4) * 16;
}

struct Rows {
  static constexpr int kHeadUnits = kHead / 16, kValueUnits = kValue / 16;  // of 16 columns
  static constexpr int kOwnHead = ceil_div(kHeadUnits, kColumnWarps);       // of a warp
  static constexpr int kOwnValue = ceil_div(kValueUnits, kColumnWarps);

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
      store_scores(gradient, 0, column);
      if constexpr (kColumnWarps == 1) add_own(dk, gradient, query, column);
    }
    const int turn = take_turn(at);
    __syncthreads();
    constexpr bool kIsRead = kColumnWarps == 1;  // are all done with these queries?
    if constexpr (kIsRead) begin_late(copies, next, more);
    add_dq(copies, at, turn);
    if constexpr (!kIsRead) {
      add_shared(dv, kColumnWarps - 1, dout, kValueUnits);
      add_shared(dk, 0, query, kHeadUnits);
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
  __device__ __forceinline__ void store_scores(const Packed& scores, int which, int column) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const int key = first_key() + lane / 4 + fragment::kRowStep * (i % 2);
      ptx::store_shared(
          score_address(score_tile(which), key, column / 8 + i / 2) + lane % 4 * 4, scores[i]);
    }
  }

  // dk or dv += dS^T or P^T times rows of Q or dO: of a fragment, all columns,
  template <int kCount>
  __device__ __forceinline__ void add_own(float (&sum)[kCount], const Packed& scores, uint32 rows,
                                          int column) const {
    multiply_columns<kFragmentQueries / 16, kStepQueries>(
        sum,
        [&](int step, uint32 (&left)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) left[i] = scores[4 * step + i];
        },
        rows, column, [](int i) { return i; }, kCount / 8);
  }
  // and of a step, the warp's share of them.
  template <int kCount>
  __device__ __forceinline__ void add_shared(float (&sum)[kCount], int which, uint32 rows,
                                             int units) const {
    const int lane = ptx::opaque(threadIdx.x) % 32;
    const int first = share() * (kCount / 8);
    multiply_columns<kStepQueries / 16, kStepQueries>(
        sum,
        [&](int step, uint32 (&left)[4]) {
          ptx::load_matrix_x4(
              score_address(score_tile(which), first_key() + lane % 16, 2 * step + lane / 16),
              left);
        },
        rows, 0, [&](int i) { return first + i; }, units);
  }

  // Adds dQ = dS K: a warp has 16 queries, and every kGroups-th 16 columns.
  __device__ __forceinline__ void add_dq(const Copies& copies, const Place& at, int turn) const {
    constexpr int kRowGroups = kStepQueries / 16, kGroups = kWarps / kRowGroups;
    constexpr int kOwn = ceil_div(kHeadUnits, kGroups), kAtOnce = kOwn < 4 ? kOwn : 4;
    static_assert(kWarps % kRowGroups == 0);
    const int lane = ptx::opaque(threadIdx.x) % 32;
    const int row = warp % kRowGroups, group = warp / kRowGroups;
    const int index = sum_index(p, walk.unit.batch, walk.head(at), at.m * kQueries);
#pragma unroll
    for (int first = 0; first < kOwn; first += kAtOnce) {
      const auto unit_at = [&](int i) { return (first + i) * kGroups + group; };
      float dq[8 * kAtOnce];
#pragma unroll
      for (float& x : dq) x = 0.f;
      multiply_columns<kKeys / 16, kKeys>(
          dq,
          [&](int step, uint32 (&left)[4]) {
            ptx::load_transposed_x4(score_address(score_tile(0), 16 * step + lane / 16 * 8 + lane % 8,
                                                  2 * row + lane / 8 % 2),
                                    left);
          },
          copies.key_tile(), 0, unit_at, kHeadUnits);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = unit_at(i);
        if (unit >= kHeadUnits) continue;
        const SumTile sum(p, index, unit / 4, (at.part * kRowGroups + row) * 32 + lane);
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
      const int block = (unit.batch * p.kv_heads + unit.kv_head) * key_blocks(p) + unit.key0 / kKeys;
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
      uint16* to = static_cast<uint16*>(array) +
                   key_row(p, walk.unit.batch, key, walk.unit.kv_head) * kDim;
#pragma unroll
      for (int g = 0; g < kPieces / 4; ++g) {
        const int own = 8 * (4 * g + lane % 4), column = first_column + own;
        if (own < 2 * kCount && column < kDim) {
          store_piece<kDim>(to, column,
                            make_uint4(pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2],
                                       pieces[4 * g + 3]));
        }
      }
    }
  }
};

}  // namespace backward
