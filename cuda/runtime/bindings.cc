// Owns the Python face of the compiled module: the FFI targets, as capsules, and what was built.
// Read next: cpu/handlers.h; the Python side is jax_flash/_native.py.

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

#ifdef JAX_FLASH_CPU
#include "cpu/handlers.h"
#endif
#ifdef JAX_FLASH_CUDA
#include "cuda/runtime/handlers.h"
#endif

namespace nb = nanobind;

namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

[[maybe_unused]] nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {platform as XLA spells it: {target name: handler}}
nb::dict Targets() {
  nb::dict targets;
#ifdef JAX_FLASH_CPU
  nb::dict cpu;
  cpu["jax_flash_cpu_forward"] = Capsule(JaxFlashCpuForward);
  cpu["jax_flash_cpu_backward"] = Capsule(JaxFlashCpuBackward);
  targets["cpu"] = cpu;
#endif
#ifdef JAX_FLASH_CUDA
  nb::dict cuda;
  cuda["jax_flash_cuda_forward"] = Capsule(JaxFlashCudaForward);
  cuda["jax_flash_cuda_backward"] = Capsule(JaxFlashCudaBackward);
  targets["CUDA"] = cuda;
#endif
  return targets;
}

}  // namespace

NB_MODULE(_ext, m) {
  m.attr("version") = JAX_FLASH_VERSION;
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", &Targets);
}
