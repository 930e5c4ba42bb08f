// A ring of buffers with a barrier each.
#pragma once

#include "ptx.cuh"

using Barrier = unsigned long long;

// A position in a ring of kStages buffers and the parity of its barriers' current phase. Barriers
// of 8 bytes lie side by side.
template <int kStages, bool kPowerOfTwo = (kStages & (kStages - 1)) == 0>
struct Ring {
  int at = 0;
  uint32 phase = 0;
  __device__ __forceinline__ int stage() const { return at; }
  __device__ __forceinline__ int barrier_offset() const { return 8 * at; }
  __device__ __forceinline__ uint32 parity() const { return phase; }
  __device__ __forceinline__ void advance() {
    if (++at == kStages) {
      at = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ Ring uniform() const {
    return {static_cast<int>(ptx::known(at)), ptx::known(phase)};
  }
  // The position that has come to this one by advance().
  __device__ __forceinline__ Ring before() const {
    return at == 0 ? Ring{kStages - 1, phase ^ 1} : Ring{at - 1, phase};
  }
};
template <int kStages>
struct Ring<kStages, true> {  // one register
  uint32 passed = 0;          // times 8
  __device__ __forceinline__ int stage() const { return passed / 8 % kStages; }
  __device__ __forceinline__ int barrier_offset() const { return passed % (8 * kStages); }
  __device__ __forceinline__ uint32 parity() const { return passed / (8 * kStages) & 1; }
  __device__ __forceinline__ void advance() { passed += 8; }
  // The same, of which the compiler knows that all lanes of a warp have it.
  __device__ __forceinline__ Ring uniform() const { return {ptx::known(passed)}; }
  __device__ __forceinline__ Ring before() const {
    return {static_cast<uint32>(ptx::opaque(static_cast<int>(passed))) - 8};
  }
};

// The same of a ring's use number `use`, where one count serves rings of several lengths: one
// register for all of them.
template <int kStages>
__device__ __forceinline__ uint32 stage_of(uint32 use) {
  return use % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32 parity_of(uint32 use) {
  return use / kStages % 2;
}
