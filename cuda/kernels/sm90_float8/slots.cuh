// The order of keys in a column of float8 values.
#pragma once

#include "numbers.cuh"

namespace forward {

// Which of 32 keys lies in a slot of a column.
__device__ __forceinline__ constexpr int key_of_slot(int slot) {
  return slot / 16 * 16 + slot % 4 / 2 * 8 + slot % 16 / 4 * 2 + slot % 2;
}

// Words from one row of shared memory to the next, of rows that write_columns() reads.
__device__ __forceinline__ constexpr int column_pitch(int words) { return words + 1; }

// Writes the columns [4 * kWords, 128] of rows [128, 4 * kWords]; a thread takes four features of
// four keys at a time.
template <int kWords, int kThreads>
__device__ __forceinline__ void write_columns(const uint32* rows, uint32* columns, int64 pitch) {
  constexpr int kFours = 128 / 4;
#pragma unroll
  for (int i = threadIdx.x; i < kFours * kWords; i += kThreads) {
    const int four = i % kFours, word = i / kFours, slot = 4 * four;
    uint32 of_key[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = slot / 32 * 32 + key_of_slot(slot % 32 + j);
      of_key[j] = rows[key * column_pitch(kWords) + word];
    }
    const uint32 low[2] = {__byte_perm(of_key[0], of_key[1], 0x5140),
                           __byte_perm(of_key[2], of_key[3], 0x5140)};
    const uint32 high[2] = {__byte_perm(of_key[0], of_key[1], 0x7362),
                            __byte_perm(of_key[2], of_key[3], 0x7362)};
    uint32* to = columns + 4 * word * pitch + four;
    to[0] = __byte_perm(low[0], low[1], 0x5410);
    to[pitch] = __byte_perm(low[0], low[1], 0x7632);
    to[2 * pitch] = __byte_perm(high[0], high[1], 0x5410);
    to[3 * pitch] = __byte_perm(high[0], high[1], 0x7632);
  }
}

}  // namespace forward
