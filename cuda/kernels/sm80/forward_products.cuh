// A warp's query rows, 16 in each of kRowTiles tiles: their registers, and the products with keys
// and values. Read forward_results.cuh next.
//
// kValueWarps warps share their rows. Each multiplies its part of the head dim; the others' scores
// come through shared memory, added in one order, so that all have the same weights. Then each
// multiplies the weights with its columns of the values.
#pragma once

#include "fragment.cuh"
#include "sm80/forward_copy.cuh"
#include "sm80/products.cuh"
#include "softmax.cuh"

namespace forward {

// A warp's part of the head dim, in steps of 16, and of the values' columns.
inline constexpr int kWarpSteps = ceil_div(ceil_div(kHeadDim, 16), kValueWarps);
static_assert(kQuerySteps == 0 || (kParts == 1 && kValueWarps == 1 && kQuerySteps <= kWarpSteps));
static_assert(!kSumsOf32 || kHalves);
inline constexpr int kWarpColumns = round_up(ceil_div(kValueDim, kValueWarps), 16);

// A block's weights of 16 rows, between the scores and the products with values: elements, two and
// two, or float32 to be split when they are used, which takes fewer registers.
template <class Of>
class Weights {
 public:
  __device__ __forceinline__ void set(int i, float low, float high,
                                      const DroppedPairs<kBlockKV>& dropped) {
    pairs_[i] = Of::pack(low, high);
    if constexpr (kHasDropout) pairs_[i] = dropped.keep(i, pairs_[i]);
  }
  // Matrices of the keys from 16 * j on: rows 0 and 8 on, then those of the next 8 keys.
  __device__ __forceinline__ void get(int j, uint32 (&a)[kParts][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) a[0][k] = pairs_[4 * j + k];
  }

 private:
  uint32 pairs_[kBlockKV / 4];
};
template <>
class Weights<Float32> {
 public:
  __device__ __forceinline__ void set(int i, float low, float high,
                                      const DroppedPairs<kBlockKV>& dropped) {
    uint32 kept = 0xffffffffu;  // a half each
    if constexpr (kHasDropout) kept = dropped.keep(i, kept);
    if constexpr (kHalves) {
      split_pair(low, high, halves_[i]);
      for (uint32& half : halves_[i]) half &= kept;
      return;
    }
    numbers_[2 * i] = kept & 0xffffu ? low : 0.0f;
    numbers_[2 * i + 1] = kept >> 16 ? high : 0.0f;
  }
  __device__ __forceinline__ void get(int j, uint32 (&a)[kParts][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kHalves) {
        for (int i = 0; i < kParts; ++i) a[i][k] = halves_[4 * j + k][i];
        continue;
      }
      uint32 parts[kParts];
      split_pair(numbers_[8 * j + 2 * k], numbers_[8 * j + 2 * k + 1], parts);
#pragma unroll
      for (int i = 0; i < kParts; ++i) a[i][k] = parts[i];
    }
  }

 private:
  float numbers_[kHalves ? 1 : kBlockKV / 2];
  uint32 halves_[kBlockKV / 4][kParts];  // in as many registers
};

struct RowProducts {
  const Sm80ForwardParams& p;
  Shared& shared;
  SoftmaxState<Element> softmax[kRowTiles];
  float output[kRowTiles][kWarpColumns / 2];
  uint32 first_columns[larger(kQuerySteps, 1)][kRowTiles][4];  // of its queries

  // The warp's number among those of its kind.
  static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % kRowWarps; }
  static __device__ __forceinline__ int value_warp() {
    return kValueWarps == 1 ? 0 : threadIdx.x / (32 * kRowWarps);
  }

 protected:
  __device__ __forceinline__ float factor_of_keys(const Walk& walk, const float* factors,
                                                  int block) const {
    return halves::factor_of(factors, static_cast<int64>(walk.batch) * p.kv_heads + walk.kv_head,
                             p.kv_len, block * kBlockKV);
  }
  __device__ __forceinline__ float factor_of_queries(const Walk& walk, int row) const {
    return halves::factor_of(p.query_factors,
                             static_cast<int64>(walk.batch) * p.query_heads + walk.head,
                             p.query_len, walk.first_query() + row);
  }
  // A fifth of what a block's scores read of shared memory, of two tiles of rows a third.
  __device__ __forceinline__ void keep_queries(uint32 from) {
    const uint32 lane = opaque_lane();
    const LaneOfTile<kUnitRows> query_at(from, row_warp() * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ptx::load_matrix_x4(query_at.at(step, kTileRows * tile), first_columns[step][tile]);
      }
    }
  }
  __device__ __forceinline__ void multiply_keys(uint32 queries, uint32 keys,
                                                const float (&factors)[kRowTiles],
                                                float (&scores)[kRowTiles][kBlockKV / 2]) const {
#pragma unroll
    for (auto& tile : scores) {
#pragma unroll
      for (float& x : tile) x = 0.0f;
    }
    // Lanes in the order of matrices: A has rows first, B, which is transposed, columns.
    const uint32 lane = opaque_lane();
    // Past the head dim there are zeros, as far as a part may reach.
    const int first = value_warp() * kWarpSteps;  // of 16 columns
    queries += first / 4 * kUnitRows * kBoxRowBytes;
    keys += first / 4 * kBlockKV * kBoxRowBytes;
    const uint32 skipped = kWarpSteps % 4 == 0 ? 0 : first % 4;
    const LaneOfTile<kUnitRows> query_at(queries, row_warp() * 16 + lane % 16, lane / 16);
    const LaneOfTile<kBlockKV> key_at(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    if constexpr (kSumsOf32 && kWarpSteps % 2 == 0) {
#pragma unroll 1
      for (int step = 0; step < kWarpSteps; step += 2) {
        uint32 a[kRowTiles][2][kParts][4];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
          load_parts<kHeadDim, kUnitRows>(query_at.at(skipped + step + i % 2, kTileRows * (i / 2)),
                                          a[i / 2][i % 2]);
        }
#pragma unroll
        for (int j = 0; j < kBlockKV / 16; ++j) {
          if (kRowTiles == 2) __syncwarp();
          uint32 b[2][kParts][4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load_parts<kHeadDim, kBlockKV>(key_at.at(skipped + step + i, 16 * j), b[i]);
          }
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            multiply_halves(scores[tile], 8 * j, a[tile][0], a[tile][1], b, factors[tile]);
          }
        }
      }
      return;
    }
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kWarpSteps; ++step) {
      uint32 a[kRowTiles][kParts][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if (step < kQuerySteps) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[tile][0][i] = first_columns[step][tile][i];
        } else {
          load_parts<kHeadDim, kUnitRows>(query_at.at(skipped + step, kTileRows * tile), a[tile]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; ++j) {
        if (kParts > 1 && kRowTiles == 2) __syncwarp();
        uint32 b[kParts][4];
        load_parts<kHeadDim, kBlockKV>(key_at.at(skipped + step, 16 * j), b);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_parts<Element>(scores[tile], 8 * j, a[tile], b, factors[tile]);
        }
      }
    }
  }
  __device__ __forceinline__ void multiply_values(uint32 values, float value_factor,
                                                  const Weights<Element> (&weights)[kRowTiles]) {
    const uint32 lane = opaque_lane();
    const int first = value_warp() * (kWarpColumns / 16);
    values += first / 4 * kBlockKV * kBoxRowBytes;
    const uint32 skipped = kWarpColumns % 64 == 0 ? 0 : first % 4;
    const LaneOfTile<kBlockKV> value_at(values, lane % 16, lane / 16);
    if constexpr (kSumsOf32 && kBlockKV % 32 == 0) {
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; j += 2) {
        uint32 a[kRowTiles][2][kParts][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) weights[tile].get(j + i, a[tile][i]);
        }
#pragma unroll
        for (int column = 0; column < kWarpColumns / 16; ++column) {
          if (column % (kRowTiles == 2 ? 1 : 4) == 0) __syncwarp();
          uint32 b[2][kParts][4];
#pragma unroll
          for (int i = 0; i < 2 * kParts; ++i) {
            ptx::load_transposed_x4(value_at.at(skipped + column, 16 * (j + i / kParts)) +
                                        i % kParts * kPlaneBytes<kValueDim, kBlockKV>,
                                    b[i / kParts][i % kParts]);
          }
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            multiply_halves(output[tile], 8 * column, a[tile][0], a[tile][1], b, value_factor);
          }
        }
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
      uint32 a[kRowTiles][kParts][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) weights[tile].get(j, a[tile]);
#pragma unroll
      for (int column = 0; column < kWarpColumns / 16; ++column) {
        // Else loads and sums of many columns are under way, and numbers kept for the end spilled.
        if (kParts > 1 && column % (kRowTiles == 2 ? 1 : 4) == 0) __syncwarp();
        uint32 b[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          ptx::load_transposed_x4(
              value_at.at(skipped + column, 16 * j) + i * kPlaneBytes<kValueDim, kBlockKV>, b[i]);
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_parts<Element>(output[tile], 8 * column, a[tile], b, value_factor);
        }
      }
    }
  }
  template <int kDim, int kRows>
  static __device__ __forceinline__ void load_parts(uint32 from, uint32 (&parts)[kParts][4]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      ptx::load_matrix_x4(from + i * kPlaneBytes<kDim, kRows>, parts[i]);
    }
  }
  // Each warp has the scores of its part of the head dim; the keys, whose place they take, are of
  // no more use.
  __device__ __forceinline__ void add_scores_of_others(
      const unsigned char* place, float (&scores)[kRowTiles][kBlockKV / 2]) const {
    constexpr int kWords = kRowTiles * kBlockKV / 8;  // of 16 bytes, of a thread
    const uint32 lanes = ptx::shared_address(place) + threadIdx.x % 32 * 16;
    const auto word_at = [&](int of, int word) {
      return lanes + ((of * kRowWarps + row_warp()) * kWords + word) * 512;
    };
    __syncthreads();
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const float* x = &scores[word / (kBlockKV / 8)][word % (kBlockKV / 8) * 4];
      ptx::store_shared_x4(word_at(value_warp(), word), __float_as_uint(x[0]),
                           __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
    __syncthreads();
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      float4 sum = ptx::load_shared_f4(word_at(0, word));
#pragma unroll
      for (int of = 1; of < kValueWarps; ++of) {
        const float4 more = ptx::load_shared_f4(word_at(of, word));
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      float* x = &scores[word / (kBlockKV / 8)][word % (kBlockKV / 8) * 4];
      x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
    }
  }
};

}  // namespace forward
