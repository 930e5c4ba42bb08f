// Decoding, the second kernel: merges what several CTAs found of a unit, writes new keys and values
// to the cache, and the results of rows that see nothing or have no place.
#pragma once

#include "decode_pieces.cuh"

namespace decode {

// The parts of a unit in their order. All threads of the CTA call.
__device__ __forceinline__ void merge_unit(const DecodeParams& p, const Line& line,
                                           const Unit& unit, const Share& share) {
  constexpr int kPieces = kValueColumns / 4;
  // Parts whose loads are under way. With other columns eight spill 8 bytes.
  constexpr int kAtOnce = (kPieces & (kPieces - 1)) == 0 ? 8 : 6;
  const int first_part = line.part_of(unit.start), last_part = line.part_of(unit.stop() - 1);
  const int first_cta = blockIdx.x + (first_part - share.part) * p.shares;
  const int count = last_part - first_part + 1;
  const bool begins = line.begin_of(first_part) == unit.start;  // else it is not that CTA's first
  const int rows = kHeads == 1 ? existing_rows(p, share) : kShareRows;
  for (int i = threadIdx.x; i < rows * kPieces; i += kMergeThreads) {
    const int row = i / kPieces, column = (i - row * kPieces) * 4;
    const Place place(p, share, row);
    if (kHeads > 1 && !place.exists(p)) continue;
    write_merged<kAtOnce>(p, unit, place, column, count, [&](int i, float2& of, float4& values) {
      const int64 from = partial_row(first_cta + i * p.shares, begins || i > 0, row);
      of = reinterpret_cast<const float2*>(p.partial_rows)[from];
      values = *reinterpret_cast<const float4*>(p.partial_out + from * kValueColumns + column);
    });
  }
}

// Copies the new keys (kDim = kHeadDim) or values of a batch row to their places, a warp for each.
template <int kDim, bool kTurns>
__device__ __forceinline__ void append(const DecodeParams& p, int batch, int length,
                                       const void* from, void* to, const Scales& scales) {
  const int warp = threadIdx.x / 32;
  for (int i = warp; i < p.query_len * p.kv_heads; i += kMergeThreads / 32) {
    const int query = i / p.kv_heads, kv_head = i - query * p.kv_heads;
    const int position = length - p.query_len + query;
    if (position < 0 || is_refused(p, length)) continue;
    const int64 place = place_of<kDim>(p, batch, position, kv_head);
    if (place < 0) continue;
    const int64 source = static_cast<int64>(batch) * p.query_len * p.kv_heads + i;
    const CachePieces<kDim> target(to, place);
    const float scale = NewScales(p, scales, batch, kv_head).at(position);
    for_pieces<kDim, kTurns>(
        p, RowPieces<kDim>(from, source * RowPieces<kDim>::kStride), position, threadIdx.x % 32, 32,
        [&](int at, const Piece& piece) { target.store(at, cache_piece(piece, scale)); });
  }
}

// Writes the results of a batch row of which no block is walked.
__device__ __forceinline__ void write_empty(const DecodeParams& p, int batch, int length) {
  constexpr int kPieces = ceil_div(kValueDim, 8);
  const bool refused = is_refused(p, length);
  const float value = refused ? __uint_as_float(0x7fffffffu) : 0.0f;
  const Piece piece = PieceOf<Element>::filled(value);
  const int heads = p.query_len * p.query_heads;
  const RowPieces<kValueDim> out(p.out,
                                 static_cast<int64>(batch) * heads * RowPieces<kValueDim>::kStride);
  for (int i = threadIdx.x; i < heads * kPieces; i += kMergeThreads) out.store_behind(i, piece);
  for (int i = threadIdx.x; i < heads; i += kMergeThreads) {
    const float lse = conclude(p, kNoBase, 0.0f, batch, i / p.query_len).lse;
    p.lse[static_cast<int64>(batch) * heads + i] = refused ? value : lse;
  }
}

// New keys and values, and the results of rows that see nothing, of the CTA's batch rows.
__device__ __forceinline__ void finish_rows(const DecodeParams& p) {
  for (int batch = blockIdx.x; batch < p.batch; batch += gridDim.x) {
    const int length = length_of(p, batch);
    if (positions_of(p, length).empty()) write_empty(p, batch, length);
    if constexpr (kAppends) {
      append<kHeadDim, kRotates>(p, batch, length, p.new_key, p.key_cache, p.key_scale);
      if constexpr (!kValuesInKeys) {
        append<kValueDim, false>(p, batch, length, p.new_value, p.value_cache, p.value_scale);
      }
    }
  }
}

__device__ __forceinline__ void merge(const DecodeParams& p) {
  const Line line(p);
  const Share share(p);
  // A unit that several parts share is merged by the CTA of the second of them.
  const int at = line.begin_of(share.part);
  const bool divides = share.part > 0 && at < line.total;
  const Unit unit = divides ? line.find(at) : Unit{};
  if constexpr (kOverlaps) ptx::wait_for_the_kernel_ahead();
  if (divides && unit.start < at && at < unit.stop() &&
      line.begin_of(share.part - 1) <= unit.start) {
    merge_unit(p, line, unit, share);
  }
  finish_rows(p);
}

}  // namespace decode
