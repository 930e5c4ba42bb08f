// Latent decoding, the second kernel: units that several CTAs share are merged by all of these, a
// slice of the sums by each. Lengths alone decide in which order parts are added.
//
// A slice of all parts is as much for every number of parts: 16 loads of 16 bytes for each thread,
// eight of which are under way together.
#pragma once

#include "decode_merge.cuh"
#include "sm90_latent/latent_results.cuh"

namespace decode {

struct MergeShared {
  float factors[kMostParts][kShareRows + 4];  // of the parts' sums; no banks are asked twice
  float4 sums[kMergeThreads];
};
static_assert(sizeof(MergeShared) <= 48 << 10 && kMergeThreads == 8 * kShareRows);

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
    const int begin = kLeftPieces * own / count, end = kLeftPieces * (own + 1) / count;
    if (count <= kAtOnce) {
      add_few(begin, end);
    } else {
#pragma unroll 1
      for (int at = begin; at < end; at += kMergeThreads) {
        add_many(at, min(end - at, kMergeThreads));
      }
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
      const float2 of = row < rows
                            ? reinterpret_cast<const float2*>(p.partial_rows)[place_of(part, row)]
                            : make_float2(kNoBase, 0.0f);
      shared.factors[part][row] = of.x;
      add_total(base, total, of.x, of.y);
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
        factor = ptx::exp2_approx(factor - base) * end.factor;
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

  __device__ __forceinline__ float4 load(int part, int piece) const {
    const float* const from = p.partial_out + place_of(part, 0) * kValueColumns;
    return reinterpret_cast<const float4*>(from)[piece];
  }
  __device__ __forceinline__ void add(float4& sum, int part, int row, const float4& values) const {
    const float factor = shared.factors[part][row];
    sum.x = fmaf(values.x, factor, sum.x);
    sum.y = fmaf(values.y, factor, sum.y);
    sum.z = fmaf(values.z, factor, sum.z);
    sum.w = fmaf(values.w, factor, sum.w);
  }

  // A thread adds up all parts of a piece: of several pieces at once, where there are few parts.
  __device__ __forceinline__ void add_few(int begin, int end) const {
    int log = 1;  // of the parts that a piece has among kAtOnce
    while (1 << log < count) ++log;
    const int step = (kAtOnce >> log) * kMergeThreads;
#pragma unroll 1
    for (int first = begin + threadIdx.x; first < end; first += step) {
      const auto piece_of = [&](int i) { return first + (i >> log) * kMergeThreads; };
      const auto part_of = [&](int i) { return i & ((1 << log) - 1); };
      float4 values[kAtOnce], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int piece = piece_of(i);
        const bool counts = part_of(i) < count && piece < end && LeftPiece(piece).row < rows;
        values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (counts) values[i] = load(part_of(i), piece);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const LeftPiece piece(piece_of(i));
        if (part_of(i) < count) add(sum, part_of(i), piece.row, values[i]);
        if (i % 2 == 0 || part_of(i + 1) != 0) continue;
        if (piece_of(i) < end) store(piece, sum);
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }

  // The same for `pieces`, if these are fewer than the CTA's threads by several threads each.
  __device__ __forceinline__ void add_many(int begin, int pieces) const {
    const int threads = kMergeThreads / pieces, lane = threadIdx.x / pieces;
    const int at = begin + threadIdx.x - lane * pieces;
    const LeftPiece piece(at);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (lane < threads && piece.row < rows) {
#pragma unroll 1
      for (int first = lane; first < count; first += kAtOnce * threads) {
        float4 values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = first + i * threads;
          if (part < count) values[i] = load(part, at);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = first + i * threads;
          if (part < count) add(sum, part, piece.row, values[i]);
        }
      }
    }
    __syncthreads();  // those of other pieces have been read
    shared.sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0) return;
    for (int i = 1; i < threads; ++i) {
      const float4 more = shared.sums[threadIdx.x + i * pieces];
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    store(piece, sum);
  }

  __device__ __forceinline__ void store(const LeftPiece& piece, const float4& sum) const {
    if (piece.row >= rows) return;
    const int64 row = static_cast<int64>(unit.batch) * p.query_len * p.query_heads +
                      share.first_row() + piece.row;
    Bits* const to = static_cast<Bits*>(p.out) + row * kValueDim + piece.column;
    *reinterpret_cast<uint32*>(to) = Element::pack(sum.x, sum.y);
    *reinterpret_cast<uint32*>(to + 8) = Element::pack(sum.z, sum.w);
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
