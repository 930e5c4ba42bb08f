// The boolean mask: a kernel ahead of either pass, mask_plan, turns its bytes into bits and notes
// for each block of pairs what there is to see. Blocks that the mask hides are never loaded, those
// that it leaves whole never tested.
//
// A mask has parts [queries, keys], one for each batch row and head, or fewer: p.mask.batch and
// p.mask.head are the parts from one row and head to the next. Where it does not vary with the
// query or the key (kMaskQueries, kMaskKeys), there is one of them. The words of a row of bits are
// those of one block, padded: wherever a block starts, a thread loads its words at once.
//
//   pass      words                               flags
//   forward   [parts, query, key block, words]    [parts, query block, key block]
//   backward  [parts, key, query block, words]    [parts, key block, query block]
//
// A flag is kSeesAny and, for the n-th rows of the block that one warpgroup takes, kSeesAll << n.
#pragma once

#include "cuda/runtime/params.h"
#include "numbers.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace mask {

inline constexpr int kSeesAny = 1, kSeesAll = 2;
inline constexpr int kThreads = 128;

// Number of the part of a batch row and head.
template <class Params>
__device__ __forceinline__ int64 part_of(const Params& p, int batch, int head) {
  return static_cast<int64>(batch) * p.mask.batch + head * p.mask.head;
}

// Bits of kPairs columns, a thread's own, in registers; all set or none where the mask does not
// vary with the columns.
template <int kPairs, bool kVaries>
struct Bits {
  static constexpr int kWords = !kVaries ? 1 : kPairs <= 32 ? 1 : kPairs <= 64 ? 2 : 4;
  uint32 words[kWords];

  // Row number `row` of bits.
  __device__ __forceinline__ void load(const uint32* all, int64 row) {
    using Part = typename Word<4 * kWords>::Type;
    const Part part = __ldg(reinterpret_cast<const Part*>(all) + row);
    const auto* from = reinterpret_cast<const uint32*>(&part);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = from[i];
  }
  // Of the columns 32 w to 32 w + 31.
  __device__ __forceinline__ uint32 word(int w) const { return words[kVaries ? w : 0]; }
};

// The forward's: bits of the keys of a block, rows are queries.
template <int kKeys>
struct KeyBits : Bits<kKeys, kMaskKeys> {
  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int query, int block) {
    int64 row = part_of(p, batch, head);
    if constexpr (kMaskQueries) row = row * p.query_len + min(query, p.query_len - 1);
    if constexpr (kMaskKeys) row = row * ceil_div(p.kv_len, kKeys) + block;
    Bits<kKeys, kMaskKeys>::load(p.mask.words, row);
  }
};
// Those of a thread's two queries.
template <int kKeys>
struct RowBits {
  KeyBits<kKeys> rows[kMaskQueries ? 2 : 1];

  __device__ __forceinline__ uint32 word(int row, int w) const {
    return rows[kMaskQueries ? row : 0].word(w);
  }
};
// The backward's: bits of the queries of a block, rows are keys.
template <int kQueries>
struct QueryBits : Bits<kQueries, kMaskQueries> {
  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int key, int block) {
    int64 row = part_of(p, batch, head);
    if constexpr (kMaskKeys) row = row * p.kv_len + min(key, p.kv_len - 1);
    if constexpr (kMaskQueries) row = row * ceil_div(p.query_len, kQueries) + block;
    Bits<kQueries, kMaskQueries>::load(p.mask.words, row);
  }
};

// The flag of a block, queries first or keys first.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int flag_by_query(const Params& p, int batch, int head, int query_block,
                                             int key_block) {
  int64 at = part_of(p, batch, head);
  if constexpr (kMaskQueries) at = at * ceil_div(p.query_len, kQueries) + query_block;
  if constexpr (kMaskKeys) at = at * ceil_div(p.kv_len, kKeys) + key_block;
  return p.mask.flags[at];
}
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int flag_by_key(const Params& p, int batch, int head, int query_block,
                                           int key_block) {
  int64 at = part_of(p, batch, head);
  if constexpr (kMaskKeys) at = at * ceil_div(p.kv_len, kKeys) + key_block;
  if constexpr (kMaskQueries) at = at * ceil_div(p.query_len, kQueries) + query_block;
  return p.mask.flags[at];
}

// ---- the kernels ahead --------------------------------------------------------------------------

// 16 bytes of a row of the mask as bits; those from `count` on are not read and give 0.
__device__ __forceinline__ uint32 load_bits(const unsigned char* from, int count) {
  using Part = typename Word<kMaskAlignment>::Type;
  union {
    Part parts[16 / kMaskAlignment];
    uint32 words[4];
  } piece;
#pragma unroll
  for (int i = 0; i < 16 / kMaskAlignment; ++i) {
    piece.parts[i] =
        i * kMaskAlignment < count ? __ldg(reinterpret_cast<const Part*>(from) + i) : Part{};
  }
  uint32 bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Bytes are 0 or 1: the product has byte j at bit 28 + j, and no two of its terms meet.
    bits |= piece.words[i] * 0x10204080u >> 28 << 4 * i;
  }
  return bits;
}

// For the forward. Grid parts * query blocks * key blocks, kThreads threads.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ void plan_by_query(const Params& p) {
  constexpr int kPieces = kMaskKeys ? kKeys / 16 : 1;  // of 16 keys
  constexpr int kHalves = 2 * Bits<kKeys, kMaskKeys>::kWords;
  const int key_blocks = kMaskKeys ? ceil_div(p.kv_len, kKeys) : 1;
  const int query_blocks = kMaskQueries ? ceil_div(p.query_len, kQueries) : 1;
  const int queries = kMaskQueries ? p.query_len : 1;
  const int key_block = blockIdx.x % key_blocks, row_block = blockIdx.x / key_blocks;
  const int query_block = row_block % query_blocks;
  const int64 part = row_block / query_blocks;
  const int rows = min(kQueries, queries - query_block * kQueries);
  const auto* bytes = static_cast<const unsigned char*>(p.mask.bytes.data);
  bool any = false, all = true;
  for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
    const int64 row = part * queries + query_block * kQueries + i / kPieces;
    if constexpr (kMaskKeys) {
      const int key = key_block * kKeys + i % kPieces * 16;
      const int count = min(p.kv_len - key, 16);
      const uint32 bits = load_bits(bytes + row * p.kv_len + key, count);
      reinterpret_cast<uint16*>(
          p.mask.words)[(row * key_blocks + key_block) * kHalves + i % kPieces] =
          static_cast<uint16>(bits);
      any = any || bits != 0;
      all = all && bits == ptx::low_bits(count);
    } else {
      const bool seen = bytes[row] != 0;
      p.mask.words[row] = seen ? 0xffffffffu : 0;
      any = any || seen;
      all = all && seen;
    }
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    p.mask.flags[blockIdx.x] =
        static_cast<unsigned char>((any ? kSeesAny : 0) | (all ? kSeesAll : 0));
  }
}

// For the backward, whose warpgroups take 64 keys each of a block. Grid parts * key blocks * query
// blocks, kThreads threads, one for each key.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ void plan_by_key(const Params& p) {
  constexpr int kWords = Bits<kQueries, kMaskQueries>::kWords;
  const int key_blocks = kMaskKeys ? ceil_div(p.kv_len, kKeys) : 1;
  const int query_blocks = kMaskQueries ? ceil_div(p.query_len, kQueries) : 1;
  const int queries = kMaskQueries ? p.query_len : 1, keys = kMaskKeys ? p.kv_len : 1;
  const int query_block = blockIdx.x % query_blocks, row_block = blockIdx.x / query_blocks;
  const int key_block = row_block % key_blocks;
  const int64 part = row_block / key_blocks;
  const int key = key_block * kKeys + threadIdx.x;
  bool any = false, all = true;
  if (static_cast<int>(threadIdx.x) < kKeys && key < keys) {
    const int first = query_block * kQueries, count = min(kQueries, queries - first);
    const auto* bytes = static_cast<const unsigned char*>(p.mask.bytes.data) +
                        (part * queries + first) * keys + key;
    uint32* words = p.mask.words + ((part * keys + key) * query_blocks + query_block) * kWords;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32 bits = 0;
      if constexpr (kMaskQueries) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int query = 32 * w + i;
          if (query < count && bytes[static_cast<int64>(query) * keys] != 0) bits |= 1u << i;
        }
        all = all && bits == ptx::low_bits(count - 32 * w);
      } else {
        bits = bytes[0] != 0 ? 0xffffffffu : 0;
        all = bits != 0;
      }
      words[w] = bits;
      any = any || bits != 0;
    }
  }
  any = __syncthreads_or(any);
  int flag = any ? kSeesAny : 0;
#pragma unroll
  for (int slab = 0; slab < ceil_div(kKeys, 64); ++slab) {
    // Without its own keys a mask is the same for all.
    const bool own = !kMaskKeys || static_cast<int>(threadIdx.x) / 64 == slab;
    if (__syncthreads_and(all || !own)) flag |= kSeesAll << slab;
  }
  if (threadIdx.x == 0) p.mask.flags[blockIdx.x] = static_cast<unsigned char>(flag);
}

}  // namespace mask
