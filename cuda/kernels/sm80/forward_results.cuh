// What a warp stores of its query rows: output and lse. Finds the rows to compute again. Read
// forward_rows.cuh next.
#pragma once

#include "forward_exact.cuh"
#include "fragment.cuh"
#include "sm80/forward_products.cuh"

namespace forward {

// Stores a warp's columns of one of its rows, `factor` times, and zeros where `empty`, with
// kFromPages what `filled` has in pairs of 16 bits; not `stored`: nothing. Returns what is not 0 if
// any is not finite. `out`: column 0; `first`: the warp's.
template <class To, int kCount>
__device__ __forceinline__ uint32 store_columns(const float (&output)[kCount], int row,
                                                float factor, bool stored, bool empty,
                                                uint32 filled, typename To::Bits* out, int first) {
  const int c = threadIdx.x % 4;
  if constexpr (kSame<To, Float32>) {
    float flaw = 0.0f;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = first + 8 * j + 2 * c;
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = output[fragment::element(j, row, i)] * factor;
        flaw = fmaf(pair[i], 0.0f, flaw);
        if (empty) pair[i] = 0.0f;
      }
      if (!stored || column >= kValueDim) continue;
      if constexpr (kValueDim % 2 == 0) {
        *reinterpret_cast<float2*>(out + column) = make_float2(pair[0], pair[1]);
      } else {
        out[column] = pair[0];
        if (column + 1 < kValueDim) out[column + 1] = pair[1];
      }
    }
    return flaw != 0.0f;  // NaN
  } else {
    constexpr int kPieces = round_up(2 * kCount, 32) / 8;
    uint32 pieces[kPieces];
    fragment::gather_row(output, row, factor, pieces);
    uint32 flaw = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) flaw = To::accumulate_nonfinite(flaw, pieces[i]);
    if (!stored) return flaw;
#pragma unroll
    for (int g = 0; g < kPieces / 4; ++g) {
      const int local = 8 * (4 * g + c), column = first + local;
      if ((2 * kCount % 32 == 0 || local < 2 * kCount) &&
          (kValueDim % (32 * kValueWarps) == 0 || column < kValueDim)) {
        store_piece<kValueDim>(out, column,
                               empty ? make_uint4(filled, filled, filled, filled)
                                     : make_uint4(pieces[4 * g], pieces[4 * g + 1],
                                                  pieces[4 * g + 2], pieces[4 * g + 3]));
      }
    }
    return flaw;
  }
}

// Computes rows of a warp again: of every four bits of `rows` two are of a tile, as repair_rows has
// them. A call: inlined, it changed the registers of the walk, and 24 bytes were spilled.
__device__ __noinline__ void repair_tiles(const Sm80ForwardParams& p, uint32 rows) {
  const Unit unit(p);
  const int row_warp = static_cast<int>(threadIdx.x) / 32 % kRowWarps;
  int first = unit.first_query() * kPackedHeads + 16 * row_warp;
#pragma unroll 1
  for (; rows != 0; rows = rows >> 2 & 0x33333333u, first += kTileRows) {
    const uint32 marks = rows & 0x33333333u;
    if (marks == 0) continue;
    repair_rows(p, unit.batch, marks, [&](int bit) -> Row {
      const int packed = first + bit / 4 + fragment::kRowStep * (bit % 4);
      const int query = packed / kPackedHeads, head = unit.head + packed % kPackedHeads;
      Range keys = row_columns(unit.sight, query, 0);
      keys.begin = max(keys.begin, 0);
      return {query, head, unit.first_key(kv_head_of(p, unit.head)), keys};
    });
  }
}

struct RowResults : RowProducts {
 protected:
  // What a thread's two rows end with.
  struct Ends {
    float factor[2], lse[2];
    bool empty[2];  // the row sees nothing, or is past the length
  };
  __device__ __forceinline__ Ends end_of(const Unit& unit, int tile) const {
    Ends ends;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float factor = softmax[tile].template finish<kHasSinks>(
          row, unit.sink(unit.head_of(tile, row)) * kLog2E, ends.lse[row]);
      ends.factor[row] = factor * dropout_scale(p);
      ends.empty[row] =
          ends.lse[row] == kNegativeInfinity || unit.query(tile, row) >= unit.sight.query_length;
    }
    return ends;
  }
  __device__ __forceinline__ ResultElement::Bits* out_of(const Unit& unit, int query,
                                                         int head) const {
    return static_cast<ResultElement::Bits*>(p.out) +
           query_row(p, unit.batch, query, head) * kValueDim;
  }
  // The result of a row that sees nothing, two elements of 16 bits: NaN of a wrong request.
  static __device__ __forceinline__ uint32 of_empty(const Unit& unit) {
    return kFromPages && unit.sight.kv_length < 0 ? 0x7fff7fff : 0;  // of bfloat16 and float16
  }
  // Its lse.
  __device__ __forceinline__ float empty_lse(const Unit& unit, int head) const {
    if constexpr (kFromPages) {
      const int length = unit.sight.kv_length;  // else of no request, or of a wrong one
      if (length <= 0) return length < 0 ? kNan : kNegativeInfinity;
    }
    return kHasSinks ? unit.sink(head) : kNegativeInfinity;
  }
  // Stores a tile's rows. Returns the warp's with NaN or infinity, bit 4 * quad + row for each.
  __device__ __forceinline__ uint32 store(const Unit& unit, int tile, const Ends& ends) const {
    uint32 nonfinite = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int query = unit.query(tile, row), head = unit.head_of(tile, row);
      const float lse = ends.lse[row];
      const bool stored = query < unit.end_of_queries(), empty = ends.empty[row];
      const uint32 flaw = store_columns<ResultElement>(
          output[tile], row, ends.factor[row], stored, empty, of_empty(unit),
          out_of(unit, query, head), value_warp() * kWarpColumns);
      // A NaN lse is right, and the row with it: masked scores never reach the sum of the weights.
      // Not so with halves, whose numbers may be too far apart.
      const bool flawed = (flaw != 0 || lse == kInfinity) && (kHalves || lse == lse);
      uint32 lanes = __ballot_sync(0xffffffffu, flawed && stored && !empty);
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      nonfinite |= (lanes & 0x11111111u) << row;
      if (stored && threadIdx.x % 4 == 0 && value_warp() == 0) {
        const float of_empty = empty_lse(unit, head);
        p.lse[lse_row(p, unit.batch, query, head)] = empty ? of_empty : lse;
      }
    }
    if constexpr (kValueWarps > 1) nonfinite = of_all_columns(nonfinite);
    return nonfinite;
  }
  // The rows of which any of the warps that share them found a result that is not finite: for the
  // first of these warps, to the others there are none. All results are stored then.
  __device__ __forceinline__ uint32 of_all_columns(uint32 rows) const {
    const uint32 found = ptx::shared_address(shared.query) + 4 * row_warp();
    __syncthreads();
    if (threadIdx.x % 32 == 0) ptx::store_shared(found + 16 * value_warp(), rows);
    __syncthreads();
    if (value_warp() != 0) return 0;
#pragma unroll
    for (int of = 1; of < kValueWarps; ++of) rows |= ptx::load_shared(found + 16 * of);
    return rows;
  }
};

}  // namespace forward
