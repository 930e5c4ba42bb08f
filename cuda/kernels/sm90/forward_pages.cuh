// Keys and values in pages, and queries that are the tokens of requests, one behind the other
// (kFromPages): which rows a unit has, made by a kernel ahead, and how the producer loads a block
// of keys that lies in several pages.
//
// A unit has rows of one request: it begins at the request's first token or a unit's rows behind
// it. The request's last token stands at its last position, so keys have an offset of
// length - stop from tokens. Page numbers are looked at ahead: a request that lacks a page comes
// here with length -1.
#pragma once

#include "sm90/forward_common.cuh"

namespace forward {

// Rows of one request.
struct alignas(16) RequestUnit {
  int first_row;  // packed
  int stop;       // the token behind the request's last
  int length;     // its positions; 0: tokens of no request, below 0: it is wrong
  int request;    // row of the page table, where length > 0

  __device__ __forceinline__ Visibility sight(const ForwardParams& p) const {
    return {length - stop, p.window_left, p.window_right, stop, length};
  }
};
__device__ __forceinline__ RequestUnit* units_of_requests(const ForwardParams& p) {
  return reinterpret_cast<RequestUnit*>(p.request_plan);
}

// A block of a request's keys, in pieces of kPageRows keys: a lane has one. All lanes call.
struct PagePieces {
  int request = 0;
  int page = 0;  // of the lane's piece in the block that was found last

  // The lane's page. Ahead of a window and behind the length a table may hold anything, and end:
  // what is loaded there is not seen, so any page does.
  __device__ __forceinline__ void find(const ForwardParams& p, int block, int lane) {
    const int column = (block * kBlockKV + lane % kPieces * kPageRows) / kPageSize;
    const int* table = p.page_table + static_cast<int64>(request) * p.table_columns;
    page = min(max(table[min(column, p.table_columns - 1)], 0), p.pages - 1);
  }
  // The lane's boxes, when all bytes are announced at the barrier `full`.
  template <int kDim>
  __device__ __forceinline__ void load(const TensorMap& map, uint32 tile, uint32 full, int kv_head,
                                       int block, int lane) const {
    if (lane >= kPieces) return;
    const int row = lane * kPageRows, slot = (block * kBlockKV + row) % kPageSize;
    if constexpr (kWholeRows) {
      constexpr int kBoxes = KeyTile<kDim, kBlockKV, true>::kBoxes;
      ptx::tma_load(tile + kBoxes * row * kBoxRowBytes, &map, full, ptx::kEvictLast, 0, 0,
                    kv_head * kBoxes, page * (kPageSize / 8) + slot / 8);
      return;
    }
#pragma unroll
    for (int i = 0; i < ceil_div(kDim, kBoxColumns); ++i) {
      ptx::tma_load(tile + (i * kBlockKV + row) * kBoxRowBytes, &map, full, ptx::kEvictLast,
                    i * kBoxColumns, kv_head, slot, page);
    }
  }
};

// ---- the kernel ahead ---------------------------------------------------------------------------

namespace requests {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr uint32 kAllLanes = 0xffffffffu;

struct Shared {
  int of_warps[kWarps];
  int begins[kThreads];  // the first unit of each request of a round
};

__device__ __forceinline__ int count_units(const ForwardParams& p, int request) {
  return ceil_div(p.request_counts[request] * kPackedHeads, kUnitRows);
}

// Writes the units of all requests in order, and how many there are. One CTA.
__device__ __forceinline__ void make_units(const ForwardParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;  // units of earlier rounds
#pragma unroll 1
  for (int first = 0; first < p.requests; first += kThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    const int count = mine < p.requests ? count_units(p, mine) : 0;
    int end = count;  // of the warp's requests up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_sync(kAllLanes, end, (lane - step) & 31);
      if (lane >= step) end += other;
    }
    if (lane == 31) shared.of_warps[warp] = end;
    __syncthreads();
    int ahead = before;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int other = shared.of_warps[i];
      if (i < warp) ahead += other;
      before += other;
    }
    shared.begins[threadIdx.x] = ahead + end - count;
    __syncthreads();
    // A warp for each request, a lane for each unit.
    const int round = min(kThreads, p.requests - first);
#pragma unroll 1
    for (int i = warp; i < round; i += kWarps) {
      const int request = first + i, token = p.request_firsts[request];
      const int stop = token + p.request_counts[request], length = p.request_lengths[request];
      const int units = count_units(p, request);
      RequestUnit* made = units_of_requests(p) + shared.begins[i];
      for (int unit = lane; unit < units; unit += 32) {
        made[unit] = {token * kPackedHeads + unit * kUnitRows, stop, length, request};
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *p.unit_count = before;
    *p.unit_counter = 0;
  }
}

}  // namespace requests
}  // namespace forward
