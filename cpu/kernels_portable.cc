// The kernels built for plain C++. Read next: kernels-inl.h.

#include "cpu/simd_portable.h"
//
#include "cpu/kernels-inl.h"

namespace jax_flash::cpu {

extern const Kernels kPortable;
const Kernels kPortable = {"portable", RunForward, RunBackward, RunDecode};

}  // namespace jax_flash::cpu
