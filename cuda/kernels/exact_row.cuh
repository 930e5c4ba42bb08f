// One query row of attention by one warp, without tensor cores and without touching a masked value.
//
// The tiled kernels multiply every value of a block, those of masked keys by a weight of zero, and
// 0 * NaN is NaN; and a row overflows when a score is more than 128 above its base (log2 units). A
// tile with rows that overflow is walked again first, where TMA loads and a slot is free. Rows
// whose result is not finite even so come here. If visible values explain it, it stands; else the
// row is computed again, exactly as the definition has it.
#pragma once

#include "mask.cuh"
#include "softmax.cuh"

template <class Element>
__device__ __forceinline__ float load_element(const void* array, long long index) {
  return ptx::unpack<Element>(static_cast<const unsigned short*>(array)[index]);
}

// Values under way together: their latency is what takes time.
inline constexpr int kKeysAtOnce = 8;

// The next keys of the set `left` (a bit each), lowest first; -1 where there are no more.
__device__ __forceinline__ void take_keys(unsigned int& left, int (&taken)[kKeysAtOnce]) {
#pragma unroll
  for (int& key : taken) {
    key = __ffs(left) - 1;
    left &= left - 1;
  }
}

// The values of the keys first_key + taken[i], this lane's columns; zeros for none.
template <class Element, int kValueDim, int kColumns>
__device__ __forceinline__ void load_values(const void* value, long long index, long long stride,
                                            const int (&taken)[kKeysAtOnce],
                                            float (&values)[kKeysAtOnce][kColumns]) {
#pragma unroll
  for (int i = 0; i < kKeysAtOnce; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = threadIdx.x % 32 + 32 * c;
      const bool inside = taken[i] >= 0 && column < kValueDim;
      values[i][c] = inside ? load_element<Element>(value, index + taken[i] * stride + column) : 0;
    }
  }
}

// Does a sum of visible values that are not finite leave open why a result is not?
__device__ __forceinline__ bool is_open(float result, float sum) {
  const bool agrees = sum == result || (sum != sum && result != result);
  return !(fabsf(result) < kInfinity) && !agrees;
}

// Adds the values that are not finite, of the keys in `keys` that visible(key) admits, to `sum`,
// until it is NaN or infinite wherever the row's `result` is: then it returns true, the visible
// values explain the result. The whole warp takes part; lane l holds columns l, l + 32, ... Most
// often the first keys decide.
template <class Element, int kValueDim, class Visible, int kColumns>
__device__ __forceinline__ bool explain_nan(const float (&result)[kColumns], const void* value,
                                            long long value_index, long long value_stride,
                                            Range keys, Visible visible, float (&sum)[kColumns]) {
#pragma unroll 1
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int mine = first + static_cast<int>(threadIdx.x % 32);
    unsigned int left = __ballot_sync(0xffffffffu, mine < keys.end && visible(mine));
#pragma unroll 1
    while (left != 0) {
      int taken[kKeysAtOnce];
      float values[kKeysAtOnce][kColumns];
      take_keys(left, taken);
      load_values<Element, kValueDim>(value, value_index + first * value_stride, value_stride,
                                      taken, values);
      bool open = false;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kKeysAtOnce; ++i) {
          if (!(fabsf(values[i][c]) < kInfinity)) sum[c] += values[i][c];
        }
        open = open || is_open(result[c], sum[c]);
      }
      if (!__any_sync(0xffffffffu, open)) return true;
    }
  }
  return false;
}

// The product of two rows of 16-bit elements.
template <class Element, int kHeadDim>
__device__ __forceinline__ float dot_rows(const void* a, long long a_index, const void* b,
                                          long long b_index) {
  float dot = 0.0f;
  if constexpr (kHeadDim % 8 == 0) {  // rows are aligned to 16 bytes
    const auto* a_pieces =
        reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(a) + a_index);
    const auto* b_pieces =
        reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(b) + b_index);
#pragma unroll 4
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const uint4 x = a_pieces[i], y = b_pieces[i];
      const unsigned int xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        using Bits = unsigned short;
        dot = fmaf(ptx::unpack<Element>(static_cast<Bits>(xs[j])),
                   ptx::unpack<Element>(static_cast<Bits>(ys[j])), dot);
        dot = fmaf(ptx::unpack<Element>(static_cast<Bits>(xs[j] >> 16)),
                   ptx::unpack<Element>(static_cast<Bits>(ys[j] >> 16)), dot);
      }
    }
  } else {
#pragma unroll 4
    for (int d = 0; d < kHeadDim; ++d) {
      dot = fmaf(load_element<Element>(a, a_index + d), load_element<Element>(b, b_index + d), dot);
    }
  }
  return dot;
}

// Softmax of the visible keys of one row times their values; the whole warp takes part.
// visible(key) tells whether the row sees a key of the half-open range `keys`; score(logit) is the
// score function, natural-log units. Lane l holds output columns l, l + 32, ... in out.
template <class Element, int kHeadDim, int kValueDim, class Visible, class Score, int kColumns>
__device__ __forceinline__ void exact_row(const void* query, long long query_index, const void* key,
                                          long long key_index, long long key_stride,
                                          const void* value, long long value_index,
                                          long long value_stride, Range keys, Visible visible,
                                          Score score, float (&out)[kColumns], float& largest,
                                          float& sum) {
  const int lane = threadIdx.x % 32;
  largest = kNegativeInfinity;
  sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = 0.0f;
#pragma unroll 1
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int mine = first + lane;
    const bool seen = mine < keys.end && visible(mine);
    unsigned int left = __ballot_sync(0xffffffffu, seen);
    if (left == 0) continue;
    float logit = kNegativeInfinity;
    if (seen) {
      logit = score(dot_rows<Element, kHeadDim>(query, query_index, key,
                                                key_index + mine * key_stride)) *
              kLog2E;
    }
    float now = logit;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, distance));
    }
    now = fmaxf(now, largest);
    const float correction = now == largest ? 1.0f : ptx::exp2_approx(largest - now);
    largest = now;
    sum *= correction;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) out[c] *= correction;
    const float weight = ptx::exp2_approx(logit - largest);
#pragma unroll 1
    while (left != 0) {
      int taken[kKeysAtOnce];
      float values[kKeysAtOnce][kColumns];
      take_keys(left, taken);
      load_values<Element, kValueDim>(value, value_index + first * value_stride, value_stride,
                                      taken, values);
#pragma unroll
      for (int i = 0; i < kKeysAtOnce; ++i) {
        const float shared = __shfl_sync(0xffffffffu, weight, max(taken[i], 0));
        const float w = taken[i] >= 0 ? shared : 0.0f;
        sum += w;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] = fmaf(w, values[i][c], out[c]);
      }
    }
  }
}
