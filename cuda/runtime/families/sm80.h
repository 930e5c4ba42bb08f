// Owns the custom calls of the mma.sync kernels: what XLA calls, in the C form that registration
// takes.

#ifndef JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM80_H_
#define JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM80_H_

#include <string>

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

// As ParamsAssertions of families/sm90.h, of sm80_params.h.
std::string Sm80ParamsAssertions();

}  // namespace jax_flash

extern "C" {
XLA_FFI_Error* JaxFlashCudaSm80Forward(XLA_FFI_CallFrame* call);
XLA_FFI_Error* JaxFlashCudaSm80Backward(XLA_FFI_CallFrame* call);
}

#endif  // JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM80_H_
