// The bias: its elements on the way to the fragments of S or S^T.
//
// The bias is read as given: float32, bfloat16 or float16 whatever the query's type (kBiasFloat32,
// kBiasBFloat16), and once along the dims that it does not have (kBiasQueries and kBiasKeys: it
// varies with the query, the key). The four threads of a quad load four each of every 16 keys of a
// query, 8 or 16 bytes, and exchange half of them; S^T takes them from there by transposing 8 x 8.
#pragma once

#include "element.cuh"
#include "fragment.cuh"
#include "numbers.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace bias {

inline constexpr int kBytes = kBiasFloat32 ? 4 : 2;
inline constexpr int kPairWords = kBytes / 2;  // 32-bit words of two elements
inline constexpr bool kIsMatrix = kBiasQueries && kBiasKeys;
using Pair = uint32[kPairWords];
using Narrow = ElementType<kBiasBFloat16>::Type;  // unless it is float32

__device__ __forceinline__ float2 unpack(const Pair& pair) {
  if constexpr (kBiasFloat32) {
    return {__uint_as_float(pair[0]), __uint_as_float(pair[kPairWords - 1])};
  } else {
    return {Narrow::unpack_low(pair[0]), Narrow::unpack_high(pair[0])};
  }
}

// The first byte of the element of a pair; of all along the dims that the bias does not have.
template <class Params>
__device__ __forceinline__ const char* place(const Params& p, int batch, int head, int query,
                                             int key) {
  int64 at = batch * p.bias.batch + head * p.bias.head;
  if constexpr (kBiasQueries) at += query * p.bias.query;
  if constexpr (kBiasKeys) at += key;
  return static_cast<const char*>(p.bias.data) + at * kBytes;
}
__device__ __forceinline__ float load(const char* from) {
  if constexpr (kBiasFloat32) return __ldg(reinterpret_cast<const float*>(from));
  return Narrow::unpack(__ldg(reinterpret_cast<const uint16*>(from)));
}
// The bias of one pair, which exists.
template <class Params>
__device__ __forceinline__ float at(const Params& p, int batch, int head, int query, int key) {
  return load(place(p, batch, head, query, key));
}

// Stores element number `index` of the bias's gradient, rounded to the bias's type.
__device__ __forceinline__ void store(void* array, int64 index, float value) {
  if constexpr (kBiasFloat32) {
    static_cast<float*>(array)[index] = value;
  } else {
    static_cast<uint16*>(array)[index] = static_cast<uint16>(Narrow::pack(value, 0.0f));
  }
}

// Four elements of a row; those from `count` on are not read and give 0.
__device__ __forceinline__ void load_four(const char* from, int count, uint32* words) {
  constexpr int kPart = kBiasAlignment < 4 * kBytes ? kBiasAlignment : 4 * kBytes;
  using Part = typename Word<kPart>::Type;
  union {
    Part parts[4 * kBytes / kPart];
    uint32 words[2 * kPairWords];
  } piece;
#pragma unroll
  for (int i = 0; i < 4 * kBytes / kPart; ++i) {
    piece.parts[i] =
        i * kPart < count * kBytes ? __ldg(reinterpret_cast<const Part*>(from) + i) : Part{};
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairWords; ++i) words[i] = piece.words[i];
}
// Stores four elements of 16 bits of a row, but those from `count` on.
__device__ __forceinline__ void store_four(uint16* to, int count, uint2 four) {
  constexpr int kPart = kBiasAlignment < 8 ? kBiasAlignment : 8;
  using Part = typename Word<kPart>::Type;
  union {
    uint2 whole;
    Part parts[8 / kPart];
  } piece{four};
#pragma unroll
  for (int i = 0; i < 8 / kPart; ++i) {
    if (i * kPart < 2 * count) reinterpret_cast<Part*>(to)[i] = piece.parts[i];
  }
}
// Which four of 16 columns a thread loads: so that one exchange with its neighbour suffices.
__device__ __forceinline__ int first_of_four(uint32 thread) {
  return 4 * (thread % 2 * 2 + thread % 4 / 2);
}
// The pairs that belong to a thread's columns in the first and the second 8 of the 16.
__device__ __forceinline__ void exchange(const uint32* words, Pair& low, Pair& high) {
  const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
  for (int i = 0; i < kPairWords; ++i) {
    const uint32 first = words[i], second = words[kPairWords + i];
    const uint32 got = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    low[i] = odd ? got : first;
    high[i] = odd ? second : got;
  }
}
// The inverse: four elements of a row.
__device__ __forceinline__ uint2 gather(uint32 low, uint32 high) {
  const bool odd = threadIdx.x % 2 != 0;
  const uint32 got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  return {odd ? got : low, odd ? high : got};
}
// Adds two elements of a gradient each.
__device__ __forceinline__ uint32 add_pairs(uint32 a, uint32 b) {
  return kBiasBFloat16 ? ptx::fma_bfloat16(a, 0x3f803f80u, b) : ptx::fma_float16(a, 0x3c003c00u, b);
}
// Two columns of a row, of 8 x 8 that the warp holds, become two rows of a column.
__device__ __forceinline__ void transpose(Pair& pair) {
  if constexpr (kBiasFloat32) {
    const uint32 low = ptx::transpose_matrix(__byte_perm(pair[0], pair[kPairWords - 1], 0x5410));
    const uint32 high = ptx::transpose_matrix(__byte_perm(pair[0], pair[kPairWords - 1], 0x7632));
    pair[0] = __byte_perm(low, high, 0x5410);
    pair[kPairWords - 1] = __byte_perm(low, high, 0x7632);
  } else {
    pair[0] = ptx::transpose_matrix(pair[0]);
  }
}

// Beside a fragment of S, whose rows are queries, by kKeys.
template <int kKeys>
struct RowTile {
  static constexpr int kRows = kBiasQueries ? 2 : 1, kGroups = kKeys / 16;
  static constexpr int kWords = kBiasKeys ? kGroups * 2 * kPairWords : 1;
  uint32 words[kRows][kWords];

  // query_of(row): of the thread's row 0 or 1.
  template <class Params, class QueryOf>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, QueryOf query_of,
                                       int first_key) {
    const int key = first_key + first_of_four(threadIdx.x);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int query = kBiasQueries ? min(query_of(row), p.query_len - 1) : 0;
      const char* from = place(p, batch, head, query, key);
      if constexpr (kBiasKeys) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          load_four(from + 16 * g * kBytes, p.kv_len - key - 16 * g,
                    words[row] + 2 * kPairWords * g);
        }
      } else {
        words[row][0] = __float_as_uint(bias::load(from));
      }
    }
  }
  // apply(i, what belongs to element i).
  template <class Apply>
  __device__ __forceinline__ void visit(Apply apply) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32* mine = words[kBiasQueries ? row : 0];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float2 low, high;
        if constexpr (kBiasKeys) {
          Pair pairs[2];
          exchange(mine + 2 * kPairWords * g, pairs[0], pairs[1]);
          low = unpack(pairs[0]);
          high = unpack(pairs[1]);
        } else {
          const float one = __uint_as_float(mine[0]);
          low = high = float2{one, one};
        }
        apply(fragment::element(2 * g, row, 0), low.x);
        apply(fragment::element(2 * g, row, 1), low.y);
        apply(fragment::element(2 * g + 1, row, 0), high.x);
        apply(fragment::element(2 * g + 1, row, 1), high.y);
      }
    }
  }
};

// Tiles that TMA fills, in front of all other shared memory: a base, which takes no place where it
// is empty. A tile is boxes of 128 bytes of each query's row side by side.
inline constexpr int kBoxKeys = kBoxRowBytes / kBytes;
template <int kStages, int kTileBytes>
struct alignas(1024) Tiles {
  unsigned char tiles[kStages][kTileBytes];
  static __device__ __forceinline__ uint32 bias_tile(uint32 shared, uint32 stage) {
    return shared + stage * kTileBytes;
  }
};
template <int kStages>
struct Tiles<kStages, 0> {
  static __device__ __forceinline__ uint32 bias_tile(uint32, uint32) { return 0; }
};
// Rows of a bias in shared memory as TMA writes it: kRows queries by kKeys, boxes of 128 bytes.
// Loads 32 keys at a time, so that who has no registers for all of them loads where it adds.
template <int kKeys, int kRows>
struct StagedRows {
  static constexpr int kParts = kKeys / 32;
  static constexpr int kPartPairs = 8;  // of four times 8 keys, two rows
  Pair pairs[kParts * kPartPairs];

  // `row`: the first of the 16 of the warp. Whole warps call.
  __device__ __forceinline__ void load(uint32 tile, int row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_part(tile, row, part, pairs + kPartPairs * part);
  }
  // apply(i, what belongs to element i).
  template <class Apply>
  __device__ __forceinline__ void visit(Apply apply) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) visit_part(part, pairs + kPartPairs * part, apply);
  }
  // Both at once.
  template <class Apply>
  static __device__ __forceinline__ void visit(uint32 tile, int row, Apply apply) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Pair now[kPartPairs];
      load_part(tile, row, part, now);
      visit_part(part, now, apply);
    }
  }

 private:
  static __device__ __forceinline__ void load_part(uint32 tile, int first_row, int part, Pair* to) {
    const int lane = threadIdx.x % 32;
    if constexpr (kBiasFloat32) {
      // A quarter of four rows one beside the other lies in the same banks: odd rows come another
      // way round.
      const bool odd = lane / 4 % 2 != 0;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int mine = first_row + lane / 4 + fragment::kRowStep * row;
        float2 two[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int chunk = 8 * part + ((2 * j) ^ (4 * odd)) + lane % 4 / 2;
          two[j] = ptx::load_shared_f2(chunk_address<kRows>(tile, mine, chunk) + lane % 2 * 8);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 one = two[j], other = two[j ^ 2];
          to[2 * j + row][0] = __float_as_uint(odd ? other.x : one.x);
          to[2 * j + row][kPairWords - 1] = __float_as_uint(odd ? other.y : one.y);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 words[4];
        ptx::load_matrix_x4(
            chunk_address<kRows>(tile, first_row + lane % 16, 4 * part + 2 * half + lane / 16),
            words);
#pragma unroll
        for (int m = 0; m < 4; ++m) to[4 * half + m][0] = words[m];
      }
    }
  }
  template <class Apply>
  static __device__ __forceinline__ void visit_part(int part, const Pair* from, Apply apply) {
#pragma unroll
    for (int i = 0; i < kPartPairs; ++i) {
      const float2 both = unpack(from[i]);
      apply(fragment::element(4 * part + i / 2, i % 2, 0), both.x);
      apply(fragment::element(4 * part + i / 2, i % 2, 1), both.y);
    }
  }
};

// Beside a fragment of S^T, whose rows are keys, by kQueries. Whole warps call.
template <int kQueries>
struct ColumnTile {
  static constexpr int kSteps = kQueries / 8;
  static constexpr int kWords = kIsMatrix      ? kSteps * 2 * kPairWords
                                : kBiasKeys    ? 2
                                : kBiasQueries ? kSteps * 2
                                               : 1;
  uint32 words[kWords];

  // `key`: the first of the 16 of the warp.
  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int first_query,
                                       int key) {
    const int lane = threadIdx.x % 32;
    if constexpr (kIsMatrix) {
      const int mine = key + first_of_four(lane);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const int query = min(first_query + 8 * j + lane / 4, p.query_len - 1);
        load_four(place(p, batch, head, query, mine), p.kv_len - mine, words + 2 * kPairWords * j);
      }
    } else if constexpr (kBiasKeys) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int mine = min(key + lane / 4 + fragment::kRowStep * row, p.kv_len - 1);
        words[row] = __float_as_uint(at(p, batch, head, 0, mine));
      }
    } else if constexpr (kBiasQueries) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int query = first_query + 8 * (i / 2) + fragment::first_column(lane) + i % 2;
        words[i] = __float_as_uint(at(p, batch, head, min(query, p.query_len - 1), 0));
      }
    } else {
      words[0] = __float_as_uint(at(p, batch, head, 0, 0));
    }
  }
  // With kIsMatrix what belongs to elements 4j and 4j + 1, and to the two after them.
  __device__ __forceinline__ void pairs_of(int j, Pair (&pairs)[2]) const {
    exchange(words + 2 * kPairWords * j, pairs[0], pairs[1]);
#pragma unroll
    for (int row = 0; row < 2; ++row) transpose(pairs[row]);
  }
  // apply(i, what belongs to element i).
  template <class Apply>
  __device__ __forceinline__ void visit(Apply apply) const {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      float2 rows[2];
      if constexpr (kIsMatrix) {
        Pair pairs[2];
        pairs_of(j, pairs);
#pragma unroll
        for (int row = 0; row < 2; ++row) rows[row] = unpack(pairs[row]);
      } else {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int i = kBiasKeys ? row : kBiasQueries ? 2 * j : 0;
          rows[row] = {__uint_as_float(words[i]), __uint_as_float(words[kBiasQueries ? i + 1 : i])};
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        apply(fragment::element(j, row, 0), rows[row].x);
        apply(fragment::element(j, row, 1), rows[row].y);
      }
    }
  }
};

// Columns of a bias in shared memory: kQueries by the block's keys.
template <int kQueries>
struct StagedColumns {
  Pair pairs[kQueries / 4];

  // `key`: of the block, the first of the 16 of the warp.
  __device__ __forceinline__ void load(uint32 tile, int key) {
    const int lane = threadIdx.x % 32;
    if constexpr (kBiasFloat32) {
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) {
        const int mine = key + lane / 4 + fragment::kRowStep * fragment::row(i);
        const int query = fragment::first_column(lane) + fragment::column(i);
        pairs[i / 2][i % 2 * (kPairWords - 1)] =
            ptx::load_shared(chunk_address<kQueries>(tile, query, mine / 4) + mine % 4 * 4);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        uint32 words[4];
        ptx::load_transposed_x4(chunk_address<kQueries>(tile, 16 * j + lane / 16 * 8 + lane % 8,
                                                        key / 8 + lane / 8 % 2),
                                words);
#pragma unroll
        for (int m = 0; m < 4; ++m) pairs[4 * j + m][0] = words[m];
      }
    }
  }
  // Takes the bias of all queries and keys, from global memory.
  __device__ __forceinline__ void take(const ColumnTile<kQueries>& tile) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      Pair two[2];
      tile.pairs_of(j, two);
#pragma unroll
      for (int i = 0; i < 2 * kPairWords; ++i) {
        pairs[2 * j + i / kPairWords][i % kPairWords] = two[i / kPairWords][i % kPairWords];
      }
    }
  }
  // apply(i, what belongs to element i).
  template <class Apply>
  __device__ __forceinline__ void visit(Apply apply) const {
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      const float2 both = unpack(pairs[i]);
      apply(2 * i, both.x);
      apply(2 * i + 1, both.y);
    }
  }
};

// Brings the bias of 64 queries and up to 256 bytes of keys into L2; by one warpgroup.
template <class Params>
__device__ __forceinline__ void prefetch(const Params& p, int batch, int head, int first_query,
                                         int first_key) {
  if constexpr (kIsMatrix) {
    const int thread = threadIdx.x % 128;
    const int query = first_query + thread / 2, key = first_key + thread % 2 * 128 / kBytes;
    if (query < p.query_len && key < p.kv_len) {
      ptx::prefetch_l2(place(p, batch, head, query, key));
    }
  }
}

}  // namespace bias
