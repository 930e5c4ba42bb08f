// Queries that are the tokens of requests, one behind the other (kFromPages): which rows a unit of
// work has, made by a kernel ahead.
//
// A unit has rows of one request: it begins at the request's first token or a unit's rows behind
// it. The request's last token stands at its last position, so keys have an offset of
// length - stop from tokens. Page numbers are looked at ahead: a request that lacks a page comes
// here with length -1.
#pragma once

#include "numbers.cuh"
#include "sees.cuh"

namespace forward {

// Rows of one request.
struct alignas(16) RequestUnit {
  int first_row;  // packed
  int stop;       // the token behind the request's last
  int length;     // its positions; 0: tokens of no request, below 0: it is wrong
  int request;    // row of the page table, where length > 0

  template <class Params>
  __device__ __forceinline__ Visibility sight(const Params& p) const {
    return {length - stop, p.window_left, p.window_right, stop, length};
  }
};
template <class Params>
__device__ __forceinline__ RequestUnit* units_of_requests(const Params& p) {
  return reinterpret_cast<RequestUnit*>(p.request_plan);
}

// ---- the kernel ahead ---------------------------------------------------------------------------

namespace requests {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr uint32 kAllLanes = 0xffffffffu;

struct Shared {
  int of_warps[kWarps];
  int begins[kThreads];  // the first unit of each request of a round
};

template <int kUnitRows, class Params>
__device__ __forceinline__ int count_units(const Params& p, int request) {
  return ceil_div(p.request_counts[request] * kPackedHeads, kUnitRows);
}

// Writes the units of all requests in order, each of kUnitRows rows, and how many there are. One
// CTA.
template <int kUnitRows, class Params>
__device__ __forceinline__ void make_units(const Params& p, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int earlier = 0;  // units of earlier rounds
#pragma unroll 1
  for (int first = 0; first < p.requests; first += kThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    const int count = mine < p.requests ? count_units<kUnitRows>(p, mine) : 0;
    int end = count;  // of the warp's requests up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_sync(kAllLanes, end, (lane - step) & 31);
      if (lane >= step) end += other;
    }
    if (lane == 31) shared.of_warps[warp] = end;
    __syncthreads();
    int ahead = earlier;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int other = shared.of_warps[i];
      if (i < warp) ahead += other;
      earlier += other;
    }
    shared.begins[threadIdx.x] = ahead + end - count;
    __syncthreads();
    // A warp for each request, a lane for each unit.
    const int round = min(kThreads, p.requests - first);
#pragma unroll 1
    for (int i = warp; i < round; i += kWarps) {
      const int request = first + i, token = p.request_firsts[request];
      const int stop = token + p.request_counts[request], length = p.request_lengths[request];
      const int units = count_units<kUnitRows>(p, request);
      RequestUnit* made = units_of_requests(p) + shared.begins[i];
      for (int unit = lane; unit < units; unit += 32) {
        made[unit] = {token * kPackedHeads + unit * kUnitRows, stop, length, request};
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.unit_count = earlier;
}

}  // namespace requests
}  // namespace forward
