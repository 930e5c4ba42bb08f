// Rows in global memory: where those of (batch, head, position) lie, and how they are read and
// written.
//
// Arrays are [B, T, N, dim] of queries, outputs and their gradients, [B, S, K, dim] of keys, values
// and theirs. Where a key lies is asked here alone, by loaders with TMA and without, and by rows
// that are computed again.
#pragma once

#include "element.cuh"
#include "numbers.cuh"

// ---- places -------------------------------------------------------------------------------------

// The number of a row; times dim it is the index of the row's first element. A head without a sign
// needs no register for it: with one, the forward at head dim 64 with lengths spilled 28 bytes.
template <class Params>
__device__ __forceinline__ int64 query_row(const Params& p, int batch, int query, int head) {
  return (static_cast<int64>(batch) * p.query_len + query) * p.query_heads +
         static_cast<uint32>(head);
}
template <class Params>
__device__ __forceinline__ int64 key_row(const Params& p, int batch, int key, int kv_head) {
  return (static_cast<int64>(batch) * p.kv_len + key) * p.kv_heads + kv_head;
}
// The rows of one head's keys (kDim = kHeadDim) or values, from a key whose key_row is given: rows
// computed again keep that one number, and nothing is spilled.
template <int kDim>
struct DenseKeyRows {
  int64 first, step;  // elements
  template <class Params>
  __device__ __forceinline__ DenseKeyRows(const Params& p, int64 first_row)
      : first(first_row * kDim), step(static_cast<int64>(p.kv_heads) * kDim) {}
  // The first element of the row of the key that comes `key` after the first.
  __device__ __forceinline__ int64 at(int key) const { return first + key * step; }
  // at(key + more) in two parts, of which the first is one for many keys.
  __device__ __forceinline__ int64 begin(int key) const { return at(key); }
  __device__ __forceinline__ int64 after(int, int more) const { return more * step; }
};
// The same of a request's keys, in pages [P, kPageSize, K, dim]. The number that stands for its
// first key is request * K + head: keys that have a page are asked for alone.
template <int kDim>
struct PagedKeyRows {
  const int* table;  // pages of the request
  int64 step;
  int head;
  template <class Params>
  __device__ __forceinline__ PagedKeyRows(const Params& p, int64 first_row)
      : table(p.page_table + first_row / p.kv_heads * p.table_columns),
        step(static_cast<int64>(p.kv_heads) * kDim),
        head(static_cast<int>(first_row % p.kv_heads)) {}
  __device__ __forceinline__ int64 at(int key) const {
    const int64 page = table[key / kPageSize];
    return (page * kPageSize + key % kPageSize) * step + head * kDim;
  }
  __device__ __forceinline__ int64 begin(int) const { return 0; }
  __device__ __forceinline__ int64 after(int key, int more) const { return at(key + more); }
};
template <int kDim, bool kPages>
struct KeyRowsOf {
  using Type = DenseKeyRows<kDim>;
};
template <int kDim>
struct KeyRowsOf<kDim, true> {
  using Type = PagedKeyRows<kDim>;
};
template <int kDim>
using KeyRows = typename KeyRowsOf<kDim, kFromPages>::Type;
// The batch row whose queries one has: with kInCommon those of a request are each part's.
template <class Params>
__device__ __forceinline__ int query_batch(const Params& p, int batch) {
  if constexpr (kInCommon) return batch / p.parts_in_common;
  return batch;
}
// The number of a query's row in [B, N, T], as lse has them; in [B, T, N] with kFromPages.
template <class Params>
__device__ __forceinline__ int64 lse_row(const Params& p, int batch, int query, int head) {
  if constexpr (kFromPages) return query_row(p, batch, query, head);
  return (static_cast<int64>(batch) * p.query_heads + head) * p.query_len + query;
}
// The key/value head that a query head reads.
template <class Params>
__device__ __forceinline__ int kv_head_of(const Params& p, int head) {
  return head / (p.query_heads / p.kv_heads);
}

// ---- elements -----------------------------------------------------------------------------------

__device__ __forceinline__ float load_element(const void* array, int64 index) {
  return Element::unpack(static_cast<const Element::Bits*>(array)[index]);
}
__device__ __forceinline__ float load_result(const void* array, int64 index) {
  return ResultElement::unpack(static_cast<const ResultElement::Bits*>(array)[index]);
}
__device__ __forceinline__ void store_result(void* array, int64 index, float value) {
  static_cast<ResultElement::Bits*>(array)[index] = ResultElement::round(value);
}

// ---- pieces of 16 bytes, whatever the rows' alignment -------------------------------------------

// Every row of kDim 16-bit elements starts at a multiple of so many bytes.
template <int kDim>
inline constexpr int kRowAlignment = kDim % 8 == 0   ? 16
                                     : kDim % 4 == 0 ? 8
                                     : kDim % 2 == 0 ? 4
                                                     : 2;

template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = uint16;
};
template <>
struct Word<4> {
  using Type = uint32;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// Eight elements of a row of kDim from `column` on, a multiple of 8; zeros past the row's end.
template <int kDim>
__device__ __forceinline__ uint4 load_piece(const uint16* row, int column) {
  constexpr int kBytes = kRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    Part parts[16 / kBytes];
    uint4 whole;
  } piece;
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 2;
    piece.parts[i] = at < kDim ? *reinterpret_cast<const Part*>(row + at) : Part{};
  }
  return piece.whole;
}

// Eight elements of float32, and how a row of them is aligned.
struct Eight {
  float x[8];
};
template <int kDim>
inline constexpr int kFloatRowAlignment = kDim % 4 == 0   ? 16
                                          : kDim % 2 == 0 ? 8
                                                          : 4;  // bytes

template <int kDim>
__device__ __forceinline__ Eight load_piece(const float* row, int column) {
  constexpr int kBytes = kFloatRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    Part parts[32 / kBytes];
    Eight whole;
  } piece;
#pragma unroll
  for (int i = 0; i < 32 / kBytes; ++i) {
    const int at = column + i * kBytes / 4;
    piece.parts[i] = at < kDim ? *reinterpret_cast<const Part*>(row + at) : Part{};
  }
  return piece.whole;
}

// What load_piece gives of an element type, and one number eight times.
template <class Of>
struct PieceOf {
  using Type = uint4;
  static __device__ __forceinline__ uint4 filled(float value) {
    const uint32 pair = Of::pack(value, value);
    return make_uint4(pair, pair, pair, pair);
  }
};
template <>
struct PieceOf<Float32> {
  using Type = Eight;
  static __device__ __forceinline__ Eight filled(float value) {
    return {{value, value, value, value, value, value, value, value}};
  }
};

// Stores them, `column` below kDim; what lies past the row's end is dropped.
template <int kDim>
__device__ __forceinline__ void store_piece(uint16* row, int column, const uint4& whole) {
  constexpr int kBytes = kRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    uint4 whole;
    Part parts[16 / kBytes];
  } piece{whole};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    const int at = column + i * kBytes / 2;
    if (kBytes == 16 || at < kDim) *reinterpret_cast<Part*>(row + at) = piece.parts[i];
  }
}
template <int kDim>
__device__ __forceinline__ void store_piece(float* row, int column, const Eight& whole) {
  constexpr int kBytes = kFloatRowAlignment<kDim>;
  using Part = typename Word<kBytes>::Type;
  union {
    Eight whole;
    Part parts[32 / kBytes];
  } piece{whole};
#pragma unroll
  for (int i = 0; i < 32 / kBytes; ++i) {
    const int at = column + i * kBytes / 4;
    if (at < kDim) *reinterpret_cast<Part*>(row + at) = piece.parts[i];
  }
}

// Two elements of a row of kDim from `column` on, which is even; what lies past its end is dropped.
template <int kDim>
__device__ __forceinline__ void store_pair(float* row, int column, float low, float high) {
  if (kDim % 2 == 0 ? column < kDim : column + 1 < kDim) {
    if constexpr (kDim % 2 == 0) {
      *reinterpret_cast<float2*>(row + column) = make_float2(low, high);
    } else {
      row[column] = low;
      row[column + 1] = high;
    }
  } else if (kDim % 2 != 0 && column < kDim) {
    row[column] = low;
  }
}
