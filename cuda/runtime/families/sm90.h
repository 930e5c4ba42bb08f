// Owns the custom calls of cuda/kernels/sm90: what XLA calls, in the C form that registration
// takes.

#ifndef JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM90_H_
#define JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM90_H_

#include <string>

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

// Assertions to compile with the kernels: their sm90_params.h is that of this module.
std::string Sm90ParamsAssertions();

}  // namespace jax_flash

extern "C" {
XLA_FFI_Error* JaxFlashCudaForward(XLA_FFI_CallFrame* call);
XLA_FFI_Error* JaxFlashCudaBackward(XLA_FFI_CallFrame* call);
}

#endif  // JAX_FLASH_CUDA_RUNTIME_FAMILIES_SM90_H_
