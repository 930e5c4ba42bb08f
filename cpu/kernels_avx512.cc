// The kernels built for AVX-512. Read next: kernels-inl.h.

#include "cpu/simd_avx512.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kAvx512;
const Kernels kAvx512 = {"avx512", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
