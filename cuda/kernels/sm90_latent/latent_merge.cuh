// Latent decoding, the second kernel: units that several CTAs share are merged by all of these, a
// part of the rows by each; a row's parts are added in the order of the line.
#pragma once

#include "decode_merge.cuh"

namespace decode {

// Parts of a row whose loads are under way: of one row of 32k positions there are 66.
inline constexpr int kMergedAtOnce = 12;

__device__ __forceinline__ void merge_own_rows(const DecodeParams& p, const Line& line,
                                               const Unit& unit, const Share& share) {
  constexpr int kColumns = kValueColumns / 4, kItems = kShareRows * kColumns;
  const int first_part = line.part_of(unit.start), last_part = line.part_of(unit.end() - 1);
  const int count = last_part - first_part + 1, own = share.part - first_part;
  if (count == 1) return;
  const int first_cta = blockIdx.x - own * p.shares;
  const bool begins = line.begin_of(first_part) == unit.start;  // else it is not that CTA's first
  const int end = kItems * (own + 1) / count;
  for (int i = kItems * own / count + threadIdx.x; i < end; i += kMergeThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    const Place place(p, share, row);
    if (!place.exists(p)) continue;
    write_merged<kMergedAtOnce>(
        p, unit, place, column, count, [&](int i, float2& of, float4& values) {
          const int64 from = partial_row(first_cta + i * p.shares, begins || i > 0, row);
          of = reinterpret_cast<const float2*>(p.partial_rows)[from];
          values = *reinterpret_cast<const float4*>(p.partial_out + from * kValueColumns + column);
        });
  }
}

__device__ __forceinline__ void merge_latent(const DecodeParams& p) {
  const Line line(p);
  const Share share(p);
  const int begin = line.begin_of(share.part), end = line.begin_of(share.part + 1);
  const bool works = begin < end;
  const Unit first = works ? line.find(begin) : Unit{};
  const Unit last = works ? line.find(end - 1, first.batch, first.start) : Unit{};
  if constexpr (kOverlaps) ptx::wait_for_the_kernel_ahead();
  if (works) {
    merge_own_rows(p, line, first, share);
    if (last.batch != first.batch) merge_own_rows(p, line, last, share);
  }
  finish_rows(p);
}

}  // namespace decode
