// The kernels built for AVX2 with FMA and F16C. Read next: kernels-inl.h.

#include "cpu/simd_avx2.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kAvx2;
const Kernels kAvx2 = {"avx2", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
