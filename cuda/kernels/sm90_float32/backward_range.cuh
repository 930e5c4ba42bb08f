// How numbers get float16's range in the roles of sm90_float32/backward.cuh and come back: factors
// of tiles, of rows and of keys, and those of P and dS.
#pragma once

#include "fragment.cuh"
#include "halves.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/backward_wide_shared.cuh"
#include "split.cuh"

namespace backward {

// What brings back the numbers of a unit's keys or values,
__device__ __forceinline__ float factor_of_keys(const BackwardParams& p,
                                                const volatile UnitRecord& u,
                                                const float* factors) {
  return halves::factor_of(factors, u.batch * p.kv_heads + u.kv_head, p.kv_len, u.key0);
}
// and those of a step's queries and output gradients, read a step ahead.
struct StepFactors {
  float query, dout;
  __device__ __forceinline__ StepFactors(const BackwardParams& p, const volatile UnitRecord& u,
                                         const Walk& walk) {
    const int row = u.batch * p.query_heads + u.head + walk.head;
    query = halves::factor_of(p.query_factors, row, p.query_len, walk.m0);
    dout = halves::factor_of(p.dout_factors, row, p.query_len, walk.m0);
  }
};
// P in halves, 1 at most.
inline constexpr float kProbabilityRange = 0x1p15f;

// What brings a number, bits of float32, to 2^14. What is not finite stays so.
__device__ __forceinline__ int exponent_of(int bits) {
  return bits == 0 || bits >= 0x7f800000 ? 0 : min(14 + 127 - (bits >> 23), 126);
}
__device__ __forceinline__ float inverse(float power_of_two) {
  return __int_as_float((254 << 23) - __float_as_int(power_of_two));
}

// Where output gradients are split by rows, their tile's factor is 0: elements of a thread, each
// times what brings its query's row back.
__device__ __forceinline__ bool is_by_rows(const StepFactors& factors) {
  return __builtin_expect(factors.dout == 0.f, 0);
}
__device__ __forceinline__ void times_rows(const BackwardParams& p, const volatile UnitRecord& u,
                                           int head, int m0, float (&x)[kScores]) {
  const int64 row = u.batch * p.query_heads + u.head + head;
  const int first = m0 + fragment::first_column(threadIdx.x);
  const float* rows = p.dout_row_factors + row * stored_rows(p) + first;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    float2 factor{};
    if (!kCompact || first + 8 * j < stored_rows(p)) {
      factor = *reinterpret_cast<const float2*>(rows + 8 * j);
    }
    x[4 * j] *= factor.x;
    x[4 * j + 1] *= factor.y;
    x[4 * j + 2] *= factor.x;
    x[4 * j + 3] *= factor.y;
  }
}
// Then each key has a power of two of its own: `back` is the inverse of a thread's two.
__device__ __forceinline__ void fit_keys(float (&x)[kScores], float (&back)[2]) {
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    largest[fragment::row(i)] = fmaxf(largest[fragment::row(i)], fabsf(x[i]));
  }
  float to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    to[r] = ptx::power_of_two(exponent_of(__float_as_int(fragment::quad_maximum(largest[r]))));
    back[r] = inverse(to[r]);
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) x[i] *= to[fragment::row(i)];
}

// How dS in halves gets float16's range, by the largest of a step; in shared memory, for the query
// role, what brings it back.
struct GradientRange {
  static __device__ __forceinline__ float fit(const float (&gradient)[kScores], uint32 iteration) {
    float largest = 0.f;
#pragma unroll
    for (float x : gradient) largest = fmaxf(largest, fabsf(x));
    const int of_warp = __reduce_max_sync(0xffffffffu, __float_as_int(largest));
    // Who is a step ahead writes elsewhere.
    const uint32 warps = at(&RangeShared::largest, iteration % 2);
    if (threadIdx.x % 32 == 0) ptx::store_shared(warps + threadIdx.x / 32 % 4 * 4, of_warp);
    ptx::named_barrier_sync(kGradientBarrier, 128);
    const float4 four = ptx::load_shared_f4(warps);
    const int exponent =
        exponent_of(__float_as_int(fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w))));
    return ptx::power_of_two(exponent);
  }
  static __device__ __forceinline__ void store(uint32 buffer, float factor) {
    if (threadIdx.x % 128 == 0) {
      ptx::store_shared(at(&RangeShared::gradient_factor, buffer), __float_as_uint(factor));
    }
  }
  // dS of a buffer that is free in halves, each query with a power of two of its own.
  static __device__ __forceinline__ void split_by_rows(const float (&gradient)[kScores],
                                                       uint32 buffer,
                                                       uint32 (&parts)[2][kScores / 2]) {
    const uint32 thread = threadIdx.x % 128, column = fragment::first_column(threadIdx.x) * 4;
    const uint32 warps = at(&Shared::gradient) + buffer * kGradientBytes;  // [4][kQueries]
    const uint32 rows = at(&RangeShared::gradient_rows, buffer);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(fabsf(gradient[4 * j + c]), fabsf(gradient[4 * j + 2 + c]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
        }
        if (threadIdx.x % 32 < 4) {
          ptx::store_shared(warps + thread / 32 * kNumberBytes + column + (8 * j + c) * 4,
                            __float_as_uint(x));
        }
      }
    }
    ptx::named_barrier_sync(kGradientBarrier, 128);
    if (thread < kQueries) {
      uint32 largest = 0;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const uint32 x = ptx::load_shared(warps + warp * kNumberBytes + thread * 4);
        largest = largest > x ? largest : x;
      }
      ptx::store_shared(rows + thread * 4,
                        __float_as_uint(ptx::power_of_two(-exponent_of(largest))));
    }
    ptx::named_barrier_sync(kGradientBarrier, 128);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 back = ptx::load_shared_f2(rows + column + 8 * j * 4);
      const float x = inverse(back.x), y = inverse(back.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32 pair[2];
        split_pair(gradient[4 * j + 2 * r] * x, gradient[4 * j + 2 * r + 1] * y, pair,
                   halves::kOneSum);
        parts[0][2 * j + r] = pair[0];
        parts[1][2 * j + r] = pair[1];
      }
    }
  }
  // The factors of the two queries whose dQ a thread has.
  static __device__ __forceinline__ void load(uint32 buffer, float (&factor)[2]) {
    const uint32 bits = ptx::load_shared(at(&RangeShared::gradient_factor, buffer));
    factor[0] = factor[1] = __uint_as_float(bits & 0x7fffffffu);
    if (bits == (bits & 0x7fffffffu)) return;
    const uint32 row =
        at(&RangeShared::gradient_rows, buffer) + fragment::first_row(threadIdx.x) * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] *= __uint_as_float(ptx::load_shared(row + r * fragment::kRowStep * 4));
    }
  }
};

// Elements of a thread in halves.
__device__ __forceinline__ void split_scores(const float (&x)[kScores], float factor,
                                             uint32 (&parts)[2][kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    uint32 pair[2];
    split_pair(x[2 * i] * factor, x[2 * i + 1] * factor, pair, halves::kOneSum);
    parts[0][i] = pair[0];
    parts[1][i] = pair[1];
  }
}

}  // namespace backward
