// Decoding: caches of eight bits, float8_e4m3fn or int8, with scales (kQuantized).
//
// Such numbers are float16 exactly, one instruction for two, so products are of float16. Queries of
// bfloat16 are brought into its range by a power of two of each row, and the largest weight of a
// row is 2^7: below it float16 has 2^-31. The scales of keys go into the scores; those of values
// into the weights, as parts of the largest so far, which the sums are multiplied by at the end.
//
// A lane reads four numbers of a row at once, side by side, where a product wants two and two that
// are eight further on. So queries lie in shared memory in another order (`query_word`), and of 16
// columns of values a lane gets four side by side (`Attended::settle`).
#pragma once

#include "decode_pieces.cuh"
#include "fragment.cuh"

namespace decode {

// The address of word `word` (two features) of chunk `at` (eight) of a row of queries: of 16
// features, words 0, 2, 4 and 6 come first.
__device__ __forceinline__ uint32 query_word(uint32 tile, int row, int at, int word) {
  const int chunk = at / 2 * 2 + word % 2;
  return chunk_address<kShareRows>(tile, row, chunk) + (at % 2 * 2 + word / 2) * 4;
}

// A power of two by which a row's float16 are the bfloat16, of the bits of the largest magnitude.
__device__ __forceinline__ int query_exponent(uint32 largest) {
  constexpr int kLargest = 14;  // exponent of the largest float16
  return max(static_cast<int>(largest >> 7) - 127 - kLargest, -126);
}

// The products of a warp.
struct Quantized {
  int tile, part;  // its rows and keys, of kHeads * kRowTiles and kKeyParts

  // Four numbers as float16: the first two, the others.
  static __device__ __forceinline__ void unpack(uint32 four, uint32& first, uint32& second) {
    if constexpr (kFloat8) {
      ptx::unpack_e4m3(four, first, second);
    } else {
      // 1024 + x + 128, of which float16 has each: less 1152.
      four ^= 0x80808080u;
      first = ptx::fma_float16(__byte_perm(four, 0x64646464u, 0x4140), 0x3c003c00u, 0xe480e480u);
      second = ptx::fma_float16(__byte_perm(four, 0x64646464u, 0x4342), 0x3c003c00u, 0xe480e480u);
    }
  }
  // The high bits of those of four that are NaN.
  static __device__ __forceinline__ uint32 nan_bits(uint32 four) {
    return kFloat8 ? ((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u : 0;
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(uint32 queries, uint32 keys,
                                             float (&sums)[kSums][kPartKeys / 2]) const {
    const int lane = threadIdx.x % 32;
    const int query = tile * 16 + lane % 16, key = part * kPartKeys + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < ceil_div(kHeadDim, 32); ++step) {
      uint32 a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = 4 * step + 2 * half + lane / 16;
        ptx::load_matrix_x4(chunk_address<kShareRows>(queries, query, chunk), a[half]);
      }
#pragma unroll
      for (int j = 0; j < kPartKeys / 16; ++j) {
        uint32 fours[4];  // of keys 0 and 8 on, of 16 features and the next
        ptx::load_matrix_x4(chunk_address<kBlockKV>(keys, key + 16 * j, 2 * step + lane / 8 % 2),
                            fours);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            uint32 b[2];
            unpack(fours[2 * eight + half], b[0], b[1]);
            ptx::multiply_add<false>(sums[half % kSums], 8 * j + 4 * eight, a[half], b[0], b[1]);
          }
        }
      }
    }
  }

  // Adds weights times values, of kKeys keys from `key` on; weights_of(j, weights) has those of 16
  // keys. kNumbersAlone: NaN counts as 0.
  template <bool kNumbersAlone, int kKeys, class WeightsOf>
  static __device__ __forceinline__ void add_values(uint32 values, int key, int first_column,
                                                    WeightsOf weights_of,
                                                    float (&output)[kOwnColumns / 2]) {
    constexpr int kChunks = kOwnColumns / 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32 weights[4];
      weights_of(j, weights);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        uint32 fours[4];  // of keys 0 and 8 on, of 16 columns, then of the next
        ptx::load_transposed_x4(chunk_address<kBlockKV>(values, key + 16 * j + lane % 16,
                                                        first_column / 16 + chunk + lane / 16),
                                fours);
#pragma unroll
        for (int i = 0; i < 2 && chunk + i < kChunks; ++i) {
          uint32 even[2], odd[2];
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            uint32 four = fours[2 * i + eight];
            if constexpr (kNumbersAlone) four &= ~((nan_bits(four) >> 7) * 0xffu);
            // Two columns of a key, of the next key: the keys of a column side by side.
            unpack(__byte_perm(four, 0, 0x3120), even[eight], odd[eight]);
          }
          ptx::multiply_add<false>(output, 8 * (chunk + i), weights, even[0], even[1]);
          ptx::multiply_add<false>(output, 8 * (chunk + i) + 4, weights, odd[0], odd[1]);
        }
      }
    }
  }

  // Are the values that a warp multiplies numbers?
  template <int kKeys>
  static __device__ __forceinline__ bool are_numbers(uint32 values, int key, int first_column) {
    constexpr int kChunks = kOwnColumns / 16;
    if constexpr (!kFloat8) return true;
    uint32 found = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kKeys * kChunks; i += 32) {
      const uint32 at =
          chunk_address<kBlockKV>(values, key + i / kChunks, first_column / 16 + i % kChunks);
#pragma unroll
      for (int word = 0; word < 4; ++word) found |= nan_bits(ptx::load_shared(at + 4 * word));
    }
    return __all_sync(0xffffffffu, found == 0);
  }

  // NaN to the rows that see its key, whatever the weight; `first`: the position of the first key.
  template <int kKeys>
  static __device__ __forceinline__ void add_nan(uint32 values, int key, int first_column,
                                                 int first, const Range (&seen)[2],
                                                 float (&output)[kOwnColumns / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = key; i < key + kKeys; ++i) {
      bool sees[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        sees[row] = first + i >= seen[row].begin && first + i < seen[row].end;
      }
#pragma unroll
      for (int chunk = 0; chunk < kOwnColumns / 16; ++chunk) {
        const uint32 at = chunk_address<kBlockKV>(values, i, first_column / 16 + chunk);
        const uint32 found = nan_bits(ptx::load_shared(at + lane % 4 * 4));
        if (found == 0) continue;
#pragma unroll
        for (int element = 0; element < 8; ++element) {
          const int column = element % 4, row = element / 4;
          if (!sees[row] || (found >> (8 * column) & 0x80) == 0) continue;
          output[fragment::element(2 * chunk + column % 2, row, column / 2)] =
              kInfinity - kInfinity;
        }
      }
    }
  }
};

}  // namespace decode
