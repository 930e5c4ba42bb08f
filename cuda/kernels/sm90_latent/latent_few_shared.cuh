// Latent decoding, few query rows: what a CTA has in shared memory, and who a thread is.
#pragma once

#include "sm90_latent/latent_results.cuh"

namespace decode {

inline constexpr int kFewWarps = 8;  // that compute
inline constexpr int kFewThreads = (kFewWarps + 1) * 32;
inline constexpr int kQuarter = 128;  // features that share a scale
inline constexpr int kScalesAt = 512, kPlainAt = 528;
inline constexpr int kPlainSteps = (kHeadDim - kValueDim) / 16;
inline constexpr int kQuerySteps = kHeadDim / 16;
inline constexpr int kQueryTiles = kQueryRows / 8;
inline constexpr int kWeightsPitch = kQueryRows * 2 + 16;  // bytes of a key: other banks each
// Quarters whose products do not wait for each other, for which 32 rows leave no registers.
inline constexpr int kTogether = kQueryTiles == 2 ? 2 : 1;
inline constexpr int kQueryExponent = 7, kWeightExponent = 7, kScaleExponent = 7;
static_assert(kBFloat16 && kHeadDim == 576 && !kAppends && !kTakesPlaces && kCluster == 1);
static_assert(kBlockKV == 16 * kFewWarps && kQueryRows <= 32);

struct FewShared {
  unsigned char rows[2][kBlockKV * kPackedBytes];   // of a stage
  uint4 queries[kQueryTiles / 2][kQuerySteps][32];  // as lanes multiply them
  unsigned char weights[kBlockKV * kWeightsPitch];
  unsigned short scales[4][kBlockKV];  // float16, of quarters
  float largest[kQueryRows][kFewWarps];
  float sums[kQueryRows][kFewWarps];
  float factors[kQueryRows];  // of queries
  int exponents[4][kFewWarps];
  int spoiled[2];
  Barrier full[2], empty[2];
  uint4 parked[kFewWarps];  // where these warps stand in the line of blocks
};

// A query row: all are of one CTA and one kv head.
struct FewRow {
  int query, head;
  bool exists;
  __device__ __forceinline__ FewRow(const DecodeParams& p, int row) {
    query = p.query_len > 1 ? row / p.query_heads : row >= p.query_heads;
    head = row - query * p.query_heads;
    exists = query < p.query_len;
  }
};

// What a thread of the warps that compute knows of itself: a lane has keys or features `group` and
// `group` + 8 of a product, and queries from 2 * quad on.
struct FewLanes {
  const DecodeParams& p;
  FewShared& shared;
  int warp, lane, group, quad;

  __device__ __forceinline__ FewLanes(const DecodeParams& p, FewShared& shared)
      : p(p), shared(shared), warp(ptx::warp_index()), lane(threadIdx.x % 32) {
    group = lane / 4;
    quad = lane % 4;
  }
  __device__ __forceinline__ void meet() const {
    ptx::named_barrier_sync(kSumsBarrier, 32 * kFewWarps);
  }
  __device__ __forceinline__ int query_row(int tile, int column) const {
    return 8 * tile + 2 * quad + column;
  }
  // The last query for rows that are none.
  __device__ __forceinline__ int query_of(int row) const {
    return min(FewRow(p, row).query, p.query_len - 1);
  }
  __device__ __forceinline__ int own_quarter() const { return warp / (kFewWarps / 4); }
};

}  // namespace decode
