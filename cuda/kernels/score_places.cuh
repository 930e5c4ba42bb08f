// Where a user's function of scores is: the query or the key of a score, and what is read along
// them. The text that jax_flash/_gpu/emit writes includes it.
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
