// The block mask: which of its blocks, kMaskBlock x kMaskBlock pairs each, are empty, full or
// partial, and where the bits of a partial one are. mask.cuh has both masks together.
#pragma once

#include "numbers.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace mask {

inline constexpr int kEmptyBlock = -2, kFullBlock = -1;  // of p.block_mask.numbers; else partial
inline constexpr int kSide = kMaskBlock != 0 ? kMaskBlock : 16;  // no division by 0 without one
inline constexpr int kBlockWords = kSide / 16;                   // of a query in a partial block

// The numbers of the blocks of a query, by block of keys.
template <class Params>
__device__ __forceinline__ const int* numbers_of(const Params& p, int64 matrix, int query) {
  const int64 row = matrix * ceil_div(p.query_len, kSide) + query / kSide;
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

}  // namespace mask
