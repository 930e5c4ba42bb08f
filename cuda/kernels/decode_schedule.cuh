// Decoding: which positions of a cache the queries of a row see, and how all of them are shared
// out.
//
// A unit is what some query rows of a batch row and kv head (of its group, at T positions) have to
// see: blocks of kBlockKV positions. The blocks of all batch rows stand in one line, cut into equal
// parts, whatever the lengths: stream-K. A CTA has one part for kHeads kv heads, whose keys lie
// side by side in memory, and for some of their query rows. A unit that several parts share is
// merged by decode_merge.cuh, in their order. Where parts end depends on lengths and on their
// number alone. Sanovar et al., LeanAttention (arXiv:2405.10480).
#pragma once

#include "element.cuh"
#include "numbers.cuh"
#include "rotary.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace decode {

inline constexpr int kTeamWarps = 4;                // that share a block
inline constexpr int kWarps = kTeamWarps * kTeams;  // that compute
// Warps that share a block for the same rows.
inline constexpr int kKeyParts = kTeamWarps / (kRowTiles * kHeads);
inline constexpr int kPartKeys = kBlockKV / kKeyParts;
inline constexpr int kHeadRows = 16 * kRowTiles;  // of a kv head, of a CTA
inline constexpr int kShareRows = kHeads * kHeadRows;
static_assert(kKeyParts * kRowTiles * kHeads == kTeamWarps);
inline constexpr int kValueColumns = round_up(kValueDim, 16);
inline constexpr int kOwnColumns = kSplitsColumns ? kValueColumns / kKeyParts : kValueColumns;
// Keys that a product takes at once.
static_assert(kPartKeys % (kFloat32 ? 8 : 16) == 0 && kOwnColumns % 16 == 0);
static_assert(!kFloat32 || (!kSplitsColumns && kCluster == 1));
static_assert(!kQuantized || (!kFloat32 && kHeadDim % 8 == 0 && kValueDim % 8 == 0));
static_assert(kCluster == 1 ? kTeams == 1
                            : (kHeads * kRowTiles == 1 || kTakesPlaces) && !kSplitsColumns);

using Bits = Element::Bits;
using Piece = PieceOf<Element>::Type;  // eight elements

// The positions that the queries of a batch row see, together; none where the row has no place for
// its length, see is_refused.
__device__ __forceinline__ bool is_refused(const DecodeParams& p, int length) {
  return length > p.columns * p.page_size;
}
// The first that the query at a position sees.
__device__ __forceinline__ int first_seen(const DecodeParams& p, int position) {
  return kWindowLeft ? max(position - p.window_left, 0) : 0;
}
__device__ __forceinline__ Range positions_of(const DecodeParams& p, int length) {
  if (length <= 0 || is_refused(p, length)) return {0, 0};
  return {first_seen(p, max(length - p.query_len, 0)), length};
}

// A batch row's. With kTakesPlaces it is the columns of a table, some of which name nothing; rows
// of kFullRows hold a key in every position.
__device__ __forceinline__ int length_of(const DecodeParams& p, int batch) {
  if constexpr (kTakesPlaces) return p.columns;
  if constexpr (kFullRows) return p.columns * p.page_size;
  return p.lengths[batch];
}
// Numbers of blocks of kBlockKV positions.
__device__ __forceinline__ Range blocks_of(const DecodeParams& p, int length) {
  const Range seen = positions_of(p, length);
  return {seen.begin / kBlockKV, ceil_div(seen.end, kBlockKV)};
}

// What a CTA has of every batch row, by its number: CTAs of one part stand side by side. With
// kCluster the CTAs of a cluster do, which have the parts of one batch row.
struct Share {
  int kv_head;  // the first of its kHeads
  int row_group;
  int part;   // of the line, or of the batch row
  int batch;  // only with kCluster
  __device__ __forceinline__ explicit Share(const DecodeParams& p) {
    int cta = blockIdx.x;
    // A division is some 120 cycles, which all that is loaded waits for.
    if constexpr (kCluster > 1) {
      part = cta % kCluster;
      cta /= kCluster;
      batch = p.batch > 1 ? cta / p.shares : 0;
      cta -= batch * p.shares;
    } else {
      part = cta / p.shares;
      cta -= part * p.shares;
    }
    const int heads = p.row_groups > 1 ? cta / p.row_groups : cta;
    kv_head = heads * kHeads;
    row_group = cta - heads * p.row_groups;
  }
  // The first of its query rows, among those of a kv head.
  __device__ __forceinline__ int first_row() const { return row_group * kHeadRows; }
};

// The steps of a batch row in the line: its blocks, and what it takes to begin with one.
__device__ __forceinline__ int steps_of(const Range& blocks) {
  return blocks.empty() ? 0 : blocks.end - blocks.begin + kRowSteps;
}
// A batch row in the line.
struct Unit {
  int batch, length;
  int start;     // where it begins
  Range blocks;  // those that its queries see
  __device__ __forceinline__ int stop() const { return start + blocks.end - blocks.begin; }
  __device__ __forceinline__ int end() const { return start + steps_of(blocks); }
};

// The line of blocks. Whole warps call.
struct Line {
  const DecodeParams& p;
  int total;       // steps
  int parts;       // none is empty
  int each, more;  // steps of every part, and those beyond; a 64-bit division takes 400 cycles

  __device__ __forceinline__ Line(const DecodeParams& p, const Share&) : Line(p) {}
  __device__ __forceinline__ explicit Line(const DecodeParams& p) : p(p) {
    int count = 0;
    for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
      count += steps_of(blocks_of(p, length_of(p, batch)));
    }
    total = __reduce_add_sync(0xffffffffu, count);
    parts = min(p.parts, total);
    each = total / max(parts, 1);
    more = total - each * parts;
  }

  // Where a part begins, and that before which the line has ended ends.
  __device__ __forceinline__ int begin_of(int part) const {
    return part >= parts ? total : part * each + part * more / parts;  // total * part / parts
  }
  // The part that a block is in: an estimate, which is one off at most.
  __device__ __forceinline__ int part_of(int block) const {
    const float of_block = static_cast<float>(parts) * ptx::reciprocal_approx(total);
    const int part = min(static_cast<int>(static_cast<float>(block) * of_block), parts - 1);
    if (begin_of(part) > block) return part - 1;
    return begin_of(part + 1) > block ? part : part + 1;
  }

  // The unit that has a block; it is batch row `from`, which begins at `start`, or a later one.
  __device__ __forceinline__ Unit find(int block, int from = 0, int start = 0) const {
    const int lane = threadIdx.x % 32;
    for (;; from += 32) {
      const int length = from + lane < p.batch ? length_of(p, from + lane) : 0;
      const int own = steps_of(blocks_of(p, length));
      int behind = own;  // in the line from `start` on, this row's included
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, behind, step);
        if (lane >= step) behind += other;
      }
      const uint32 beyond = __ballot_sync(0xffffffffu, start + behind > block);
      if (beyond != 0) {
        const int at = __ffs(beyond) - 1;
        Unit unit;
        unit.batch = from + at;
        unit.length = __shfl_sync(0xffffffffu, length, at);
        unit.blocks = blocks_of(p, unit.length);
        unit.start = start + __shfl_sync(0xffffffffu, behind - own, at);
        return unit;
      }
      start += __shfl_sync(0xffffffffu, behind, 31);
    }
  }

  // Calls visit(unit, blocks) for a part's blocks of every unit, in order. With kParks where it
  // stands lies in shared memory meanwhile, four words of a warp: visits have no register to spare.
  template <bool kParks = false, class Visit>
  __device__ __forceinline__ void walk(const Share& share, Visit visit,
                                       [[maybe_unused]] uint32 parked = 0) const {
    int end = begin_of(share.part + 1);
    int at = begin_of(share.part), from = 0, start = 0, length = 0;
    while (at < end) {
      Unit unit{from, length, start, blocks_of(p, length)};
      if (!kAsksAhead || unit.blocks.empty()) unit = find(at, from, start);
      if constexpr (kAsksAhead) {
        // Mostly the next unit is the next batch row, whose length comes while this one is visited.
        from = unit.batch + 1;
        length = from < p.batch ? length_of(p, from) : 0;
      } else {
        from = unit.batch;
      }
      int stop = min(end, unit.end());
      start = kAsksAhead ? unit.end() : unit.start;
      const int shift = unit.blocks.begin - unit.start;
      Range blocks{at + shift, stop + shift};
      if constexpr (kRowSteps > 0) {
        blocks.end = min(blocks.end, unit.blocks.end);
        if (blocks.empty()) {
          at = stop;
          continue;
        }
      }
      if constexpr (kParks) {
        if (ptx::fresh_lane() == 0) ptx::store_shared_x4(parked, end, stop, from, start);
        __syncwarp();
        visit(unit, blocks);
        end = ptx::load_shared(parked);
        stop = ptx::load_shared(parked + 4);
        from = ptx::load_shared(parked + 8);
        start = ptx::load_shared(parked + 12);
        __syncwarp();
      } else {
        visit(unit, blocks);
      }
      at = stop;
    }
  }
};

// The blocks of one batch row, cut into equal parts for the CTAs of a cluster.
struct ClusterLine {
  const DecodeParams& p;
  int length;
  __device__ __forceinline__ ClusterLine(const DecodeParams& p, const Share& share)
      : p(p), length(length_of(p, share.batch)) {}

  template <bool kParks = false, class Visit>
  __device__ __forceinline__ void walk(const Share& share, Visit visit, uint32 = 0) const {
    Unit unit;
    unit.batch = share.batch;
    unit.length = length;
    unit.start = 0;
    unit.blocks = blocks_of(p, unit.length);
    const int count = unit.blocks.end - unit.blocks.begin;
    const auto begin_of = [&](int part) { return unit.blocks.begin + count * part / kCluster; };
    visit(unit, Range{begin_of(share.part), begin_of(share.part + 1)});
  }
};

template <bool kInCluster>
struct ChosenLine {
  using Type = Line;
};
template <>
struct ChosenLine<true> {
  using Type = ClusterLine;
};
using OwnLine = ChosenLine<(kCluster > 1)>::Type;

// Row `row` of kShareRows: those of a kv head are its group's heads at query 0, then at query 1.
struct Place {
  int query, head;  // among all query heads; query T and more are none
  __device__ __forceinline__ Place(const DecodeParams& p, const Share& share, int row) {
    const int of_head = share.first_row() + row % kHeadRows;
    query = p.query_len > 1 ? of_head / p.group : of_head >= p.group;
    head = (share.kv_head + row / kHeadRows) * p.group + of_head - query * p.group;
  }
  __device__ __forceinline__ bool exists(const DecodeParams& p) const {
    return query < p.query_len;
  }
};

// Rows of each kv head of a CTA that exist, kHeadRows at most.
__device__ __forceinline__ int existing_rows(const DecodeParams& p, const Share& share) {
  return min(kHeadRows, p.query_len * p.group - share.first_row());
}

// A row of a query, key or value, in pieces. Where 16 bytes divide it, these are read and written
// whole, and places are counted in them: a row is kStride of its places long.
template <int kDim, bool kWhole = (sizeof(Bits) == 2 && kDim % 8 == 0)>
struct RowPieces {
  static constexpr int kStride = kDim;
  Bits* row;
  __device__ __forceinline__ RowPieces(const void* array, int64 place)
      : row(static_cast<Bits*>(const_cast<void*>(array)) + place) {}
  __device__ __forceinline__ Piece load(int i) const { return load_piece<kDim>(row, 8 * i); }
  __device__ __forceinline__ void store(int i, const Piece& piece) const {
    store_piece<kDim>(row, 8 * i, piece);
  }
  // Piece i, counted on into the rows behind this one.
  __device__ __forceinline__ void store_behind(int i, const Piece& piece) const {
    constexpr int kPieces = ceil_div(kDim, 8);
    store_piece<kDim>(row + static_cast<int64>(i / kPieces) * kDim, i % kPieces * 8, piece);
  }
};
template <int kDim>
struct RowPieces<kDim, true> {
  static constexpr int kStride = kDim / 8;
  uint4* row;
  __device__ __forceinline__ RowPieces(const void* array, int64 place)
      : row(static_cast<uint4*>(const_cast<void*>(array)) + place) {}
  __device__ __forceinline__ uint4 load(int i) const { return row[i]; }
  __device__ __forceinline__ void store(int i, const uint4& piece) const { row[i] = piece; }
  __device__ __forceinline__ void store_behind(int i, const uint4& piece) const { row[i] = piece; }
};

// Calls store(index, piece) for the pieces of eight elements of a new key's or value's row, rotated
// if kTurns; `thread` of so many.
template <int kDim, bool kTurns, class Store>
__device__ __forceinline__ void for_pieces(const DecodeParams& p, const RowPieces<kDim>& row,
                                           int position, int thread, int threads, Store store) {
  constexpr int kSteps = kTurns ? kDim / 16 : ceil_div(kDim, 8);
  for (int i = thread; i < kSteps; i += threads) {
    Piece piece = row.load(i);
    if constexpr (kTurns) {
      Piece other = row.load(i + kSteps);
      rotary::turn<Element>(p.frequencies, i, position, piece, other);
      store(i + kSteps, other);
    }
    store(i, piece);
  }
}

// New rows of keys or values in their order, as a warp reads them and writes them elsewhere: an
// item is a piece of eight elements, or with kTurns two that turn together. Of 16 bits the first 32
// items are loaded at once; wide heads of float32 have no registers for that.
template <int kDim, bool kTurns>
struct NewRows {
  static constexpr int kSteps = kTurns ? kDim / 16 : ceil_div(kDim, 8);  // items of a row
  const DecodeParams& p;
  const void* array;  // [B, T, K, dim]
  int64 row;          // of the first position
  Range positions;
  Piece first, second;

  __device__ __forceinline__ NewRows(const DecodeParams& p, const void* array, const Unit& unit,
                                     int kv_head, const Range& positions)
      : p(p), array(array), positions(positions) {
    const int query = positions.begin - (unit.length - p.query_len);
    row = (static_cast<int64>(unit.batch) * p.query_len + query) * p.kv_heads + kv_head;
    load(threadIdx.x % 32);
  }
  // Calls store(position, index, piece).
  template <class Store>
  __device__ __forceinline__ void store(Store store) {
    for (int item = threadIdx.x % 32; exists(item); item += 32) {
      if (item >= 32) load(item);
      const int position = positions.begin + item / kSteps, at = item % kSteps;
      store(position, at, first);
      if constexpr (kTurns) store(position, at + kSteps, second);
    }
  }

 private:
  __device__ __forceinline__ bool exists(int item) const {
    return item < (positions.end - positions.begin) * kSteps;
  }
  __device__ __forceinline__ void load(int item) {
    if (!exists(item)) return;
    const int query = item / kSteps, at = item % kSteps;
    const RowPieces<kDim> from(
        array, (row + static_cast<int64>(query) * p.kv_heads) * RowPieces<kDim>::kStride);
    first = from.load(at);
    if constexpr (kTurns) {
      second = from.load(at + kSteps);
      rotary::turn<Element>(p.frequencies, at, positions.begin + query, first, second);
    }
  }
};

// Halves that are infinite or NaN become 0.
__device__ __forceinline__ uint32 finite_halves(uint32 pair) {
  constexpr uint32 kExponent = kBFloat16 ? 0x7f80u : 0x7c00u;
  const uint32 low = (pair & kExponent) == kExponent ? 0 : 0xffffu;
  const uint32 high = (pair & kExponent << 16) == kExponent << 16 ? 0 : 0xffff0000u;
  return pair & (low | high);
}

// Where a CTA leaves what it found of a unit that it shares, in partial_rows and, times
// kValueColumns, in partial_out. There are two such units at most, of three the second would be all
// its own: that with which the part begins, and another.
__device__ __forceinline__ int64 partial_row(int cta, bool is_first, int row) {
  return (static_cast<int64>(cta) * 2 + (is_first ? 0 : 1)) * kShareRows + row;
}

// A base is so far above the largest score. Weights of quantised caches, in float16, are 2^7 at
// most: a base of 2^27, which is a multiple of 16, then still is the maximum. Sums of bfloat16, of
// fewer than 2^30 positions, stay in range with the largest values that there are.
inline constexpr int kHeadroom = kQuantized ? -7 : kSame<Element, BFloat16> ? 32 : 0;

// What the sums of a row come to.
struct Conclusion {
  float factor;  // of the weighted values
  float lse;     // natural logarithm
};
// Headroom away first, which is exact: the logarithm of 2^-32 would cost three bits.
__device__ __forceinline__ float lse_of(float base, float total) {
  if (kHeadroom > 0 && total < 0x1p-8f) {
    base -= kHeadroom;
    total *= ptx::power_of_two(kHeadroom);
  }
  return (base + ptx::log2_approx(total)) * kLn2;
}
// `total` is relative to 2^base. A row that sees nothing gives 0 and -inf, or its sink.
__device__ __forceinline__ Conclusion conclude(const DecodeParams& p, float base, float total,
                                               int batch, int head) {
  const bool sees_nothing = total == 0.0f;
  if constexpr (kHasSinks) {
    const float sink = p.sinks[batch * p.sinks_batch_stride + head];
    if (sees_nothing) return {0.0f, sink};
    const float largest = fmaxf(base, sink * kLog2E);
    const float own = ptx::exp2_approx(base - largest);
    total = total * own + ptx::exp2_approx(sink * kLog2E - largest);
    return {own * ptx::reciprocal_approx(total), lse_of(largest, total)};
  }
  if (sees_nothing) return {0.0f, kNegativeInfinity};
  return {ptx::reciprocal_approx(total), lse_of(base, total)};
}

// The first `count` of four values at a multiple of 4 in a row of kValueDim.
template <class Of>
__device__ __forceinline__ void store_four(typename Of::Bits* to, int count, const float4& values) {
  if constexpr (kValueDim % 4 == 0 && !kSame<Of, Float32>) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(Of::pack(values.x, values.y), Of::pack(values.z, values.w));
  } else if constexpr (kValueDim % 4 == 0) {
    *reinterpret_cast<float4*>(to) = values;
  } else {
    const float all[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = Of::round(all[i]);
    }
  }
}
// Four values of a row from `column` on, of which the row has one at least.
__device__ __forceinline__ void store_out(const DecodeParams& p, const Unit& unit,
                                          const Place& place, int column, const float4& values,
                                          float factor) {
  if (column >= kValueDim) return;
  const int64 row =
      (static_cast<int64>(unit.batch) * p.query_len + place.query) * p.query_heads + place.head;
  Bits* const to = static_cast<Bits*>(p.out) + row * kValueDim + column;
  store_four<Element>(
      to, min(kValueDim - column, 4),
      make_float4(values.x * factor, values.y * factor, values.z * factor, values.w * factor));
}
__device__ __forceinline__ void store_lse(const DecodeParams& p, const Unit& unit,
                                          const Place& place, float lse) {
  p.lse[(static_cast<int64>(unit.batch) * p.query_heads + place.head) * p.query_len + place.query] =
      lse;
}

// Merges `count` parts of a unit in their order, and writes four values of a row. load(i, of,
// values) reads part i: base and sum of the row, and its weighted values from `column` on. kAtOnce:
// parts whose loads are under way.
template <int kAtOnce = 8, class LoadPart>
__device__ __forceinline__ void write_merged(const DecodeParams& p, const Unit& unit,
                                             const Place& place, int column, int count,
                                             LoadPart load) {
  float base = kNoBase, total = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int at = 0; at < count; at += kAtOnce) {
    float2 of[kAtOnce];
    float4 values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      of[j] = make_float2(kNoBase, 0.0f);
      values[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at + j < count) load(at + j, of[j], values[j]);
    }
    float now = base;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) now = fmaxf(now, of[j].x);
    const float kept = ptx::exp2_approx(base - now);
    base = now;
    total *= kept;
    sum = make_float4(sum.x * kept, sum.y * kept, sum.z * kept, sum.w * kept);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float weight = ptx::exp2_approx(of[j].x - now);
      total = fmaf(of[j].y, weight, total);
      sum.x = fmaf(values[j].x, weight, sum.x);
      sum.y = fmaf(values[j].y, weight, sum.y);
      sum.z = fmaf(values[j].z, weight, sum.z);
      sum.w = fmaf(values[j].w, weight, sum.w);
    }
  }
  const Conclusion end = conclude(p, base, total, unit.batch, place.head);
  store_out(p, unit, place, column, sum, end.factor);
  if (column == 0) store_lse(p, unit, place, end.lse);
}

}  // namespace decode
