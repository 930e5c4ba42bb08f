// The order of keys in a column of float8 values.
#pragma once

namespace forward {

// Which of 32 keys lies in a slot of a column.
__device__ __forceinline__ constexpr int key_of_slot(int slot) {
  return slot / 16 * 16 + slot % 4 / 2 * 8 + slot % 16 / 4 * 2 + slot % 2;
}

}  // namespace forward
