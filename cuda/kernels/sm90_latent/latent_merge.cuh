// Latent decoding, the second kernel: units that several CTAs share are merged by all of these, a
// slice of the sums by each. Lengths alone decide in which order parts are added.
//
// A slice of all parts is as much for every number of parts: eight pieces for each thread, whose
// loads are under way together.
#pragma once

#include "decode_merge.cuh"
#include "sm90_latent/latent_results.cuh"

namespace decode {

struct MergeShared {
  union {
    float factors[kMostParts][kShareRows + 4];  // of the parts' sums; no banks are asked twice
    float4 sums[2][kMergeThreads];              // of pieces, when all factors have been read
  };
  signed char exponents[kMostParts][kShareRows];
};
static_assert(sizeof(MergeShared) <= 48 << 10 && kMergeThreads == 8 * kShareRows);
// Four threads turn theirs into eight columns each.
inline constexpr int kQuads = kLeftPieces / 4;
static_assert(kMostParts <= kQuads && kLeftPieces / 9 + 4 <= kMergeThreads);

// A unit's parts, of which this CTA has one.
struct LatentMerge {
  const DecodeParams& p;
  const Share& share;
  const Unit& unit;
  MergeShared& shared;
  int count, own, first_cta;
  int rows;     // of the unit: of a tile the others are none
  bool begins;  // else the unit is not that with which the first part begins

  __device__ __forceinline__ LatentMerge(const DecodeParams& p, const Line& line, const Unit& unit,
                                         const Share& share, MergeShared& shared)
      : p(p), share(share), unit(unit), shared(shared) {
    const int first_part = line.part_of(unit.start);
    count = line.part_of(unit.end() - 1) - first_part + 1;
    own = share.part - first_part;
    first_cta = blockIdx.x - own * p.shares;
    rows = p.query_len * p.query_heads - share.first_row();
    begins = line.begin_of(first_part) == unit.start;
  }

  __device__ __forceinline__ void run() const {
    if (count == 1) return;
    find_factors();
    const int begin = kQuads * own / count * 4, end = kQuads * (own + 1) / count * 4;
    if (count <= kAtOnce) {
      add_few(begin, end);
    } else {
      add_many(begin, end - begin);
    }
  }

 private:
  static constexpr int kAtOnce = 8;  // loads under way

  __device__ __forceinline__ int64 place_of(int part, int row) const {
    return partial_row(first_cta + part * p.shares, begins || part > 0, row);
  }

  // Eight threads for each row. All threads of the CTA call.
  __device__ __forceinline__ void find_factors() const {
    constexpr int kThreads = kMergeThreads / kShareRows;
    const int row = threadIdx.x / kThreads, lane = threadIdx.x % kThreads;
    float base = kNoBase, total = 0.0f;
#pragma unroll 4
    for (int part = lane; part < count; part += kThreads) {
      LeftRow of{kNoBase, 0.0f, 0, 0};
      if (row < rows) {
        const auto* const from = reinterpret_cast<const float4*>(p.partial_rows);
        const float4 found = from[place_of(part, row)];
        of = {found.x, found.y, __float_as_int(found.z), 0};
      }
      shared.factors[part][row] = of.base;
      shared.exponents[part][row] = static_cast<signed char>(of.exponent);
      add_total(base, total, of.base, of.total);
    }
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, base, step);
      add_total(base, total, other, __shfl_xor_sync(0xffffffffu, total, step));
    }
    if (row < rows) {
      const Place place(p, share, row);
      const Conclusion end = conclude(p, base, total, unit.batch, place.head);
      for (int part = lane; part < count; part += kThreads) {
        float& factor = shared.factors[part][row];
        factor = ptx::exp2_approx(factor - base) * end.factor *
                 ptx::power_of_two(shared.exponents[part][row]);
      }
      if (own == 0 && lane == 0) store_lse(p, unit, place, end.lse);
    }
    __syncthreads();
  }
  static __device__ __forceinline__ void add_total(float& base, float& total, float other_base,
                                                   float other) {
    const float now = fmaxf(base, other_base);
    total = total * ptx::exp2_approx(base - now) + other * ptx::exp2_approx(other_base - now);
    base = now;
  }

  struct Sums {
    float of[8] = {};
  };
  using Loaded = uint4[kLeftBytes / 16];
  __device__ __forceinline__ void load(int part, int piece, Loaded& to) const {
    const unsigned char* const from = left_of(p, place_of(part, 0)) + piece * kLeftBytes;
#pragma unroll
    for (int i = 0; i < kLeftBytes / 16; ++i) to[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ __forceinline__ void add(Sums& sum, int part, int row, const Loaded& loaded) const {
    const float factor = shared.factors[part][row];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4& four = loaded[kLeavesHalves ? 0 : i / 2];
      float low, high;
      if constexpr (kLeavesHalves) {
        const uint32 pair = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
        low = Float16::unpack_low(pair);
        high = Float16::unpack_high(pair);
      } else {
        low = __uint_as_float(i % 2 == 0 ? four.x : four.z);
        high = __uint_as_float(i % 2 == 0 ? four.y : four.w);
      }
      sum.of[2 * i] = fmaf(low, factor, sum.of[2 * i]);
      sum.of[2 * i + 1] = fmaf(high, factor, sum.of[2 * i + 1]);
    }
  }

  // A thread adds up all parts of a piece: of several pieces at once, where there are few parts.
  // Whole warps stay together.
  __device__ __forceinline__ void add_few(int begin, int end) const {
    int log = 1;  // of the parts that a piece has among kAtOnce
    while (1 << log < count) ++log;
    const int step = (kAtOnce >> log) * kMergeThreads;
#pragma unroll 1
    for (int first = begin; first < end; first += step) {
      const auto piece_of = [&](int i) {
        return first + static_cast<int>(threadIdx.x) + (i >> log) * kMergeThreads;
      };
      const auto part_of = [&](int i) { return i & ((1 << log) - 1); };
      Loaded loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = piece_of(i);
        const bool counts = part_of(i) < count && piece < end && LeftPiece(piece).row < rows;
#pragma unroll
        for (uint4& x : loaded[i]) x = make_uint4(0, 0, 0, 0);
        if (counts) load(part_of(i), piece, loaded[i]);
      }
      Sums sum;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = piece_of(i);
        if (part_of(i) < count) add(sum, part_of(i), LeftPiece(piece).row, loaded[i]);
        if (i % 2 == 0 || part_of(i + 1) != 0) continue;
        store(LeftPiece(piece), piece < end, sum);
        sum = Sums{};
      }
    }
  }

  // The same for `pieces`, if these are fewer than the CTA's threads by several threads each.
  __device__ __forceinline__ void add_many(int begin, int pieces) const {
    const int threads = kMergeThreads / pieces, lane = threadIdx.x / pieces;
    const int at = begin + threadIdx.x - lane * pieces;
    const LeftPiece piece(at);
    Sums sum;
    if (lane < threads && piece.row < rows) {
#pragma unroll 1
      for (int first = lane; first < count; first += kAtOnce * threads) {
        Loaded loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = first + i * threads;
          if (part < count) load(part, at, loaded[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = first + i * threads;
          if (part < count) add(sum, part, piece.row, loaded[i]);
        }
      }
    }
    if (threads > 1) {
      __syncthreads();  // all factors have been read
      const float (&of)[8] = sum.of;
      shared.sums[0][threadIdx.x] = make_float4(of[0], of[1], of[2], of[3]);
      shared.sums[1][threadIdx.x] = make_float4(of[4], of[5], of[6], of[7]);
      __syncthreads();
      for (int i = 1; i < threads && lane == 0; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 more = shared.sums[j][threadIdx.x + i * pieces];
          sum.of[4 * j] += more.x;
          sum.of[4 * j + 1] += more.y;
          sum.of[4 * j + 2] += more.z;
          sum.of[4 * j + 3] += more.w;
        }
      }
    }
    store(piece, lane == 0, sum);
  }

  // Whole warps call; four lanes store 32 columns of a row, eight each.
  __device__ __forceinline__ void store(const LeftPiece& piece, bool exists,
                                        const Sums& sum) const {
    float two_rows[16];  // a fragment, of whose first row these are
    uint32 pieces[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) two_rows[fragment::element(i / 2, 0, i % 2)] = sum.of[i];
    fragment::gather_row(two_rows, 0, 1.0f, pieces);
    if (!exists || piece.row >= rows) return;
    const int64 row = static_cast<int64>(unit.batch) * p.query_len * p.query_heads +
                      share.first_row() + piece.row;
    uint4* const to = static_cast<uint4*>(p.out) + (row * kValueDim + piece.column / 32 * 32) / 8;
    to[threadIdx.x % 4] = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
  }
};

__device__ __forceinline__ void merge_latent(const DecodeParams& p) {
  __shared__ MergeShared shared;
  const Line line(p);
  const Share share(p);
  const int begin = line.begin_of(share.part), end = line.begin_of(share.part + 1);
  const bool works = begin < end;
  const Unit first = works ? line.find(begin) : Unit{};
  const Unit last = works ? line.find(end - 1, first.batch, first.start) : Unit{};
  if constexpr (kOverlaps) ptx::wait_for_the_kernel_ahead();
  const int units = !works ? 0 : last.batch == first.batch ? 1 : 2;
#pragma unroll 1
  for (int i = 0; i < units; ++i) {
    const Unit unit = i == 0 ? first : last;
    if (i > 0) __syncthreads();
    LatentMerge(p, line, unit, share, shared).run();
  }
  finish_rows(p);
}

}  // namespace decode
