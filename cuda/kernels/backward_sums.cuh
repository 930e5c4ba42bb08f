// Where the float32 sums of dq lie in memory, and with kSharesKeys those of dk and dv: how a thread
// loads, stores and adds its pieces of a tile.
#pragma once

#include "backward_common.cuh"
#include "fragment.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace backward {

// The float32 sum of dq is kept in the order in which a warpgroup's threads hold 64 x 64 tiles, as
// eight pieces of 16 bytes a thread. dq_sum has them as [B, N, query block, tile, 8, thread, 4],
// the tiles of a block by rows, then columns. With kDqRowBytes, which needs whole tiles, dq_sum is
// half as large: the 128 bytes that each row of a tile will have in dq hold the even pieces until
// flash_backward_finish has read them, and dq_sum, with the shape of dq, holds the odd ones.
//
// Where no instruction adds 16 bytes (kAddsFour = false), the 2 KB that the 128 threads have of a
// piece hold its first elements, then the second ones: what a warp adds at once is one line of 128
// bytes, not four bytes of every 16.
//
// A dq of float32 holds all of its sum: the odd pieces in the next 128 bytes of a row of a tile.
//
// With kRing the sums of p.ring_heads heads take turns in dq_sum, and what a warp has of a tile
// lies side by side: [tile, 4, 8, lane, 4]. See sm90/backward_ring.cuh.
//
// With kCompact dq_sum is [B, N, T, H], or dq itself where that is float32: of few rows or columns
// tiles would take many times the memory of the queries. Elements are added by twos where a pair
// begins at 8 bytes and kAddsFour, else each alone.
//
// With kStoresDq there is no sum: sm90/backward_dq.cuh. With kLastStores the unit that adds last
// makes dq of it, whose rows held a part of it.
inline constexpr bool kSumsInDq = kDqRowBytes > 0;
static_assert(kSumsInDq + kRing + kCompact <= 1);
static_assert(!kStoresDq || !(kSumsInDq || kRing || kDeterministic));
static_assert(!kLastStores || (kSumsInDq && kDeterministic));

// Where the sum of the query block from m0 on starts, or dq itself: an index of the rows of dq, or
// of blocks.
template <class Params>
__device__ __forceinline__ int sum_index(const Params& p, int batch, int head, int m0) {
  if constexpr (kSumsInDq || kStoresDq) return (batch * p.query_len + m0) * p.query_heads + head;
  int of = batch * p.query_heads + head;
  if constexpr (kRing) of %= p.ring_heads;
  return of * query_blocks(p) + m0 / kQueries;
}

// A thread's pieces of one tile of the block at `index`.
class TiledSum {
 public:
  template <class Params>
  __device__ __forceinline__ TiledSum(const Params& p, int index, int tile,
                                      uint32 thread = threadIdx.x % 128) {
    char* sum = reinterpret_cast<char*>(p.dq_sum);
    if constexpr (kSumsInDq) {
      constexpr int kElement = sizeof(ResultElement::Bits);
      const uint32 row = static_cast<uint32>(tile) / kHeadBoxes * 64 + thread / kThreadsOnRow;
      const uint32 column = static_cast<uint32>(tile) % kHeadBoxes * (64 * kElement) +
                            thread % kThreadsOnRow * kBytes;
      const int64 at =
          static_cast<int64>(index) * (kHeadDim * kElement) + (row * kDqRowBytes + column);
      even_ = static_cast<char*>(p.dquery) + at;
      odd_ = kElement == 4 ? even_ + 128 : sum + at;
    } else if constexpr (kRing) {
      even_ = odd_ = sum +
                     (static_cast<int64>(index) * (kQueries / 64 * kHeadBoxes) + tile) * 16384 +
                     thread / 32 * 4096 + thread % 32 * 16;
    } else {
      constexpr int64 kTileBytes = 64 * 64 * 4;
      even_ = sum + (static_cast<int64>(index) * (kQueries / 64 * kHeadBoxes) + tile) * kTileBytes +
              thread * kBytes;
      odd_ = even_ + 2048;
    }
  }
  __device__ __forceinline__ float4 load(int i) const {
    if constexpr (kAddsFour) return __ldcs(reinterpret_cast<const float4*>(at(i)));
    return {__ldcs(at(i, 0)), __ldcs(at(i, 1)), __ldcs(at(i, 2)), __ldcs(at(i, 3))};
  }
  __device__ __forceinline__ void store(int i, const float4& x) const {
    if constexpr (kAddsFour) {
      *reinterpret_cast<float4*>(at(i)) = x;
    } else {
      *at(i, 0) = x.x;
      *at(i, 1) = x.y;
      *at(i, 2) = x.z;
      *at(i, 3) = x.w;
    }
  }
  // With kAddsFour.
  __device__ __forceinline__ void store_or_add(bool stores, int i, const float4& x) const {
    ptx::store_or_add_x4(stores, at(i), x.x, x.y, x.z, x.w);
  }
  __device__ __forceinline__ void add(int i, const float4& x) const {
    if constexpr (kAddsFour) {
      ptx::reduce_add_x4(at(i), x.x, x.y, x.z, x.w);
    } else {
      ptx::reduce_add(at(i, 0), x.x);
      ptx::reduce_add(at(i, 1), x.y);
      ptx::reduce_add(at(i, 2), x.z);
      ptx::reduce_add(at(i, 3), x.w);
    }
  }

 private:
  static constexpr int kBytes = kAddsFour ? 16 : 4;  // of a thread in a row of 128
  static constexpr int kThreadsOnRow = 128 / kBytes;

  // Element e of piece i.
  __device__ __forceinline__ float* at(int i, int e = 0) const {
    constexpr int kStep = kSumsInDq ? 16 * kDqRowBytes : 4096;
    if constexpr (kRing) return reinterpret_cast<float*>(even_ + i * 512 + e * 4);
    constexpr int kElementStep = kSumsInDq ? 4 * kDqRowBytes : 512;
    return reinterpret_cast<float*>((i % 2 == 0 ? even_ : odd_) + i / 2 * kStep + e * kElementStep);
  }

  char *even_, *odd_;
};

// The same with kCompact: rows past the last query and columns past kHeadDim are not there.
class CompactSum {
 public:
  template <class Params>
  __device__ __forceinline__ CompactSum(const Params& p, int index, int tile,
                                        uint32 thread = ptx::opaque(threadIdx.x) % 128) {
    const int head_index = index / query_blocks(p);
    const int row = (index - head_index * query_blocks(p)) * kQueries + tile / kHeadBoxes * 64 +
                    fragment::first_row(thread);
    rows_ = p.query_len - row;
    column_ = tile % kHeadBoxes * 64 + fragment::first_column(thread);
    int64 at;
    if constexpr (kSumsAreDq) {
      const int batch = head_index / p.query_heads;
      at = query_row(p, batch, row, head_index - batch * p.query_heads);
      pitch_ = p.query_heads * kHeadDim;
    } else {
      at = static_cast<int64>(head_index) * p.query_len + row;
      pitch_ = kHeadDim;
    }
    first_ = p.dq_sum + at * kHeadDim + column_;
  }
  __device__ __forceinline__ float4 load(int i) const {
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    for_each(i, [&](float* at, int e) {
      if constexpr (kAtOnce == 2) {
        const float2 pair = __ldcs(reinterpret_cast<const float2*>(at));
        x[e] = pair.x;
        x[e + 1] = pair.y;
      } else {
        x[e] = __ldcs(at);
      }
    });
    return {x[0], x[1], x[2], x[3]};
  }
  __device__ __forceinline__ void store(int i, const float4& of) const {
    const float x[4] = {of.x, of.y, of.z, of.w};
    for_each(i, [&](float* at, int e) {
      if constexpr (kAtOnce == 2) {
        *reinterpret_cast<float2*>(at) = {x[e], x[e + 1]};
      } else {
        *at = x[e];
      }
    });
  }
  __device__ __forceinline__ void add(int i, const float4& of) const {
    const float x[4] = {of.x, of.y, of.z, of.w};
    for_each(i, [&](float* at, int e) {
      if constexpr (kAtOnce == 2) {
        ptx::reduce_add_x2(at, x[e], x[e + 1]);
      } else {
        ptx::reduce_add(at, x[e]);
      }
    });
  }

 private:
  // dq is float32, and its sum.
  static constexpr bool kSumsAreDq = sizeof(ResultElement::Bits) == 4;

  static constexpr int kAtOnce = kAddsFour && kHeadDim % 2 == 0 ? 2 : 1;  // of a row

  // What is there of the elements of piece i: `e` is the first of kAtOnce.
  template <class Do>
  __device__ __forceinline__ void for_each(int i, Do act) const {
#pragma unroll
    for (int e = 0; e < 4; e += kAtOnce) {
      const int row = fragment::row(e) * fragment::kRowStep, column = 8 * i + fragment::column(e);
      if (row < rows_ && (kHeadDim % 64 == 0 || column_ + column < kHeadDim)) {
        act(first_ + (kSumsAreDq ? static_cast<int64>(row) * pitch_ : row * kHeadDim) + column, e);
      }
    }
  }

  float* first_;
  int pitch_, rows_, column_;
};

template <bool kIsCompact>
struct SumOf {
  using Tile = TiledSum;
};
template <>
struct SumOf<true> {
  using Tile = CompactSum;
};
using SumTile = SumOf<kCompact>::Tile;

// A thread's pieces of the tile that has row `row0` and the columns of `box`.
template <class Params>
__device__ __forceinline__ SumTile sum_tile(const Params& p, int batch, int head, int row0,
                                            int box) {
  const int within = row0 % kQueries;
  return {p, sum_index(p, batch, head, row0 - within), within / 64 * kHeadBoxes + box};
}

// A thread's pieces of one of the tiles that hold, with kSharesKeys, the sums of dk and then of dv
// of 64 keys, as [B, K, key block, 64 keys, tile, 8, thread, 4].
class KeySumTile {
 public:
  static constexpr int kTiles = kHeadBoxes + kValueBoxes;  // of 64 columns

  // `slab`: of the 64 keys, of all key/value heads.
  template <class Params>
  __device__ __forceinline__ KeySumTile(const Params& p, int slab, int tile)
      : sum_(p.key_sums + (static_cast<int64>(slab) * kTiles + tile) * (64 * 64) +
             threadIdx.x % 128 * 4) {}
  __device__ __forceinline__ float4 load(int i) const {
    return __ldcs(reinterpret_cast<const float4*>(sum_ + i * 512));
  }
  __device__ __forceinline__ void store(int i, const float4& x) const {
    *reinterpret_cast<float4*>(sum_ + i * 512) = x;
  }
  __device__ __forceinline__ void add(int i, const float4& x) const {
    ptx::reduce_add_x4(sum_ + i * 512, x.x, x.y, x.z, x.w);
  }

 private:
  float* sum_;
};

}  // namespace backward
