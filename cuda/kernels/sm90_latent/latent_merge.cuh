// Latent decoding, the second kernel: units that several CTAs share are merged by all of these, a
// slice of the sums by each. Lengths alone decide in which order parts are added.
//
// It is short: to fetch its instructions seems to take longer than to execute them. So CTAs of the
// first kernel say what there is to merge (LeftUnit), and loops have one body. A thread's pieces
// come to shared memory while factors are found.
#pragma once

#include "decode_merge.cuh"
#include "sm80/ptx_sm80.cuh"
#include "sm90_latent/latent_results.cuh"

namespace decode {

// What a CTA is to merge of a unit.
struct LeftUnit {
  int parts;       // 0: nothing
  int begin, end;  // of the CTA's pieces
  int batch, first_row;
  int first_place, second_place;  // of parts 0 and 1 among partial_row's units
  int is_first;                   // of the unit's CTAs
};
static_assert(sizeof(LeftUnit) == 32);
// Pieces come in quads: four threads turn theirs into eight columns each.
inline constexpr int kQuads = kLeftPieces / 4;

// The first kernel: the unit with which a CTA's part begins and that with which it ends, if parts
// share these. A whole warp calls. It finds its part anew: who loads has no register to spare.
__device__ __forceinline__ void leave_units(const DecodeParams& p) {
  const Share share(p);
  const Line line(p);
  const int begin = line.begin_of(share.part), end = line.begin_of(share.part + 1);
  int batch = -1;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    LeftUnit left{};
    if (begin < end) {
      const Unit unit = line.find(i == 0 ? begin : end - 1);
      const int first_part = line.part_of(unit.start), own = share.part - first_part;
      const int parts = line.part_of(unit.stop() - 1) - first_part + 1;
      if (parts > 1 && unit.batch != batch) {
        const int cta = blockIdx.x - own * p.shares;
        const bool begins = line.begin_of(first_part) == unit.start;
        left = {parts,
                kQuads * own / parts * 4,
                kQuads * (own + 1) / parts * 4,
                unit.batch,
                share.first_row(),
                2 * cta + (begins ? 0 : 1),
                2 * (cta + p.shares),
                own == 0};
      }
      batch = unit.batch;
    }
    if (threadIdx.x % 32 == 0) {
      int4* const to = reinterpret_cast<int4*>(p.left_units) + (2 * blockIdx.x + i) * 2;
      to[0] = make_int4(left.parts, left.begin, left.end, left.batch);
      to[1] = make_int4(left.first_row, left.first_place, left.second_place, left.is_first);
    }
  }
}

struct MergeShared {
  // Pieces of a thread that are under way: of 16 bytes all that it has for any number of parts.
  static constexpr int kAtOnce = kLeavesHalves ? 16 : 8;
  uint4 coming[kAtOnce][kLeftBytes / 16][kMergeThreads];
  float factors[kMostParts][kShareRows + 4];  // of the parts' sums; no banks are asked twice
  float4 sums[2][kMergeThreads];
  signed char exponents[kMostParts][kShareRows];
};
static_assert(kMergeThreads == 8 * kShareRows && kMostParts <= kQuads);

// A CTA's pieces of a unit. A thread adds up parts of a piece, every `lanes`-th, and where there
// are few parts several pieces one after another.
struct LatentMerge {
  const DecodeParams& p;
  const LeftUnit& unit;
  MergeShared& shared;
  int pieces, rows;  // rows of the unit: those behind are none
  int places, lanes;
  int place, lane;                // this thread's
  int coming_piece, coming_part;  // to be asked for next

  __device__ __forceinline__ LatentMerge(const DecodeParams& p, const LeftUnit& unit,
                                         MergeShared& shared)
      : p(p), unit(unit), shared(shared) {
    pieces = unit.end - unit.begin;
    rows = p.query_len * p.query_heads - unit.first_row;
    int log = 5;
    while (1 << log < min(pieces, kMergeThreads)) ++log;
    places = 1 << log;
    lanes = kMergeThreads >> log;
    place = threadIdx.x & (places - 1);
    lane = threadIdx.x >> log;
    coming_piece = place;
    coming_part = lane;
  }

  __device__ __forceinline__ void run() {
    ask();
    find_factors();
    add();
  }

 private:
  // The first of a part's rows among partial_row's.
  __device__ __forceinline__ int64 row_of(int part) const {
    const int at = part == 0 ? unit.first_place : unit.second_place + (part - 1) * 2 * p.shares;
    return static_cast<int64>(at) * kShareRows;
  }
  // Factors are of rows, or of quads if these are not more.
  __device__ __forceinline__ bool is_of_quads() const { return pieces <= 4 * kShareRows; }

  __device__ __forceinline__ void ask() {
#pragma unroll 1
    for (int i = 0; i < MergeShared::kAtOnce && coming_piece < pieces; ++i) {
      const unsigned char* const from =
          left_of(p, row_of(coming_part)) + (unit.begin + coming_piece) * kLeftBytes;
#pragma unroll
      for (int j = 0; j < kLeftBytes / 16; ++j) {
        ptx::copy_async_past_l1(ptx::shared_address(&shared.coming[i][j][threadIdx.x]),
                                reinterpret_cast<uint64>(from) + 16 * j, true);
      }
      coming_part += lanes;
      if (coming_part < unit.parts) continue;
      coming_part = lane;
      coming_piece += places;
    }
    ptx::copy_async_commit();
  }

  // All threads of the CTA call.
  __device__ __forceinline__ void find_factors() const {
    const int own = is_of_quads() ? pieces / 4 : kShareRows;
    int log = 5;  // of the threads that find those of a row
    while (own << log > kMergeThreads) --log;
    const int at = threadIdx.x >> log, threads = 1 << log, first = threadIdx.x & (threads - 1);
    const LeftPiece piece(unit.begin + 4 * at);
    const int row = is_of_quads() ? piece.row : at;
    const bool exists = at < own && row < rows;
    float base = kNoBase, total = 0.0f;
#pragma unroll 2
    for (int part = first; exists && part < unit.parts; part += threads) {
      const float4 of = reinterpret_cast<const float4*>(p.partial_rows)[row_of(part) + row];
      shared.factors[part][at] = of.x;
      shared.exponents[part][at] = static_cast<signed char>(__float_as_int(of.z));
      add_total(base, total, of.x, of.y);
    }
#pragma unroll 1
    for (int step = 1; step < threads; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, base, step);
      add_total(base, total, other, __shfl_xor_sync(0xffffffffu, total, step));
    }
    if (exists) {
      const int of_head = unit.first_row + row;
      const int query = p.query_len > 1 ? of_head / p.query_heads : 0;
      const int head = of_head - query * p.query_heads;
      const Conclusion end = conclude(p, base, total, unit.batch, head);
      if (first == 0 && (is_of_quads() ? piece.column < 8 : unit.is_first)) {
        p.lse[(unit.batch * p.query_heads + head) * static_cast<int64>(p.query_len) + query] =
            end.lse;
      }
#pragma unroll 1
      for (int part = first; part < unit.parts; part += threads) {
        float& factor = shared.factors[part][at];
        factor = ptx::exp2_approx(factor - base) * end.factor *
                 ptx::power_of_two(shared.exponents[part][at]);
      }
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
  __device__ __forceinline__ void add(Sums& sum, float factor, int at) const {
    uint4 loaded[kLeftBytes / 16];
#pragma unroll
    for (int j = 0; j < kLeftBytes / 16; ++j) loaded[j] = shared.coming[at][j][threadIdx.x];
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

  // All threads of the CTA call.
  __device__ __forceinline__ void add() {
    int at = 0, own = place;
    ptx::copy_async_wait();
    do {  // once if there are several lanes; whole warps stay together
      const LeftPiece piece(unit.begin + own);
      const int column = is_of_quads() ? own / 4 : piece.row;
      Sums sum;
#pragma unroll 1
      for (int part = lane; own < pieces && part < unit.parts; part += lanes) {
        if (!kLeavesHalves && at == MergeShared::kAtOnce) {
          ask();
          ptx::copy_async_wait();
          at = 0;
        }
        add(sum, shared.factors[part][column], at++);
      }
      if (lanes > 1) add_lanes(sum);
      store(piece, own < pieces && lane == 0, sum);
      own += places;
    } while (own - static_cast<int>(threadIdx.x % 32) < pieces);
  }
  // What other threads have of the same piece.
  __device__ __forceinline__ void add_lanes(Sums& sum) const {
    float (&of)[8] = sum.of;
    shared.sums[0][threadIdx.x] = make_float4(of[0], of[1], of[2], of[3]);
    shared.sums[1][threadIdx.x] = make_float4(of[4], of[5], of[6], of[7]);
    __syncthreads();
    if (lane > 0) return;
#pragma unroll 1
    for (int i = 1; i < lanes; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 more = shared.sums[j][place + i * places];
        of[4 * j] += more.x;
        of[4 * j + 1] += more.y;
        of[4 * j + 2] += more.z;
        of[4 * j + 3] += more.w;
      }
    }
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
    const int64 row =
        static_cast<int64>(unit.batch) * p.query_len * p.query_heads + unit.first_row + piece.row;
    uint4* const to = static_cast<uint4*>(p.out) + (row * kValueDim + piece.column / 32 * 32) / 8;
    to[threadIdx.x % 4] = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
  }
};

__device__ __forceinline__ void merge_latent(const DecodeParams& p, MergeShared& shared) {
  if (threadIdx.x == 0 && !kTakesPlaces && static_cast<int>(blockIdx.x) < p.batch) {
    ptx::prefetch(p.lengths + blockIdx.x);
  }
  if constexpr (kOverlaps) ptx::wait_for_the_kernel_ahead();
  const int4* const left = reinterpret_cast<const int4*>(p.left_units) + 4 * blockIdx.x;
  const bool more = left[2].x > 0;
#pragma unroll 1
  for (int i = 0; i < (more ? 2 : 1); ++i) {
    const int4 head = left[2 * i], tail = left[2 * i + 1];
    if (head.x == 0) continue;
    if (i > 0) __syncthreads();  // all factors have been read
    const LeftUnit unit{head.x, head.y, head.z, head.w, tail.x, tail.y, tail.z, tail.w};
    LatentMerge(p, unit, shared).run();
  }
  finish_rows(p);
}

}  // namespace decode
