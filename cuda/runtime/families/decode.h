// Owns the custom call of decoding on GPUs: what XLA calls, in the C form that registration takes.

#ifndef JAX_FLASH_CUDA_RUNTIME_FAMILIES_DECODE_H_
#define JAX_FLASH_CUDA_RUNTIME_FAMILIES_DECODE_H_

#include <string>

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

// As ParamsAssertions of families/sm90.h, of decode_params.h.
std::string DecodeParamsAssertions();

}  // namespace jax_flash

extern "C" {
XLA_FFI_Error* JaxFlashCudaDecode(XLA_FFI_CallFrame* call);
}

#endif  // JAX_FLASH_CUDA_RUNTIME_FAMILIES_DECODE_H_
