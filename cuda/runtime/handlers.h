// Owns the CUDA custom calls: what XLA calls, in the C form that registration takes.

#ifndef JAX_FLASH_CUDA_RUNTIME_HANDLERS_H_
#define JAX_FLASH_CUDA_RUNTIME_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxFlashCudaForward(XLA_FFI_CallFrame* call);
XLA_FFI_Error* JaxFlashCudaBackward(XLA_FFI_CallFrame* call);
}

#endif  // JAX_FLASH_CUDA_RUNTIME_HANDLERS_H_
