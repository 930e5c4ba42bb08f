// Latent decoding: what a CTA has in shared memory, and who waits for what there.
//
// A block is kBlockKV = 64 positions. Its tile has a box for every 64 features, the first of which
// are the values too. A block's owner is the warpgroup that computes its scores.
#pragma once

#include "decode_pieces.cuh"
#include "fragment.cuh"
#include "ptx_barriers.cuh"
#include "ring.cuh"
#include "sm90/ptx_sm90.cuh"

namespace decode {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kLatentThreads = 3 * kGroupThreads;
inline constexpr int kLoaders = 4;  // warps
inline constexpr int kPackedBytes = 656;
inline constexpr int kBoxBytes = kBlockKV * kBoxRowBytes;
inline constexpr int kKeyBoxes = kHeadDim / kBoxColumns;
inline constexpr int kHalfBoxes = kValueDim / kBoxColumns / 2;  // of the values, a warpgroup's
inline constexpr int kHalfColumns = kValueDim / 2;
// The box behind the values holds the weights of its block once its scores are there.
inline constexpr int kWeightsAt = 2 * kHalfBoxes * kBoxBytes;
static_assert((kBlockKV == 64 || kFewRows) && kShareRows == 64 && kHeads == 1 && kValuesInKeys);
static_assert(kHalfBoxes == kLoaders);  // so a box is always the same warp's
static_assert(kHeadDim % kBoxColumns == 0 && kValueDim == 512 && kHeadDim > kValueDim);
static_assert(kCacheColumns == kBoxColumns);

// Queries of a box. A product reads 64 rows of it: of fewer what lies behind them too, which makes
// rows that nobody stores.
inline constexpr int kQueryBoxBytes = kQueryRows * kBoxRowBytes;
static_assert(kQueryRows % 16 == 0 && kQueryRows <= kShareRows);

// With packed rows: what each thread that loads has under way (latent_packed.cuh).
template <bool kIsPacked>
struct Incoming {
  static constexpr uint4* incoming = nullptr;
};
template <>
struct Incoming<true> {
  uint4 incoming[4 * kGroupThreads];  // 8 KB: keys still begin at a multiple of 1024 bytes
};

struct LatentShared : Incoming<kPackedRows> {
  unsigned char keys[2][kKeyBytes];  // at multiples of 1024 bytes
  unsigned char queries[(kKeyBoxes - 1) * kQueryBoxBytes + kBoxBytes];
  float base[2][kShareRows];          // of rows, by the owner of the last block
  float sums[2][2][kShareRows];       // of units in turn, by warpgroup
  short exponents[2][2][kShareRows];  // likewise, of the largest of a row's sums: kLeavesHalves
  uint32 bad[2][kBlockKV];            // by owner: positions whose values are not finite
  Barrier full[2][kKeyBoxes];         // a box of a stage has come
  // A half of a stage is free: boxes of 256 columns, and with the half that the owner does not
  // multiply what lies behind them.
  Barrier empty[2][2];
  Barrier queries_full, queries_empty;
  Barrier gathered;                                       // sums of the cluster's CTAs have come
  unsigned short unread[2][kTakesPlaces ? kLoaders : 1];  // by stage: bits of rows not read
  int spoiled[2];          // a page that the stage's block needs is none
  uint4 parked[kLoaders];  // where the warps that load stand in the line of blocks
  uint2 counted[kPackedRows ? kLoaders : 1];  // likewise: blocks less the unit's own, and units
};

// Named barriers.
inline constexpr int kWeightsBarrier = 1;  // and 2: weights of warpgroup 0, of 1
inline constexpr int kSumsBarrier = 3;
inline constexpr int kGroupBarrier = 4;  // and 5: a warpgroup by itself
inline constexpr int kTurnBarrier = 6;

// The four warps of a warpgroup meet.
template <int kGroup>
__device__ __forceinline__ void meet_group() {
  ptx::named_barrier_sync(kGroupBarrier + kGroup, kGroupThreads);
}
// The rows of a fragment that this thread has.
__device__ __forceinline__ int own_row(int i) {
  return fragment::first_row(threadIdx.x) + i * fragment::kRowStep;
}

// Where a block lies, by its number among those of the CTA.
__device__ __forceinline__ uint32 stage_of_block(uint32 number) { return number % 2; }
__device__ __forceinline__ uint32 parity_of_block(uint32 number) { return number / 2 % 2; }

}  // namespace decode
