// A warp's query rows, 16 in each of kRowTiles tiles that lie 64 rows apart: products, weights,
// results.
#pragma once

#include "forward_exact.cuh"
#include "fragment.cuh"
#include "sm80/forward_copy.cuh"
#include "softmax.cuh"

namespace forward {

inline constexpr int kValueColumns = round_up(kValueDim, 16);

struct Rows {
  const Sm80ForwardParams& p;
  const Walk& walk;
  Shared& shared;
  SoftmaxState<Element> softmax[kRowTiles];
  float output[kRowTiles][kValueColumns / 2];

  // The thread's query, row = 0 or 1 of a tile.
  __device__ __forceinline__ int query_of(int tile, int row) const {
    return walk.first_query() + 64 * tile + fragment::first_row(threadIdx.x) +
           fragment::kRowStep * row;
  }

  // Weights that overflow, which bases of earlier blocks let happen, make the sum infinite: then
  // all blocks are walked again, with a maximum in each.
  __device__ __forceinline__ void run() {
    Ends ends[kRowTiles];
    for (bool again = false;; again = true) {
      attend(again);
      bool overflowed = false;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ends[tile] = end_of(tile);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          overflowed = overflowed || (ends[tile].lse[row] == kInfinity && !ends[tile].empty[row]);
        }
      }
      if (!__syncthreads_or(overflowed) || again) break;
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) store(tile, ends[tile]);
  }

 private:
  using Scores = float[kBlockKV / 2];
  using Weights = uint32[kBlockKV / 16][4];  // matrices: rows 0 and 8 on, then the next 8 keys

  __device__ __forceinline__ void attend(bool again) {
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
    if (walk.is_over(walk.first_block())) return;
    Copies copies(p, walk, shared);
    bool is_first = true;
#pragma unroll 1
    for (Place at{walk.first_block()}; !walk.is_over(at.block); at.advance(walk)) {
      float scores[kRowTiles][kBlockKV / 2];
      Weights weights[kRowTiles];
      multiply_keys(copies.query_tile(), copies.take_keys(at, is_first), scores);
      is_first = false;
      const bool whole = walk.is_whole(at.block);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        add_weights(tile, at.block, whole, again, scores[tile], weights[tile]);
      }
      multiply_values(copies.take_values(at), weights);
    }
  }

  // -- products --
  __device__ __forceinline__ void multiply_keys(uint32 queries, uint32 keys,
                                                float (&scores)[kRowTiles][kBlockKV / 2]) const {
#pragma unroll
    for (auto& tile : scores) {
#pragma unroll
      for (float& x : tile) x = 0.0f;
    }
    // Lanes in the order of matrices: A has rows first, B, which is transposed, columns.
    // Opaque: addresses would be computed ahead of the loop, for registers that are not there.
    const int thread = ptx::opaque(threadIdx.x), lane = thread % 32;
    const int query = thread / 32 * 16 + lane % 16;
    const int key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < ceil_div(kHeadDim, 16); ++step) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ptx::load_matrix_x4(
            chunk_address<kUnitRows>(queries, query + 64 * tile, 2 * step + lane / 16), a[tile]);
      }
#pragma unroll
      for (int j = 0; j < kBlockKV / 16; ++j) {
        uint32 b[4];
        ptx::load_matrix_x4(chunk_address<kBlockKV>(keys, key + 16 * j, 2 * step + lane / 8 % 2),
                            b);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          ptx::multiply_add<kBFloat16>(scores[tile], 8 * j, a[tile], b[0], b[1]);
          ptx::multiply_add<kBFloat16>(scores[tile], 8 * j + 4, a[tile], b[2], b[3]);
        }
      }
    }
  }
  __device__ __forceinline__ void multiply_values(uint32 values,
                                                  const Weights (&weights)[kRowTiles]) {
    const int lane = threadIdx.x % 32, key = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int j = 0; j < kBlockKV / 16; ++j) {
#pragma unroll
      for (int column = 0; column < kValueColumns / 16; ++column) {
        uint32 b[4];
        ptx::load_transposed_x4(chunk_address<kBlockKV>(values, key + 16 * j, 2 * column + chunk),
                                b);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          ptx::multiply_add<kBFloat16>(output[tile], 8 * column, weights[tile][j], b[0], b[1]);
          ptx::multiply_add<kBFloat16>(output[tile], 8 * column + 4, weights[tile][j], b[2], b[3]);
        }
      }
    }
  }

  // -- scores to weights --
  __device__ __forceinline__ void add_weights(int tile, int block, bool whole, bool again,
                                              Scores& scores, Weights& weights) {
    const int first_key = block * kBlockKV;
    const auto query = [&](int row) { return query_of(tile, row); };
    if constexpr (kHasBias) {
      bias::RowTile<kBlockKV> biases;
      biases.load(p, walk.batch, walk.head, query, first_key);
      biases.visit([&](int i, float bias) { scores[i] = with_bias(p, scores[i], bias); });
    }
    if constexpr (kHasScoreFunction) {
      apply_function(p, walk.batch, walk.head, query, first_key, scores);
    }
    score_function<kPreScale>(p, scores);
    if (!whole) {
      mask::RowBits<kBlockKV> bits;
      if constexpr (kHasMask) {
#pragma unroll
        for (int row = 0; row < (kMaskQueries ? 2 : 1); ++row) {
          bits.rows[row].load(p, walk.batch, walk.head, query(row), block);
        }
      }
      hide_scores<kBlockKV / 2, /*kBranches=*/true>(p, walk.batch, walk.sight, query, first_key,
                                                    walk.is_one_segment(block), bits, scores);
    }
    SoftmaxState<Element>& state = softmax[tile];
    float correction[2];
    if (state.extend(scores, p.scale_log2, again || !state.is_started(), correction, Alone{})) {
#pragma unroll
      for (int i = 0; i < kValueColumns / 2; ++i) output[tile][i] *= correction[fragment::row(i)];
    }
    DroppedPairs<kBlockKV> dropped;
    if constexpr (kHasDropout) {
      const Draws draws(p, walk.batch, walk.head);
      const uint32 counter = Draws::of_query(query(0));
      const int key = first_key + fragment::first_column(threadIdx.x);
#pragma unroll
      for (int i = 0; i < kBlockKV / 16; ++i) {
        dropped.draw(p, draws, counter, Draws::of_key(key), i);
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) {
      uint32& pair = weights[i / 4][i % 4];
      pair = Element::pack(scores[2 * i], scores[2 * i + 1]);
      if constexpr (kHasDropout) pair = dropped.keep(i, pair);
    }
  }

  // -- results --
  // Of a thread's two rows.
  struct Ends {
    float factor[2], lse[2];
    bool empty[2];  // they see nothing, or are past the length
  };
  __device__ __forceinline__ float sink() const {
    return kHasSinks ? p.sinks[walk.batch * p.sinks_batch_stride + walk.head] : 0.0f;
  }
  __device__ __forceinline__ Ends end_of(int tile) const {
    Ends ends;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float factor =
          softmax[tile].template finish<kHasSinks>(row, sink() * kLog2E, ends.lse[row]);
      ends.factor[row] = factor * dropout_scale(p);
      ends.empty[row] =
          ends.lse[row] == kNegativeInfinity || query_of(tile, row) >= walk.sight.query_length;
    }
    return ends;
  }
  __device__ __forceinline__ uint16* out_of(int query) const {
    return static_cast<uint16*>(p.out) + query_row(p, walk.batch, query, walk.head) * kValueDim;
  }
  __device__ __forceinline__ void store(int tile, const Ends& ends) const {
    constexpr int kPieces = round_up(kValueColumns, 32) / 8;
    const int c = threadIdx.x % 4;
    uint32 nonfinite = 0;  // rows of the warp with NaN or infinity, bit 4 * quad + row for each
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32 pieces[kPieces];
      fragment::gather_row(output[tile], row, ends.factor[row], pieces);
      uint32 flaw = 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) flaw = Element::accumulate_nonfinite(flaw, pieces[i]);
      const int query = query_of(tile, row);
      const float lse = ends.lse[row];
      const bool stored = query < p.query_len, empty = ends.empty[row];
      // A NaN lse is right, and the row with it: masked scores never reach the sum of the weights.
      const bool flawed = (flaw != 0 || lse == kInfinity) && lse == lse;
      uint32 lanes = __ballot_sync(0xffffffffu, flawed && stored && !empty);
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      nonfinite |= (lanes & 0x11111111u) << row;
      if (!stored) continue;
      uint16* out = out_of(query);
#pragma unroll
      for (int g = 0; g < kPieces / 4; ++g) {
        const int column = 8 * (4 * g + c);
        if (kValueDim % 32 == 0 || column < kValueDim) {
          store_piece<kValueDim>(out, column,
                                 empty ? make_uint4(0, 0, 0, 0)
                                       : make_uint4(pieces[4 * g], pieces[4 * g + 1],
                                                    pieces[4 * g + 2], pieces[4 * g + 3]));
        }
      }
      if (c == 0) {
        const float of_empty = kHasSinks ? sink() : kNegativeInfinity;
        p.lse[lse_row(p, walk.batch, query, walk.head)] = empty ? of_empty : lse;
      }
    }
    if (nonfinite == 0) return;
    __syncwarp();  // these results are stored before others
    const int first = walk.first_query() + 64 * tile + static_cast<int>(threadIdx.x) / 32 * 16;
    repeat_rows(p, walk.batch, nonfinite, [&](int bit) -> Row {
      const int query = first + bit / 4 + fragment::kRowStep * (bit % 4);
      Range keys = row_columns(walk.sight, query, 0);
      keys.begin = max(keys.begin, 0);
      const int64 first_key = key_row(p, walk.batch, 0, walk.kv_head);
      const int64 lse = lse_row(p, walk.batch, query, walk.head);
      return {query, walk.head, first_key, keys, lse, out_of(query)};
    });
  }
};

}  // namespace forward
