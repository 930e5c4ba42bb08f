// Keys that a falling line of the distance hides (kFades): ALiBi's from some hundred on in most
// heads. A score is no further from the line than the products of the norms of queries and keys:
// where that leaves a weight below 2^-kFaded of the row's, at the key of the query's own index,
// the key's block is left out. The results are those of all blocks but for that.
//
// A value that is not finite would show in the result, whatever its weight: heads with one, or with
// queries or keys that are not finite, walk all their blocks.
#pragma once

#include "sm90/forward_common.cuh"

namespace fading {

inline constexpr int kRows = 64;  // whose largest norm is kept
inline constexpr int kThreads = 256;
// The first maximum has the weight 2^-80 and those below 2^-126 are flushed: 46 would leave out
// what is lost for bfloat16 anyhow. 2^23 keys of 2^-64 add to 2^-41.
inline constexpr float kFaded = 64.0f;

inline constexpr int kInfinityBits = 0x7f800000;

// The largest norm of a head's `count` rows from `row` on, as the bits of a float32, which are in
// their order; of rows that are not finite, or whose squares are not, those of infinity or NaN.
template <class Of, int kDim>
__device__ __forceinline__ int largest_norm(const void* data, int64 row, int heads, int count) {
  constexpr int kLanes = 8;  // that share a row
  const int lane = threadIdx.x % 32;
  const int64 pitch = static_cast<int64>(heads) * kDim;
  const uint16* rows = static_cast<const uint16*>(data) + row * kDim;
  int largest = 0;
#pragma unroll 4
  for (int i = lane / kLanes; i < kRows; i += 32 / kLanes) {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < ceil_div(kDim, 8 * kLanes); ++piece) {
      const int column = 8 * (lane % kLanes + kLanes * piece);
      if (i >= count || column >= kDim) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(rows + i * pitch + column);
      const uint32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float low = Of::unpack_low(pairs[pair]);
        const float high = Of::unpack_high(pairs[pair]);
        sum = fmaf(low, low, fmaf(high, high, sum));
      }
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    largest = max(largest, __float_as_int(sum) & 0x7fffffff);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  return __float_as_int(ptx::exp2_approx(0.5f * ptx::log2_approx(__int_as_float(largest))));
}

// A warp's 64 rows of queries, or of keys and values, of 16 bits.
template <class Of>
__device__ __forceinline__ void measure(const ForwardParams& p) {
  const int query_parts = ceil_div(p.query_len, kRows), key_parts = ceil_div(p.kv_len, kRows);
  int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const bool of_keys = index >= p.batch * query_parts * p.query_heads;
  if (of_keys) index -= p.batch * query_parts * p.query_heads;
  const int heads = of_keys ? p.kv_heads : p.query_heads, parts = of_keys ? key_parts : query_parts;
  const int of_batch = index / heads, head = index - of_batch * heads;
  const int batch = of_batch / parts, part = of_batch - batch * parts;
  if (batch >= p.batch) return;
  const int first = part * kRows;
  if (of_keys) {
    const int64 row = key_row(p, batch, first, head);
    const int key = largest_norm<Of, kHeadDim>(p.key_data, row, heads, p.kv_len - first);
    const int value = largest_norm<Of, kValueDim>(p.value_data, row, heads, p.kv_len - first);
    if (threadIdx.x % 32 != 0) return;
    p.key_norms[(batch * heads + head) * parts + part] = value < kInfinityBits ? key : value;
  } else {
    const int64 row = query_row(p, batch, first, head);
    const int query = largest_norm<Of, kHeadDim>(p.query_data, row, heads, p.query_len - first);
    if (threadIdx.x % 32 != 0) return;
    p.query_norms[(batch * heads + head) * parts + part] = query;
  }
}

// A unit's rows from first_row on see `blocks`: returns those that may count. All lanes call.
__device__ __forceinline__ Range blocks_that_count(const ForwardParams& p, int batch, int head,
                                                   int first_row, const Range& blocks) {
  const int lane = ptx::fresh_lane();
  const int query_parts = ceil_div(p.query_len, kRows), key_parts = ceil_div(p.kv_len, kRows);
  const int part = first_row / kRows + lane;
  int query = 0, key = 0;
  if (lane < kConsumers && part < query_parts) {
    query = p.query_norms[(batch * p.query_heads + head) * query_parts + part];
  }
  const int* norms = p.key_norms + (batch * p.kv_heads + kv_head_of(p, head)) * key_parts;
#pragma unroll 1
  for (int i = lane; i < key_parts; i += 32) key = max(key, norms[i]);
  const float product = __int_as_float(__reduce_max_sync(0xffffffffu, query)) *
                        __int_as_float(__reduce_max_sync(0xffffffffu, key));
  const float spread = fmaf(2.0f * fabsf(line_factor(p)), product, kFaded);
  ScoreLine<ForwardParams> line;
  line.read(p, batch, head);
  // From which distance on a line that falls by `slope` a key is below all that counts.
  const auto reach = [&](float slope) {
    const float distance = spread * ptx::reciprocal_approx(slope) + 1.0f;
    return slope > 0.0f && distance < 0x1p24f ? static_cast<int>(distance) : 1 << 24;
  };
  const int first = first_row - reach(line.of_side(false).slope);
  const int end = first_row + forward::kUnitRows + reach(-line.of_side(true).slope);
  return {max(blocks.begin, first / kBlockKV), min(blocks.end, ceil_div(end, kBlockKV))};
}

}  // namespace fading
