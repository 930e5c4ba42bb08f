// Latent decoding: what becomes of a unit's sums.
#pragma once

#include "sm90_latent/latent_cluster.cuh"

namespace decode {

// What a CTA leaves of a unit that it shares lies as its threads have it: pieces of eight sums of a
// row, two columns of four times 8. Where results have 8 bits, sums have float16's 11, relative to
// a power of two of each row: half the bytes, which are what the second kernel waits for. A sum of
// less than 2^-86, or than 2^-28 times the largest of its row, then loses bits. Kernels of packed
// rows would spill 8 bytes.
inline constexpr bool kLeavesHalves = kBFloat16 && !kPackedRows;
static_assert(kCluster == 1 || kLeavesHalves);
inline constexpr int kLeftRows = kFewRows ? kQueryRows : kShareRows;
inline constexpr int kLeftPieces = kLeftRows * kValueDim / 8;
inline constexpr int kLeftThreads = 2 * kLeftRows;          // four have two rows, 8 apart
inline constexpr int kLeftBytes = kLeavesHalves ? 16 : 32;  // of a piece
struct LeftPiece {
  int row, column;  // of the first two; the others are 8, 16 and 24 columns on
  __device__ __forceinline__ explicit LeftPiece(int piece) {
    const int of_group = piece / kLeftThreads;  // 32 columns, then rows, then halves
    column = of_group / (kHalfColumns / 16) * kHalfColumns + of_group % (kHalfColumns / 32) * 32 +
             fragment::first_column(piece);
    row = fragment::first_row(piece % kLeftThreads) +
          of_group / (kHalfColumns / 32) % 2 * fragment::kRowStep;
  }
};
// A row's base and sum, and with kLeavesHalves the exponent that its sums are relative to.
struct LeftRow {
  float base, total;
  int exponent, unused;
};
static_assert(sizeof(LeftRow) == 16);
// Sums are below 2^15 then.
inline constexpr int kHalfExponent = 14, kLeastExponent = -100;

// Pieces of a unit whose first row is `at`.
__device__ __forceinline__ unsigned char* left_of(const DecodeParams& p, int64 at) {
  return reinterpret_cast<unsigned char*>(p.partial_out) + at * (kValueDim / 8 * kLeftBytes);
}

// A warpgroup has half of the columns.
template <int kGroup>
struct LatentResults {
  const DecodeParams& p;
  const Share& share;
  LatentShared& shared;
  const Unit& unit;
  const float (&output)[kHalfColumns / 2];
  const float (&base)[2];

  // `units` are behind this warpgroup; `sum` is of this thread's columns.
  __device__ __forceinline__ void finish(const float (&sum)[2], uint32 units, bool is_whole,
                                         bool is_first) const {
    float total[2];
    int exponent[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] = fragment::quad_sum(sum[i]);
      if (kLeavesHalves && !is_whole) exponent[i] = exponent_of(i);
      if (threadIdx.x % 4 == 0) {
        shared.sums[units % 2][kGroup][own_row(i)] = total[i];
        if (kLeavesHalves && !is_whole)
          shared.exponents[units % 2][kGroup][own_row(i)] = exponent[i];
      }
    }
    ptx::named_barrier_sync(kSumsBarrier, 2 * kGroupThreads);
    const LatentClusterMerge<kGroup> cluster{p, share, shared, unit, output, base};
    if constexpr (kCluster > 1) cluster.wait();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own_row(i);
      total[i] += shared.sums[units % 2][1 - kGroup][row];
      const Place place(p, share, row);
      if (is_whole) {
        store(place, i, total[i]);
      } else if (place.exists(p)) {
        if constexpr (kLeavesHalves) {
          exponent[i] = max(exponent[i], int{shared.exponents[units % 2][1 - kGroup][row]});
          exponent[i] = min(max(exponent[i] - kHalfExponent, kLeastExponent), 126);
        } else {
          exponent[i] = 0;
        }
        if constexpr (kCluster > 1) {
          cluster.send(i, total[i], exponent[i]);
        } else {
          leave(partial_row(blockIdx.x, is_first, 0), i, total[i], exponent[i]);
        }
      }
    }
    if constexpr (kCluster > 1) cluster.merge();
  }

 private:
  // Whole warps call.
  __device__ __forceinline__ void store(const Place& place, int i, float total) const {
    const bool exists = place.exists(p);
    Conclusion end{0.0f, 0.0f};
    if (exists) end = conclude(p, base[i], total, unit.batch, place.head);
    uint32 pieces[kHalfColumns / 8];
    fragment::gather_row(output, i, end.factor, pieces);
    if (!exists) return;
    const int64 row =
        (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
    uint4* const to = static_cast<uint4*>(p.out) + (row * kValueDim + kGroup * kHalfColumns) / 8;
#pragma unroll
    for (int g = 0; g < kHalfColumns / 32; ++g) {
      to[4 * g + threadIdx.x % 4] =
          make_uint4(pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]);
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) store_lse(p, unit, place, end.lse);
  }
  // The exponent of the largest finite number among row i's sums of this warpgroup; -127 for zeros.
  __device__ __forceinline__ int exponent_of(int i) const {
    uint32 largest = 0;
#pragma unroll
    for (int j = 0; j < kHalfColumns / 4; ++j) {
      // The exponent, more by one, is in the highest 8 bits: what is not finite wraps to 0.
      const uint32 bits = __float_as_uint(output[fragment::element(j / 2, i, j % 2)]);
      largest = max(largest, 2 * bits + 0x01000000u);
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return static_cast<int>(largest >> 24) - 128;
  }
  // For latent_merge.cuh: row i of this thread; see LeftPiece. `at` is the unit's first row.
  __device__ __forceinline__ void leave(int64 at, int i, float total, int exponent) const {
    constexpr int kPieces = kHalfColumns / 32;
    const int first = (2 * kGroup + i) * kPieces * kGroupThreads + threadIdx.x % kGroupThreads;
    const float scale = ptx::power_of_two(-exponent);
    unsigned char* const to = left_of(p, at);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      unsigned char* const piece = to + (first + j * kGroupThreads) * kLeftBytes;
      if constexpr (kLeavesHalves) {
        *reinterpret_cast<uint4*>(piece) = half_sums(output, i, j, scale);
      } else {
        float x[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int from = fragment::element(4 * j + k, i, 0);
          x[2 * k] = output[from];
          x[2 * k + 1] = output[from + 1];
        }
        reinterpret_cast<float4*>(piece)[0] = make_float4(x[0], x[1], x[2], x[3]);
        reinterpret_cast<float4*>(piece)[1] = make_float4(x[4], x[5], x[6], x[7]);
      }
    }
    if (kGroup == 0 && threadIdx.x % 4 == 0) {
      reinterpret_cast<LeftRow*>(p.partial_rows)[at + own_row(i)] = {base[i], total, exponent, 0};
    }
  }
};

}  // namespace decode
