// Latent decoding: rows of float8 in 656 bytes, as FlashMLA stores them (kPackedRows): 512 e4m3,
// four float32 scales of 128 of these each, 64 bfloat16.
//
// The four warps that load have 16 rows of a block each. They copy them to shared memory as they
// are, four rows at a time, and write bfloat16 to where the block lies while the next four come.
// The rows of the block that follows come to L2 meanwhile.
#pragma once

#include "sm80/ptx_sm80.cuh"  // copy_async_past_l1
#include "sm90_latent/latent_shared.cuh"

namespace decode {

inline constexpr int kPackedBytes = 656;
inline constexpr int kPackedScalesAt = 512, kPackedPlainAt = 528;
static_assert(!kPackedRows || (kBFloat16 && kHeadDim == 576 && !kAppends));

// A float32 as a sum of two bfloat16, each in both halves of a register, times 2^120.
struct PackedScale {
  uint32 high, low;
  __device__ __forceinline__ explicit PackedScale(float scale) {
    const float large = scale * 0x1p120f;
    high = ptx::pack_bfloat16(large, large);
    const float rest = large - __uint_as_float(high << 16);
    low = ptx::pack_bfloat16(rest, rest);
  }
  // Its product with 2^-120 of any e4m3 is finite.
  static __device__ __forceinline__ bool is_plain(float scale) { return fabsf(scale) < 0x1p7f; }
};

// Four e4m3 times their scale, as four bfloat16: to nearest, but for one in 200 of scales that are
// no power of two, which lie in the middle of two. As a bfloat16 with the same sign, exponent and
// mantissa a number is 2^-120 of itself, denormal or not; NaN is 480.
__device__ __forceinline__ uint2 scaled(uint32 four, const PackedScale& scale) {
  const uint32 low = four << 4 & 0xf0f0f0f0u;
  const uint32 high = (four & 0x80808080u) | (four >> 4 & 0x07070707u);
  const auto product = [&](uint32 x) {
    return ptx::fma_bfloat16(x, scale.high, ptx::fma_bfloat16(x, scale.low, 0));
  };
  return make_uint2(product(__byte_perm(low, high, 0x5140)),
                    product(__byte_perm(low, high, 0x7362)));
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

// A warp's rows of a block, `warp` of four. A step is 256 features of four of these rows: a lane
// has 16 features of every other row, and copies them to a place of its own (`incoming`): it has
// few registers, since the two warpgroups that compute have all but 72. A lane knows where row lane
// % 16 lies.
struct PackedSteps {
  static constexpr int kRows = kBlockKV / 4;
  static constexpr int kLoads = 2;                     // of a lane and step
  static constexpr int kSteps = kRows / (2 * kLoads);  // of a half of the boxes
  static constexpr int kPlaces = 4 / kLoads;           // of steps; all but one are under way

  const DecodeParams& p;
  const Unit& unit;
  LatentShared& shared;
  int warp;

  // The number of a page, as the table has it: it comes while another block is loaded.
  __device__ __forceinline__ int page(int block) const {
    const int position = position_of(block);
    if (!kPaged || !is_needed(position)) return 0;
    return p.page_table[static_cast<int64>(unit.batch) * p.columns + position / p.page_size];
  }
  // Where the row lies, counted over all pages, or kNotNeeded, or kNone.
  __device__ __forceinline__ int slot(int page, int block) const {
    const int position = position_of(block);
    if (!is_needed(position)) return kNotNeeded;
    if constexpr (!kPaged) return unit.batch * p.page_size + position;
    if (page < 0 || page >= p.pages) return kNone;
    return page * p.page_size + position % p.page_size;
  }

  // Whole warps call what is below. Brings the rows to L2, a line for each lane.
  __device__ __forceinline__ void prefetch(int slots) const {
    const int lane = ptx::fresh_lane(), at = lane % 8 * 128;
#pragma unroll 2
    for (int i = 0; i < kRows / 4; ++i) {
      const int slot = __shfl_sync(0xffffffffu, slots, 4 * i + lane / 8);
      if (slot >= 0 && at < kPackedBytes) ptx::prefetch_l2(start(slot) + at);
    }
  }
  // The scales of row lane / 2: of features 0 to 255 in even lanes, of the rest in odd ones.
  __device__ __forceinline__ float2 scales(int slots) const {
    const int lane = ptx::fresh_lane(), slot = __shfl_sync(0xffffffffu, slots, lane / 2);
    if (slot < 0) return make_float2(0.0f, 0.0f);
    return *reinterpret_cast<const float2*>(start(slot) + kPackedScalesAt + lane % 2 * 8);
  }
  // Zeros in the place of a row that is not needed.
  __device__ __forceinline__ void load(int slots, int half, int step) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int slot = __shfl_sync(0xffffffffu, slots, row_of(step * kLoads + i));
      ptx::copy_async_past_l1(ptx::shared_address(place(step, i)),
                              reinterpret_cast<uint64>(start(max(slot, 0)) + features_at(half)),
                              slot >= 0);
    }
    ptx::copy_async_commit();
  }
  // A lane's 16 features are two pieces of a box's row; lanes with odd rows have the other banks.
  // Returns whether all numbers are what they should be: else store_slowly has to do it again.
  __device__ __forceinline__ bool store(const float2& scales, int half, int step,
                                        uint32 keys) const {
    uint32 found = 0;  // bytes that are NaN
    bool is_plain = true;
    uint4 bytes[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) bytes[i] = *place(step, i);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int number = step * kLoads + i, from = 2 * row_of(number) + half;
      const float left = __shfl_sync(0xffffffffu, scales.x, from);
      const float right = __shfl_sync(0xffffffffu, scales.y, from);
      const float factor = threadIdx.x % 32 < 16 ? left : right;
      const uint4& x = bytes[i];
      found |= ((x.x & 0x7f7f7f7fu) + 0x01010101u) | ((x.y & 0x7f7f7f7fu) + 0x01010101u);
      found |= ((x.z & 0x7f7f7f7fu) + 0x01010101u) | ((x.w & 0x7f7f7f7fu) + 0x01010101u);
      is_plain = is_plain && PackedScale::is_plain(factor);
      const PackedScale scale(factor);
      store_piece(keys, half, number, x, [&](uint32 four) { return scaled(four, scale); });
    }
    return is_plain && (found & 0x80808080u) == 0;
  }
  // Does all of a half.
  __device__ __forceinline__ void store_slowly(int slots, int half, uint32 keys) const {
#pragma unroll 1
    for (int i = 0; i < kRows / 2; ++i) {
      const int slot = __shfl_sync(0xffffffffu, slots, row_of(i));
      if (slot < 0) continue;
      const unsigned char* const row = start(slot);
      const uint4 bytes = *reinterpret_cast<const uint4*>(row + features_at(half));
      const float scale = *reinterpret_cast<const float*>(row + kPackedScalesAt + half * 8 +
                                                          threadIdx.x % 32 / 16 * 4);
      store_piece(keys, half, i, bytes, [&](uint32 four) { return scaled_slowly(four, scale); });
    }
  }
  // Features that are bfloat16: eight lanes a row. They are there when the next step's are.
  __device__ __forceinline__ void copy_plain(int slots, uint32 keys) const {
    const int lane = ptx::fresh_lane();
    const uint32 box = keys + (kKeyBoxes - 1) * kBoxBytes;
#pragma unroll 2
    for (int i = 0; i < kRows / 4; ++i) {
      const int row = 4 * i + lane / 8, slot = __shfl_sync(0xffffffffu, slots, row);
      const unsigned char* const from = start(max(slot, 0)) + kPackedPlainAt + lane % 8 * 16;
      ptx::copy_async_past_l1(chunk_address<kBlockKV>(box, warp * kRows + row, lane % 8),
                              reinterpret_cast<uint64>(from), slot >= 0);
    }
  }

 private:
  __device__ __forceinline__ const unsigned char* start(int slot) const {
    return static_cast<const unsigned char*>(p.key_data) + static_cast<int64>(slot) * kPackedBytes;
  }
  // The row that a lane has by this number.
  static __device__ __forceinline__ int row_of(int number) {
    return 2 * number + threadIdx.x / 4 % 2;
  }
  static __device__ __forceinline__ int features_at(int half) {
    return half * 256 + (threadIdx.x % 32 / 8 * 4 + threadIdx.x % 4) * 16;
  }
  __device__ __forceinline__ uint4* place(int step, int i) const {
    return &shared.incoming[(step % kPlaces * kLoads + i) * kGroupThreads + threadIdx.x];
  }
  template <class Convert>
  __device__ __forceinline__ void store_piece(uint32 keys, int half, int number, const uint4& bytes,
                                              Convert convert) const {
    const int lane = threadIdx.x % 32;
    // A swizzle is an exclusive or of three bits of the row.
    const uint32 first = chunk_address<kBlockKV>(keys + (half * kHalfBoxes + lane / 8) * kBoxBytes,
                                                 warp * kRows + lane / 4 % 2, lane % 4 * 2);
    const uint32 to = (first + 2 * number * kBoxRowBytes) ^ 2 * number % 8 * 16;
    uint2 left = convert(bytes.x), right = convert(bytes.y);
    ptx::store_shared_x4(to, left.x, left.y, right.x, right.y);
    left = convert(bytes.z);
    right = convert(bytes.w);
    ptx::store_shared_x4(to ^ 16, left.x, left.y, right.x, right.y);
  }
  __device__ __forceinline__ int position_of(int block) const {
    return block * kBlockKV + warp * kRows + ptx::fresh_lane() % kRows;
  }
  __device__ __forceinline__ bool is_needed(int position) const {
    const Range seen = positions_of(p, unit.length);
    return position >= seen.begin && position < seen.end;
  }
};

}  // namespace decode
