// Latent decoding: rows of float8 in 656 bytes, as FlashMLA stores them (kPackedRows): 512 e4m3,
// four float32 scales of 128 of these each, 64 bfloat16.
//
// The four warps that load have 16 rows of a block each. They copy them to shared memory as they
// are, two rows at a time, and write bfloat16 to where the block lies while the next six come. Rows
// of blocks that follow come to L2 meanwhile. A warp is alone on its scheduler and waits for
// instructions, not for memory: so they are few, and no load goes through registers that the next
// turn of a loop has, since these are copied, and copies wait. Calls of up to 32 query rows have
// a kernel of their own: latent_few.cuh.
#pragma once

#include "sm80/ptx_sm80.cuh"  // copy_async_past_l1
#include "sm90_latent/latent_shared.cuh"

namespace decode {

inline constexpr int kPackedScalesAt = 512, kPackedPlainAt = 528;
static_assert(!kPackedRows || (kBFloat16 && kHeadDim == 576 && !kAppends));

// A float32 times 2^120 as a sum of two bfloat16: the larger one in the high half.
__device__ __forceinline__ uint32 split_scale(float scale) {
  const float large = scale * 0x1p120f;
  const uint32 high = ptx::pack_bfloat16(0.0f, large);
  return high | ptx::pack_bfloat16(large - __uint_as_float(high), 0.0f);
}
// Its product with 2^-120 of any e4m3 is finite.
__device__ __forceinline__ bool is_plain_scale(float scale) { return fabsf(scale) < 0x1p7f; }
// The two bfloat16, each in both halves of a register.
struct PackedScale {
  uint32 high, low;
  __device__ __forceinline__ explicit PackedScale(uint32 both)
      : high(ptx::permute<0x3232>(both)), low(ptx::permute<0x1010>(both)) {}
};

inline constexpr uint32 kNanPair = 0x08000800u;  // beyond 480 in one of two
// Four e4m3 times their scale, as four bfloat16: to nearest, but for one in 200 of scales that are
// no power of two, which lie in the middle of two. As a bfloat16 with the same sign, exponent and
// mantissa a number is 2^-120 of itself, denormal or not; NaN is 480. A byte with eight times its
// sign ahead, shifted by four, has all of these in their places.
__device__ __forceinline__ uint2 scaled(uint32 four, const PackedScale& scale, uint32& found) {
  uint32 pairs[2] = {ptx::permute<0x9180>(four), ptx::permute<0xb3a2>(four)};
#pragma unroll
  for (uint32& pair : pairs) {
    pair = pair << 4 & 0x87f087f0u;
    found |= pair + 0x00100010u;
    pair = ptx::fma_bfloat16(pair, scale.high, ptx::fma_bfloat16(pair, scale.low, 0));
  }
  return make_uint2(pairs[0], pairs[1]);
}
// The same of any scale and any bytes.
__device__ __forceinline__ uint2 scaled_slowly(uint32 four, float scale) {
  uint32 halves[2];
  ptx::unpack_e4m3(four, halves[0], halves[1]);
#pragma unroll
  for (uint32& pair : halves) {
    pair = ptx::pack_bfloat16(ptx::unpack_float16(pair & 0xffffu) * scale,
                              ptx::unpack_float16(pair >> 16) * scale);
  }
  return make_uint2(halves[0], halves[1]);
}

// A warp's rows of a block, `warp` of kLoaders. A step is 256 features of two rows: a lane has 16
// of one of them. Four steps of a half are a turn. A lane knows where its row_of(lane % 4) of each
// turn lies, so four lanes side by side know all rows that one of them has.
struct PackedSteps {
  static constexpr int kRows = kBlockKV / kLoaders;
  static constexpr int kSteps = 4, kTurns = kRows / (2 * kSteps);  // of a half of the features

  const DecodeParams& p;
  const Unit& unit;
  LatentShared& shared;
  int warp;
  uint32 to;                // where this lane's features of step 0 lie in a half of a block
  float scales[kTurns][2];  // this lane's, of the halves of a block
  uint32 scale;             // in the turn that is stored, by split_scale
  uint32 found = 0;         // of a half: kNanPair is in it if a byte is NaN

  __device__ __forceinline__ PackedSteps(const DecodeParams& p, const Unit& unit,
                                         LatentShared& shared, int warp)
      : p(p), unit(unit), shared(shared), warp(warp) {
    const int lane = threadIdx.x % 32;
    to = chunk_address<kBlockKV>(lane / 8 * kBoxBytes, warp * kRows + lane / 4 % 2, lane % 4 * 2);
  }

  // The number of a row's page, as the table has it, and the row in it: they come while other
  // blocks are loaded. In the place of a row that is not needed there is one that is, by its side.
  struct Found {
    int page, row;
  };
  __device__ __forceinline__ Found find(int block, int turn) const {
    if constexpr (!kPaged) return {};
    const int position = position_of(block, turn), page = position / p.page_size;
    return {p.page_table[static_cast<int64>(unit.batch) * p.columns + page],
            position - page * p.page_size};
  }
  // Where the row lies, counted over all pages, or kNone.
  __device__ __forceinline__ int slot(const Found& of, int block, int turn) const {
    if constexpr (!kPaged) return unit.batch * p.page_size + position_of(block, turn);
    return of.page < 0 || of.page >= p.pages ? kNone : of.page * p.page_size + of.row;
  }

  // Whole warps call what is below. Brings the rows to L2, a line for each lane.
  __device__ __forceinline__ void prefetch(int slots, bool asks) const {
    const int lane = ptx::fresh_lane(), at = lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = __shfl_sync(0xffffffffu, slots, 4 * i + lane / 8);
      if (asks && slot >= 0 && at < kPackedBytes) ptx::prefetch_l2(start(slot) + at);
    }
  }
  // Asks for a step's bytes; zeros for those of a row that lies nowhere.
  __device__ __forceinline__ void load(int slots, int half, int step, bool asks) const {
    const int slot = __shfl_sync(0xffffffffu, slots, step, kSteps);
    ptx::copy_async_past_l1(ptx::shared_address(place(step)),
                            reinterpret_cast<uint64>(start(max(slot, 0)) + features_at(half)),
                            asks && slot >= 0);
    ptx::copy_async_commit();
  }
  // A block ahead: of one turn ahead the compiler waits for them.
  __device__ __forceinline__ void load_scales(const int (&slots)[kTurns],
                                              float (&of)[kTurns][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kTurns; ++i) {
      const int slot = slots[i / 2];
      of[i / 2][i % 2] = !kPaged || slot >= 0 ? *scale_at(slot, i % 2) : 1.0f;
    }
  }
  // Ahead of a turn's steps.
  __device__ __forceinline__ void take_scale(int half, int turn) {
    const float own = half == 0 ? scales[turn][0] : scales[turn][1];
    scale = split_scale(own);
    if (!is_plain_scale(own)) found |= kNanPair;
  }
  // A lane's 16 features are two pieces of a box's row; lanes with odd rows have the other banks.
  __device__ __forceinline__ void store(int turn, int step, uint32 keys) {
    const uint4 x = *place(step);
    const PackedScale own(__shfl_sync(0xffffffffu, scale, step, kSteps));
    store_piece(keys, turn, step, x, [&](uint32 four) { return scaled(four, own, found); });
  }
  // Whether all numbers of a half were what they should be: else store_slowly has to do it again.
  __device__ __forceinline__ bool is_right() {
    const bool is_wrong = (found & kNanPair) != 0;
    found = 0;
    return !__any_sync(0xffffffffu, is_wrong);
  }
  // Does all of a turn.
  __device__ __forceinline__ void store_slowly(int slots, int half, int turn, uint32 keys) const {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int slot = __shfl_sync(0xffffffffu, slots, step, kSteps);
      if (slot < 0) continue;
      const uint4 all = *reinterpret_cast<const uint4*>(start(slot) + features_at(half));
      const float factor = *scale_at(slot, half);
      store_piece(keys, turn, step, all, [&](uint32 four) { return scaled_slowly(four, factor); });
    }
  }
  // Features that are bfloat16: eight lanes a row. They are there when the next step's are.
  __device__ __forceinline__ void copy_plain(int slots, int turn, uint32 box) const {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = turn * 2 * kSteps + 2 * (lane / 8) + i,
                slot = __shfl_sync(0xffffffffu, slots, 4 * i + lane / 8);
      const unsigned char* const from = start(max(slot, 0)) + kPackedPlainAt + lane % 8 * 16;
      ptx::copy_async_past_l1(chunk_address<kBlockKV>(box, warp * kRows + row, lane % 8),
                              reinterpret_cast<uint64>(from), slot >= 0);
    }
  }

 private:
  __device__ __forceinline__ uint4* place(int step) const {
    return &shared.incoming[step * kGroupThreads + threadIdx.x];
  }
  __device__ __forceinline__ int position_of(int block, int turn) const {
    const Range needed = positions_of(p, ptx::opaque(unit.length));
    const int row =
        block * kBlockKV + warp * kRows + turn * 2 * kSteps + row_of(ptx::fresh_lane() % 4);
    return min(max(row, needed.begin), needed.end - 1);
  }
  __device__ __forceinline__ const unsigned char* start(int slot) const {
    return static_cast<const unsigned char*>(p.key_data) + static_cast<int64>(slot) * kPackedBytes;
  }
  // The row that this lane has of a step.
  static __device__ __forceinline__ int row_of(int step) { return 2 * step + threadIdx.x / 4 % 2; }
  static __device__ __forceinline__ int features_at(int half) {
    return half * 256 + (threadIdx.x % 32 / 8 * 4 + threadIdx.x % 4) * 16;
  }
  __device__ __forceinline__ const float* scale_at(int slot, int half) const {
    return reinterpret_cast<const float*>(start(slot) + kPackedScalesAt + half * 8 +
                                          threadIdx.x % 32 / 16 * 4);
  }
  template <class Convert>
  __device__ __forceinline__ void store_piece(uint32 keys, int turn, int step, const uint4& all,
                                              Convert convert) const {
    // A swizzle is an exclusive or of three bits of the row.
    const uint32 at = keys + (to ^ 2 * step * 16) + 2 * (turn * kSteps + step) * kBoxRowBytes;
    uint2 left = convert(all.x), right = convert(all.y);
    ptx::store_shared_x4(at, left.x, left.y, right.x, right.y);
    left = convert(all.z);
    right = convert(all.w);
    ptx::store_shared_x4(at ^ 16, left.x, left.y, right.x, right.y);
  }
};

}  // namespace decode
