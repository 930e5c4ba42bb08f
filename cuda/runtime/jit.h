// Owns the way from kernel source to a kernel that can be launched: NVRTC and the driver found at
// run time, compilation, the caches in the process and on disk. Knows neither XLA nor attention.
// Read next: disk_cache.h, launch.h.

#ifndef JAX_FLASH_CUDA_RUNTIME_JIT_H_
#define JAX_FLASH_CUDA_RUNTIME_JIT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/result.h"

namespace jax_flash {

// Where things are on this machine; Python finds out (jax_flash/_native.py).
struct Settings {
  std::string nvrtc;                           // path of libnvrtc; empty when there is none
  std::string nvrtc_error;                     // then: why, and what to install
  std::map<std::string, std::string> sources;  // file name as `#include` spells it -> text
  std::string cache_folder;                    // empty: nothing is kept on disk
  std::uint64_t cache_bytes = 0;
};

// Replaces the settings and forgets compiled programs, failed ones included; loaded kernels stay
// loaded, since a running program may hold them.
void Configure(Settings settings);

// How often that was done: kernels loaded before the last time are of other settings.
std::uint64_t Generation();

// One compilation: `header` (generated constexpr definitions), then the file named `source`.
struct Program {
  std::string source;  // "sm90/forward.cuh"
  std::string header;
  std::string arch;  // "sm_90a"
};

struct Image {
  std::string cubin;
  std::string log;  // NVRTC's and ptxas's: registers, shared memory, spills, warnings
  double seconds;   // spent in this process on getting it
  bool from_disk;
};

// Compiles, or finds the result of the same compilation in the caches. Needs NVRTC, no driver and
// no GPU. NVRTC runs on a thread of its own: the calling thread may be capturing a stream. Safe
// from any thread; callers asking for one program at once share one compilation.
Result<std::shared_ptr<const Image>> Compile(const Program& program);

// The parts of it, for who wants to do something meanwhile. A compilation cannot be stopped.
void StartCompiling(const Program& program);
bool WaitFor(const Program& program, double seconds);  // starts it too; true if it is done
bool WaitForAll(double seconds);                       // true if none is under way

// An entry point in the driver. Serves every device of the process.
class Kernel {
 public:
  explicit Kernel(CUkernel handle) : handle_(handle) {}
  CUfunction function() const { return reinterpret_cast<CUfunction>(handle_); }

  // Lets blocks on `device` have `bytes` of dynamic shared memory, more than the 48 KB any kernel
  // may; remembered per device.
  Status AllowShared(const Driver& driver, CUdevice device, int bytes) const;

 private:
  static constexpr int kDevices = 64;  // beyond that the attribute is set on each call

  CUkernel handle_;
  mutable std::array<std::atomic<int>, kDevices> allowed_{};
};

// The entry point `name` of the compiled program, loaded into the driver once per process. The
// kernel lives as long as the process.
Result<const Kernel*> Load(const Program& program, const std::string& name);

// libcuda.so.1, initialised; an error on a machine without an NVIDIA driver.
Result<const Driver*> GetDriver();

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_JIT_H_
