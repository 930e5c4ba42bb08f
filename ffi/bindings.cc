// Owns the Python face of the compiled module: the FFI targets, as capsules, and what was built.
// Read next: cpu/handlers.h; the Python side is jax_flash/_native.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "ffi/operands.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAX_FLASH_CPU
#include "cpu/handlers.h"
#endif
#ifdef JAX_FLASH_CUDA
#include "cuda/runtime/jit.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/run_plan.h"
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
  cpu["jax_flash_cpu_decode"] = Capsule(JaxFlashCpuDecode);
  targets["cpu"] = cpu;
#endif
#ifdef JAX_FLASH_CUDA
  nb::dict cuda;
  // One handler: the names tell a reader of a program what its plan is for.
  for (const char* pass : {"forward", "backward", "sm80_forward", "sm80_backward", "decode"}) {
    cuda[(std::string("jax_flash_cuda_") + pass).c_str()] = Capsule(JaxFlashCudaRunPlan);
  }
  targets["CUDA"] = cuda;
#endif
  return targets;
}

#ifdef JAX_FLASH_CUDA
void CudaConfigure(std::string nvrtc, std::string nvrtc_error,
                   std::map<std::string, std::string> sources, std::string cache_folder,
                   std::uint64_t cache_bytes) {
  jax_flash::Configure({std::move(nvrtc), std::move(nvrtc_error), std::move(sources),
                        std::move(cache_folder), cache_bytes});
}

// Returns (cubin, log, seconds, from_disk).
nb::tuple CudaCompile(const jax_flash::Program& program) {
  auto image = [&] {
    nb::gil_scoped_release release;
    return jax_flash::Compile(program);
  }();
  if (!image.ok()) throw std::runtime_error(image.error());
  const jax_flash::Image& done = **image;
  return nb::make_tuple(nb::bytes(done.cubin.data(), done.cubin.size()), done.log, done.seconds,
                        done.from_disk);
}

void CudaLoad(const jax_flash::Program& program, const std::string& entry) {
  auto kernel = [&] {
    nb::gil_scoped_release release;
    return jax_flash::Load(program, entry);
  }();
  if (!kernel.ok()) throw std::runtime_error(kernel.error());
}
#endif

}  // namespace

NB_MODULE(_ext, m) {
  m.attr("version") = JAX_FLASH_VERSION;
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("terms", &jax_flash::TermRows);
  m.def("targets", &Targets);
#ifdef JAX_FLASH_CUDA
  m.def("cuda_configure", &CudaConfigure);
  m.def("cuda_compile", [](std::string source, std::string header, std::string arch) {
    return CudaCompile({std::move(source), std::move(header), std::move(arch)});
  });
  m.def("cuda_start", [](std::string source, std::string header, std::string arch) {
    jax_flash::StartCompiling({std::move(source), std::move(header), std::move(arch)});
  });
  m.def("cuda_wait", [](std::string source, std::string header, std::string arch, double seconds) {
    nb::gil_scoped_release release;
    return jax_flash::WaitFor({std::move(source), std::move(header), std::move(arch)}, seconds);
  });
  m.def("cuda_wait_for_all", [](double seconds) {
    nb::gil_scoped_release release;
    return jax_flash::WaitForAll(seconds);
  });
  m.def("cuda_load",
        [](std::string source, std::string header, std::string arch, const std::string& entry) {
          CudaLoad({std::move(source), std::move(header), std::move(arch)}, entry);
        });
  m.def("cuda_pretend_multiprocessors", &jax_flash::PretendMultiprocessors);
#endif
}
