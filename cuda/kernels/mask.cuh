// Masks, a boolean one and one of blocks: what there is to see in each block of pairs, and the bits
// of the pairs. Blocks that a mask hides are never loaded, those that it leaves whole never tested.
//
// Of the boolean mask a kernel ahead of either pass, mask_plan, makes bits and flags of blocks. It
// has parts [queries, keys], one for each batch row and head, or fewer: p.mask.batch and
// p.mask.head are the parts from one row and head to the next. Where it does not vary with the
// query or the key (kByteQueries, kByteKeys), there is one of them. A thread loads its bits of a
// block at once: in the backward the padded words of a row, of one block; in the forward its part
// of them, a ThreadWord, which lies with those of the block's other queries and threads.
//
//   pass      words                                           flags
//   forward   [parts, query block, key block, query, thread]  [parts, query block, key block]
//   backward  [parts, key, query block, words]                [parts, key block, query block]
//
// The block mask has blocks of its own, kMaskBlock x kMaskBlock pairs: mask_plan makes flags of
// those that a block of the kernel meets; bits are read where they are, 16 keys of a query a word.
//
// A flag is kSeesAny and, for the n-th rows of the block that one warpgroup takes, kSeesAll << n:
// of the boolean mask a byte; of the block mask its bits are those of three words, for 32 blocks in
// a row, so that a warp reads what 1024 blocks show at once.
#pragma once

#include "params.cuh"
#include "fragment.cuh"
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

// ---- the block mask -----------------------------------------------------------------------------

inline constexpr int kEmptyBlock = -2, kFullBlock = -1;  // of p.block_mask.numbers; else partial
inline constexpr int kSide = kMaskBlock != 0 ? kMaskBlock : 16;  // no division by 0 without one
inline constexpr int kBlockWords = kSide / 16;                   // of a query in a partial block

// The numbers of the blocks of a query, by block of keys.
template <class Params>
__device__ __forceinline__ const int* numbers_of(const Params& p, int64 part, int query) {
  const int64 row = part * ceil_div(p.query_len, kSide) + query / kSide;
  return p.block_mask.numbers + row * ceil_div(p.kv_len, kSide);
}
template <class Params>
__device__ __forceinline__ int64 block_part_of(const Params& p, int batch, int head) {
  return static_cast<int64>(batch) * p.block_mask.batch + head * p.block_mask.head;
}
// The words of a query in block `number`; of one that is not partial, any.
template <class Params>
__device__ __forceinline__ const uint16* words_of(const Params& p, int batch, int query,
                                                  int number) {
  const int stored = max(min(number, p.block_mask.stored - 1), 0);
  return p.block_mask.bits + batch * p.block_mask.bits_batch +
         (static_cast<int64>(stored) * kSide + query % kSide) * kBlockWords;
}
__device__ __forceinline__ uint32 in_block(int number, uint32 bits) {
  return number >= 0 ? bits : number == kFullBlock ? 0xffffffffu : 0;
}

// Does the query see the key?
template <class Params>
__device__ __forceinline__ bool block_shows(const Params& p, int batch, int head, int query,
                                            int key) {
  const int number = numbers_of(p, block_part_of(p, batch, head), query)[key / kSide];
  const uint32 word = words_of(p, batch, query, number)[key % kSide / 16];
  return in_block(number, word) >> key % 16 & 1;
}

// kSeesAny and kSeesAll of the pairs of kQueries queries and kKeys keys.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int seen_in_blocks(const Params& p, int64 part, int first_query,
                                              int first_key) {
  const int last_query = min(first_query + kQueries, p.query_len) - 1;
  const int last = (min(first_key + kKeys, p.kv_len) - 1) / kSide;
  bool any = false, all = true;
#pragma unroll 1
  for (int query = first_query; query <= last_query; query = (query / kSide + 1) * kSide) {
    const int* numbers = numbers_of(p, part, query);
#pragma unroll 1
    for (int i = first_key / kSide; i <= last; ++i) {
      const int number = __ldg(numbers + i);
      any = any || number != kEmptyBlock;
      all = all && number == kFullBlock;
    }
  }
  return !any ? 0 : all ? kSeesAny | kSeesAll : kSeesAny;
}

// The bits of a query for the kWords words of keys from first_key on, a block of the kernel; any if
// none of them is tested. Loads depend on each other, and then there are none. `beside`: a query of
// the same 16, by which its row of blocks is found.
template <int kKeys, int kWords, class Params>
__device__ __forceinline__ void load_blocks(const Params& p, int batch, int head, int query,
                                            int beside, int first_key, bool tests,
                                            uint32 (&words)[kWords]) {
  // Keys of a load: they lie in one block, and begin at a multiple of it there.
  constexpr int kLoad = kKeys % 128 == 0 && kSide % 128 == 0 ? 128
                        : kKeys % 64 == 0 && kSide % 64 == 0 ? 64
                        : kKeys % 32 == 0 && kSide % 32 == 0 ? 32
                                                             : 16;
  using Part = typename Word<kLoad / 8>::Type;
  query = min(query, p.query_len - 1);
  const int* numbers = numbers_of(p, block_part_of(p, batch, head), min(beside, p.query_len - 1));
#pragma unroll
  for (int i = 0; i < kKeys / kLoad; ++i) {
    const int key = min(first_key + i * kLoad, (p.kv_len - 1) / kLoad * kLoad);
    const int number = tests ? __ldg(numbers + key / kSide) : kFullBlock;
    const uint16* from = words_of(p, batch, query, number) + key % kSide / 16;
    // No branch beside wgmma.
    const Part part = tests ? __ldg(reinterpret_cast<const Part*>(from)) : Part{};
    if constexpr (kLoad == 16) {
      const uint32 piece = in_block(number, part) & 0xffff;
      words[i / 2] = i % 2 == 0 ? piece : words[i / 2] | piece << 16;
    } else {
      const auto* pieces = reinterpret_cast<const uint32*>(&part);
#pragma unroll
      for (int w = 0; w < kLoad / 32; ++w) {
        words[i * (kLoad / 32) + w] = in_block(number, pieces[w]);
      }
    }
  }
}

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

// Those of a thread's two queries, from the words that plan_by_query<kQueries, kKeys> has made.
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
// The same of a block mask by itself: bits of whole rows.
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
// The backward's: bits of the queries of a block, rows are keys. Those of a block mask are added by
// keep_blocks.
template <int kQueries>
struct QueryBits : Bits<kQueries, kMaskQueries> {
  using Bits<kQueries, kMaskQueries>::words;
  static constexpr int kWords = Bits<kQueries, kMaskQueries>::kWords;

  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int key, int block) {
    if constexpr (kHasMaskBytes) {
      int64 row = part_of(p, batch, head);
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

// Of the block mask: where the words of 32 blocks in a row are, kSeesAny first; the last is not
// used.
inline constexpr int kFlagWords = 3, kGroupWords = 4;
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ uint32 flags_by_query(const Params& p, int batch, int head,
                                                 int query_block, int group) {
  const int part = batch * p.block_mask.batch + head * p.block_mask.head;
  const int row = part * ceil_div(p.query_len, kQueries) + query_block;
  return (row * ceil_div(p.kv_len, 32 * kKeys) + group) * kGroupWords;
}
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ uint32 flags_by_key(const Params& p, int batch, int head, int key_block,
                                               int group) {
  const int part = batch * p.block_mask.batch + head * p.block_mask.head;
  const int row = part * ceil_div(p.kv_len, kKeys) + key_block;
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
    int64 at = part_of(p, batch, head);
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

// Of the block mask, a thread for each flag, whole warps for 32 in a row.
template <int kQueries, int kKeys, bool kByKey, class Params>
__device__ __forceinline__ void plan_blocks(const Params& p, uint32 cta) {
  const uint32 index = cta * kThreads + threadIdx.x;
  if (index >= static_cast<uint32>(p.block_mask.flag_count)) return;
  const uint32 query_blocks = ceil_div(p.query_len, kQueries);
  const uint32 key_blocks = ceil_div(p.kv_len, kKeys);
  const uint32 columns = kByKey ? query_blocks : key_blocks;
  const uint32 rows = kByKey ? key_blocks : query_blocks;
  const uint32 padded = ceil_div(static_cast<int>(columns), 32) * 32;
  const uint32 column = index % padded, row = index / padded % rows;
  const int first_query = (kByKey ? column : row) * kQueries;
  const int first_key = (kByKey ? row : column) * kKeys;
  const int64 part = index / padded / rows;
  int flag = 0;
  if (column >= columns) {
  } else if constexpr (kByKey) {  // warpgroups take 64 keys each
    constexpr int kSlab = kKeys < 64 ? kKeys : 64;
#pragma unroll 1
    for (int slab = 0; slab < ceil_div(kKeys, 64); ++slab) {
      const int seen = seen_in_blocks<kQueries, kSlab>(p, part, first_query, first_key + 64 * slab);
      flag |= (seen & kSeesAny) | (seen & kSeesAll) << slab;
    }
  } else {
    flag = seen_in_blocks<kQueries, kKeys>(p, part, first_query, first_key);
    if (first_key + kKeys > p.kv_len) flag &= kSeesAny;  // the end of the keys needs a test
  }
#pragma unroll
  for (int i = 0; i < kFlagWords; ++i) {
    const uint32 word = __ballot_sync(0xffffffffu, flag >> i & 1);
    if (index % 32 == 0) p.block_mask.flags[index / 32 * kGroupWords + i] = word;
  }
}

// The CTA's number among those of the boolean mask, behind those that have made flags of the other.
template <int kQueries, int kKeys, bool kByKey, class Params>
__device__ __forceinline__ bool plans_bytes(const Params& p, uint32* cta) {
  *cta = blockIdx.x;
  if constexpr (kMaskBlock != 0) {
    const uint32 ctas = ceil_div(p.block_mask.flag_count, kThreads);
    if (*cta < ctas) {
      plan_blocks<kQueries, kKeys, kByKey>(p, *cta);
      return false;
    }
    *cta -= ctas;
  }
  return kHasMaskBytes;
}

// For the forward. Grid: a thread for each flag of the block mask, in whole CTAs, then parts *
// query blocks * key blocks of the boolean mask; kThreads threads.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ void plan_by_query(const Params& p) {
  if (is_left_to_other(p)) return;
  uint32 cta;
  if (!plans_bytes<kQueries, kKeys, false>(p, &cta)) return;
  constexpr int kWords = Bits<kKeys, kByteKeys>::kWords;
  constexpr int kPieces = kByteKeys ? 2 * kWords : 1;  // of 16 keys
  const int key_blocks = kByteKeys ? ceil_div(p.kv_len, kKeys) : 1;
  const int query_blocks = kByteQueries ? ceil_div(p.query_len, kQueries) : 1;
  const int queries = kByteQueries ? p.query_len : 1;
  const int key_block = cta % key_blocks, row_block = cta / key_blocks;
  const int query_block = row_block % query_blocks;
  const int64 part = row_block / query_blocks;
  const int64 first = part * queries + query_block * kQueries;  // of the mask's rows
  const int rows = min(kQueries, queries - query_block * kQueries);
  const auto* bytes = static_cast<const unsigned char*>(p.mask.bytes.data);
  using Words = RowBits<kQueries, kKeys, true>;
  constexpr int kRows = Words::kRows;
  auto* words = Words::words_of(p, cta);
  __shared__ uint32 bits_of_rows[kRows][kWords];
  bool any = false, all = true;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces;
    if constexpr (kByteKeys) {
      const int key = key_block * kKeys + i % kPieces * 16;
      const int last = min(p.kv_len, (key_block + 1) * kKeys);
      const int count = row < rows ? min(last - key, 16) : 0;
      const uint32 bits = load_bits(bytes + (first + row) * p.kv_len + key, count);
      reinterpret_cast<uint16*>(bits_of_rows)[i] = static_cast<uint16>(bits);
      any = any || bits != 0;
      all = all && bits == ptx::low_bits(count);
    } else {
      // Rows past the queries see all keys: their words are read, and always the same.
      const bool seen = row >= rows || bytes[first + row] != 0;
      words[row] = seen ? 0xffffffffu : 0;
      any = any || (seen && row < rows);
      all = all && seen;
    }
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    p.mask.flags[cta] = static_cast<unsigned char>((any ? kSeesAny : 0) | (all ? kSeesAll : 0));
  }
  if constexpr (kByteKeys) {
    for (int i = threadIdx.x; i < kRows * Words::kRowWords; i += kThreads) {
      const int row = i / Words::kRowWords;
      const uint32 seen = thread_bits(bits_of_rows[row], 2 * (i % Words::kRowWords));
      words[i] = static_cast<typename Words::Stored>(row < rows ? seen : 0xffffffffu);
    }
  }
}

// For the backward, whose warpgroups take 64 keys each of a block. Grid as for the forward, with
// key blocks before query blocks; a thread for each key.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ void plan_by_key(const Params& p) {
  if (is_left_to_other(p)) return;
  uint32 cta;
  if (!plans_bytes<kQueries, kKeys, true>(p, &cta)) return;
  constexpr int kWords = Bits<kQueries, kByteQueries>::kWords;
  const int key_blocks = kByteKeys ? ceil_div(p.kv_len, kKeys) : 1;
  const int query_blocks = kByteQueries ? ceil_div(p.query_len, kQueries) : 1;
  const int queries = kByteQueries ? p.query_len : 1, keys = kByteKeys ? p.kv_len : 1;
  const int query_block = cta % query_blocks, row_block = cta / query_blocks;
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
      if constexpr (kByteQueries) {
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
    const bool own = !kByteKeys || static_cast<int>(threadIdx.x) / 64 == slab;
    if (__syncthreads_and(all || !own)) flag |= kSeesAll << slab;
  }
  if (threadIdx.x == 0) p.mask.flags[cta] = static_cast<unsigned char>(flag);
}

}  // namespace mask
