// Keys and values in pages (kFromPages): how the producer loads a block of keys that lies in
// several of them. Which rows a unit has: request_units.cuh.
#pragma once

#include "request_units.cuh"
#include "sm90/forward_common.cuh"

namespace forward {

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

}  // namespace forward
