// The kernels built for AArch64, of which NEON is a part. Read next: kernels-inl.h.

#include "cpu/simd_neon.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kNeon;
const Kernels kNeon = {"neon", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
