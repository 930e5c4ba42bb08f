// A warp's query rows from block to block: the walk, terms, and how scores become weights.
// forward_products.cuh has their registers and products, forward_results.cuh what is stored.
#pragma once

#include "fragment.cuh"
#include "sm80/forward_copy.cuh"
#include "sm80/forward_results.cuh"
#include "softmax.cuh"

namespace forward {

struct Rows : RowResults {
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
    uint32 nonfinite = 0;  // bits 2 * tile on of every four
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      nonfinite |= store(unit, tile, end_of(unit, tile)) << 2 * tile;
    }
    if (nonfinite == 0) return;
    __syncwarp();  // these results are stored before others
    repair_tiles(p, nonfinite);
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
        const auto row_of = [&](const ::Place& at, int) { return function.of_query(at); };
        apply_function(function, row_of, query, first_key, scores[tile]);
      }
      score_function<kPreScale>(p, scores[tile]);
    }
    if (whole) return;
    if constexpr (kFromPages) {  // found anew: in registers they were spilled, 12 bytes
      hide(Unit(p), first_key, scores);
      return;
    }
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
  // The same of a request's keys: no mask hides any, and no segments.
  __device__ __forceinline__ void hide(const Unit& unit, int first_key,
                                       Scores (&scores)[kRowTiles]) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const auto query = [&](int row) { return unit.query(tile, row); };
      hide_scores<kBlockKV / 2, /*kBranches=*/true>(p, unit.batch, unit.sight, query, first_key,
                                                    true, mask::RowBits<kUnitRows, kBlockKV>(),
                                                    scores[tile]);
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
};

}  // namespace forward
