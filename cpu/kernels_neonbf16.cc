// The kernels built for AArch64 with bfloat16 dot products. Read next: kernels-inl.h.

#include "cpu/simd_neon.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kNeonBf16;
const Kernels kNeonBf16 = {"neonbf16", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
