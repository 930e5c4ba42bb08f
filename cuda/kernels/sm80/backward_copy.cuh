// Tiles of keys, values, queries and output gradients on their way to shared memory. Read
// backward_scores.cuh next.
#pragma once

#include "halves.cuh"
#include "sm80/backward_walk.cuh"
#include "sm80/ptx_sm80.cuh"
#include "split.cuh"
#include "tile.cuh"

namespace backward {

// Bytes of a tile of kRows rows, in kParts parts.
template <int kDim, int kRows>
inline constexpr int kTileBytes = kParts * kPlaneBytes<kDim, kRows>;
inline constexpr int kScoreBytes = kKeys * kStepQueries * 2;  // of a part

// Two factors for each 16 keys and 16 queries of dS^T: its product with keys is multiplied with the
// first, that with queries with the second. Only with kHalves.
template <bool kAreThere>
struct alignas(128) ScoreFactors {
  float2 factors[kKeys / 16][kStepQueries / 16];
  __device__ __forceinline__ float2 score_factor(int key, int query) const {
    return factors[key][query];
  }
  __device__ __forceinline__ void set_score_factor(int key, int query, float x, float y) {
    factors[key][query] = make_float2(x, y);
  }
};
template <>
struct ScoreFactors<false> {
  __device__ __forceinline__ float2 score_factor(int, int) const { return make_float2(1.f, 1.f); }
  __device__ __forceinline__ void set_score_factor(int, int, float, float) {}
};

struct alignas(128) Shared : ScoreFactors<kHalves> {
  unsigned char key[kTileBytes<kHeadDim, kKeys>];
  unsigned char value[kTileBytes<kValueDim, kKeys>];
  unsigned char query[kStages][kTileBytes<kHeadDim, kStepQueries>];
  unsigned char dout[kDoutStages][kTileBytes<kValueDim, kStepQueries>];
  // dS^T, and P^T if warps share it.
  unsigned char scores[kColumnWarps == 1 ? 1 : kDefersDq ? 3 : 2][kParts * kScoreBytes];
  float minus_lse[kStages][kStepQueries];
  float minus_delta[kDoutStages][kStepQueries];
  int flaws[kKeys / 16][2];  // are 16 rows of dk, dv not all finite?
  int unit;                  // deterministic mode: that of this CTA
};

using halves::Copied;
inline constexpr int kCopiedHead = halves::kCopied<kHeadDim>;
inline constexpr int kCopiedValue = halves::kCopied<kValueDim>;

// Rows of a tile that all warps fill, or of few rows of halves the first of them.
template <int kDim, int kRows>
struct FewRows {
  CopiedRows<kDim, kRows, kRows / 4, 1, halves::kPlanes> rows;
  __device__ __forceinline__ void begin(int count) const {
    if (threadIdx.x < kRows * 8) rows.begin(count);
  }
  __device__ __forceinline__ void finish() const {}
};
template <class Of, int kDim, int kRows, bool kAreFew = (kHalves && kRows < 4 * kWarps)>
struct RowsOf {
  using Type = CopiedRows<kDim, kRows, kWarps, 1, halves::kPlanes>;
};
template <class Of, int kDim, int kRows>
struct RowsOf<Of, kDim, kRows, true> {
  using Type = FewRows<kDim, kRows>;
};
template <int kDim, int kRows>
struct RowsOf<Float32, kDim, kRows, false> {
  using Type = SplitRows<kDim, kRows, kParts, kThreads>;
};
template <int kDim, int kRows>
using TileRows = typename RowsOf<Copied, kDim, kRows>::Type;

// What a thread copies of a step's queries or output gradients where rows are pieces of 16 bytes:
// in every kStep-th row a piece of every box. All it needs of the step's place is the first row.
template <int kDim>
struct StepPieces {
  static constexpr int kStep = kThreads / 8;  // rows at a time
  static constexpr bool kFits = kStepsInPieces && kDim % 8 == 0;
  static constexpr int kBoxes = ceil_div(kDim, kBoxColumns);  // of a plane
  static constexpr int kRowBytes = 2 * halves::kPlanes * kDim;

  // Rows from `count` on read as zero.
  static __device__ __forceinline__ void begin(const void* array, uint32 tile, int64 first_row,
                                               int heads, int count) {
    // Opaque: kept addresses take registers.
    const uint32 thread = ptx::opaque(threadIdx.x), row = thread / 8, chunk = thread % 8;
    const uint32 to = tile + row * kBoxRowBytes + swizzled(chunk, row);
    uint64 source = reinterpret_cast<uint64>(array) + chunk * 16 +
                    (first_row + row * static_cast<uint32>(heads)) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kStepQueries / kStep; ++i) {
#pragma unroll
      for (int j = 0; j < halves::kPlanes * kBoxes; ++j) {
        const int box = j % kBoxes, plane = j / kBoxes;
        const bool inside = box * kBoxColumns + kBoxColumns <= kDim ||
                            static_cast<int>(chunk) * 8 < kDim - box * kBoxColumns;
        ptx::copy_async_past_l1(to + (j * kStepQueries + i * kStep) * kBoxRowBytes,
                                source + plane * (2 * kDim) + box * kBoxRowBytes,
                                inside && static_cast<int>(row) < count - i * kStep);
      }
      source += static_cast<uint64>(static_cast<uint32>(heads)) * (kStep * kRowBytes);
    }
  }
};

// Keys and values are copied once, queries and output gradients for each step, each with a number
// for each row. Those with two stages are under way for a step; what has one stage is copied when
// all are done with what it replaces.
struct Copies {
  const Sm80BackwardParams& p;
  const Walk& walk;
  Shared& shared;

  __device__ __forceinline__ void begin(const Step& at) const {
    const int count = walk.seen_keys().end - walk.unit.key0;
    keys().begin(count);
    values().begin(count);
    begin_queries(at);
    begin_dout(at);
  }
  __device__ __forceinline__ void begin_queries(const Step& at) const {
    if constexpr (StepPieces<kCopiedHead>::kFits) {
      StepPieces<kCopiedHead>::begin(kHalves ? p.query_halves : p.query_data, query_tile(at),
                                     first_row(at), p.query_heads, rows_left(at));
    } else {
      queries(at).begin(rows_left(at));
    }
    begin_numbers(minus_lse(at), p.lse_log2, kNegativeInfinity, at);
  }
  __device__ __forceinline__ void begin_dout(const Step& at) const {
    if constexpr (StepPieces<kCopiedValue>::kFits) {
      StepPieces<kCopiedValue>::begin(kHalves ? p.dout_halves : p.dout_data, dout_tile(at),
                                      first_row(at), p.query_heads, rows_left(at));
    } else {
      douts(at).begin(rows_left(at));
    }
    begin_numbers(minus_delta(at), p.minus_delta, 0.f, at);
  }
  // Waits for all that is under way, which is of this step; past a barrier all are done with the
  // step before, too.
  __device__ __forceinline__ void take(const Step& at) const {
    ptx::copy_async_wait();
    if (at.number == 0) {
      keys().finish();
      values().finish();
    }
    if constexpr (!StepPieces<kCopiedHead>::kFits) queries(at).finish();
    if constexpr (!StepPieces<kCopiedValue>::kFits) douts(at).finish();
    __syncthreads();
    if constexpr (kWindowLeft || kWindowRight) hide_unseen(at);
  }

  // What brings back the numbers of the tile with row `first`, of keys or values, or of queries or
  // output gradients.
  __device__ __forceinline__ float factor_of_keys(const float* factors, int first) const {
    const int64 row = static_cast<int64>(walk.unit.batch) * p.kv_heads + walk.unit.kv_head;
    return halves::factor_of(factors, row, p.kv_len, first);
  }
  __device__ __forceinline__ float factor_of_queries(const float* factors, const Step& at) const {
    const int64 row = static_cast<int64>(walk.unit.batch) * p.query_heads + walk.head(at);
    return halves::factor_of(factors, row, p.query_len, walk.first_query(at));
  }

  __device__ __forceinline__ uint32 key_tile() const { return ptx::shared_address(shared.key); }
  __device__ __forceinline__ uint32 value_tile() const { return ptx::shared_address(shared.value); }
  __device__ __forceinline__ uint32 query_tile(const Step& at) const {
    return ptx::shared_address(shared.query[at.number % kStages]);
  }
  __device__ __forceinline__ uint32 dout_tile(const Step& at) const {
    return ptx::shared_address(shared.dout[at.number % kDoutStages]);
  }
  __device__ __forceinline__ uint32 minus_lse(const Step& at) const {
    return ptx::shared_address(shared.minus_lse[at.number % kStages]);
  }
  __device__ __forceinline__ uint32 minus_delta(const Step& at) const {
    return ptx::shared_address(shared.minus_delta[at.number % kDoutStages]);
  }

 private:
  template <int kDim>
  __device__ __forceinline__ TileRows<kDim, kKeys> block_of(const void* array, uint32 tile) const {
    const KeyRows<halves::kPlanes * kDim> rows(
        p, key_row(p, walk.unit.batch, walk.unit.key0, walk.unit.kv_head));
    return {tile, static_cast<const Copied::Bits*>(array) + rows.first, rows.step};
  }
  __device__ __forceinline__ TileRows<kCopiedHead, kKeys> keys() const {
    return block_of<kCopiedHead>(kHalves ? p.key_halves : p.key_data, key_tile());
  }
  __device__ __forceinline__ TileRows<kCopiedValue, kKeys> values() const {
    return block_of<kCopiedValue>(kHalves ? p.value_halves : p.value_data, value_tile());
  }
  __device__ __forceinline__ int64 first_row(const Step& at) const {
    // Opaque: what follows would be computed ahead of the loop, for registers that are not there.
    const int batch = ptx::opaque(walk.unit.batch);
    if constexpr (!kKeepsAddresses) return query_row(p, batch, walk.first_query(at), walk.head(at));
    const int query = batch * p.query_len + walk.first_query(at);
    return static_cast<int64>(query) * p.query_heads + walk.head(at);
  }
  template <int kDim>
  __device__ __forceinline__ TileRows<kDim, kStepQueries> rows_of(const void* array, uint32 tile,
                                                                  const Step& at) const {
    constexpr int kRow = halves::kPlanes * kDim;
    return {tile, static_cast<const Copied::Bits*>(array) + first_row(at) * kRow,
            static_cast<int64>(p.query_heads) * kRow};
  }
  __device__ __forceinline__ TileRows<kCopiedHead, kStepQueries> queries(const Step& at) const {
    return rows_of<kCopiedHead>(kHalves ? p.query_halves : p.query_data, query_tile(at), at);
  }
  __device__ __forceinline__ TileRows<kCopiedValue, kStepQueries> douts(const Step& at) const {
    return rows_of<kCopiedValue>(kHalves ? p.dout_halves : p.dout_data, dout_tile(at), at);
  }
  // Rows that see no key read as zero, as keys do that no query sees: they may hold anything, and
  // must not meet a zero in a product.
  __device__ __forceinline__ int rows_left(const Step& at) const {
    return walk.seeing_queries().end - walk.first_query(at);
  }
  // `past`: what there is past the stored rows.
  __device__ __forceinline__ void begin_numbers(uint32 to, const float* from, float past,
                                                const Step& at) const {
    const int thread = threadIdx.x;
    if (thread < kStepQueries / 4) {
      if (kCompact && walk.first_query(at) + 4 * thread >= stored_rows(p)) {
        const uint32 bits = __float_as_uint(past);
        ptx::store_shared_x4(to + 16 * thread, bits, bits, bits, bits);
        return;
      }
      const int64 first = padded_row(p, walk.unit.batch, walk.head(at), walk.first_query(at));
      ptx::copy_async<16>(to + 16 * thread, reinterpret_cast<uint64>(from + first + 4 * thread),
                          true);
    }
  }

  // Zeroes rows in front of what is seen: few blocks have any.
  __device__ __forceinline__ void hide_unseen(const Step& at) const {
    const int keys = at.number == 0 ? walk.seen_keys().begin - walk.unit.key0 : 0;
    const int queries = walk.seeing_queries().begin - walk.first_query(at);
    if (keys <= 0 && queries <= 0) return;
    zero_rows<kHeadBoxes, kKeys>(key_tile(), keys);
    zero_rows<kValueBoxes, kKeys>(value_tile(), keys);
    zero_rows<kHeadBoxes, kStepQueries>(query_tile(at), queries);
    zero_rows<kValueBoxes, kStepQueries>(dout_tile(at), queries);
    __syncthreads();
  }
  // The first `count` rows of a tile, of all its boxes and parts.
  template <int kBoxes, int kRows>
  static __device__ __forceinline__ void zero_rows(uint32 tile, int count) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kParts * kBoxes * kRows * 8; i += kThreads) {
      const int row = i / 8 % kRows;
      if (row < count) ptx::store_shared_x4(tile + i * 16, 0, 0, 0, 0);
    }
  }
};

}  // namespace backward
