// A warp's keys, kRowTiles tiles of 16: their registers, the products of dk, dv and dq, and P and
// dS in shared memory. Read backward_rows.cuh next.
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

// The scores of a warp's tiles.
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

struct RowProducts {
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

 protected:
  // The warp's first key, of the block; which of the warps that share it.
  __device__ __forceinline__ int first_key() const { return warp % kRowWarps * kOwnKeys; }
  __device__ __forceinline__ int share() const { return warp / kRowWarps; }

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

  // The factors of dS^T, from a query of the step on.
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
};

}  // namespace backward
