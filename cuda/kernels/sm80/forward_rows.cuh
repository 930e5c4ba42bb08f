// A warp's query rows, 16 in each of kRowTiles tiles: products, weights, results.
//
// kValueWarps warps share their rows. Each multiplies its part of the head dim; the others' scores
// come through shared memory, added in one order, so that all have the same weights. Then each
// multiplies them with its columns of the values.
#pragma once

#include "forward_exact.cuh"
#include "fragment.cuh"
#include "sm80/forward_copy.cuh"
#include "sm80/products.cuh"
#include "softmax.cuh"

namespace forward {

// Of a warp: of the head dim and of the values' columns.
inline constexpr int kWarpSteps = ceil_div(ceil_div(kHeadDim, 16), kValueWarps);
static_assert(kQuerySteps == 0 || (kParts == 1 && kValueWarps == 1 && kQuerySteps <= kWarpSteps));
static_assert(!kSumsOf32 || kHalves);
inline constexpr int kWarpColumns = round_up(ceil_div(kValueDim, kValueWarps), 16);

// A block's weights of 16 rows, between the scores and the products with values: elements, two and
// two, or float32 to be split when they are used, which takes fewer registers.
template <class Of>
class Weights {
 public:
  __device__ __forceinline__ void set(int i, float low, float high,
                                      const DroppedPairs<kBlockKV>& dropped) {
    pairs_[i] = Of::pack(low, high);
    if constexpr (kHasDropout) pairs_[i] = dropped.keep(i, pairs_[i]);
  }
  // Of the keys from 16 * j on, matrices: rows 0 and 8 on, then of the next 8 keys.
  __device__ __forceinline__ void get(int j, uint32 (&a)[kParts][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) a[0][k] = pairs_[4 * j + k];
  }

 private:
  uint32 pairs_[kBlockKV / 4];
};
template <>
class Weights<Float32> {
 public:
  __device__ __forceinline__ void set(int i, float low, float high,
                                      const DroppedPairs<kBlockKV>& dropped) {
    uint32 kept = 0xffffffffu;  // a half each
    if constexpr (kHasDropout) kept = dropped.keep(i, kept);
    if constexpr (kHalves) {
      split_pair(low, high, halves_[i]);
      for (uint32& half : halves_[i]) half &= kept;
      return;
    }
    numbers_[2 * i] = kept & 0xffffu ? low : 0.0f;
    numbers_[2 * i + 1] = kept >> 16 ? high : 0.0f;
  }
  __device__ __forceinline__ void get(int j, uint32 (&a)[kParts][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kHalves) {
        for (int i = 0; i < kParts; ++i) a[i][k] = halves_[4 * j + k][i];
        continue;
      }
      uint32 parts[kParts];
      split_pair(numbers_[8 * j + 2 * k], numbers_[8 * j + 2 * k + 1], parts);
#pragma unroll
      for (int i = 0; i < kParts; ++i) a[i][k] = parts[i];
    }
  }

 private:
  float numbers_[kHalves ? 1 : kBlockKV / 2];
  uint32 halves_[kBlockKV / 4][kParts];  // in as many registers
};

// Stores a warp's columns of one of its rows, `factor` times, and zeros where `empty`; not
// `stored`: nothing. Returns what is not 0 if any is not finite. `out`: column 0; `first`: the
// warp's.
template <class To, int kCount>
__device__ __forceinline__ uint32 store_columns(const float (&output)[kCount], int row,
                                                float factor, bool stored, bool empty,
                                                typename To::Bits* out, int first) {
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
                               empty ? make_uint4(0, 0, 0, 0)
                                     : make_uint4(pieces[4 * g], pieces[4 * g + 1],
                                                  pieces[4 * g + 2], pieces[4 * g + 3]));
      }
    }
    return flaw;
  }
}

struct Rows {
  const Sm80ForwardParams& p;
  Shared& shared;
  SoftmaxState<Element> softmax[kRowTiles];
  float output[kRowTiles][kWarpColumns / 2];
  uint32 first_columns[larger(kQuerySteps, 1)][kRowTiles][4];  // of its queries

  // Of its kind, the warp's number.
  static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % kRowWarps; }
  static __device__ __forceinline__ int value_warp() {
    return kValueWarps == 1 ? 0 : threadIdx.x / (32 * kRowWarps);
  }
  // Weights that overflow, which bases of earlier blocks let happen, make the sum infinite: then
  // all blocks are walked again, with a maximum in each.
  __device__ __forceinline__ void run() {
    for (Search search = kUntilStarted;; search = kAlways) {
      // Opaque: a register would hold that it is kAlways beside the one that says what it is.
      search = static_cast<Search>(ptx::opaque(attend(Walk(p), search)));
      const Unit unit(p);
      bool overflowed = false;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const Ends ends = end_of(unit, tile);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          overflowed = overflowed || (ends.lse[row] == kInfinity && !ends.empty[row]);
        }
      }
      if (!__syncthreads_or(overflowed) || search == kAlways) break;
    }
    const Unit unit(p);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) store(unit, tile, end_of(unit, tile));
  }

 private:
  using Scores = float[kBlockKV / 2];
  // In which blocks the bases of the softmax rise to the maxima: till all rows of the warp have
  // one.
  enum Search { kNoMore, kUntilStarted, kAlways };

  __device__ __forceinline__ Search attend(const Walk& walk, Search search) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (float& x : output[tile]) x = 0.0f;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        softmax[tile].base[row] = kNoBase;
        softmax[tile].sum[row] = 0.0f;
      }
    }
    park(shared);
    const Place first{walk.first_block()};
    if (walk.is_over(first.block)) return search;
    Copies copies(p, walk, shared, first);
    ScoreFunction<Sm80ForwardParams> function;
    function.read(p, walk.batch, walk.head);
    bool is_first = true;
#pragma unroll 1
    for (Place at = first; !walk.is_over(at.block); at = copies.after(at)) {
      float scores[kRowTiles][kBlockKV / 2];
      // On their way beside the copies.
      float score_factors[kRowTiles];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        score_factors[tile] = factor_of_keys(walk, p.key_factors, at.block) *
                              factor_of_queries(walk, kTileRows * tile);
      }
      const float value_factor = factor_of_keys(walk, p.value_factors, at.block);
      const uint32 keys = copies.take_keys(at, is_first);
      if (kQuerySteps > 0 && is_first) keep_queries(copies.query_tile());
      multiply_keys(copies.query_tile(), keys, score_factors, scores);
      if constexpr (kValueWarps > 1) add_scores_of_others(shared.key(at.stage), scores);
      is_first = false;
      // Ahead of the softmax, which is then one piece with the products.
      const uint32 values = copies.take_values(at);
      apply_terms(walk, function, at.block, scores);
      unpark(shared);
      add_weights(search != kNoMore, scores);
      if (search == kUntilStarted && is_started()) search = kNoMore;
      park(shared);
      Weights<Element> weights[kRowTiles];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        pack_weights(walk, tile, at.block, scores[tile], weights[tile]);
      }
      multiply_values(values, value_factor, weights);
    }
    unpark(shared);
    return search;
  }

  template <class Of>
  __device__ __forceinline__ void park(Of& shared) const {
    if constexpr (kParksSoftmax) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const auto& base = softmax[tile].base;
        const auto& sum = softmax[tile].sum;
        const uint32 to = ptx::shared_address(&shared.softmax[tile][threadIdx.x]);
        ptx::store_shared_x4(to, __float_as_uint(base[0]), __float_as_uint(base[1]),
                             __float_as_uint(sum[0]), __float_as_uint(sum[1]));
      }
    }
  }
  template <class Of>
  __device__ __forceinline__ void unpark(const Of& shared) {
    if constexpr (kParksSoftmax) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const float4 x =
            ptx::load_shared_f4(ptx::shared_address(&shared.softmax[tile][threadIdx.x]));
        softmax[tile].base[0] = x.x, softmax[tile].base[1] = x.y;
        softmax[tile].sum[0] = x.z, softmax[tile].sum[1] = x.w;
      }
    }
  }

  // -- products --
  __device__ __forceinline__ float factor_of_keys(const Walk& walk, const float* factors,
                                                  int block) const {
    return halves::factor_of(factors, static_cast<int64>(walk.batch) * p.kv_heads + walk.kv_head,
                             p.kv_len, block * kBlockKV);
  }
  __device__ __forceinline__ float factor_of_queries(const Walk& walk, int row) const {
    return halves::factor_of(p.query_factors,
                             static_cast<int64>(walk.batch) * p.query_heads + walk.head,
                             p.query_len, walk.first_query() + row);
  }
  // A fifth of what a block's scores read of shared memory, of two tiles of rows a third.
  __device__ __forceinline__ void keep_queries(uint32 from) {
    const uint32 lane = opaque_lane();
    const LaneOfTile<kUnitRows> query_at(from, row_warp() * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ptx::load_matrix_x4(query_at.at(step, kTileRows * tile), first_columns[step][tile]);
      }
    }
  }
  __device__ __forceinline__ void multiply_keys(uint32 queries, uint32 keys,
                                                const float (&factors)[kRowTiles],
                                                float (&scores)[kRowTiles][kBlockKV / 2]) const {
#pragma unroll
    for (auto& tile : scores) {
#pragma unroll
      for (float& x : tile) x = 0.0f;
    }
    // Lanes in the order of matrices: A has rows first, B, which is transposed, columns.
    const uint32 lane = opaque_lane();
    // Past the head dim there are zeros, as far as a part may reach.
    const int first = value_warp() * kWarpSteps;  // of 16 columns
    queries += first / 4 * kUnitRows * kBoxRowBytes;
    keys += first / 4 * kBlockKV * kBoxRowBytes;
    const uint32 skipped = kWarpSteps % 4 == 0 ? 0 : first % 4;
    const LaneOfTile<kUnitRows> query_at(queries, row_warp() * 16 + lane % 16, lane / 16);
    const LaneOfTile<kBlockKV> key_at(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    if constexpr (kSumsOf32 && kWarpSteps % 2 == 0) {
#pragma unroll 1
      for (int step = 0; step < kWarpSteps; step += 2) {
        uint32 a[kRowTiles][2][kParts][4];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
          load_parts<kHeadDim, kUnitRows>(query_at.at(skipped + step + i % 2, kTileRows * (i / 2)),
                                          a[i / 2][i % 2]);
        }
#pragma unroll
        for (int j = 0; j < kBlockKV / 16; ++j) {
          if (kRowTiles == 2) __syncwarp();
          uint32 b[2][kParts][4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load_parts<kHeadDim, kBlockKV>(key_at.at(skipped + step + i, 16 * j), b[i]);
          }
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            multiply_halves(scores[tile], 8 * j, a[tile][0], a[tile][1], b, factors[tile]);
          }
        }
      }
      return;
    }
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kWarpSteps; ++step) {
      uint32 a[kRowTiles][kParts][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if (step < kQuerySteps) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[tile][0][i] = first_columns[step][tile][i];
        } else {
          load_parts<kHeadDim, kUnitRows>(query_at.at(skipped + step, kTileRows * tile), a[tile]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; ++j) {
        if (kParts > 1 && kRowTiles == 2) __syncwarp();
        uint32 b[kParts][4];
        load_parts<kHeadDim, kBlockKV>(key_at.at(skipped + step, 16 * j), b);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_parts<Element>(scores[tile], 8 * j, a[tile], b, factors[tile]);
        }
      }
    }
  }
  __device__ __forceinline__ void multiply_values(uint32 values, float value_factor,
                                                  const Weights<Element> (&weights)[kRowTiles]) {
    const uint32 lane = opaque_lane();
    const int first = value_warp() * (kWarpColumns / 16);
    values += first / 4 * kBlockKV * kBoxRowBytes;
    const uint32 skipped = kWarpColumns % 64 == 0 ? 0 : first % 4;
    const LaneOfTile<kBlockKV> value_at(values, lane % 16, lane / 16);
    if constexpr (kSumsOf32 && kBlockKV % 32 == 0) {
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; j += 2) {
        uint32 a[kRowTiles][2][kParts][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) weights[tile].get(j + i, a[tile][i]);
        }
#pragma unroll
        for (int column = 0; column < kWarpColumns / 16; ++column) {
          if (column % (kRowTiles == 2 ? 1 : 4) == 0) __syncwarp();
          uint32 b[2][kParts][4];
#pragma unroll
          for (int i = 0; i < 2 * kParts; ++i) {
            ptx::load_transposed_x4(value_at.at(skipped + column, 16 * (j + i / kParts)) +
                                        i % kParts * kPlaneBytes<kValueDim, kBlockKV>,
                                    b[i / kParts][i % kParts]);
          }
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            multiply_halves(output[tile], 8 * column, a[tile][0], a[tile][1], b, value_factor);
          }
        }
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
      uint32 a[kRowTiles][kParts][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) weights[tile].get(j, a[tile]);
#pragma unroll
      for (int column = 0; column < kWarpColumns / 16; ++column) {
        // Else loads and sums of many columns are under way, and numbers kept for the end spilled.
        if (kParts > 1 && column % (kRowTiles == 2 ? 1 : 4) == 0) __syncwarp();
        uint32 b[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          ptx::load_transposed_x4(
              value_at.at(skipped + column, 16 * j) + i * kPlaneBytes<kValueDim, kBlockKV>, b[i]);
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_parts<Element>(output[tile], 8 * column, a[tile], b, value_factor);
        }
      }
    }
  }
  template <int kDim, int kRows>
  static __device__ __forceinline__ void load_parts(uint32 from, uint32 (&parts)[kParts][4]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      ptx::load_matrix_x4(from + i * kPlaneBytes<kDim, kRows>, parts[i]);
    }
  }
  // Each warp has the scores of its part of the head dim; the keys, whose place they take, are of
  // no more use.
  __device__ __forceinline__ void add_scores_of_others(
      const unsigned char* place, float (&scores)[kRowTiles][kBlockKV / 2]) const {
    constexpr int kWords = kRowTiles * kBlockKV / 8;  // of 16 bytes, of a thread
    const uint32 lanes = ptx::shared_address(place) + threadIdx.x % 32 * 16;
    const auto word_at = [&](int of, int word) {
      return lanes + ((of * kRowWarps + row_warp()) * kWords + word) * 512;
    };
    __syncthreads();
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const float* x = &scores[word / (kBlockKV / 8)][word % (kBlockKV / 8) * 4];
      ptx::store_shared_x4(word_at(value_warp(), word), __float_as_uint(x[0]),
                           __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
    __syncthreads();
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      float4 sum = ptx::load_shared_f4(word_at(0, word));
#pragma unroll
      for (int of = 1; of < kValueWarps; ++of) {
        const float4 more = ptx::load_shared_f4(word_at(of, word));
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      float* x = &scores[word / (kBlockKV / 8)][word % (kBlockKV / 8) * 4];
      x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
    }
  }

  // -- scores to weights --
  __device__ __forceinline__ void apply_terms(const Walk& walk,
                                              const ScoreFunction<Sm80ForwardParams>& function,
                                              int block, Scores (&scores)[kRowTiles]) const {
    const int first_key = block * kBlockKV;
    const bool whole = walk.is_whole(block);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const auto query = [&](int row) { return walk.query(tile, row); };
      if constexpr (kHasBias) {
        bias::RowTile<kBlockKV> biases;
        biases.load(p, walk.batch, walk.head, query, first_key);
        biases.visit(
            [&](int i, float bias) { scores[tile][i] = with_bias(p, scores[tile][i], bias); });
      }
      if constexpr (kHasScoreFunction) {
        apply_function(p, function, query, first_key, scores[tile]);
      }
      score_function<kPreScale>(p, scores[tile]);
    }
    if (whole) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const auto query = [&](int row) { return walk.query(tile, row); };
      mask::RowBits<kUnitRows, kBlockKV> bits;
      if constexpr (kHasMask) {
        bits.load(p, walk.batch, walk.head, query, block);
      }
      hide_scores<kBlockKV / 2, /*kBranches=*/true>(p, walk.batch, walk.sight, query, first_key,
                                                    walk.is_one_segment(block), bits, scores[tile]);
    }
  }
  __device__ __forceinline__ bool is_started() const {
    bool started = true;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) started = started && softmax[tile].is_started();
    return started;
  }
  // Scores become weights, of all tiles together: what is rare costs one branch.
  __device__ __forceinline__ void add_weights(bool searches, Scores (&scores)[kRowTiles]) {
    const auto multiply_output = [&](int tile, const float (&correction)[2]) {
#pragma unroll
      for (int i = 0; i < kWarpColumns / 2; ++i) output[tile][i] *= correction[fragment::row(i)];
    };
    if (searches) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        float correction[2];
        softmax[tile].search<false>(scores[tile], p.scale_log2, correction);
        multiply_output(tile, correction);
      }
    }
    bool rises = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float apart[2];  // two more registers a tile, if it were kept, are spilled at head dim 128
      rises |= softmax[tile].weigh(scores[tile], OneFactor{p.scale_log2}, kDecisiveOfThread, apart,
                                   Alone{});
    }
    // After a search the bases are maxima: beyond 2^27 their rounding alone may look like a rise.
    if (!__any_sync(0xffffffffu, rises && !searches)) return;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float correction[2];
      softmax[tile].raise(scores[tile], correction);
      multiply_output(tile, correction);
    }
  }
  __device__ __forceinline__ void pack_weights(const Walk& walk, int tile, int block,
                                               const Scores& scores,
                                               Weights<Element>& weights) const {
    DroppedPairs<kBlockKV> dropped;
    if constexpr (kHasDropout) {
      const int key = block * kBlockKV + fragment::first_column(threadIdx.x);
      const RowDraws draws(Draws(p, walk.batch, walk.head), walk.query(tile, 0), key);
#pragma unroll
      for (int i = 0; i < kBlockKV / 16; i += 2) dropped.draw(p, draws, i);
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      weights.set(i, scores[2 * i], scores[2 * i + 1], dropped);
    }
  }

  // -- results --
  // Of a thread's two rows.
  struct Ends {
    float factor[2], lse[2];
    bool empty[2];  // they see nothing, or are past the length
  };
  __device__ __forceinline__ Ends end_of(const Unit& unit, int tile) const {
    Ends ends;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float factor =
          softmax[tile].template finish<kHasSinks>(row, unit.sink() * kLog2E, ends.lse[row]);
      ends.factor[row] = factor * dropout_scale(p);
      ends.empty[row] =
          ends.lse[row] == kNegativeInfinity || unit.query(tile, row) >= unit.sight.query_length;
    }
    return ends;
  }
  __device__ __forceinline__ ResultElement::Bits* out_of(const Unit& unit, int query) const {
    return static_cast<ResultElement::Bits*>(p.out) +
           query_row(p, unit.batch, query, unit.head) * kValueDim;
  }
  __device__ __forceinline__ void store(const Unit& unit, int tile, const Ends& ends) const {
    uint32 nonfinite = 0;  // rows of the warp with NaN or infinity, bit 4 * quad + row for each
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int query = unit.query(tile, row);
      const float lse = ends.lse[row];
      const bool stored = query < p.query_len, empty = ends.empty[row];
      const uint32 flaw =
          store_columns<ResultElement>(output[tile], row, ends.factor[row], stored, empty,
                                       out_of(unit, query), value_warp() * kWarpColumns);
      // A NaN lse is right, and the row with it: masked scores never reach the sum of the weights.
      // But of halves, whose numbers may be too far apart.
      const bool flawed = (flaw != 0 || lse == kInfinity) && (kHalves || lse == lse);
      uint32 lanes = __ballot_sync(0xffffffffu, flawed && stored && !empty);
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      nonfinite |= (lanes & 0x11111111u) << row;
      if (stored && threadIdx.x % 4 == 0 && value_warp() == 0) {
        const float of_empty = kHasSinks ? unit.sink() : kNegativeInfinity;
        p.lse[lse_row(p, unit.batch, query, unit.head)] = empty ? of_empty : lse;
      }
    }
    if constexpr (kValueWarps > 1) nonfinite = of_all_columns(nonfinite);
    if (nonfinite == 0) return;
    __syncwarp();  // these results are stored before others
    const int first = unit.first_query() + kTileRows * tile + 16 * row_warp();
    const auto row_of = [&](int bit) -> Row {
      const int query = first + bit / 4 + fragment::kRowStep * (bit % 4);
      Range keys = row_columns(unit.sight, query, 0);
      keys.begin = max(keys.begin, 0);
      const int64 first_key = key_row(p, unit.batch, 0, kv_head_of(p, unit.head));
      const int64 lse = lse_row(p, unit.batch, query, unit.head);
      return {query, unit.head, first_key, keys, lse, out_of(unit, query)};
    };
    find_wrong(p, unit.batch, nonfinite, row_of,
               [&](int, const Row& row) { repeat_row(p, unit.batch, row); });
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
