// Where a user's function of scores is: the query or the key of a score, and what is read along them.
// The text that jax_flash/_gpu/emit writes includes it.
#pragma once

#include "numbers.cuh"

// The index of a query or key; as a float it is real + offset, of which the offset is the constant
// part of the elements of a fragment. What a function does not read is not computed.
struct Place {
  int index;
  float real, offset;
};
__device__ __forceinline__ Place place(int index) {
  return {index, static_cast<float>(index), 0.f};
}
// `offset` places after it.
__device__ __forceinline__ Place place_after(const Place& first, int offset) {
  return {first.index + offset, first.real, first.offset + static_cast<float>(offset)};
}

// Two columns of a fragment side by side, in blocks of kBlock of them.
template <int kBlock>
struct PairedPlace : Place {
  int first, pair;  // of the thread's columns, and how many pairs of it are before
  bool is_second;
};
template <int kBlock>
__device__ __forceinline__ PairedPlace<kBlock> column_after(const Place& first, int column) {
  return {place_after(first, column), first.index, column / 2, column % 2 == 1};
}
template <class Value>
struct PairOf;
template <>
struct PairOf<float> {
  using Type = float2;
};
template <>
struct PairOf<int> {
  using Type = int2;
};
template <>
struct PairOf<unsigned> {
  using Type = uint2;
};
// The element at a place of those from `row` on, of which there are `count`, as many as there are
// places (`length`) or more. A place that is none has any of them.
template <class Value>
__device__ __forceinline__ Value element_along(const Value* row, const Place& at, int, int count) {
  return __ldg(row + min(at.index, count - 1));
}
template <class Value, int kBlock>
__device__ __forceinline__ Value element_along(const Value* row, const PairedPlace<kBlock>& at,
                                               int length, int count) {
  using Pair = typename PairOf<Value>::Type;
  const bool covers = count >= round_up(length, kBlock);  // the last block too
  const Value* first = covers ? row + at.first : row + min(at.first + 2 * at.pair, count - 2);
  const Pair both = __ldg(reinterpret_cast<const Pair*>(first) + (covers ? at.pair : 0));
  return at.is_second ? both.y : both.x;
}

// A block's elements of an array that is read along the keys, two columns side by side of every 64
// in a thread: read beside the product, and exchanged where they are needed. Loaded there, two for
// each 8 columns, they would wait for L2 and take 32 registers, of which the weights before have
// none to spare.
template <class Value, int kBlock>
struct HeldColumns {
  typename PairOf<Value>::Type pairs[ceil_div(kBlock, 64)];
  __device__ __forceinline__ HeldColumns() {}
  __device__ __forceinline__ HeldColumns(const Value* row, int first_key, int length, int count) {
    const int last = count >= round_up(round_up(length, kBlock), 64) ? count : count - 2;
    const int first = first_key + 2 * (static_cast<int>(threadIdx.x) % 32);
#pragma unroll
    for (int i = 0; i < ceil_div(kBlock, 64); ++i) {
      const Value* from = last == count ? row + first + 64 * i : row + min(first + 64 * i, last);
#ifdef JF_TOUCH
      asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
#else
      pairs[i] = __ldg(reinterpret_cast<const typename PairOf<Value>::Type*>(from));
#endif
    }
  }
  __device__ __forceinline__ Value at(int pair, bool is_second) const {
    const auto& both = pairs[pair / 32];
    const int lane = static_cast<int>(threadIdx.x) % 4 + pair % 32;
    return __shfl_sync(0xffffffffu, is_second ? both.y : both.x, lane);
  }
};
template <int kNumber>
struct Nth {};
struct NoColumns {};
template <int kBlock, class Columns>
struct HeldPlace : PairedPlace<kBlock> {
  const Columns& columns;
};
// The same of the array kNumber of those that are held.
template <class Value, class At, int kNumber>
__device__ __forceinline__ Value element_along(const Value* row, const At& at, int length,
                                               int count, Nth<kNumber>) {
  return element_along(row, at, length, count);
}
template <class Value, int kBlock, class Columns, int kNumber>
__device__ __forceinline__ Value element_along(const Value* row, const HeldPlace<kBlock, Columns>& at,
                                               int length, int count, Nth<kNumber> number) {
#ifdef JF_TOUCH
  return element_along(row, static_cast<const PairedPlace<kBlock>&>(at), length, count);
#endif
  return at.columns.of(number).at(at.pair, at.is_second);
}
template <int kBlock>
__device__ __forceinline__ const PairedPlace<kBlock>& with_columns(const PairedPlace<kBlock>& at,
                                                                   const NoColumns&) {
  return at;
}
template <int kBlock, class Columns>
__device__ __forceinline__ HeldPlace<kBlock, Columns> with_columns(const PairedPlace<kBlock>& at,
                                                                   const Columns& columns) {
  return {at, columns};
}
