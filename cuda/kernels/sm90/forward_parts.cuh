// What a part of a unit walks (kSplits): some of its keys. Read forward_join.cuh next, which makes
// a unit of its parts.
//
// Few units leave multiprocessors idle, of float8 those of the last wave: each is as many parts as
// multiprocessors can take at once.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

static_assert(!kSplits || !(kWindowLeft || kHasSegments || kHasPositions || kHasMask || kHasBias ||
                            kHasScoreFunction || kHasDropout || kHasSinks || kFromPages || kEarly),
              "keys of a part count from its first, and a sink is of no part");

// Leaves of `seen` the keys of a part, if the number is one's, and returns its first block.
template <class Params>
__device__ __forceinline__ int narrow_to_part(const Params& p, int number, Visibility& seen) {
  if constexpr (kSplits) {
    const int part = part_at(p, number);
    if (part < 0) return 0;
    const int blocks = ceil_div(ceil_div(p.kv_len, kBlockKV), p.split_parts);
    const int first = part % p.split_parts * blocks;
    seen.kv_length = min(seen.kv_length - first * kBlockKV, blocks * kBlockKV);
    if constexpr (kWindowRight) seen.offset -= first * kBlockKV;
    return first;
  }
  return 0;
}

}  // namespace forward
