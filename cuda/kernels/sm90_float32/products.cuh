// Products of numbers in two halves, a plane of a tile each: three make one, the smallest first,
// low times high, high times low, high times high.
#pragma once

inline constexpr int kProducts = 3;

// The operands' planes of one of them.
struct Planes {
  int left, right;
};
__device__ __forceinline__ constexpr Planes planes_of(int product) {
  return {product == 0, product == 1};
}
