// Decoding: the products of a warp, for float32, whose keys and values lie in shared memory as they
// are. A number is split into bfloat16 parts (split.cuh) where it becomes an operand: few
// warps meet a block, mostly one, so that planes of parts would only take the room of blocks in
// flight.
#pragma once

#include "decode_pieces.cuh"
#include "fragment.cuh"
#include "split.cuh"

namespace decode {

// Bytes of a plane of queries in shared memory: 16 bits a number, a plane for each part.
inline constexpr int kQueryPlane = kPlaneBytes<kHeadDim, kShareRows>;

using Seen = Range[2];  // of each of a thread's rows

struct Split {
  int tile, part;  // a warp's rows and keys, of kHeads * kRowTiles and kKeyParts

  // sum[first] to sum[first + 3] += what multiply(part, i, j) adds up of parts i and j of the two
  // operands. Tensor cores cut sums off, so of many this one starts from 0.
  template <bool kOfMany, int kCount, class Multiply>
  static __device__ __forceinline__ void add_parts(float (&sum)[kCount], int first,
                                                   Multiply multiply) {
    float of_parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_parts[i] = kOfMany ? 0.0f : sum[first + i];
#pragma unroll
    for (int order = kParts - 1; order >= 0; --order) {  // the smallest first
#pragma unroll
      for (int i = 0; i <= order; ++i) multiply(of_parts, i, order - i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[first + i] = kOfMany ? sum[first + i] + of_parts[i] : of_parts[i];
    }
  }

  // The address of a column, in a tile of kBlockKV rows.
  static __device__ __forceinline__ uint32 address(uint32 tile, int row, int column) {
    return chunk_address<kBlockKV>(tile, row, column / 4) + column % 4 * 4;
  }
  // The same `columns` further, a multiple of 8, from an address in the first 8 columns: tiles
  // begin at multiples of 1024 bytes, so that the swizzle is one of the bits that change.
  static __device__ __forceinline__ uint32 further(uint32 address, int columns) {
    return (address ^ columns % 32 * 4) + columns / 32 * (kBlockKV * kBoxRowBytes);
  }

  __device__ __forceinline__ void add_scores(uint32 queries, uint32 keys,
                                             float (&scores)[kPartKeys / 2]) const {
    const int lane = threadIdx.x % 32;
    const int query = tile * 16 + lane % 16, key = part * kPartKeys + lane / 4;
    // Wide values leave few registers: all steps of a wide head at once spill where keys are few.
    constexpr bool kFewAtOnce = kHeadDim > 128 && kPartKeys <= 8;
    constexpr int kSteps = ceil_div(kHeadDim, 16), kAtOnce = kFewAtOnce ? 4 : kSteps;
#pragma unroll kAtOnce
    for (int step = 0; step < kSteps; ++step) {
      uint32 a[kParts][4];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const uint32 plane = queries + i * kQueryPlane;
        ptx::load_matrix_x4(chunk_address<kShareRows>(plane, query, 2 * step + lane / 16), a[i]);
      }
#pragma unroll
      for (int j = 0; j < kPartKeys / 8; ++j) {
        uint32 b[2][kParts];  // of columns 0 to 7, and 8 to 15
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32 first = address(keys, key + 8 * j, fragment::first_column(lane));
          const float2 x = ptx::load_shared_f2(further(first, 16 * step + 8 * half));
          split_pair(x.x, x.y, b[half]);
        }
        // Two parts leave an error of 2^-16, beside which what a row's sums lose is little.
        add_parts<(kParts > 2)>(scores, 4 * j, [&](float (&sum)[4], int i, int other) {
          ptx::multiply_add<true>(sum, 0, a[i], b[0][other], b[1][other]);
        });
      }
    }
  }

  // Weights times values. The parts of an infinity make NaN, and values that a row does not see may
  // be anything: products take the finite ones alone, and split large ones in another way.
  __device__ __forceinline__ void add_values(uint32 values, const float (&scores)[kPartKeys / 2],
                                             int first, const Seen& seen,
                                             float (&output)[kOwnColumns / 2]) const {
    const int lane = threadIdx.x % 32;
    uint32 weights[kPartKeys / 8][kParts][2];
#pragma unroll
    for (int j = 0; j < kPartKeys / 8; ++j) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32 parts[kParts];
        split_pair(scores[fragment::element(j, row, 0)], scores[fragment::element(j, row, 1)],
                   parts);
#pragma unroll
        for (int i = 0; i < kParts; ++i) weights[j][i][row] = parts[i];
      }
    }
    const bool plain = are_plain(values);
    if (kFiniteApart && plain) {
      multiply_values</*kFiniteAlone=*/false>(values, weights, output);
    } else {
      multiply_values</*kFiniteAlone=*/true>(values, weights, output);
    }
    if (!plain) add_what_is_not_finite(values, first, seen, output);
  }

  template <bool kFiniteAlone>
  __device__ __forceinline__ void multiply_values(uint32 values,
                                                  const uint32 (&weights)[kPartKeys / 8][kParts][2],
                                                  float (&output)[kOwnColumns / 2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kPartKeys / 8; ++j) {
      const int key = part * kPartKeys + 8 * j + fragment::first_column(lane);
#pragma unroll
      for (int column = 0; column < kOwnColumns / 8; ++column) {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32 bits =
              ptx::load_shared(further(address(values, key + i, lane / 4), 8 * column));
          x[i] = __uint_as_float(!kFiniteAlone || is_finite(bits) ? bits : 0);
        }
        uint32 b[kParts];
        if constexpr (kFiniteAlone) {
          split_large(x[0], x[1], b);
        } else {
          split_pair(x[0], x[1], b);
        }
        add_parts<true>(output, 4 * column, [&](float (&sum)[4], int i, int other) {
          ptx::multiply_add(sum, 0, weights[j][i], b[other]);
        });
      }
    }
  }

  // Finite numbers from here on round to an infinite bfloat16.
  static constexpr uint32 kLarge = 0x7f7f8000u;

  // As split_pair, of finite numbers that may be large: their first part is the largest bfloat16.
  static __device__ __forceinline__ void split_large(float low, float high,
                                                     uint32 (&parts)[kParts]) {
    constexpr float kMost = 0x1.fep127f;
    const auto first = [](float x) { return fminf(fmaxf(x, -kMost), kMost); };
    parts[0] = BFloat16::pack(first(low), first(high));
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      low -= BFloat16::unpack_low(parts[i - 1]);
      high -= BFloat16::unpack_high(parts[i - 1]);
      parts[i] = BFloat16::pack(low, high);
    }
  }

  // Looks at the numbers that this warp multiplies: 0 times what is not finite, or has a part that
  // is not, is NaN. Looking at each where it is split would take three times the instructions.
  // Where no key is seen shared memory is as the CTA before left it.
  __device__ __forceinline__ bool are_plain(uint32 values) const {
    constexpr int kChunks = kOwnColumns / 4;
    uint32 largest = 0;
#pragma unroll 4  // more spill beside wide values
    for (int i = 0; i < kPartKeys * kChunks; i += 32) {
      const int at = i + threadIdx.x % 32, row = at / kChunks, chunk = at - row * kChunks;
      if (i + 32 > kPartKeys * kChunks && row >= kPartKeys) break;
      const uint32 from = chunk_address<kBlockKV>(values, part * kPartKeys + row, chunk);
      const float4 x = ptx::load_shared_f4(from);
      const float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (float number : numbers) {
        largest = max(largest, __float_as_uint(number) & 0x7fffffffu);
      }
    }
    return __all_sync(0xffffffffu, largest < kLarge);
  }

  static __device__ __forceinline__ bool is_finite(uint32 bits) {
    return (bits & 0x7f800000u) != 0x7f800000u;
  }

  // Infinities and NaN to the rows that see their keys, whatever the weight.
  __device__ __forceinline__ void add_what_is_not_finite(uint32 values, int first, const Seen& seen,
                                                         float (&output)[kOwnColumns / 2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < kPartKeys; ++i) {
      const int key = part * kPartKeys + i;
      bool sees[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        sees[row] = first + key >= seen[row].begin && first + key < seen[row].end;
      }
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        const uint32 at = address(values, key, 8 * j + fragment::first_column(lane));
        const uint32 bits[2] = {ptx::load_shared(at), ptx::load_shared(at + 4)};
        if (is_finite(bits[0]) && is_finite(bits[1])) continue;
#pragma unroll
        for (int element = 0; element < 4; ++element) {
          const uint32 x = bits[element % 2];
          const bool counts = sees[element / 2] && !is_finite(x);
          output[4 * j + element] += __uint_as_float(counts ? x : 0);
        }
      }
    }
  }
};

}  // namespace decode
