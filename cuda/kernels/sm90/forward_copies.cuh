// Pages of eight bits with scales, float8_e4m3fn (kCopiesFloat8) or int8, for the forward kernel
// over pages: a kernel ahead copies those that requests' tokens see to pages of bfloat16, and
// writes the page table of the copies. Included in place of forward_entries.cuh by calls with such
// pages.
//
// Each page that requests see has an index among them all, in the order of the table. The index
// that is first to claim a page copies it, once for all that name it. A copy lies at its page's own
// number where there is place for all pages, else at the index that copied it. Pages are copied
// whole: what a block loads past a length is what it would load of bfloat16 pages.
#pragma once

#include "sm90/forward_entries.cuh"

namespace copies {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kPositions = 8;                    // of a page that a warp copies at a time
inline constexpr int kPieces = kPageSize / kPositions;  // of a page
inline constexpr int kInFlight = 4;                     // loads of a lane
inline constexpr int kAround = ceil_div(kBlockKV, kPageSize);  // columns that a block may lie in
inline constexpr uint32 kAllLanes = 0xffffffffu;
static_assert(kBFloat16 && kPageSize % kPositions == 0);

// Columns of the table whose pages tokens of a request see; none of one without.
__device__ __forceinline__ Range seen_columns(const ForwardParams& p, int request) {
  const int length = p.request_lengths[request], count = p.request_counts[request];
  if (length <= 0 || count <= 0) return {0, 0};
  const int first = kWindowLeft ? max(length - count - p.window_left, 0) : 0;
  return {first / kPageSize, min(ceil_div(length, kPageSize), p.table_columns)};
}

__device__ __forceinline__ bool have_own_numbers(const ForwardParams& p) {
  return p.copied_pages == p.pages;
}
__device__ __forceinline__ int stored_page(const ForwardParams& p, int64 at) {
  return min(max(p.stored_table[at], 0), p.pages - 1);
}
// The index that copies a page: this one unless another has claimed it, whichever it is. A lane
// asks.
__device__ __forceinline__ int claimed_by(const ForwardParams& p, int page, int index) {
  const uint32 mine = static_cast<uint32>(index) + 1;
  const uint32 other = atomicCAS(&p.claims[page], 0u, mine);
  return static_cast<int>((other == 0 ? mine : other) - 1);
}
__device__ __forceinline__ int copy_of(const ForwardParams& p, int page, int claimed) {
  return have_own_numbers(p) ? page : claimed;
}

// Four numbers times a scale.
__device__ __forceinline__ uint2 scaled(uint32 four, float scale) {
  float x[4];
  if constexpr (kCopiesFloat8) {
    uint32 pairs[2];
    ptx::unpack_e4m3(four, pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = ptx::unpack_float16(static_cast<uint16>(pairs[i / 2] >> (i % 2 * 16)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = static_cast<float>(static_cast<signed char>(four >> (8 * i)));
    }
  }
  return {ptx::pack_bfloat16(x[0] * scale, x[1] * scale),
          ptx::pack_bfloat16(x[2] * scale, x[3] * scale)};
}

// Rows of all kv heads of kPositions positions, by a warp; `row` and `to_row` count positions.
template <int kDim>
__device__ __forceinline__ void copy_rows(const void* stored, void* copied, const Scales& scales,
                                          int kv_heads, int page, int64 row, int64 to_row) {
  constexpr int kChunks = kDim / 8;  // of eight numbers
  const int chunks = kPositions * kv_heads * kChunks;
  const uint2* const from = static_cast<const uint2*>(stored) + row * kv_heads * kChunks;
  uint4* const to = static_cast<uint4*>(copied) + to_row * kv_heads * kChunks;
  const float* const own = scales.data + page * scales.page;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < chunks; first += 32 * kInFlight) {
    uint2 eight[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + 32 * i < chunks) eight[i] = from[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + 32 * i;
      if (at >= chunks) break;
      const float scale = own[at / kChunks % kv_heads];
      const uint2 low = scaled(eight[i].x, scale), high = scaled(eight[i].y, scale);
      to[at] = {low.x, low.y, high.x, high.y};
    }
  }
}

// kPositions positions of the page at a place of the table, unless another index copies it.
__device__ __forceinline__ void copy_piece(const ForwardParams& p, int64 at, int index, int piece) {
  const int page = stored_page(p, at);
  int claimed = 0;
  if (threadIdx.x % 32 == 0) claimed = claimed_by(p, page, index);
  claimed = __shfl_sync(kAllLanes, claimed, 0);
  const int copy = copy_of(p, page, claimed);
  if (piece == 0 && threadIdx.x % 32 == 0) p.copied_table[at] = copy;
  if (claimed != index) return;
  const int64 row = (static_cast<int64>(page) * kPieces + piece) * kPositions;
  const int64 to_row = (static_cast<int64>(copy) * kPieces + piece) * kPositions;
  copy_rows<kHeadDim>(p.stored_keys, p.copied_keys, p.key_scale, p.kv_heads, page, row, to_row);
  copy_rows<kValueDim>(p.stored_values, p.copied_values, p.value_scale, p.kv_heads, page, row,
                       to_row);
}

// A request, whose first page has an index: pieces and columns dealt out to all warps.
__device__ __forceinline__ void copy_request(const ForwardParams& p, int request,
                                             const Range& columns, int first_index, int& next) {
  const int warps = gridDim.x * kWarps;
  const int64 row = static_cast<int64>(request) * p.table_columns;
  const int pieces = (columns.end - columns.begin) * kPieces;
#pragma unroll 1
  for (; next < pieces; next += warps) {
    const int column = next / kPieces;
    copy_piece(p, row + columns.begin + column, first_index + column, next % kPieces);
  }
  next -= pieces;
  // Columns about those that are seen get the copy of the nearest: blocks may load of them.
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= 2 * kAround) return;
  const bool ahead = i < kAround;
  const int nearest = ahead ? columns.begin : columns.end - 1;
  const int column = nearest + (ahead ? -1 - i : 1 + i - kAround);
  if (column < 0 || column >= p.table_columns) return;
  const int page = stored_page(p, row + nearest);
  const int claimed = claimed_by(p, page, first_index + nearest - columns.begin);
  p.copied_table[row + column] = copy_of(p, page, claimed);
}

}  // namespace copies

// Behind request_units, beside which it runs. As many CTAs as run at once.
extern "C" __global__ void __launch_bounds__(copies::kThreads, 4)
    copy_pages(const __grid_constant__ ForwardParams p) {
  using namespace copies;
  const int lane = threadIdx.x % 32;
  int next = blockIdx.x * kWarps + threadIdx.x / 32;  // piece of this warp, from a request's first
  int index = 0;                                      // of the request's first page
#pragma unroll 1
  for (int first = 0; first < p.table_rows; first += 32) {
    const int mine = first + lane;
    const Range own = mine < p.table_rows ? seen_columns(p, mine) : Range{0, 0};
#pragma unroll 1
    for (uint32 left = __ballot_sync(kAllLanes, !own.empty()); left != 0; left &= left - 1) {
      const int of = __ffs(left) - 1;
      const Range columns = {__shfl_sync(kAllLanes, own.begin, of),
                             __shfl_sync(kAllLanes, own.end, of)};
      copy_request(p, first + of, columns, index, next);
      index += columns.end - columns.begin;
    }
  }
  ptx::wait_for_the_kernel_ahead();  // the next waits for this one alone
}
