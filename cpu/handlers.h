// Owns the names of the CPU custom calls; cpu/handlers.cc has their meaning.
#ifndef JAX_FLASH_CPU_HANDLERS_H_
#define JAX_FLASH_CPU_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxFlashCpuForward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxFlashCpuBackward(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxFlashCpuDecode(XLA_FFI_CallFrame* call_frame);
}

#endif  // JAX_FLASH_CPU_HANDLERS_H_
