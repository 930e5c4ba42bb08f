// Philox4x32-7, the counter-based generator that dropout draws from. Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "numbers.cuh"

struct PhiloxWords {
  uint32 word[4];
};

// Four random words of a key's two words and a counter's four.
__device__ __forceinline__ PhiloxWords philox(uint32 key0, uint32 key1, uint32 c0, uint32 c1,
                                              uint32 c2, uint32 c3) {
#pragma unroll
  for (uint32 round = 0; round < 7; ++round) {
    const uint64 a = static_cast<uint64>(0xD2511F53u) * c0;
    const uint64 b = static_cast<uint64>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32>(b >> 32) ^ c1 ^ (key0 + round * 0x9E3779B9u);
    c2 = static_cast<uint32>(a >> 32) ^ c3 ^ (key1 + round * 0xBB67AE85u);
    c1 = static_cast<uint32>(b);
    c3 = static_cast<uint32>(a);
  }
  return {{c0, c1, c2, c3}};
}
