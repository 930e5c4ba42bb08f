// Latent decoding, few query rows: queries as they are multiplied, and scores of 16 keys a warp.
#pragma once

#include "sm90_latent/latent_few_shared.cuh"

namespace decode {

struct FewScores : FewLanes {
  using FewLanes::FewLanes;

  Unit unit;

  // Four features at a time go to the lane that multiplies them: of a quarter a lane has 32 side by
  // side, of those in bfloat16 16.
  __device__ __forceinline__ void load_query(int row) {
    constexpr int kFours = kHeadDim / 4, kTurns = ceil_div(kFours, 32);
    const FewRow place(p, row);
    const int64 of_unit = static_cast<int64>(unit.batch) * p.query_len + place.query;
    const uint2* const from = reinterpret_cast<const uint2*>(
        static_cast<const Bits*>(p.query) + (of_unit * p.query_heads + place.head) * kHeadDim);
    uint2 fours[kTurns];
    uint32 largest = 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int at = i * 32 + lane;
      fours[i] = place.exists && at < kFours ? from[at] : make_uint2(0, 0);
      if (4 * at >= kValueDim) continue;
      const uint32 halves[4] = {fours[i].x << 16, fours[i].x, fours[i].y << 16, fours[i].y};
      // The exponent, more by one, is in the highest 8 bits: what is not finite wraps to 0.
#pragma unroll
      for (uint32 x : halves) largest = max(largest, 2 * x + 0x01000000u);
    }
    const int exponent =
        max(static_cast<int>(__reduce_max_sync(0xffffffffu, largest) >> 24) - 128, kLeastExponent) -
        kQueryExponent;
    const float scale = ptx::power_of_two(-exponent);
    if (lane == 0) shared.factors[row] = ptx::power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int four = i * 32 + lane;
      if (four >= kFours) continue;
      int step, of_quad;
      uint2 x = fours[i];
      if (4 * four < kValueDim) {
        step = four / 32 * 8 + four % 8;
        of_quad = four % 32 / 8;
        x.x = ptx::pack_float16(BFloat16::unpack_low(x.x) * scale,
                                BFloat16::unpack_high(x.x) * scale);
        x.y = ptx::pack_float16(BFloat16::unpack_low(x.y) * scale,
                                BFloat16::unpack_high(x.y) * scale);
      } else {
        step = kValueDim / 16 + four % 4;
        of_quad = four % 16 / 4;
      }
      uint4& to = shared.queries[row / 16][step][row % 8 * 4 + of_quad];
      reinterpret_cast<uint2*>(&to)[row / 8 % 2] = x;
    }
  }

  // scores[16 keys, queries], quarter by quarter.
  __device__ __forceinline__ void multiply_queries(uint32 rows, float (&scores)[4 * kQueryTiles]) {
    const uint32 own = rows + (16 * warp + group) * kPackedBytes, next = own + 8 * kPackedBytes;
#pragma unroll
    for (float& x : scores) x = 0.0f;
    float of[kTogether][4 * kQueryTiles];
#pragma unroll kTogether
    for (int quarter = 0; quarter < 4; quarter += kTogether) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (float& x : of[i]) x = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 keys[kTogether][2];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const uint32 at = (quarter + i) * kQuarter + 32 * quad + 16 * half;
          keys[i][0] = load(own + at);
          keys[i][1] = load(next + at);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            uint32 a[4];
            ptx::unpack_e4m3(word(keys[i][0], j), a[0], a[2]);
            ptx::unpack_e4m3(word(keys[i][1], j), a[1], a[3]);
            multiply<false>(of[i], a, (quarter + i) * 8 + 4 * half + j);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint32 at = kScalesAt + 4 * (quarter + i);
        const float scales[2] = {__uint_as_float(ptx::load_shared(own + at)),
                                 __uint_as_float(ptx::load_shared(next + at))};
#pragma unroll
        for (int j = 0; j < 4 * kQueryTiles; ++j) {
          scores[j] = fmaf(of[i][j], scales[fragment::row(j)], scores[j]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[4 * tile + i] *= shared.factors[query_row(tile, i % 2)];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 at = kPlainAt + 32 * quad + 16 * half;
      const uint4 keys[2] = {load(own + at), load(next + at)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32 a[4] = {word(keys[0], 2 * j), word(keys[1], 2 * j), word(keys[0], 2 * j + 1),
                             word(keys[1], 2 * j + 1)};
        multiply<true>(scores, a, kValueDim / 16 + 2 * half + j);
      }
    }
  }
  template <bool kOfBFloat16>
  __device__ __forceinline__ void multiply(float (&sums)[4 * kQueryTiles], const uint32 (&a)[4],
                                           int step) const {
#pragma unroll
    for (int i = 0; i < kQueryTiles / 2; ++i) {
      const uint4 b = shared.queries[i][step][lane];
      ptx::multiply_add<kOfBFloat16>(sums, 8 * i, a, b.x, b.y);
      ptx::multiply_add<kOfBFloat16>(sums, 8 * i + 4, a, b.z, b.w);
    }
  }
  static __device__ __forceinline__ uint4 load(uint32 address) {
    const float4 x = ptx::load_shared_f4(address);
    return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                      __float_as_uint(x.w));
  }
  static __device__ __forceinline__ uint32 word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }

  // Hides scores of positions that not every row sees, `first` the first of this warp's. Rows that
  // nobody sees become 0, as does what is not finite of those that some see: a row that sees such a
  // key is NaN by its weight.
  __device__ __forceinline__ void hide(uint32 rows, int first, float (&scores)[4 * kQueryTiles]) {
    const int oldest = unit.length - p.query_len;
    const Range by_some{first_seen(p, oldest), unit.length};
    uint32 bad = 0;
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const uint32 at = rows + (16 * warp + row) * kPackedBytes;
      const bool is_seen = first + row >= by_some.begin && first + row < by_some.end;
      bool found = false;
      for (int i = lane; i < kPlainAt / 4; i += 32) {
        uint32 x = is_seen ? ptx::load_shared(at + 4 * i) : 0;
        const bool is_wrong = i < kScalesAt / 4
                                  ? ((x & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u) != 0
                                  : (x & 0x7f800000u) == 0x7f800000u;
        if (is_wrong || !is_seen) ptx::store_shared(at + 4 * i, 0);
        found = found || is_wrong;
      }
      if (__any_sync(0xffffffffu, found)) bad |= 1u << row;
    }
    ptx::fence_async_proxy();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4 * kQueryTiles; ++i) {
      const int row = group + 8 * fragment::row(i), at = first + row;
      const int position = oldest + query_of(query_row(i / 4, i % 2));
      if (at < first_seen(p, position) || at > position) {
        scores[i] = kNegativeInfinity;
      } else if (bad >> row & 1) {
        scores[i] = kNan;
      }
    }
  }
};

}  // namespace decode
