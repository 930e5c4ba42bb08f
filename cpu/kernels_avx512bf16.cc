// The kernels built for AVX-512 with bfloat16 dot products. Read next: kernels-inl.h.

#include "cpu/simd_avx512.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = {"avx512bf16", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
