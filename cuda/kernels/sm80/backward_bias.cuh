// The gradient of the bias by mma.sync. Two kernels after the others:
//   kernel                    grid                              block             dynamic shared
//   flash_backward_bias       blocks of the bias * dbias_ctas   bias_sum::kThreads   sizeof(Shared)
//   flash_backward_bias_sum   elements of the bias / 32         256                  0
#pragma once

#include "backward_bias_sum.cuh"
#include "halves.cuh"
#include "sm80/products.cuh"
#include "tile.cuh"

namespace backward::bias_sum {

// All columns of a block of keys and one of queries at once; when all is summed, a SharedSum.
struct alignas(128) WholeShared {
  unsigned char key[kHeadBoxes * kKeys * kBoxRowBytes];
  unsigned char value[kValueBoxes * kKeys * kBoxRowBytes];
  unsigned char query[kHeadBoxes * kQueries * kBoxRowBytes];
  unsigned char dout[kValueBoxes * kQueries * kBoxRowBytes];
};

struct WholeTiles {
  static constexpr int kParts = 2;  // of the queries of a block
  static constexpr int kStages = 1;
  const Sm80BackwardParams& p;
  WholeShared& shared;

  __device__ __forceinline__ const auto& load(const BlockPair& at, const BlockPair&, bool) const {
    const int64 key = key_row(p, at.batch, at.key0, kv_head_of(p, at.head));
    const int64 query = query_row(p, at.batch, at.m0, at.head);
    const KeyRows<kHeadDim> keys(p, key);
    const KeyRows<kValueDim> values(p, key);
    const int64 heads = p.query_heads;
    const int key_count = p.kv_len - at.key0, query_count = p.query_len - at.m0;
    __syncthreads();  // the tiles are free
    copy<kHeadDim, kKeys>(shared.key, p.key_data, keys.first, keys.step, key_count);
    copy<kValueDim, kKeys>(shared.value, p.value_data, values.first, values.step, key_count);
    copy<kHeadDim, kQueries>(shared.query, p.query_data, query * kHeadDim, heads * kHeadDim,
                             query_count);
    copy<kValueDim, kQueries>(shared.dout, p.dout_data, query * kValueDim, heads * kValueDim,
                              query_count);
    __syncthreads();
    return *this;
  }
  __device__ __forceinline__ void finish(int part, bool, float (&x)[kSums / kParts],
                                         float (&dp)[kSums / kParts]) const {
    const uint32 key = ptx::warp_index() * 16, query = part * (kQueries / kParts);
    multiply_rows<kHeadDim, kKeys, kQueries>(x, ptx::shared_address(shared.key), key,
                                             ptx::shared_address(shared.query), query);
    multiply_rows<kValueDim, kKeys, kQueries>(dp, ptx::shared_address(shared.value), key,
                                              ptx::shared_address(shared.dout), query);
  }
  template <class Products>
  __device__ __forceinline__ void begin(int, const Products&, const Products&) const {}

 private:
  template <int kDim, int kRows>
  static __device__ __forceinline__ void copy(const unsigned char* tile, const void* array,
                                              int64 first, int64 step, int count) {
    copy_rows<kDim, kRows, bias_sum::kWarps>(
        ptx::shared_address(tile), static_cast<const uint16*>(array) + first, step, count);
  }
};

// Where not all columns fit (more than 256, or float32): 64 of them at a time, of a part of the
// queries.
inline constexpr int kBoxQueries = 32;
union alignas(128) BoxShared {
  struct {
    unsigned char keys[::kParts * kPlaneBytes<kBoxColumns, kKeys>];
    unsigned char queries[::kParts * kPlaneBytes<kBoxColumns, kBoxQueries>];
  } box;
  SharedSum sum;
};

// 64 columns of kRows rows of kDim elements, from `first` on, those from `count` on zero.
template <int kDim, int kRows>
__device__ __forceinline__ void copy_box(uint32 tile, const Element::Bits* first, int64 step,
                                         int count, int box, float factor) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * 8; i += kThreads) {
    const int row = i / 8, column = box * kBoxColumns + i % 8 * 8;
    const uint32 to = chunk_address<kRows>(tile, row, i % 8);
    decltype(load_piece<kDim>(first, 0)) piece{};
    if (row < count && column < kDim) piece = load_piece<kDim>(first + row * step, column);
    if constexpr (kHalves) {
#pragma unroll
      for (float& x : piece.x) x *= factor;
    }
    store_parts<kPlaneBytes<kBoxColumns, kRows>>(to, piece);
  }
}

// The largest factor of the tiles that hold kRows rows from `first` on.
template <int kRows>
__device__ __forceinline__ float largest_factor(const float* factors, int64 row, int length,
                                                int first) {
  float largest = kHalves ? 0.f : 1.f;
#pragma unroll
  for (int i = 0; kHalves && i < kRows; i += halves::kRows) {
    largest = fmaxf(largest, fabsf(halves::stored_factor(factors, row, length, first + i)));
  }
  return largest;
}

struct BoxTiles {
  static constexpr int kParts = kQueries / kBoxQueries, kStages = 1;

  struct Loaded {
    const Sm80BackwardParams& p;
    BoxShared& shared;
    const BlockPair& at;
    int64 key, query;  // rows
    int key_count, query_count;

    __device__ __forceinline__ void finish(int part, bool, float (&x)[kSums / kParts],
                                           float (&dp)[kSums / kParts]) const {
      add_boxes<kHeadDim>(x, p.key_data, p.query_data, p.key_factors, p.query_factors, part);
      add_boxes<kValueDim>(dp, p.value_data, p.dout_data, p.value_factors, p.dout_factors, part);
    }
    template <class Products>
    __device__ __forceinline__ void begin(int, const Products&, const Products&) const {}

   private:
    template <int kDim>
    __device__ __forceinline__ void add_boxes(float (&sum)[kSums / kParts], const void* keys,
                                              const void* queries, const float* key_factors,
                                              const float* query_factors, int part) const {
      const KeyRows<kDim> rows(p, key);
      const int64 step = static_cast<int64>(p.query_heads) * kDim;
      const auto* of_keys = static_cast<const Element::Bits*>(keys) + rows.first;
      const auto* of_queries =
          static_cast<const Element::Bits*>(queries) + query * kDim + part * kBoxQueries * step;
      const uint32 a = ptx::shared_address(shared.box.keys);
      const uint32 b = ptx::shared_address(shared.box.queries);
      // Magnitudes: nothing computes again what is NaN here.
      const float key_factor = largest_factor<kKeys>(
          key_factors, at.batch * p.kv_heads + kv_head_of(p, at.head), p.kv_len, at.key0);
      const float query_factor = largest_factor<kQueries>(
          query_factors, at.batch * p.query_heads + at.head, p.query_len, at.m0);
#pragma unroll
      for (float& one : sum) one = 0.f;
#pragma unroll 1
      for (int box = 0; box < ceil_div(kDim, kBoxColumns); ++box) {
        __syncthreads();
        copy_box<kDim, kKeys>(a, of_keys, rows.step, key_count, box, 1 / key_factor);
        copy_box<kDim, kBoxQueries>(b, of_queries, step, query_count - part * kBoxQueries, box,
                                    1 / query_factor);
        __syncthreads();
        add_rows<kBoxColumns, kKeys, kBoxQueries>(sum, a, ptx::warp_index() * 16, b, 0,
                                                  key_factor * query_factor);
      }
    }
  };

  const Sm80BackwardParams& p;
  BoxShared& shared;

  __device__ __forceinline__ Loaded load(const BlockPair& at, const BlockPair&, bool) const {
    return {p,
            shared,
            at,
            key_row(p, at.batch, at.key0, kv_head_of(p, at.head)),
            query_row(p, at.batch, at.m0, at.head),
            p.kv_len - at.key0,
            p.query_len - at.m0};
  }
};

template <bool kIsWhole>
struct TilesOf {
  using Type = WholeTiles;
  using Memory = WholeShared;
};
template <>
struct TilesOf<false> {
  using Type = BoxTiles;
  using Memory = BoxShared;
};
using Tiles = TilesOf<kSumsWholeTiles>::Type;
using Shared = TilesOf<kSumsWholeTiles>::Memory;
static_assert(!kHasDbias || sizeof(SharedSum) <= sizeof(Shared));

}  // namespace backward::bias_sum

extern "C" __global__ void __launch_bounds__(backward::bias_sum::kThreads, 1)
    flash_backward_bias(const __grid_constant__ Sm80BackwardParams p) {
  using namespace backward;
  if (is_left_to_other(p)) return;
  extern __shared__ unsigned char dynamic_shared[];
  if constexpr (kHasDbias && kDbiasByHeads) {
    bias_sum::sum_batch(p);
  } else if constexpr (kHasDbias && !kStoresDbias) {
    auto& shared = *reinterpret_cast<bias_sum::Shared*>(dynamic_shared);
    bias_sum::sum(p, bias_sum::Tiles{p, shared}, &shared);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    flash_backward_bias_sum(const __grid_constant__ Sm80BackwardParams p) {
  if (is_left_to_other(p)) return;
  if constexpr (kHasDbias) backward::bias_sum::sum_parts(p);
}
