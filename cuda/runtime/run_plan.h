// The handler of all custom calls on GPUs: it runs the plan that a call brings along.

#ifndef JAX_FLASH_CUDA_RUNTIME_RUN_PLAN_H_
#define JAX_FLASH_CUDA_RUNTIME_RUN_PLAN_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* JaxFlashCudaRunPlan(XLA_FFI_CallFrame* call_frame);

#endif  // JAX_FLASH_CUDA_RUNTIME_RUN_PLAN_H_
