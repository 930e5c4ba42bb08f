// Decoding: what a warp makes of blocks of keys and values in shared memory, for 16 query rows.
//
// Rows are queries as in the forward pass (fragment.cuh), products are mma.sync. kKeyParts warps
// have the same rows and each a part of a block's keys, with a maximum, sum and weighted values of
// its own; at the end of a unit they are added up through shared memory. With kSplitsColumns the
// weights of all go through shared memory, and each warp adds up a part of the values' columns.
#pragma once

#include "decode_found.cuh"
#include "terms.cuh"
#include "tile.cuh"

namespace decode {

template <class Of>
struct AttendOf : Attended {
  static constexpr bool kSplits = kSame<Of, Float32>;  // then products are those of Split
  using Weight = typename ElementType<!kQuantized && kSame<Of, BFloat16>>::Type;

  __device__ __forceinline__ void start() {
#pragma unroll
    for (float& x : output) x = 0.0f;
    const int first = unit.length - p.query_len;  // position of query 0
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.base[i] = kNoBase;
      state.sum[i] = 0.0f;
      int query = 0;
      if (p.query_len > 1) {
        const Place place(p, share, tile * 16 + threadIdx.x % 32 / 4 + i * fragment::kRowStep);
        query = min(place.query, p.query_len - 1);
      }
      const int position = kAllStandLast ? unit.length - 1 : first + query;
      seen[i] = {first_seen(p, position), position + 1};
    }
    seen_by_all = {first_seen(p, unit.length - 1), kAllStandLast ? unit.length : first + 1};
    if constexpr (kQuantized) start_scales(*exchange);
  }

  static constexpr int kWeightTiles = ceil_div(kPartKeys, 16);
  // Keys of a block and columns of its values that this warp multiplies by weights.
  static constexpr int kProductKeys = kSplitsColumns ? kBlockKV : kPartKeys;
  // A block of positions from `first` on; keys and values are tiles of kBlockKV rows of its head.
  __device__ __forceinline__ void add_block(uint32 keys, uint32 values, int first,
                                            const Note& note) {
    const bool is_partial = first < seen_by_all.begin || first + kBlockKV > seen_by_all.end;

    float sums[kScoreSums][kPartKeys / 2] = {};
    float (&scores)[kPartKeys / 2] = sums[0];
    if constexpr (kSplits) {
      Split{tile, part}.add_scores(queries, keys, scores);
    } else if constexpr (kQuantized) {
      Quantized{tile, part}.add_scores(queries, keys, sums);
    } else {
      // Lanes in the order of matrices: A has rows first, B, which is transposed, columns.
      const int lane = threadIdx.x % 32;
      const int query = tile * 16 + lane % 16, key = part * kPartKeys + lane / 16 * 8 + lane % 8;
#pragma unroll
      for (int step = 0; step < ceil_div(kHeadDim, 16); ++step) {
        uint32 a[4];
        ptx::load_matrix_x4(chunk_address<kShareRows>(queries, query, 2 * step + lane / 16), a);
#pragma unroll
        for (int j = 0; j < kPartKeys / 16; ++j) {
          uint32 b[4];
          ptx::load_matrix_x4(chunk_address<kBlockKV>(keys, key + 16 * j, 2 * step + lane / 8 % 2),
                              b);
          ptx::multiply_add<kBFloat16>(sums[step % kScoreSums], 8 * j, a, b[0], b[1]);
          ptx::multiply_add<kBFloat16>(sums[step % kScoreSums], 8 * j + 4, a, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < (kScoreSums - 1) * kPartKeys / 2; ++i) scores[i] += sums[kScoreSums - 1][i];
    if constexpr (kQuantized) scale_scores(scores, note);
    score_function(p, scores);
    // Rounded here, not within a fused product: the largest weight is 1 however large scores are.
#pragma unroll
    for (float& x : scores) x = __fmul_rn(x, p.scale_log2);
    if (is_partial) {
#pragma unroll
      for (int i = 0; i < kPartKeys / 2; ++i) {
        if (!sees(first, i)) scores[i] = kNegativeInfinity;
      }
    }

    float correction[2];
    if constexpr (kSplitsColumns) {
      add_weights_of_all(scores, correction);
    } else {
      // Bases are maxima, which no weight decides.
      state.extend<false>(scores, 1.0f, /*searches=*/true, correction, Alone{});
    }
    if constexpr (kScalesOfPages) scale_weights(scores, correction, note, first, is_partial);
    if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOwnColumns / 2; ++i) output[i] *= correction[fragment::row(i)];
    }
    if constexpr (kSplits) {
      Split{tile, part}.add_values(values, scores, first, seen, output);
    } else {
      uint32 weights[kWeightTiles][4];
#pragma unroll
      for (int j = 0; j < kPartKeys / 16; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrices: rows 0 and 8 on, then the next 8 keys
          const int at = fragment::element(2 * j + i / 2, i % 2, 0);
          weights[j][i] = Weight::pack(scores[at], scores[at + 1]);
        }
      }
      if constexpr (kSplitsColumns) {
        store_weights(weights);
        meet();
      }
      // Values that a row does not see may be anything where a block is seen in part.
      if constexpr (kQuantized) {
        add_quantized(values, weights, first, is_partial);
      } else if (is_partial && !values_are_finite(values)) {
        add_what_is_not_finite(values, first);
        add_values</*kFiniteAlone=*/true>(values, weights);
      } else {
        add_values</*kFiniteAlone=*/false>(values, weights);
      }
    }
  }

  // As SoftmaxState::extend, by the maxima over the keys of all warps.
  template <int kCount>
  __device__ __forceinline__ void add_weights_of_all(float (&scores)[kCount],
                                                     float (&correction)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = fragment::row_maximum<kCount>(scores, row);
      const int at = lane / 4 + row * fragment::kRowStep;
      if (lane % 4 == 0) exchange->largest[tile * kKeyParts + part][at] = largest;
    }
    meet();  // and all have read the weights of the block before
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = kNegativeInfinity;
#pragma unroll
      for (int other = 0; other < kKeyParts; ++other) {
        const int at = lane / 4 + row * fragment::kRowStep;
        largest = fmaxf(largest, exchange->largest[tile * kKeyParts + other][at]);
      }
      if constexpr (kHeadroom != 0) largest += kHeadroom;
      state.rise(row, fmaxf(largest, state.base[row]), correction[row]);
    }
    float added[2][2];
    state.exponentials<kCount>(scores, OneFactor{1.0f}, added, Alone{});
#pragma unroll
    for (int row = 0; row < 2; ++row) state.sum[row] += added[row][0] + added[row][1];
  }
  __device__ __forceinline__ void store_weights(const uint32 (&weights)[kWeightTiles][4]) {
    const int lane = threadIdx.x % 32;
    const uint32 to = ptx::shared_address(exchange->weights);
#pragma unroll
    for (int j = 0; j < kPartKeys / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 16 + lane / 4 + i % 2 * fragment::kRowStep;
        const int chunk = part * (kPartKeys / 8) + 2 * j + i / 2;
        ptx::store_shared(chunk_address<kShareRows>(to, row, chunk) + lane % 4 * 4, weights[j][i]);
      }
    }
  }

  __device__ __forceinline__ void add_quantized(uint32 values, const uint32 (&own)[kWeightTiles][4],
                                                int first, bool is_partial) {
    const int key = first_key(), column = first_column();
    const auto weights_of = [&](int j, uint32(&weights)[4]) { load_weights(own, j, weights); };
    if (is_partial && !Quantized::are_numbers<kProductKeys>(values, key, column)) {
      Quantized::add_nan<kProductKeys>(values, key, column, first, seen, output);
      Quantized::add_values</*kNumbersAlone=*/true, kProductKeys>(values, key, column, weights_of,
                                                                  output);
    } else {
      Quantized::add_values</*kNumbersAlone=*/false, kProductKeys>(values, key, column, weights_of,
                                                                   output);
    }
  }

  // The weights of keys 16 * j and on, of those that this warp multiplies.
  __device__ __forceinline__ void load_weights(const uint32 (&own)[kWeightTiles][4], int j,
                                               uint32 (&weights)[4]) const {
    if constexpr (kSplitsColumns) {
      const int lane = threadIdx.x % 32;
      const uint32 from = ptx::shared_address(exchange->weights);
      ptx::load_matrix_x4(chunk_address<kShareRows>(from, tile * 16 + lane % 16, 2 * j + lane / 16),
                          weights);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = own[j][i];
    }
  }

  template <bool kFiniteAlone>
  __device__ __forceinline__ void add_values(uint32 values, const uint32 (&own)[kWeightTiles][4]) {
    const int lane = threadIdx.x % 32;
    const int key = first_key() + lane % 16, chunk = first_column() / 8 + lane / 16;
#pragma unroll
    for (int j = 0; j < kProductKeys / 16; ++j) {
      uint32 weights[4];
      load_weights(own, j, weights);
#pragma unroll
      for (int column = 0; column < kOwnColumns / 16; ++column) {
        uint32 b[4];
        ptx::load_transposed_x4(chunk_address<kBlockKV>(values, key + 16 * j, 2 * column + chunk),
                                b);
        if constexpr (kFiniteAlone) {
#pragma unroll
          for (uint32& pair : b) pair = finite_halves(pair);
        }
        ptx::multiply_add<kBFloat16>(output, 8 * column, weights, b[0], b[1]);
        ptx::multiply_add<kBFloat16>(output, 8 * column + 4, weights, b[2], b[3]);
      }
    }
  }

  // Are the values that this warp multiplies finite?
  __device__ __forceinline__ bool values_are_finite(uint32 values) {
    const int lane = threadIdx.x % 32;
    uint32 found = 0;
#pragma unroll 4
    for (int i = lane; i < kProductKeys * kOwnColumns / 8; i += 32) {
      const int row = first_key() + i / (kOwnColumns / 8);
      const int chunk = first_column() / 8 + i % (kOwnColumns / 8);
      const uint32 at = chunk_address<kBlockKV>(values, row, chunk);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        found = Of::accumulate_nonfinite(found, ptx::load_shared(at + 4 * word));
      }
    }
    return __all_sync(0xffffffffu, found == 0);
  }

  // Infinities and NaN to the rows that see their keys, whatever the weight: it may have come to 0.
  __device__ __forceinline__ void add_what_is_not_finite(uint32 values, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < kProductKeys; ++i) {
      const int key = first_key() + i;
      bool sees[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        sees[row] = first + key >= seen[row].begin && first + key < seen[row].end;
      }
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        const uint32 at = chunk_address<kBlockKV>(values, key, first_column() / 8 + j);
        const uint32 pair = ptx::load_shared(at + 2 * fragment::first_column(lane));
        const uint32 bad = pair ^ finite_halves(pair);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          if (bad == 0 || !sees[row]) continue;
          output[fragment::element(j, row, 0)] += Of::unpack_low(bad);
          output[fragment::element(j, row, 1)] += Of::unpack_high(bad);
        }
      }
    }
  }
};

using Attend = AttendOf<Element>;

// What the warps with a row have, together: its base and sum.
__device__ __forceinline__ float2 total_of(const Sums& sums, int row) {
  const float base = Attend::largest_base(sums, row / 16, row % 16);
  float total = 0.0f;
#pragma unroll
  for (int part = 0; part < kKeyParts; ++part) {
    const int warp = row / 16 * kKeyParts + part;
    const float weight = ptx::exp2_approx(sums.base[warp][row % 16] - base);
    total = fmaf(sums.total[warp][row % 16], weight, total);
  }
  return make_float2(base, total);
}

// Writes results, or a part of them for decode_merge.cuh. `thread` of kWarps * 32; all have left
// their sums. `is_first`: the part that the CTA begins with.
__device__ __forceinline__ void write(const DecodeParams& p, const Unit& unit, const Share& share,
                                      const Sums& sums, int thread, bool is_whole, bool is_first) {
  constexpr int kPieces = kValueColumns / 4, kAtOnce = kAsksAhead ? 2 : 1;
  const int rows = kHeads == 1 ? existing_rows(p, share) : kShareRows;
  const bool halves = leaves_halves(p, share);
#pragma unroll kAtOnce
  for (int i = thread; i < rows * kPieces; i += kWarps * 32) {
    const int row = i / kPieces, column = (i - row * kPieces) * 4;
    const Place place(p, share, row);
    if (kHeads > 1 && !place.exists(p)) continue;
    const float2 of = total_of(sums, row);
    float4 sum = *reinterpret_cast<const float4*>(&sums.values[row / 16][row % 16][column]);
    if (halves) {
      const float4 more = *reinterpret_cast<const float4*>(&sums.values[0][row + 8][column]);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    if (is_whole) {
      const Conclusion end = conclude(p, of.x, of.y, unit.batch, place.head);
      store_out(p, unit, place, column, sum, end.factor);
      if (column == 0) store_lse(p, unit, place, end.lse);
    } else {
      const int64 at = partial_row(blockIdx.x, is_first, row);
      *reinterpret_cast<float4*>(p.partial_out + at * kValueColumns + column) = sum;
      if (column == 0) {
        reinterpret_cast<float2*>(p.partial_rows)[at] = of;
      }
    }
  }
}

}  // namespace decode
