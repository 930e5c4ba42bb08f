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

// Four e4m3 times their scale, as four bfloat16: to nearest, but for one in 200 of scales that are
// no bfloat16, which lie in the middle of two. As a bfloat16 with the same sign, exponent and
// mantissa a number is 2^-120 of itself, denormal or not. A byte with eight times its sign ahead,
// shifted by four, has all of these in their places. kOne: the scale is a bfloat16.
template <bool kOne>
__device__ __forceinline__ uint2 scaled(uint32 four, const PackedScale& scale) {
  uint32 pairs[2] = {ptx::permute<0x9180>(four), ptx::permute<0xb3a2>(four)};
#pragma unroll
  for (uint32& pair : pairs) {
    pair = pair << 4 & 0x87f087f0u;
    pair = ptx::fma_bfloat16(pair, scale.high, kOne ? 0u : ptx::fma_bfloat16(pair, scale.low, 0));
  }
  return make_uint2(pairs[0], pairs[1]);
}
// Has the highest bit of a byte of e4m3 that is NaN.
inline constexpr uint32 kNanBytes = 0x80808080u;
__device__ __forceinline__ uint32 nan_bytes(uint32 four) {
  return (four & 0x7f7f7f7fu) + 0x01010101u;
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

// A warp's rows of a block, `warp` of kLoaders. A step is 256 features of two rows, four steps of a
// half are a turn. Copies take the rows as they lie, 16 lanes each; a lane converts 16 features of
// one of them. A lane knows where its row_copied() lies, and of row lane % 16 the scales of feature
// 128 * (lane / 16) of both halves: others ask it.
struct PackedSteps {
  static constexpr int kRows = kBlockKV / kLoaders;
  static constexpr int kSteps = 4, kTurns = kRows / (2 * kSteps);  // of a half of the features
  static_assert(kRows == 16);

  const DecodeParams& p;
  const Unit& unit;
  LatentShared& shared;
  int warp;
  uint32 to;         // where this lane's features of step 0 lie in a half of a block
  float scales[2];   // this lane's, of the halves of a block
  uint32 found = 0;  // of a half: kNanBytes of what was converted

  __device__ __forceinline__ PackedSteps(const DecodeParams& p, const Unit& unit,
                                         LatentShared& shared, int warp)
      : p(p), unit(unit), shared(shared), warp(warp) {
    to = chunk_address<kBlockKV>(group_of() * kBoxBytes, warp * kRows + threadIdx.x / 4 % 2,
                                 threadIdx.x % 4 * 2);
  }

  // The number of a row's page, as the table has it, and the row in it: they come while other
  // blocks are loaded. In the place of a row that is not needed there is one that is, by its side.
  struct Found {
    int page, row;
  };
  __device__ __forceinline__ Found find(int block) const {
    if constexpr (!kPaged) return {};
    const int position = position_of(block), page = position / p.page_size;
    return {p.page_table[static_cast<int64>(unit.batch) * p.columns + page],
            position - page * p.page_size};
  }
  // Where the row lies, counted over all pages, or kNone.
  __device__ __forceinline__ int slot(const Found& of, int block) const {
    if constexpr (!kPaged) return unit.batch * p.page_size + position_of(block);
    return of.page < 0 || of.page >= p.pages ? kNone : of.page * p.page_size + of.row;
  }

  // Whole warps call what is below. Brings the rows to L2, a line for each lane.
  __device__ __forceinline__ void prefetch(int slots, bool asks) const {
    const int lane = ptx::fresh_lane(), at = lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int slot = slot_of(slots, i / 2, lane / 8, i % 2);
      if (asks && slot >= 0 && at < kPackedBytes) ptx::prefetch_l2(start(slot) + at);
    }
  }
  // Asks for a step's bytes; zeros for those of a row that lies nowhere. All lanes have taken what
  // was in their place.
  __device__ __forceinline__ void load(int slots, int half, int turn, int step, bool asks) const {
    const int slot = __shfl_sync(0xffffffffu, slots, turn * kSteps + step, 16);
    const int lane = ptx::fresh_lane(), from = half * 256 + lane % 16 * 16;
    ptx::copy_async_past_l1(ptx::shared_address(place(step) + lane),
                            reinterpret_cast<uint64>(start(max(slot, 0)) + from),
                            asks && slot >= 0);
    ptx::copy_async_commit();
  }
  // A step's 16 features of this lane, as they came; lanes with odd rows have the other banks.
  __device__ __forceinline__ uint4 take(int step) const {
    return place(step)[threadIdx.x / 4 % 2 * 16 + group_of() * 4 + threadIdx.x % 4];
  }
  // A block ahead: of one turn ahead the compiler waits for them.
  __device__ __forceinline__ void load_scales(int slots, float (&of)[2]) const {
    const int lane = ptx::fresh_lane(), row = lane % 16;
    const int slot = slot_of(slots, row / 8, row % 8 / 2, row % 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of[half] = !kPaged || slot >= 0 ? *scale_at(slot, half) : 1.0f;
    }
  }
  // Ahead of a step: what scale_of() is for what this lane converts.
  __device__ __forceinline__ PackedScale spread(uint32 scale, int turn, int step) const {
    const int row = 2 * (turn * kSteps + step) + threadIdx.x / 4 % 2;
    return PackedScale(__shfl_sync(0xffffffffu, scale, row + (threadIdx.x & 16)));
  }
  // A lane's 16 features are two pieces of a box's row.
  template <bool kOne>
  __device__ __forceinline__ void store(int turn, int step, const uint4& all,
                                        const PackedScale& scale, uint32 keys) {
    found |= nan_bytes(all.x) | nan_bytes(all.y);
    found |= nan_bytes(all.z) | nan_bytes(all.w);
    store_piece(keys, turn, step, all, [&](uint32 four) { return scaled<kOne>(four, scale); });
  }
  // Whether all numbers of a half were what they should be: else store_slowly has to do it again.
  __device__ __forceinline__ bool is_right(float scale) {
    const bool is_wrong = (found & kNanBytes) != 0 || !is_plain_scale(scale);
    found = 0;
    return !__any_sync(0xffffffffu, is_wrong);
  }
  // Does all of a half.
  __device__ __forceinline__ void store_slowly(int slots, int half, uint32 keys) const {
#pragma unroll 1
    for (int step = 0; step < kTurns * kSteps; ++step) {
      const int slot = slot_of(slots, 0, step, threadIdx.x / 4 % 2);
      if (slot < 0) continue;
      const uint4 all = *reinterpret_cast<const uint4*>(start(slot) + half * 256 + group_of() * 64 +
                                                        threadIdx.x % 4 * 16);
      const float factor = *scale_at(slot, half);
      store_piece(keys, 0, step, all, [&](uint32 four) { return scaled_slowly(four, factor); });
    }
  }
  // Features that are bfloat16: eight lanes a row. They are there when three steps more are.
  __device__ __forceinline__ void copy_plain(int slots, uint32 box) const {
    const int lane = ptx::fresh_lane();
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int slot = slot_of(slots, i / 2, lane / 8, i % 2);
      const unsigned char* const from = start(max(slot, 0)) + kPackedPlainAt + lane % 8 * 16;
      ptx::copy_async_past_l1(plain_at(box, i, lane), reinterpret_cast<uint64>(from), slot >= 0);
    }
  }

 private:
  // A step's bytes: 256 of one row, then of the next.
  __device__ __forceinline__ uint4* place(int step) const {
    return &shared.incoming[step * kGroupThreads + threadIdx.x / 32 * 32];
  }
  __device__ __forceinline__ int position_of(int block) const {
    const Range needed = positions_of(p, ptx::opaque(unit.length));
    const int row = block * kBlockKV + warp * kRows + row_copied();
    return min(max(row, needed.begin), needed.end - 1);
  }
  // Lanes s, 16 + s: the rows of step s; of the second turn four further on.
  static __device__ __forceinline__ int row_copied() {
    const int lane = ptx::fresh_lane();
    return 2 * (lane % 8) + lane / 16;
  }
  static __device__ __forceinline__ int slot_of(int slots, int turn, int step, int row) {
    return __shfl_sync(0xffffffffu, slots, turn * kSteps + step + 16 * row);
  }
  __device__ __forceinline__ const unsigned char* start(int slot) const {
    return static_cast<const unsigned char*>(p.key_data) + static_cast<int64>(slot) * kPackedBytes;
  }
  __device__ __forceinline__ const float* scale_at(int slot, int half) const {
    return reinterpret_cast<const float*>(start(slot) + kPackedScalesAt + half * 8 +
                                          threadIdx.x % 32 / 16 * 4);
  }
  template <class Convert>
  __device__ __forceinline__ void store_piece(uint32 keys, int turn, int step, const uint4& all,
                                              Convert convert) const {
    // A swizzle is an exclusive or of three bits of the row.
    const uint32 at = keys + (ptx::opaque(to) ^ 2 * (step % kSteps) * 16) +
                      2 * (turn * kSteps + step) * kBoxRowBytes;
    uint2 left = convert(all.x), right = convert(all.y);
    ptx::store_shared_x4(at, left.x, left.y, right.x, right.y);
    left = convert(all.z);
    right = convert(all.w);
    ptx::store_shared_x4(at ^ 16, left.x, left.y, right.x, right.y);
  }
  // The 64 features of a half that this lane converts.
  static __device__ __forceinline__ int group_of() {
    return threadIdx.x % 32 / 8 ^ threadIdx.x / 4 % 2;
  }
  __device__ __forceinline__ int row_of_plain(int i, int lane) const {
    return warp * kRows + i / 2 * 2 * kSteps + 2 * (lane / 8) + i % 2;
  }
  __device__ __forceinline__ uint32 plain_at(uint32 box, int i, int lane) const {
    return chunk_address<kBlockKV>(box, row_of_plain(i, lane), lane % 8);
  }
};

}  // namespace decode
