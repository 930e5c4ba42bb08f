// The kernel ahead of either pass with a mask, mask_plan: makes bits and flags of the boolean mask
// and flags of the block mask, where mask.cuh reads them.
#pragma once

#include "element.cuh"
#include "mask.cuh"
#include "numbers.cuh"
#include "ptx.cuh"
#include "rows.cuh"

namespace mask {

inline constexpr int kThreads = 128;

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

// kSeesAny and kSeesAll of the pairs of kQueries queries and kKeys keys.
template <int kQueries, int kKeys, class Params>
__device__ __forceinline__ int seen_in_blocks(const Params& p, int64 matrix, int first_query,
                                              int first_key) {
  const int last_query = min(first_query + kQueries, p.query_len) - 1;
  const int last = (min(first_key + kKeys, p.kv_len) - 1) / kSide;
  bool any = false, all = true;
#pragma unroll 1
  for (int query = first_query; query <= last_query; query = (query / kSide + 1) * kSide) {
    const int* numbers = numbers_of(p, matrix, query);
#pragma unroll 1
    for (int i = first_key / kSide; i <= last; ++i) {
      const int number = __ldg(numbers + i);
      any = any || number != kEmptyBlock;
      all = all && number == kFullBlock;
    }
  }
  return !any ? 0 : all ? kSeesAny | kSeesAll : kSeesAny;
}

// The flags of the block mask: a thread for each, whole warps for 32 in a row.
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
  const int64 matrix = index / padded / rows;
  int flag = 0;
  if (column >= columns) {
  } else if constexpr (kByKey) {  // warpgroups take 64 keys each
    constexpr int kSlab = kKeys < 64 ? kKeys : 64;
#pragma unroll 1
    for (int slab = 0; slab < ceil_div(kKeys, 64); ++slab) {
      const int seen =
          seen_in_blocks<kQueries, kSlab>(p, matrix, first_query, first_key + 64 * slab);
      flag |= (seen & kSeesAny) | (seen & kSeesAll) << slab;
    }
  } else {
    flag = seen_in_blocks<kQueries, kKeys>(p, matrix, first_query, first_key);
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
  const int64 matrix = row_block / query_blocks;
  const int64 first = matrix * queries + query_block * kQueries;  // of the mask's rows
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
  const int64 matrix = row_block / key_blocks;
  const int key = key_block * kKeys + threadIdx.x;
  bool any = false, all = true;
  if (static_cast<int>(threadIdx.x) < kKeys && key < keys) {
    const int first = query_block * kQueries, count = min(kQueries, queries - first);
    const auto* bytes = static_cast<const unsigned char*>(p.mask.bytes.data) +
                        (matrix * queries + first) * keys + key;
    uint32* words = p.mask.words + ((matrix * keys + key) * query_blocks + query_block) * kWords;
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
