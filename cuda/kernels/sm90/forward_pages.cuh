// Keys and values in pages (kFromPages): how the producer loads a block of keys that lies in
// several of them. Which rows a unit has: request_units.cuh, with kInCommon as of dense calls.
#pragma once

#include "request_units.cuh"
#include "sm90/forward_common.cuh"

namespace forward {

// The keys of a unit, among those of a request: with kInCommon a part of them, in whole blocks,
// which its batch row stands for.
struct KeysOfUnit {
  RequestUnit own;  // whose positions count from the first of these keys
  int first_block = 0;

  __device__ __forceinline__ KeysOfUnit(const ForwardParams& p, const UnitIndex& unit) {
    if constexpr (kInCommon) {
      const int request = query_batch(p, unit.batch);
      const Range keys = in_part(p, request, unit.batch - request * p.parts_in_common);
      first_block = keys.begin / kBlockKV;
      own = {unit.query_block * kUnitRows, p.query_len, keys.end - keys.begin, request};
    } else {
      own = units_of_requests(p)[unit.query_block];
    }
  }
  __device__ __forceinline__ int first_key() const { return first_block * kBlockKV; }
  // Keys of a part of those in common.
  template <class Params>
  static __device__ __forceinline__ Range in_part(const Params& p, int request, int part) {
    const int parts = p.parts_in_common, length = max(p.request_lengths[request], 0);
    const int blocks = ceil_div(length, kBlockKV);
    return {blocks * part / parts * kBlockKV, min(blocks * (part + 1) / parts * kBlockKV, length)};
  }
};

// Loads kPageRows keys of a page, from `slot` on, to the rows from `row` on of a block of kRows.
template <int kDim, int kRows>
__device__ __forceinline__ void fetch_piece(const TensorMap& map, uint32 tile, uint32 full,
                                            uint64 policy, int kv_head, int page, int row,
                                            int slot) {
  using Tile = KeyTile<kDim, kRows, kWholeRows>;
  if constexpr (kWholeRows) {
    ptx::tma_load(tile + Tile::kBoxes * row * kBoxRowBytes, &map, full, policy, 0, 0,
                  kv_head * Tile::kBoxes, page * (kPageSize / 8) + slot / 8);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kBoxes; ++i) {
      ptx::tma_load(tile + i * Tile::kBoxBytes + row * kBoxRowBytes, &map, full, policy,
                    i * kBoxColumns, kv_head, slot, page);
    }
  }
}

// A block of a request's keys, in pieces of kPageRows keys: a lane has one. All lanes call.
struct PagePieces {
  int request = 0;
  int first_block = 0;  // with kInCommon, of the unit's
  int page = 0;         // of the lane's piece in the block that was found last

  __device__ __forceinline__ int first_key(int block) const {
    return (kInCommon ? first_block + block : block) * kBlockKV;
  }
  // The lane's page. Ahead of a window and behind the length a table may hold anything, and end:
  // what is loaded there is not seen, so any page does.
  __device__ __forceinline__ void find(const ForwardParams& p, int block, int lane) {
    const int column = (first_key(block) + lane % kPieces * kPageRows) / kPageSize;
    const int* table = p.page_table + static_cast<int64>(request) * p.table_columns;
    page = min(max(table[min(column, p.table_columns - 1)], 0), p.pages - 1);
  }
  // The lane's boxes, when all bytes are announced at the barrier `full`.
  template <int kDim>
  __device__ __forceinline__ void load(const TensorMap& map, uint32 tile, uint32 full, int kv_head,
                                       int block, int lane) const {
    if (lane >= kPieces) return;
    const int row = lane * kPageRows, slot = (first_key(block) + row) % kPageSize;
    fetch_piece<kDim, kBlockKV>(map, tile, full, ptx::kEvictLast, kv_head, page, row, slot);
  }
};

}  // namespace forward
