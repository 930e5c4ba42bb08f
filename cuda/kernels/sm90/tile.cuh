// Tiles in 128-byte-swizzled shared memory and the two products of attention on them.
//
// A tile [rows, dim] is dim/64 boxes side by side, each [rows, 64] elements (128 bytes a row), as
// TMA writes them. Head dims that are no multiple of 64 are zero-filled by TMA, not copied.
#pragma once

inline constexpr int kBoxColumns = 64;    // elements: 128 bytes, the swizzle width
inline constexpr int kBoxRowBytes = 128;  // bytes

// The element type of queries, keys, values and results.
template <bool kChoice>
struct ElementType {
  using Type = ptx::Float16;
};
template <>
struct ElementType<true> {
  using Type = ptx::BFloat16;
};
using Element = ElementType<kBFloat16>::Type;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A position in a ring of kStages buffers and the parity of its barriers' current phase. Barriers
// of 8 bytes lie side by side.
template <int kStages, bool kPowerOfTwo = (kStages & (kStages - 1)) == 0>
struct Ring {
  int at = 0;
  ptx::uint32 phase = 0;
  __device__ __forceinline__ int stage() const { return at; }
  __device__ __forceinline__ int barrier_offset() const { return 8 * at; }
  __device__ __forceinline__ ptx::uint32 parity() const { return phase; }
  __device__ __forceinline__ void advance() {
    if (++at == kStages) {
      at = 0;
      phase ^= 1;
    }
  }
};
template <int kStages>
struct Ring<kStages, true> {  // one register
  ptx::uint32 passed = 0;     // times 8
  __device__ __forceinline__ int stage() const { return passed / 8 % kStages; }
  __device__ __forceinline__ int barrier_offset() const { return passed % (8 * kStages); }
  __device__ __forceinline__ ptx::uint32 parity() const { return passed / (8 * kStages) & 1; }
  __device__ __forceinline__ void advance() { passed += 8; }
};

// scores[64, N] = q[64, kDim] k[N, kDim]^T, both K-major; issues, does not wait.
template <class Element, int kDim, int kQueryRows, int kKeyRows, int kCount>
__device__ __forceinline__ void issue_scores(float (&scores)[kCount], ptx::Descriptor query,
                                             ptx::Descriptor key) {
#pragma unroll
  for (int step = 0; step < ceil_div(kDim, 16); ++step) {
    const int box = step / 4, inner = step % 4 * 32;
    ptx::wgmma_ss<Element, 0, 0>(scores, query.at(box * kQueryRows * kBoxRowBytes + inner),
                                 key.at(box * kKeyRows * kBoxRowBytes + inner), step > 0);
  }
}

// output[64, N] (+)= weights[64, kKeyRows] v[kKeyRows, N], weights in registers; does not wait.
template <class Element, int kKeyRows, int kCount, int kWeights>
__device__ __forceinline__ void issue_output(float (&output)[kCount],
                                             const ptx::uint32 (&weights)[kWeights],
                                             ptx::Descriptor value, int accumulate) {
#pragma unroll
  for (int step = 0; step < kKeyRows / 16; ++step) {
    ptx::wgmma_rs<Element, 1>(output, weights[4 * step], weights[4 * step + 1],
                              weights[4 * step + 2], weights[4 * step + 3],
                              value.at(step * 16 * kBoxRowBytes), step > 0 ? 1 : accumulate);
  }
}

// Turns one row's accumulators into 16-byte pieces: after it, piece g of lane c of a quad holds
// the eight elements of columns 8 * (4g + c). Two exchanges across the quad per four registers.
template <class Element, int kCount, int kPieces>
__device__ __forceinline__ void gather_row(const float (&fragment)[kCount], int row, float factor,
                                           ptx::uint32 (&pieces)[kPieces]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kPieces / 4; ++g) {
    ptx::uint32 a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * (4 * g + j) + 2 * row;
      a[j] = i < kCount ? ptx::pack<Element>(fragment[i < kCount ? i : 0] * factor,
                                             fragment[i < kCount ? i + 1 : 0] * factor)
                        : 0;
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const ptx::uint32 other = __shfl_xor_sync(0xffffffffu, c & 1 ? a[j] : a[j + 1], 1);
      if (c & 1) {
        a[j] = other;
      } else {
        a[j + 1] = other;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const ptx::uint32 other = __shfl_xor_sync(0xffffffffu, c & 2 ? a[j] : a[j + 2], 2);
      if (c & 2) {
        a[j] = other;
      } else {
        a[j + 2] = other;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) pieces[4 * g + j] = a[j];
  }
}
