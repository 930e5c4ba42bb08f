// Latent decoding: packed rows and up to 32 query rows (kFewRows).
//
// Blocks of 128 keys come as they are, by bulk copies. Each of eight warps has 16 keys of a block
// as the left operand of S^T = K Q^T, and 64 features as that of O^T = V^T P^T, both by mma.sync.
// So an e4m3 becomes a float16, which holds it, in one instruction for two of them, and never goes
// back to shared memory. Scales are left to what there is less of: to scores, by quarters of the
// features, and to weights.
//
// In float16 are: a query relative to a power of two of its row, weights relative to the row's
// largest, and scales relative to a power of two of their quarter, as large as the largest so far.
// What is 2^-21 of these and less loses bits.
#pragma once

#include "logit.cuh"
#include "sm90_latent/latent_boxes.cuh"
#include "sm90_latent/latent_few_results.cuh"

namespace decode {

struct FewLoader {
  const DecodeParams& p;
  FewShared& shared;
  uint32 blocks = 0;

  __device__ __forceinline__ void run(const OwnLine& line, const Share& share) {
    line.walk(share, [&](const Unit& unit, const Range& range) {
      Boxes boxes(p, unit, range);
#pragma unroll 1
      for (boxes.find_pages(); boxes.block < range.end; boxes.find_pages()) {
        load(boxes, unit);
        ++blocks;
        boxes.move();
      }
    });
  }

  __device__ __forceinline__ void load(const Boxes& boxes, const Unit& unit) {
    const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
    const uint32 full = ptx::shared_address(&shared.full[stage]);
    const uint32 to = ptx::shared_address(shared.rows[stage]);
    const Range seen = positions_of(p, unit.length);
    const auto rows_of = [&](int piece) {  // what is behind a row's end may be no cache
      return min(kBoxRows, seen.end - (boxes.block * kBlockKV + piece * kBoxRows));
    };
    int bytes = 0;
    boxes.each([&](int piece, int, int) { bytes += rows_of(piece) * kPackedBytes; });
    if constexpr (kPieces > 1) bytes = __reduce_add_sync(0xffffffffu, bytes);
    const bool lacks = boxes.lack();
    ptx::barrier_wait(ptx::shared_address(&shared.empty[stage]), parity ^ 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      shared.spoiled[stage] = lacks;
      ptx::barrier_arrive_expect(full, bytes);
    }
    __syncwarp();
    if (kPieces == 1 && threadIdx.x % 32 != 0) return;
    boxes.each([&](int piece, int page, int row) {
      const int64 slot = static_cast<int64>(page) * p.page_size + row;
      ptx::bulk_load(to + piece * kBoxRows * kPackedBytes,
                     static_cast<const unsigned char*>(p.key_data) + slot * kPackedBytes,
                     rows_of(piece) * kPackedBytes, full);
    });
  }
};

struct FewConsumer : FewSums {
  using FewSums::FewSums;

  uint32 blocks = 0;  // behind this warp
  int of_scales[2];   // exponents of the quarters of this lane's two scales

  __device__ __forceinline__ void run(const OwnLine& line, const Share& share) {
    line.walk<true>(
        share,
        [&](const Unit& of, const Range& range) {
          unit = of;
          start();
          const int end = ptx::uniform(range.end);
          const bool begins = range.begin == unit.blocks.begin, ends = end == unit.blocks.end;
          const int is_whole = ptx::opaque(begins && ends);  // known from here on: registers
#pragma unroll 1
          for (int block = ptx::uniform(range.begin); block < end; ++block) add(block);
          finish(is_whole);
          ++units;
        },
        ptx::shared_address(shared.parked + warp));
  }

 private:
  __device__ __forceinline__ void start() {
    exponent = of_scales[0] = of_scales[1] = kLeastExponent;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (float& x : output[i]) x = 0.0f;
    }
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        base[tile][i] = kNoBase;
        sum[tile][i] = 0.0f;
      }
    }
#pragma unroll 1
    for (int row = warp; row < kQueryRows; row += kFewWarps) load_query(row);
    meet();
  }

  __device__ __forceinline__ void add(int block) {
    const uint32 stage = stage_of_block(blocks);
    const uint32 rows = ptx::shared_address(shared.rows[stage]);
    ptx::barrier_wait(ptx::shared_address(&shared.full[stage]), parity_of_block(blocks));
    float scores[4 * kQueryTiles];
    multiply_queries(rows, scores);
    score_function(p, scores);
    // Rounded here, not within a fused product: the largest weight is 1 however large scores are.
#pragma unroll
    for (float& x : scores) x = __fmul_rn(x, p.scale_log2);
    const int first = block * kBlockKV + 16 * warp;
    const int oldest = unit.length - p.query_len;  // position of query 0
    const int by_all = first_seen(p, unit.length - 1);
    if (first < by_all || first + 16 > oldest + 1) hide(rows, first, scores);
    float correction[kQueryTiles][2];
    weigh(rows, scores, correction);
    if (shared.spoiled[stage]) {
#pragma unroll
      for (auto& of : sum) of[0] = of[1] = kInfinity - kInfinity;
    }
    meet();
    multiply_values(rows, correction);
    __syncwarp();
    if (ptx::kEveryLaneArrives || lane == 0) {
      ptx::lane_arrive(ptx::shared_address(&shared.empty[stage]));
    }
    ++blocks;
  }

  // Scores become weights, in shared memory, and `correction` is for what was summed before.
  __device__ __forceinline__ void weigh(uint32 rows, float (&scores)[4 * kQueryTiles],
                                        float (&correction)[kQueryTiles][2]) {
    // A lane's two scales, of quarters lane / 16 and two more.
    float scales[2];
    int largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = __uint_as_float(ptx::load_shared(rows + (16 * warp + lane % 16) * kPackedBytes +
                                                   kScalesAt + 4 * (lane / 16 + 2 * i)));
      largest[i] = static_cast<int>(__float_as_uint(scales[i]) << 1 >> 24) - 127;
#pragma unroll
      for (int step = 1; step < 16; step *= 2) {
        largest[i] = max(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], step));
      }
      if (lane % 16 == 0) {
        shared.exponents[lane / 16 + 2 * i][warp] = min(largest[i], 127);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(scores[4 * tile + i], scores[4 * tile + 2 + i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        }
        if (group == 0) shared.largest[query_row(tile, i)][warp] = most;
      }
    }
    meet();
    const int before = exponent;
    exponent = raised(exponent, own_quarter());
    const float ratio = ptx::power_of_two(max(before - exponent, -127));
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4* const of =
            reinterpret_cast<const float4*>(shared.largest[query_row(tile, i)]);
        const float4 a = of[0], b = of[1];
        const float most =
            fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        const float now = fmaxf(base[tile][i], most);
        const float by = ptx::exp2_approx(base[tile][i] - now);
        base[tile][i] = now;
        float weights[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[4 * tile + 2 * j + i];
          weights[j] = ptx::exp2_approx(score - now);
          score = weights[j] * (1 << kWeightExponent);
        }
        sum[tile][i] = fmaf(sum[tile][i], by, weights[0] + weights[1]);
        correction[tile][i] = by * ratio;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ptx::store_shared(
            ptx::shared_address(shared.weights) + (16 * warp + group + 8 * j) * kWeightsPitch +
                16 * tile + 4 * quad,
            ptx::pack_float16(scores[4 * tile + 2 * j], scores[4 * tile + 2 * j + 1]));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_scales[i] = raised(of_scales[i], lane / 16 + 2 * i);
      const float scale = scales[i] * ptx::power_of_two(kScaleExponent - of_scales[i]);
      shared.scales[lane / 16 + 2 * i][16 * warp + lane % 16] = Float16::round(scale);
    }
  }

  // The largest exponent of a quarter so far, this block's included.
  __device__ __forceinline__ int raised(int before, int quarter) const {
    const int4* const of = reinterpret_cast<const int4*>(shared.exponents[quarter]);
    const int4 a = of[0], b = of[1];
    return max(max(max(a.x, a.y), max(a.z, a.w)), max(max(max(b.x, b.y), max(b.z, b.w)), before));
  }

  // output[64 features, queries] += values[keys, 64 features]^T weights[keys, queries].
  __device__ __forceinline__ void multiply_values(uint32 rows,
                                                  const float (&correction)[kQueryTiles][2]) {
    bool rises = false;
#pragma unroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
      rises = rises || correction[tile][0] != 1.0f || correction[tile][1] != 1.0f;
    }
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4 * kQueryTiles; ++j) output[i][j] *= correction[j / 4][j % 2];
      }
    }
    const uint32 values = rows + 2 * quad * kPackedBytes + 64 * warp + 8 * group;
    const uint32 weights =
        ptx::shared_address(shared.weights) + lane % 16 * kWeightsPitch + lane / 16 * 16;
    const uint32 scales =
        ptx::shared_address(shared.scales) + 2 * (own_quarter() * kBlockKV + 2 * quad);
#pragma unroll kTogether
    for (int key = 0; key < kBlockKV; key += 16) {
      uint32 a[4][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32 at = values + (key + 8 * half) * kPackedBytes;
        const float2 even = ptx::load_shared_f2(at), odd = ptx::load_shared_f2(at + kPackedBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32 x = __float_as_uint(i == 0 ? even.x : even.y);
          const uint32 y = __float_as_uint(i == 0 ? odd.x : odd.y);
          ptx::unpack_e4m3(__byte_perm(x, y, 0x5140), a[2 * i][2 * half], a[2 * i][2 * half + 1]);
          ptx::unpack_e4m3(__byte_perm(x, y, 0x7362), a[2 * i + 1][2 * half],
                           a[2 * i + 1][2 * half + 1]);
        }
      }
      const uint32 low = ptx::load_shared(scales + 2 * key),
                   high = ptx::load_shared(scales + 2 * key + 16);
#pragma unroll
      for (int two = 0; two < kQueryTiles / 2; ++two) {
        uint32 b[4];
        ptx::load_transposed_x4(weights + key * kWeightsPitch + 32 * two, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = ptx::fma_float16(b[i], i % 2 == 0 ? low : high, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::multiply_add<false>(output[i], 8 * two, a[i], b[0], b[1]);
          ptx::multiply_add<false>(output[i], 8 * two + 4, a[i], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace decode
