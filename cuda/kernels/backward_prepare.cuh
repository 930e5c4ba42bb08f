// First kernel of the backward pass, one block per 64-row tile of one query head:
//   lse_log2 = -lse * log2(e)      (-inf on rows past the length, and where lse is -inf)
//   minus_delta = dlse - rowsum(out * dout), with dropout times 1 - rate
//   dq_sum   = 0 (unless deterministic), and the counters of the main kernel; with kStoresDq, which
//              has no sum, dq of queries that the main kernel may leave out.
// With sinks a row that sees nothing has the sink as its lse; the main kernel hides its scores.
// Both numbers are those of a row past the length if out * dout or dlse is not finite there, and in
// 16 bits in rows whose lse is beyond 1e7.
// Rows are padded to whole query blocks, so that the main kernel needs no test on queries.
#pragma once

#include "backward_exact.cuh"
#include "backward_sums.cuh"
#include "halves.cuh"

namespace backward {

// With kHalves a CTA of split_float32 goes on with it, for the rows of dout that it has split.
inline constexpr int kPrepareThreads = kHalves ? halves::kThreads : 128;
static_assert(!kHalves || (kQueries == halves::kRows && kPrepareParts == 1));

// Eight elements of a row of out or dout.
template <class Of>
struct Piece {
  uint4 bits = {0, 0, 0, 0};

  // Loads from out, which nobody reads again (kStreamed), or dout, from index `at`, a column of a
  // row, on.
  template <bool kStreamed>
  __device__ __forceinline__ void load(const void* array, int64 at, int column) {
    const uint16* from = static_cast<const uint16*>(array) + at;
    if constexpr (kWholePieces) {
      const auto* whole = reinterpret_cast<const uint4*>(from);
      bits = kStreamed ? __ldcs(whole) : __ldg(whole);
    } else {
      bits = load_piece<kValueDim>(from - column, column);
    }
  }
  __device__ __forceinline__ float dot(const Piece& other) const {
    const uint4 &a = bits, &b = other.bits;
    const uint32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += Of::unpack_low(x[i]) * Of::unpack_low(y[i]) +
             Of::unpack_high(x[i]) * Of::unpack_high(y[i]);
    }
    return sum;
  }
};
template <>
struct Piece<Float32> {
  Eight numbers = {};

  template <bool kStreamed>
  __device__ __forceinline__ void load(const void* array, int64 at, int column) {
    numbers = load_piece<kValueDim>(static_cast<const float*>(array) + at - column, column);
  }
  __device__ __forceinline__ float dot(const Piece<Float16>& other) const {
    const uint32 y[4] = {other.bits.x, other.bits.y, other.bits.z, other.bits.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = fmaf(numbers.x[2 * i], Float16::unpack_low(y[i]), sum);
      sum = fmaf(numbers.x[2 * i + 1], Float16::unpack_high(y[i]), sum);
    }
    return sum;
  }
  __device__ __forceinline__ float dot(const Piece& other) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(numbers.x[i], other.numbers.x[i], sum);
    return sum;
  }
};

// Does the query see any key? One thread finds out, slowly.
template <class Params>
__device__ __forceinline__ bool sees_any(const Params& p, int batch, int head, int query) {
  const Range keys = visible_keys(visibility(p, batch), query, query);
#pragma unroll 1
  for (int key = keys.begin; key < keys.end; ++key) {
    if (sees(p, batch, head, query, key)) return true;
  }
  return false;
}

// Clears the marks and counters of these rows.
template <class Params>
__device__ __forceinline__ void clear_ring(const Params& p, int head_index, int row0) {
  const int tile = (head_index * (query_blocks(p) * (kQueries / 64)) + row0 / 64) * kHeadBoxes;
  if (threadIdx.x < kHeadBoxes) p.dq_marks[tile + threadIdx.x] = 0;
  if (row0 == 0 && head_index % unit_heads(p) == 0 && threadIdx.x < 2) {
    p.ring_counts[head_index / unit_heads(p) * 2 + threadIdx.x] = 0;
  }
}

// With kSharesKeys: this CTA's share of the zeros that units add to, or, in deterministic mode, of
// the turns in which they do.
template <class Params>
__device__ __forceinline__ void clear_keys(const Params& p, int index) {
  const int slabs = p.batch * p.kv_heads * key_blocks(p) * (kKeys / 64);
  const auto clear = [&](auto* array, int64 count, auto zero) {
    const int64 share = (count + gridDim.x - 1) / gridDim.x, begin = index * share;
    const int64 end = begin + share < count ? begin + share : count;
    for (int64 i = begin + threadIdx.x; i < end; i += kPrepareThreads) array[i] = zero;
  };
  if constexpr (kDeterministic) {
    clear(p.key_turns, slabs, 0);
  } else {
    clear(reinterpret_cast<float4*>(p.key_sums),
          static_cast<int64>(slabs) * KeySumTile::kTiles * 1024, float4{0.f, 0.f, 0.f, 0.f});
  }
}

// With kStoresDq: may the walk of the keys leave out the block of queries that holds
// this row? Of those that it walks a few may be named too. Whole warps call.
template <class Params>
__device__ __forceinline__ bool may_be_left_out(const Params& p, int batch, int head, int row) {
  const Visibility sight = visibility(p, batch);
  const Range seeing = visible_queries(sight, 0, kPair * kKeys - 1);
  const int block = row / kQueries, first = block * kQueries, end = first + kQueries;
  if (end <= seeing.begin || first >= seeing.end) return true;
  if constexpr (kHasPositions) return true;  // their ranges are found beside this
  if constexpr (kHasMask && kSkipsMasked) {
    if (mask::flag_by_key<kQueries, kKeys>(p, batch, head, block, 0) == 0) return true;
  }
  if constexpr (kHasSegments) {
    const SegmentRange queries =
        segment_range(p.query_segments + static_cast<int64>(batch) * p.query_len, first,
                      min(end, sight.query_length));
    const SegmentRange keys = segment_range(
        p.key_value_segments + static_cast<int64>(batch) * p.kv_len, 0, sight.kv_length);
    return !keys.meets({queries.low, queries.high});
  }
  return false;
}

// Zeros in 64 rows of dq.
template <class Params>
__device__ __forceinline__ void clear_dq(const Params& p, int batch, int head, int row0) {
  constexpr int kPieces = ceil_div(kHeadDim, 8);
  const int count = min(64, p.query_len - row0) * kPieces;
  for (int i = threadIdx.x; i < count; i += kPrepareThreads) {
    const int64 at = query_row(p, batch, row0 + i / kPieces, head) * kHeadDim;
    store_piece<kHeadDim>(static_cast<ResultElement::Bits*>(p.dquery) + at, i % kPieces * 8,
                          PieceOf<ResultElement>::filled(0.f));
  }
}

// Has dq_sum a place for a head at first?
template <class Params>
__device__ __forceinline__ bool has_place(const Params& p, int head_index) {
  if constexpr (kRing) return head_index < p.ring_heads;
  return !kStoresDq;
}

// `index`: of the blocks of 64 rows, all of a head side by side. `part`: of kPrepareParts.
template <class Params>
__device__ __forceinline__ void prepare(const Params& p, int index, int part = 0) {
  if constexpr (kRest) {
    if (is_left_to_other(p)) return;
  }
  constexpr int kLanes = kValue <= 64 ? 8 : kValue <= 128 ? 16 : 32;  // threads on one row
  constexpr int kRows = kPrepareThreads / kLanes;                     // rows at a time
  constexpr int kColumns = 8 * kLanes;                                // of a row at a time
  constexpr int kPartRows = 64 / kPrepareParts;
  constexpr int kUnroll = kPartRows < kRows * kPrepareUnroll ? kPartRows / kRows : kPrepareUnroll;
  static_assert(kUnroll > 0 && kPartRows % (kRows * kUnroll) == 0);
  const int tiles = query_blocks(p) * (kQueries / 64);
  const int head_index = index / tiles;  // batch * N + head
  const int row0 = (index - head_index * tiles) * 64;
  const int batch = head_index / p.query_heads, head = head_index - batch * p.query_heads;
  const int queries = visibility(p, batch).query_length;
  const int lane = threadIdx.x % kLanes;
  const int64 padded = (kCompact ? static_cast<int64>(head_index) * stored_rows(p)
                                 : static_cast<int64>(head_index) * tiles * 64) +
                       row0;
  // Once: a division for each row, whose rare cases are a call, spilled 36 bytes.
  const float keep_rate = kHasDropout ? 1.f / p.dropout_scale : 1.f;

  const bool first = part == 0;
  if (first && index == 0 && threadIdx.x == 0) *p.next_unit = 0;
  if constexpr (kRing) clear_ring(p, head_index, row0);
  if constexpr (kMarksRows) {
    const int marks = ceil_div(p.batch * p.query_len * p.query_heads, 64);
    if (first && threadIdx.x == 0 && index < marks) p.dq_marks[index] = 0;
  }
  if constexpr (kStoresDq) {
    if (first && may_be_left_out(p, batch, head, row0)) clear_dq(p, batch, head, row0);
  }
  if constexpr (kSharesKeys) clear_keys(p, index * kPrepareParts + part);
  if constexpr (kDeterministic) {  // the first unit stores
    if (row0 % kQueries == 0 && threadIdx.x < kTurnParts) {
      const int64 block = kCompact ? index / (kQueries / 64) : padded / kQueries;
      p.turns[block * kTurnParts + threadIdx.x] = 0;
    }
  } else if (has_place(p, head_index)) {
#pragma unroll
    for (int box = 0; box < kHeadBoxes; ++box) {
      const SumTile sum = sum_tile(p, batch, head, row0, box);
      const int of_half = kPrepareThreads == 128 ? 0 : threadIdx.x / 128;
#pragma unroll
      for (int j = 0; j < 8 / kPrepareParts; j += kPrepareThreads / 128) {
        sum.store(part * (8 / kPrepareParts) + j + of_half, float4{0.f, 0.f, 0.f, 0.f});
      }
    }
  }

#pragma unroll
  for (int step = 0; step < kPartRows; step += kRows * kUnroll) {
    const int base = part * kPartRows + step;
    Piece<ResultElement> o[kUnroll];
    Piece<Element> d[kUnroll];
    float lse[kUnroll], dlse[kUnroll];
    // Loads all columns, or kColumns from one on.
    const auto load = [&](int i, int column) {
      const int row = row0 + base + i * kRows + threadIdx.x / kLanes;
      o[i] = {};
      d[i] = {};
      if (row < queries && column + lane * 8 < kValueDim) {
        const int64 at = query_row(p, batch, row, head) * kValueDim + column + lane * 8;
        o[i].template load<true>(p.out_data, at, column + lane * 8);
        d[i].template load<false>(p.dout_data, at, column + lane * 8);
      }
    };
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      load(i, 0);
      // With them: behind a row's sum it took 1 us more of short calls, 5 of 42 of long ones
      // (H200).
      const int row = row0 + base + i * kRows + threadIdx.x / kLanes;
      const int64 at = static_cast<int64>(head_index) * p.query_len + row;
      lse[i] = kNegativeInfinity, dlse[i] = 0.f;
      if (lane == 0 && row < queries) {
        lse[i] = p.lse[at];
        if (kHasDlse) dlse[i] = p.dlse[at];
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      float total = o[i].dot(d[i]);
#pragma unroll
      for (int column = kColumns; column < kValueDim; column += kColumns) {
        load(i, column);
        total += o[i].dot(d[i]);
      }
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, mask);
      }
      const int local = base + i * kRows + threadIdx.x / kLanes;
      if (lane == 0 && (!kCompact || row0 + local < stored_rows(p))) {
        if (kHasDlse) total -= dlse[i];
        bool empty = lse[i] == kNegativeInfinity;
        if constexpr (!kFloat32) {
          // Logits of 1e10, or a bias of -1e10 for all keys, leave lse no bits for the weights:
          // they would be 2^300 or 0. No weight of float32 is above 1 (probability_of), which takes
          // a comparison for each. Bits of magnitudes: infinity and NaN do not count.
          constexpr uint32 kLeast = __builtin_bit_cast(uint32, 0x1p24f / kLog2E);
          empty = empty || (__float_as_uint(lse[i]) & 0x7fffffffu) - kLeast < 0x7f800000u - kLeast;
        }
        if constexpr (kHasSinks) {
          if (!empty && !is_finite(total)) empty = !sees_any(p, batch, head, row0 + local);
        }
        p.lse_log2[padded + local] = empty ? kNegativeInfinity : -lse[i] * kLog2E;
        if constexpr (kHasDropout) total *= keep_rate;
        p.minus_delta[padded + local] = empty ? 0.f : -total;
      }
    }
  }

  // The smallest and largest of what there is for the block of queries that starts here, if one
  // does, and beside the first one for every block of keys. Members of the parameters: read where
  // they are used.
  const auto find_ranges = [&](auto of_queries, auto of_keys, auto query_ranges, auto key_ranges) {
    const int warp = threadIdx.x / 32;
    if (first && head == 0 && row0 % kQueries == 0 && warp == 0) {
      const SegmentRange range =
          segment_range(p.*of_queries + static_cast<int64>(batch) * p.query_len, row0,
                        min(row0 + kQueries, queries));
      if (threadIdx.x == 0) {
        reinterpret_cast<int2*>(p.*query_ranges)[batch * query_blocks(p) + row0 / kQueries] = {
            range.low, range.high};
      }
    }
    if (first && head == 0 && row0 == 0) {
      const int keys = visibility(p, batch).kv_length;
      const int blocks = key_blocks(p);
      for (int block = warp; block < blocks; block += kPrepareThreads / 32) {
        const SegmentRange range = segment_range(p.*of_keys + static_cast<int64>(batch) * p.kv_len,
                                                 block * kKeys, min(block * kKeys + kKeys, keys));
        if (threadIdx.x % 32 == 0) {
          reinterpret_cast<int2*>(p.*key_ranges)[batch * blocks + block] = {range.low, range.high};
        }
      }
    }
  };
  if constexpr (kHasSegments) {
    find_ranges(&Params::query_segments, &Params::key_value_segments, &Params::query_segment_ranges,
                &Params::key_segment_ranges);
  }
  if constexpr (kHasPositions) {
    find_ranges(&Params::query_positions, &Params::key_value_positions,
                &Params::query_position_ranges, &Params::key_position_ranges);
  }
}

// split_float32, a CTA for 64 rows of a head of one of the four arrays: of dout it goes on with the
// rest, while these rows are near. kByRows: dout may be split by rows. CTAs after all: after(i).
template <bool kByRows, class Params, class After>
__device__ __forceinline__ void split_and_prepare(const Params& p, float second, float wide,
                                                  After after) {
  halves::Choice choice(blockIdx.x);
  halves::Source dout{p.dout_data, p.dout_halves, p.dout_factors, p.query_len, p.query_heads,
                      second,      wide};
  if constexpr (kByRows) {
    dout.rows = p.dout_row_factors;
    dout.stored = min(stored_rows(p), halves::kRows);
  }
  const auto of_queries = [&](int batch) { return visibility(p, batch).query_length; };
  const bool goes_on = !halves::offer_inputs(p, choice, second, wide, wide);
  if (goes_on && !choice.offer(dout, true, p.batch, of_queries)) {
    after(choice.index);
    return;
  }
  choice.template split<kByRows, kByRows && kCompact>();
  if (!goes_on) return;
  const halves::Place& at = choice.place;
  prepare(p, (at.batch * p.query_heads + at.head) * dout.tiles() + at.first / halves::kRows);
}

// kPrepareParts CTAs for 64 rows of a query head, but with kHalves.
template <class Params>
__device__ __forceinline__ void prepare_alone(const Params& p) {
  // The heads that the main kernel takes first come last, so that it finds them in L2.
  const int index = gridDim.x - 1 - blockIdx.x;
  if constexpr (!kHalves) prepare(p, index / kPrepareParts, index % kPrepareParts);
}

}  // namespace backward
