// Latent decoding: positions that not every row sees, and new keys.
#pragma once

#include "sm90_latent/latent_shared.cuh"

namespace decode {

struct Sight {
  Range own[2];           // positions that this thread's rows see
  Range by_all, by_some;  // that every row of the tile sees, that any does
};

// Hides scores. Values that no row sees become 0, as does what is not finite of those that some
// see: a row that sees such a key is NaN by its weight.
template <int kGroup>
__device__ __forceinline__ void hide(LatentShared& shared, const Sight& sight, int first,
                                     uint32 keys, float (&scores)[kBlockKV / 2]) {
  const int lane = threadIdx.x % 32;
  meet_group<kGroup>();  // all have multiplied these keys
#pragma unroll 1
  for (int row = threadIdx.x / 32 % 4; row < kBlockKV; row += 4) {
    const int at = first + row;
    uint32 found = 0;
    if (at < sight.by_some.begin || at >= sight.by_some.end) {
#pragma unroll
      for (int chunk = lane; chunk < kValueDim / 8; chunk += 32) {
        ptx::store_shared_x4(chunk_address<kBlockKV>(keys, row, chunk), 0, 0, 0, 0);
      }
    } else if (at < sight.by_all.begin || at >= sight.by_all.end) {
      for (int word = lane; word < kValueDim / 2; word += 32) {
        const uint32 from = chunk_address<kBlockKV>(keys, row, word / 4) + word % 4 * 4;
        const uint32 pair = ptx::load_shared(from), clean = finite_halves(pair);
        found |= pair ^ clean;
        if (pair != clean) ptx::store_shared(from, clean);
      }
    }
    const bool is_bad = __any_sync(0xffffffffu, found != 0);
    if (lane == 0) shared.bad[kGroup][row] = is_bad;
  }
  ptx::fence_async_proxy();
  meet_group<kGroup>();
  const int own = fragment::first_column(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kBlockKV / 2; ++i) {
    const int column = own + fragment::column(i), at = first + column;
    const Range& range = sight.own[fragment::row(i)];
    if (at < range.begin || at >= range.end) {
      scores[i] = kNegativeInfinity;
    } else if (shared.bad[kGroup][column]) {
      scores[i] = kNan;
    }
  }
}

// Hides scores of what is not read: zeros have come in its place.
__device__ __forceinline__ void hide_unread(const LatentShared& shared, uint32 stage,
                                            float (&scores)[kBlockKV / 2]) {
  static_assert(kLoaders == 4);
  const uint2 unread = *reinterpret_cast<const uint2*>(shared.unread[stage]);
  if ((unread.x | unread.y) == 0) return;
  const int own = fragment::first_column(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kBlockKV / 2; ++i) {
    const int column = own + fragment::column(i);
    const uint32 word = fragment::column(i) < 32 ? unread.x : unread.y;
    if (word >> column % 32 & 1) scores[i] = kNegativeInfinity;
  }
}

// New keys in the places of what the cache had there; flash_decode_merge writes them to it.
template <int kGroup>
__device__ __forceinline__ void patch(const DecodeParams& p, const Unit& unit, int block,
                                      uint32 keys, uint32 full, uint32 parity) {
  const int first = block * kBlockKV, oldest = unit.length - p.query_len;
  const int begin = max(max(oldest, 0), first), end = min(unit.length, first + kBlockKV);
  if (begin >= end) return;
  for (int box = 0; box < kKeyBoxes; ++box) ptx::barrier_wait(full + 8 * box, parity);
  const RowPieces<kHeadDim> rows(
      p.new_key, static_cast<int64>(unit.batch) * p.query_len * RowPieces<kHeadDim>::kStride);
  constexpr int kOfRow = kHeadDim / 8;
  for (int i = threadIdx.x % kGroupThreads; i < (end - begin) * kOfRow; i += kGroupThreads) {
    const int position = begin + i / kOfRow, piece = i % kOfRow;
    store_in_tile(keys, position - first, piece, rows.load((position - oldest) * kOfRow + piece));
  }
  ptx::fence_async_proxy();
  meet_group<kGroup>();
}

}  // namespace decode
