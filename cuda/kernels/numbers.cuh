// Numbers: types by size, constants, rounded quotients, ranges.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNegativeInfinity = -kInfinity;
inline constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int common_divisor(int a, int b) {
  return b == 0 ? a : common_divisor(b, a % b);
}

inline constexpr int kLargest = 0x7fffffff, kSmallest = -kLargest - 1;  // of an int

// Half-open.
struct Range {
  int begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
  // Holds every query or key, and as many numbers below zero.
  static __device__ __forceinline__ Range all() { return {-0x40000000, 0x40000000}; }
};
