// Masks, a boolean one and one of blocks: what there is to see in each block of pairs, and the bits
// of the pairs. Blocks that a mask hides are never loaded, those that it leaves whole never tested.
//
// A kernel ahead of either pass makes bits and flags of blocks from the boolean mask, see
// mask_plan.cuh. The mask is matrices [queries, keys], one for each batch row and head, or fewer:
// p.mask.batch and p.mask.head count them from one row and head to the next. Where the mask does
// not vary with the query or the key (kByteQueries, kByteKeys), a matrix has one of them. A thread
// loads its bits of a block at once: in the backward the padded words of a row, of one block; in
// the forward its part of a row, a ThreadWord, which lies with those of the block's other queries
// and threads.
//
//   pass      words                                              flags
//   forward   [matrices, query block, key block, query, thread]  [matrices, query block, key block]
//   backward  [matrices, key, query block, words]                [matrices, key block, query block]
//
// The block mask has blocks of its own (block_mask.cuh): mask_plan makes a flag for each block of
// the kernel from those that the block meets; bits are read where they are, 16 keys of a query a
// word.
//
// A flag is kSeesAny and, for the n-th rows of the block that one warpgroup takes, kSeesAll << n:
// of the boolean mask a byte; of the block mask its bits are those of three words, for 32 blocks in
// a row, so that a warp reads what 1024 blocks show at once.
#pragma once

#include "block_mask.cuh"
#include "fragment.cuh"
#include "numbers.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace mask {

inline constexpr int kSeesAny = 1, kSeesAll = 2;

// Number of the matrix of a batch row and head.
template <class Params>
__device__ __forceinline__ int64 matrix_of(const Params& p, int batch, int head) {
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
  // The bits of the columns 32 w to 32 w + 31.
  __device__ __forceinline__ uint32 word(int w) const { return words[kVaries ? w : 0]; }
};

// ---- bits of fragments --------------------------------------------------------------------------

// The forward's, of the boolean mask: a thread's own, one word for each of its two queries. Bit
// 2 j + i is of the column 8 j + i after its first; those past the keys are 0. Where the mask does
// not vary with the key, all bits are set or none.
template <int kKeys>
using ThreadWord = typename Word<(!kByteKeys || kKeys > 64) ? 4
                                 : (kKeys > 32)             ? 2
                                                            : 1>::Type;
// The bit of element i of a fragment in the word of its row.
__host__ __device__ constexpr int thread_bit(int i) { return i / 4 * 2 + i % 2; }
// A thread's bits among those of whole rows.
template <int kWords>
__device__ __forceinline__ uint32 thread_bits(const uint32 (&words)[kWords], int first_column) {
  uint32 mine = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    // The product has the pairs of bits at 24, 26, 28 and 30, and no two of its terms meet.
    mine |= (words[w] >> first_column & 0x03030303u) * 0x01041040u >> 24 << 8 * w;
  }
  return mine;
}
// The bits of the columns below `end`, which counts from the thread's first one.
__device__ __forceinline__ uint32 low_thread_bits(int end) {
  return ptx::low_bits((end >> 3) * 2 + min(end & 7, 2));
}

// The bits of a thread's two queries, from the words that plan_by_query<kQueries, kKeys> has made.
template <int kQueries, int kKeys, bool kByThread = kHasMaskBytes>
struct RowBits {
  using Stored = ThreadWord<kKeys>;
  static constexpr int kRows = kByteQueries ? kQueries : 1;  // of a block, of which each has
  static constexpr int kRowWords = kByteKeys ? 4 : 1;        // so many words
  uint32 rows[kMaskQueries ? 2 : 1];

  // Number of the block of queries, of which `query` is one, and the first block of keys: as of its
  // flag.
  template <class Params>
  static __device__ __forceinline__ int tile_of(const Params& p, int batch, int head, int query) {
    int at = batch * p.mask.batch + head * p.mask.head;
    if constexpr (kByteQueries) {
      at = at * ceil_div(p.query_len, kQueries) + min(query, p.query_len - 1) / kQueries;
    }
    return kByteKeys ? at * ceil_div(p.kv_len, kKeys) : at;
  }
  template <class Params>
  static __device__ __forceinline__ Stored* words_of(const Params& p, int tile) {
    return reinterpret_cast<Stored*>(p.mask.words) + static_cast<int64>(tile) * (kRows * kRowWords);
  }
  // `tile`: that of tile_of; `query_of(row)`: the query of row 0 or 1.
  template <class Params, class QueryOf>
  __device__ __forceinline__ void load(const Params& p, int tile, int batch, int head,
                                       QueryOf query_of, int block, bool tests = true) {
    const Stored* words = words_of(p, kByteKeys ? tile + block : tile);
    if constexpr (kByteQueries) words += query_of(0) % kQueries * kRowWords;
    if constexpr (kByteKeys) words += threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < (kMaskQueries ? 2 : 1); ++row) {
      // No load of what never changes: mask_plan may write beside this kernel's first warps.
      rows[row] = __ldca(words + (kByteQueries ? fragment::kRowStep * row * kRowWords : 0));
      if constexpr (kMaskBlock != 0) {
        uint32 of_rows[ceil_div(kKeys, 32)];
        load_blocks<kKeys>(p, batch, head, query_of(row), query_of(row), block * kKeys, tests,
                           of_rows);
        rows[row] &= thread_bits(of_rows, fragment::first_column(threadIdx.x));
      }
    }
  }
  template <class Params, class QueryOf>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, QueryOf query_of,
                                       int block, bool tests = true) {
    load(p, tile_of(p, batch, head, query_of(0)), batch, head, query_of, block, tests);
  }
  __device__ __forceinline__ void show_all() {
#pragma unroll
    for (uint32& row : rows) row = 0xffffffffu;
  }
  __device__ __forceinline__ uint32 of(int row) const { return rows[kMaskQueries ? row : 0]; }
};
// A thread's bits of a block mask by itself: those of whole rows.
template <int kQueries, int kKeys>
struct RowBits<kQueries, kKeys, false> {
  Bits<kKeys, true> rows[2];

  template <class Params, class QueryOf>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, QueryOf query_of,
                                       int block, bool tests = true) {
    if constexpr (kMaskBlock != 0) {
      const int first = query_of(0);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        load_blocks<kKeys>(p, batch, head, first + fragment::kRowStep * row, first, block * kKeys,
                           tests, rows[row].words);
      }
    }
  }
  __device__ __forceinline__ void show_all() {
#pragma unroll
    for (Bits<kKeys, true>& row : rows) {
#pragma unroll
      for (uint32& word : row.words) word = 0xffffffffu;
    }
  }
  __device__ __forceinline__ uint32 word(int row, int w) const { return rows[row].word(w); }
};
// The backward's bits of the queries of a block, where rows are keys. keep_blocks adds those of a
// block mask.
template <int kQueries>
struct QueryBits : Bits<kQueries, kMaskQueries> {
  using Bits<kQueries, kMaskQueries>::words;
  static constexpr int kWords = Bits<kQueries, kMaskQueries>::kWords;

  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int key, int block) {
    if constexpr (kHasMaskBytes) {
      int64 row = matrix_of(p, batch, head);
      if constexpr (kByteKeys) row = row * p.kv_len + min(key, p.kv_len - 1);
      if constexpr (kByteQueries) row = row * ceil_div(p.query_len, kQueries) + block;
      Bits<kQueries, kByteQueries> bytes;
      bytes.load(p.mask.words, row);
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = bytes.word(w);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = 0xffffffffu;
    }
  }
};

// Hides what the block mask does, of the queries from first_query on and the thread's two keys, of
// which `key` is the first: the 16 of a warp lie in one word. A lane reads that of a query in 32,
// and votes turn it. Whole warps call.
template <int kQueries, int kBlock, class Params>
__device__ __forceinline__ void keep_blocks(const Params& p, int batch, int head, int key,
                                            int first_query, QueryBits<kBlock> (&bits)[2]) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const int first_key = min(key - row, (p.kv_len - 1) / 16 * 16);
#pragma unroll
  for (int w = 0; w < kQueries / 32; ++w) {
    const int query = min(first_query + 32 * w + lane, p.query_len - 1);
    const int number =
        __ldg(numbers_of(p, block_part_of(p, batch, head), query) + first_key / kSide);
    const uint16* from = words_of(p, batch, query, number) + first_key % kSide / 16;
    const uint32 mine = in_block(number, __ldg(from));
    uint32 seen[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32 turned = __ballot_sync(0xffffffffu, mine >> i & 1);
      if (i % 8 == row) seen[i / 8] = turned;
    }
    bits[0].words[w] &= seen[0];
    bits[1].words[w] &= seen[1];
  }
}

// ---- flags of blocks ----------------------------------------------------------------------------

// Where the block mask's words for 32 blocks in a row are, kSeesAny first; the last is not used.
inline constexpr int kFlagWords = 3, kGroupWords = 4;
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ uint32 flags_by_query(const Params& p, int batch, int head,
                                                 int query_block, int group) {
  const int matrix = batch * p.block_mask.batch + head * p.block_mask.head;
  const int row = matrix * ceil_div(p.query_len, kQueries) + query_block;
  return (row * ceil_div(p.kv_len, 32 * kKeys) + group) * kGroupWords;
}
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ uint32 flags_by_key(const Params& p, int batch, int head, int key_block,
                                               int group) {
  const int matrix = batch * p.block_mask.batch + head * p.block_mask.head;
  const int row = matrix * ceil_div(p.kv_len, kKeys) + key_block;
  return (row * ceil_div(p.query_len, 32 * kQueries) + group) * kGroupWords;
}
template <class Params>
__device__ __forceinline__ int flag_of(const Params& p, uint32 group, int block) {
  const uint4 words = *reinterpret_cast<const uint4*>(p.block_mask.flags + group);
  const int bit = block % 32;
  return (words.x >> bit & 1) | (words.y >> bit & 1) << 1 | (words.z >> bit & 1) << 2;
}

template <class Params>
__device__ __forceinline__ bool varies_by_head(const Params& p) {
  bool varies = false;
  if constexpr (kHasMaskBytes) varies = p.mask.head != 0;
  if constexpr (kMaskBlock != 0) varies = varies || p.block_mask.head != 0;
  return varies;
}

// The flag of a block, queries first or keys first: what both masks may show.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int flag_by_query(const Params& p, int batch, int head, int query_block,
                                             int key_block) {
  int flag = kSeesAny | kSeesAll;
  if constexpr (kHasMaskBytes) {
    uint32 at = batch * p.mask.batch + head * p.mask.head;  // there is a CTA for each
    if constexpr (kByteQueries) at = at * ceil_div(p.query_len, kQueries) + query_block;
    if constexpr (kByteKeys) at = at * ceil_div(p.kv_len, kKeys) + key_block;
    flag = p.mask.flags[at];
  }
  if constexpr (kMaskBlock != 0) {
    flag &= flag_of(p, flags_by_query<kQueries, kKeys>(p, batch, head, query_block, key_block / 32),
                    key_block);
  }
  return flag;
}
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int flag_by_key(const Params& p, int batch, int head, int query_block,
                                           int key_block) {
  int flag = kSeesAny | kSeesAll << 0 | kSeesAll << 1;
  if constexpr (kHasMaskBytes) {
    int64 at = matrix_of(p, batch, head);
    if constexpr (kByteKeys) at = at * ceil_div(p.kv_len, kKeys) + key_block;
    if constexpr (kByteQueries) at = at * ceil_div(p.query_len, kQueries) + query_block;
    flag = p.mask.flags[at];
  }
  if constexpr (kMaskBlock != 0) {
    flag &= flag_of(p, flags_by_key<kQueries, kKeys>(p, batch, head, key_block, query_block / 32),
                    query_block);
  }
  return flag;
}

}  // namespace mask
