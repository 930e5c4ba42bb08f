// float32 on tensor cores: each number as a sum of bfloat16 parts, whose products are exact.
//
// Two parts hold 16 bits of the 24, three all of them. A product of two numbers is the sum of those
// of their parts but for the smallest ones: of two parts three products, of three six, which leave
// an error of 2^-16 and 2^-24. Ootomo & Yokota 2022 (arXiv:2203.03341), for the sums too: tensor
// cores cut off instead of rounding, so that sums of many blocks are left to ordinary additions.
//
// A tile of kParts planes is as many tiles of bfloat16 (tile.cuh), one after the other. Its numbers
// arrive where its first two planes are: of 8 columns the first four where the first plane has
// these, the others in the same place of the second. Whoever copied them splits them in place.
#pragma once

#include "element.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "tile.cuh"

inline constexpr float kSecondHalf = 0x1p11f;  // times what the first half leaves

// The parts of two numbers, `low` in the low half: each is the nearest to what those before leave,
// of halves `second` times. Infinity becomes infinity and NaN.
template <int kParts>
__device__ __forceinline__ void split_pair(float low, float high, uint32 (&parts)[kParts],
                                           float second = kSecondHalf) {
  if constexpr (kHalves) {
    parts[0] = Float16::pack(low, high);
    parts[1] = Float16::pack((low - Float16::unpack_low(parts[0])) * second,
                             (high - Float16::unpack_high(parts[0])) * second);
    return;
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = BFloat16::pack(low, high);
    low -= BFloat16::unpack_low(parts[i]);
    high -= BFloat16::unpack_high(parts[i]);
  }
}

// Eight numbers to shared memory, their parts kPlane bytes apart.
template <int kPlane>
__device__ __forceinline__ void store_parts(uint32 to, const Eight& numbers) {
  uint32 parts[4][kParts];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_pair(numbers.x[2 * i], numbers.x[2 * i + 1], parts[i]);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    ptx::store_shared_x4(to + i * kPlane, parts[0][i], parts[1][i], parts[2][i], parts[3][i]);
  }
}
// Elements of 16 bits have one part.
template <int kPlane>
__device__ __forceinline__ void store_parts(uint32 to, const uint4& elements) {
  ptx::store_shared_x4(to, elements.x, elements.y, elements.z, elements.w);
}

// Bytes of a plane of kRows rows.
template <int kDim, int kRows>
inline constexpr int kPlaneBytes = ceil_div(kDim, kBoxColumns) * kRows * kBoxRowBytes;

// The rows of a tile that kThreads threads fill: kRows of kDim numbers, `pitch` numbers apart.
template <int kDim, int kRows, int kParts, int kThreads>
struct SplitRows {
  static constexpr int kBytes = kDim % 4 == 0 ? 16 : kDim % 2 == 0 ? 8 : 4;  // rows' alignment
  static constexpr int kSlots = ceil_div(kDim, kBoxColumns) * kRows;         // rows of boxes
  static constexpr int kPlane = kPlaneBytes<kDim, kRows>;
  static constexpr int kStep = kThreads / 8;  // slots at a time: a thread has 8 columns
  static_assert(kParts >= 2);

  uint32 tile;
  const float* source;
  int64 pitch;
  uint32 thread = ptx::opaque(threadIdx.x);  // as CopiedRows has it

  __device__ __forceinline__ uint32 place(uint32 slot) const {
    return tile + slot * kBoxRowBytes + swizzled(thread % 8, slot % kRows);
  }
  // Starts the copies; rows from `count` on read as zero.
  __device__ __forceinline__ void begin(int count) const {
#pragma unroll 1
    for (uint32 slot = thread / 8; slot < kSlots; slot += kStep) {
      const uint32 row = slot % kRows;
      const int column = slot / kRows * kBoxColumns + thread % 8 * 8;
      const auto from = reinterpret_cast<uint64>(source + row * pitch + column);
      const int columns = static_cast<int>(row) < count ? kDim - column : 0;
#pragma unroll
      for (int at = 0; at < 8; at += kBytes / 4) {
        ptx::copy_async<kBytes>(place(slot) + at / 4 * kPlane + at % 4 * 4, from + at * 4,
                                at < columns);
      }
    }
  }
  // When this thread's copies are there.
  __device__ __forceinline__ void finish() const {
#pragma unroll 1
    for (uint32 slot = thread / 8; slot < kSlots; slot += kStep) {
      const uint32 to = place(slot);
      const float4 x = ptx::load_shared_f4(to), y = ptx::load_shared_f4(to + kPlane);
      store_parts<kPlane>(to, Eight{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w});
    }
  }
};

// What tensor cores sum up of products of halves: the large ones, and 2^11 times the others but for
// the smallest.
struct HalvesSum {
  float large[8] = {}, small[8] = {};

  template <int kParts>
  __device__ __forceinline__ void multiply_add(const uint32 (&a)[kParts][4],
                                               const uint32 (&b)[kParts][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::multiply_add<false>(small, 0, a[i], b[1 - i][0], b[1 - i][1]);
      ptx::multiply_add<false>(small, 4, a[i], b[1 - i][2], b[1 - i][3]);
    }
    ptx::multiply_add<false>(large, 0, a[0], b[0][0], b[0][1]);
    ptx::multiply_add<false>(large, 4, a[0], b[0][2], b[0][3]);
  }
  // `factor` times.
  template <int kCount>
  __device__ __forceinline__ void add_to(float (&sum)[kCount], int first, float factor) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[first + i] = fmaf(small[i], factor * (1 / kSecondHalf), sum[first + i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[first + i] = fmaf(large[i], factor, sum[first + i]);
  }
};

// sum[first] to sum[first + 7] += factor * a b, of halves, of 32 columns of `a` and 16 columns of
// b, with half as many ordinary additions as for 16 columns at a time.
template <int kParts, int kCount>
__device__ __forceinline__ void multiply_halves(float (&sum)[kCount], int first,
                                                const uint32 (&a0)[kParts][4],
                                                const uint32 (&a1)[kParts][4],
                                                const uint32 (&b)[2][kParts][4], float factor) {
  HalvesSum part;
  part.multiply_add(a0, b[0]);
  part.multiply_add(a1, b[1]);
  part.add_to(sum, first, factor);
}

// sum[first] to sum[first + 7] += a b, of 16 columns of `a` and 16 columns of b, in parts; of
// halves times `factor`.
template <class Of, int kParts, int kCount>
__device__ __forceinline__ void multiply_parts(float (&sum)[kCount], int first,
                                               const uint32 (&a)[kParts][4],
                                               const uint32 (&b)[kParts][4], float factor = 1.f) {
  if constexpr (kParts == 1) {
    constexpr bool kOfBFloat16 = kSame<Of, BFloat16>;
    ptx::multiply_add<kOfBFloat16>(sum, first, a[0], b[0][0], b[0][1]);
    ptx::multiply_add<kOfBFloat16>(sum, first + 4, a[0], b[0][2], b[0][3]);
  } else if constexpr (kHalves) {
    HalvesSum part;
    part.multiply_add(a, b);
    part.add_to(sum, first, factor);
  } else {
    float part[8] = {};
#pragma unroll
    for (int order = kParts - 1; order >= 0; --order) {  // the smallest first
#pragma unroll
      for (int i = 0; i <= order; ++i) {
        ptx::multiply_add<true>(part, 0, a[i], b[order - i][0], b[order - i][1]);
        ptx::multiply_add<true>(part, 4, a[i], b[order - i][2], b[order - i][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[first + i] += part[i];
  }
}
