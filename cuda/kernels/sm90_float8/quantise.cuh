// Quantises queries, keys or values of 16 bits for the forward pass of float8: the bits are those
// of jax_flash/_float8.py. Memory is read once, and nothing is written but the results.
//
// Constants of the generated header, beside those of element.cuh:
//   int kHeadDim      16 divides it, 256 at most
//   bool kTurns       numbers of a row are multiplied by a Hadamard matrix first
//   int kTurnShift    its entries are 2^-kTurnShift and -2^-kTurnShift
//   int kScaled       positions of a scale in memory: 128, or 64, where two have the same
//   bool kColumns     the columns that tensor cores take of values are written, too
//   bool kAmax        the largest magnitudes before the turn are written, too
#pragma once

#include "element.cuh"
#include "sm90/ptx_sm90.cuh"
#include "sm90_float8/slots.cuh"

namespace quantise {

inline constexpr int kPositions = 128;  // of a CTA
inline constexpr int kPiece = 8;        // numbers side by side that a thread loads at once
inline constexpr int kPieces = 4;       // of a thread
inline constexpr int kNumbers = kPieces * kPiece;
inline constexpr int kRowPieces = kHeadDim / kPiece;
inline constexpr int kThreads = kPositions * kHeadDim / kNumbers;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kWords = kHeadDim / 4;  // of a row of float8
inline constexpr int kPitch = forward::column_pitch(kWords);
inline constexpr int kLeastExponent = -117;  // of a scale
static_assert(kHeadDim % 16 == 0 && kThreads <= 1024);
static_assert(kPositions % kScaled == 0);

// Where a thread's first piece lies, position and feature, and how far apart the others are. A row
// that is turned is that of kLanes lanes side by side; others are read in their order in memory.
inline constexpr int kLanes = kTurns ? kRowPieces / kPieces : kRowPieces;
inline constexpr int kFeatureStep = kTurns ? kLanes * kPiece : 0;
inline constexpr int kPositionStep = kTurns ? 0 : kPositions / kPieces;
static_assert(kTurns || kThreads == kPositionStep * kLanes);

using Numbers = float[kPieces][kPiece];

// Sums and differences of numbers that are kStep apart.
template <int kStep>
__device__ __forceinline__ void add_pairs(Numbers& x) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    if (i & kStep) continue;
    float& low = x[i / kPiece][i % kPiece];
    float& high = x[(i + kStep) / kPiece][(i + kStep) % kPiece];
    const float sum = low + high;
    high = low - high;
    low = sum;
  }
}

// Multiplies a row by the Hadamard matrix, but for 2^-kTurnShift. The bits of a feature's number,
// from the lowest: those within a piece, the lane, the piece.
__device__ __forceinline__ void turn(Numbers& x) {
  add_pairs<1>(x);
  add_pairs<2>(x);
  add_pairs<4>(x);
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
    const float sign = threadIdx.x & lane ? -1.0f : 1.0f;
#pragma unroll
    for (auto& piece : x) {
#pragma unroll
      for (float& own : piece) own = fmaf(own, sign, __shfl_xor_sync(0xffffffffu, own, lane));
    }
  }
  add_pairs<8>(x);
  add_pairs<16>(x);
}

// The largest finite magnitude, as bits of float32.
__device__ __forceinline__ uint32 largest_finite(const uint4 (&loaded)[kPieces]) {
  constexpr uint32 kInfinityBits = kBFloat16 ? 0x7f80 : 0x7c00;
  uint32 largest = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32 pairs[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32 low = pairs[j] & 0x7fff, high = pairs[j] >> 16 & 0x7fff;
      if (low < kInfinityBits) largest = max(largest, low);
      if (high < kInfinityBits) largest = max(largest, high);
    }
  }
  return __float_as_uint(Element::unpack_low(largest));
}

// Returns the largest finite magnitude. Infinity becomes NaN.
__device__ __forceinline__ float settle(Numbers& x) {
  float largest = 0.0f;
#pragma unroll
  for (const auto& piece : x) {
#pragma unroll
    for (float number : piece) largest = fmaxf(largest, fabsf(number));  // which passes over NaN
  }
  if (largest < kInfinity) return largest;
  largest = 0.0f;
#pragma unroll
  for (auto& piece : x) {
#pragma unroll
    for (float& number : piece) {
      if (fabsf(number) == kInfinity) number = kNan;
      largest = fmaxf(largest, fabsf(number));
    }
  }
  return largest;
}

// The largest of all threads', of which each warp has written its own.
__device__ __forceinline__ float largest_of(const uint32* of_warps) {
  const int lane = threadIdx.x % 32;
  const uint32 bits = of_warps[min(lane, kWarps - 1)];
  return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

// The least e by which a magnitude is at most 448 = 1.75 * 2^8 times 2^e; 0 of 0.
__device__ __forceinline__ int exponent_of(float largest) {
  const uint32 bits = __float_as_uint(largest);
  if (bits == 0) return 0;
  const int exponent = static_cast<int>(bits >> 23) - 135 + ((bits & 0x7fffff) > 0x600000);
  return max(exponent, kLeastExponent);
}

}  // namespace quantise

// A CTA for 128 positions of a head, heads first.
extern "C" __global__ void __launch_bounds__(quantise::kThreads, 1024 / quantise::kThreads)
    flash_quantise(const __grid_constant__ QuantiseParams p) {
  using namespace quantise;
  __shared__ uint32 largest_of_warps[2][kWarps];
  __shared__ uint32 rows[kColumns ? kPositions * kPitch : 1];
  const int blocks = ceil_div(p.length, kPositions);
  const int head = blockIdx.x % p.heads, of = blockIdx.x / p.heads;
  const int block = of % blocks, batch = of / blocks;
  const int count = min(p.length - block * kPositions, kPositions);
  const int64 row = static_cast<int64>(p.heads) * kHeadDim;  // elements from one to the next
  const int position = threadIdx.x / kLanes, feature = threadIdx.x % kLanes * kPiece;
  const int64 first = (static_cast<int64>(batch) * p.length + block * kPositions + position) * row +
                      static_cast<int64>(head) * kHeadDim + feature;
  const int64 step = kFeatureStep + kPositionStep * row;

  uint4 loaded[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const auto* from = static_cast<const Element::Bits*>(p.source) + first + i * step;
    const bool there = position + i * kPositionStep < count;
    loaded[i] = there ? __ldcs(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
  }
  const int warp = threadIdx.x / 32;
  const bool leads = threadIdx.x % 32 == 0;
  if constexpr (kAmax && kTurns) {  // ahead of the numbers, which take the registers
    const uint32 bits = __reduce_max_sync(0xffffffffu, largest_finite(loaded));
    if (leads) largest_of_warps[1][warp] = bits;
  }
  Numbers x;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32 pairs[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[i][2 * j] = Element::unpack_low(pairs[j]);
      x[i][2 * j + 1] = Element::unpack_high(pairs[j]);
    }
  }
  if constexpr (kTurns) {
    turn(x);
  }
  const float own = settle(x) * ptx::power_of_two(-kTurnShift);
  const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(own));
  if (leads) largest_of_warps[0][warp] = bits;
  __syncthreads();
  const float largest = largest_of(largest_of_warps[0]);
  const int exponent = exponent_of(largest);
  if constexpr (kAmax) {
    const float unturned = kTurns ? largest_of(largest_of_warps[1]) : largest;
    if (threadIdx.x == 0) p.amax[blockIdx.x] = unturned;
  }
  if (static_cast<int>(threadIdx.x) < ceil_div(count, kScaled)) {
    const int scale = block * (kPositions / kScaled) + threadIdx.x;
    const int64 of_batch = static_cast<int64>(batch) * ceil_div(p.length, kScaled);
    p.scales[(of_batch + scale) * p.heads + head] = ptx::power_of_two(exponent);
  }

  const float factor = ptx::power_of_two(-exponent - kTurnShift);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint32 words[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* four = x[i] + 4 * j;
      words[j] =
          ptx::pack_float8(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
    }
    const int at = position + i * kPositionStep;
    if (at < count) {
      auto* to = static_cast<unsigned char*>(p.values) + first + i * step;
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
    if constexpr (kColumns) {
      uint32* to = rows + at * kPitch + (feature + i * kFeatureStep) / 4;
      to[0] = words[0];
      to[1] = words[1];
    }
  }
  if constexpr (kColumns) {
    __syncthreads();
    const int64 pitch = static_cast<int64>(blocks) * (kPositions / 4);
    const int64 of_head = static_cast<int64>(batch) * p.heads + head;
    auto* columns = static_cast<uint32*>(p.columns) + of_head * kHeadDim * pitch;
    forward::write_columns<kWords, kThreads>(rows, columns + block * (kPositions / 4), pitch);
  }
}
