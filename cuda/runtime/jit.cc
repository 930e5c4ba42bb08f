#include "cuda/runtime/jit.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/runtime/disk_cache.h"
#include "cuda/runtime/sha256.h"

namespace jax_flash {
namespace {

using ImageResult = Result<std::shared_ptr<const Image>>;

// -default-device: lambdas and templates need no __device__. -v: ptxas reports its resources.
const std::vector<std::string>& Options() {
  static const auto* options =
      new std::vector<std::string>{"--std=c++17", "-default-device", "--ptxas-options=-v"};
  return *options;
}

// Fills `*entry` with the symbol of that name, or appends the name to `*missing`.
template <class Function>
void Find(void* library, const char* name, Function* entry, std::string* missing) {
  *entry = reinterpret_cast<Function>(dlsym(library, name));
  if (*entry == nullptr) *missing += std::string(missing->empty() ? "" : ", ") + name;
}

Result<const Driver*> OpenDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Failure{std::string("the NVIDIA driver is not installed: ") + dlerror()};
  }
  auto* driver = new Driver;  // lives as long as the process
  std::string missing;
#define JAX_FLASH_FIND(name) Find(library, #name, &driver->name, &missing)
  JAX_FLASH_FIND(cuInit);
  JAX_FLASH_FIND(cuGetErrorName);
  JAX_FLASH_FIND(cuGetErrorString);
  JAX_FLASH_FIND(cuCtxGetCurrent);
  JAX_FLASH_FIND(cuCtxGetDevice);
  JAX_FLASH_FIND(cuDeviceGetAttribute);
  JAX_FLASH_FIND(cuDeviceGetCount);
  JAX_FLASH_FIND(cuStreamGetCtx);
  JAX_FLASH_FIND(cuLibraryLoadData);
  JAX_FLASH_FIND(cuLibraryGetKernel);
  JAX_FLASH_FIND(cuKernelSetAttribute);
  JAX_FLASH_FIND(cuLaunchKernelEx);
  JAX_FLASH_FIND(cuMemsetD32Async);
  JAX_FLASH_FIND(cuStreamCreate);
  JAX_FLASH_FIND(cuStreamIsCapturing);
  JAX_FLASH_FIND(cuStreamEndCapture);
  JAX_FLASH_FIND(cuGraphInstantiateWithFlags);
  JAX_FLASH_FIND(cuGraphDestroy);
  JAX_FLASH_FIND(cuGraphExecDestroy);
  JAX_FLASH_FIND(cuGraphLaunch);
  JAX_FLASH_FIND(cuTensorMapEncodeTiled);
#undef JAX_FLASH_FIND
  // cuda.h maps these names to their second versions.
  Find(library, "cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent, &missing);
  Find(library, "cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent, &missing);
  Find(library, "cuStreamBeginCapture_v2", &driver->cuStreamBeginCapture, &missing);
  if (!missing.empty()) {
    return Failure{"the NVIDIA driver is older than CUDA 12.0 (it lacks " + missing + ")"};
  }
  if (CUresult code = driver->cuInit(0); code != 0) return Failure{driver->Explain("cuInit", code)};
  return driver;
}

Result<const Nvrtc*> OpenNvrtc(const std::string& path) {
  // libnvrtc opens libnvrtc-builtins by name at its first compilation and finds it only if it is
  // already in the process.
  std::error_code ignored;
  for (const auto& file :
       std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), ignored)) {
    const std::string name = file.path().filename().string();
    if (name.rfind("libnvrtc-builtins.so", 0) == 0) {
      dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Failure{std::string("NVRTC does not open: ") + dlerror()};
  auto* nvrtc = new Nvrtc;  // lives as long as the process
  std::string missing;
#define JAX_FLASH_FIND(name) Find(library, #name, &nvrtc->name, &missing)
  JAX_FLASH_FIND(nvrtcVersion);
  JAX_FLASH_FIND(nvrtcGetErrorString);
  JAX_FLASH_FIND(nvrtcCreateProgram);
  JAX_FLASH_FIND(nvrtcDestroyProgram);
  JAX_FLASH_FIND(nvrtcCompileProgram);
  JAX_FLASH_FIND(nvrtcGetProgramLogSize);
  JAX_FLASH_FIND(nvrtcGetProgramLog);
  JAX_FLASH_FIND(nvrtcGetCUBINSize);
  JAX_FLASH_FIND(nvrtcGetCUBIN);
#undef JAX_FLASH_FIND
  if (!missing.empty()) return Failure{path + " is not a usable NVRTC: it lacks " + missing};
  int major = 0;
  int minor = 0;
  nvrtc->nvrtcVersion(&major, &minor);
  nvrtc->version = 1000 * major + 10 * minor;
  if (major < 12) return Failure{path + " is older than CUDA 12.0, the oldest supported"};
  return nvrtc;
}

// The settings of one Configure() and what was derived from them once.
struct Toolchain {
  explicit Toolchain(Settings given)
      : settings(std::move(given)), disk(settings.cache_folder, settings.cache_bytes) {
    Sha256 hash;
    for (const auto& [name, text] : settings.sources) hash.AddField(name).AddField(text);
    for (const std::string& option : Options()) hash.AddField(option);
    digest = hash.Hex();
  }

  const Result<const Nvrtc*>& nvrtc() {
    std::call_once(opened, [this] {
      if (!settings.nvrtc.empty()) {
        nvrtc_ = OpenNvrtc(settings.nvrtc);
      } else if (!settings.nvrtc_error.empty()) {
        nvrtc_ = Failure{settings.nvrtc_error};
      }
    });
    return nvrtc_;
  }

  const Settings settings;
  const DiskCache disk;
  std::string digest;

 private:
  std::once_flag opened;
  Result<const Nvrtc*> nvrtc_ = Failure{"jax_flash's compiler was used before it was configured"};
};

ImageResult CompileWith(const Nvrtc& nvrtc, const Settings& settings, const Program& program) {
  const std::string text = program.header + "\n#include \"" + program.source + "\"\n";
  std::vector<const char*> names;
  std::vector<const char*> texts;
  for (const auto& [name, source] : settings.sources) {
    names.push_back(name.c_str());
    texts.push_back(source.c_str());
  }
  nvrtcProgram compiler = nullptr;
  nvrtcResult code =
      nvrtc.nvrtcCreateProgram(&compiler, text.c_str(), "jax_flash.cu",
                               static_cast<int>(names.size()), texts.data(), names.data());
  if (code != 0) {
    return Failure{std::string("nvrtcCreateProgram: ") + nvrtc.nvrtcGetErrorString(code)};
  }
  const std::string arch = "--gpu-architecture=" + program.arch;
  std::vector<const char*> options = {arch.c_str()};
  for (const std::string& option : Options()) options.push_back(option.c_str());
  code = nvrtc.nvrtcCompileProgram(compiler, static_cast<int>(options.size()), options.data());

  Image image{};
  std::size_t size = 0;
  if (nvrtc.nvrtcGetProgramLogSize(compiler, &size) == 0 && size > 1) {
    image.log.resize(size);
    nvrtc.nvrtcGetProgramLog(compiler, image.log.data());
    image.log.resize(size - 1);  // ends in a zero byte
  }
  if (code == 0) code = nvrtc.nvrtcGetCUBINSize(compiler, &size);
  if (code == 0) {
    image.cubin.resize(size);
    code = nvrtc.nvrtcGetCUBIN(compiler, image.cubin.data());
  }
  nvrtc.nvrtcDestroyProgram(&compiler);
  if (code != 0) {
    return Failure{"NVRTC " + std::to_string(nvrtc.version / 1000) + "." +
                   std::to_string(nvrtc.version % 1000 / 10) + " failed on " + program.source +
                   " for " + program.arch + " (" + nvrtc.nvrtcGetErrorString(code) + "):\n" +
                   image.log};
  }
  return std::make_shared<const Image>(std::move(image));
}

ImageResult FindOrCompile(Toolchain& toolchain, const Program& program) {
  const auto start = std::chrono::steady_clock::now();
  const Result<const Nvrtc*>& nvrtc = toolchain.nvrtc();
  if (!nvrtc.ok()) return nvrtc.failure();
  const std::string key = Sha256()
                              .AddField(toolchain.digest)
                              .AddField(std::to_string((*nvrtc)->version))
                              .AddField(program.arch)
                              .AddField(program.source)
                              .AddField(program.header)
                              .Hex();
  Image image{};
  if (auto cached = toolchain.disk.Read(key)) {
    image = Image{std::move(cached->cubin), std::move(cached->log), 0, true};
  } else {
    ImageResult compiled = CompileWith(**nvrtc, toolchain.settings, program);
    if (!compiled.ok()) return compiled;
    image = **compiled;
    toolchain.disk.Write(key, CachedImage{image.log, image.cubin});
  }
  image.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::make_shared<const Image>(std::move(image));
}

// What the process knows: programs asked for, by content, and kernels loaded. Never destroyed: XLA
// threads may still call when the process exits.
struct Process {
  std::mutex mutex;
  std::shared_ptr<Toolchain> toolchain = std::make_shared<Toolchain>(Settings{});
  std::unordered_map<std::string, std::shared_future<ImageResult>> images;
  std::unordered_map<std::string, Result<CUlibrary>> libraries;
  std::unordered_map<std::string, Result<const Kernel*>> kernels;
  std::atomic<std::uint64_t> generation{0};
  int compiling = 0;  // programs
  std::condition_variable compiled;
};

Process& TheProcess() {
  static auto* process = new Process;
  return *process;
}

std::string KeyOf(const Program& program) {
  return program.arch + '\n' + program.source + '\n' + program.header;
}

// The image of a program, whose compilation is started if nobody asked for it yet.
std::shared_future<ImageResult> ImageOf(const Program& program) {
  Process& process = TheProcess();
  auto promise = std::make_shared<std::promise<ImageResult>>();
  std::shared_future<ImageResult> image;
  std::shared_ptr<Toolchain> toolchain;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    auto [entry, added] = process.images.try_emplace(KeyOf(program));
    if (added) {
      entry->second = promise->get_future().share();
      toolchain = process.toolchain;
      ++process.compiling;
    }
    image = entry->second;
  }
  if (toolchain == nullptr) return image;
  const auto compile = [&process, promise, toolchain, program] {
    try {
      promise->set_value(FindOrCompile(*toolchain, program));
    } catch (const std::exception& error) {
      promise->set_value(Failure{std::string("compiling a kernel: ") + error.what()});
    }
    std::lock_guard<std::mutex> lock(process.mutex);
    --process.compiling;
    process.compiled.notify_all();
  };
  try {
    std::thread(compile).detach();
  } catch (const std::system_error&) {
    compile();  // no thread to be had
  }
  return image;
}

Result<CUlibrary> LoadLibrary(const Driver& driver, const Image& image) {
  CUlibrary library = nullptr;
  const CUresult code = driver.cuLibraryLoadData(&library, image.cubin.data(), nullptr, nullptr, 0,
                                                 nullptr, nullptr, 0);
  if (code != 0) {
    return Failure{driver.Explain("cuLibraryLoadData", code) +
                   "; an NVRTC of a newer CUDA major version than the driver's gives this"};
  }
  return library;
}

}  // namespace

std::string Driver::Explain(const char* call, CUresult code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(code, &name);
  cuGetErrorString(code, &text);
  return std::string(call) + ": " + (name ? name : std::to_string(code).c_str()) + " (" +
         (text ? text : "unknown error") + ")";
}

Result<const Driver*> GetDriver() {
  static const auto* driver = new Result<const Driver*>(OpenDriver());
  return *driver;
}

void Configure(Settings settings) {
  auto toolchain = std::make_shared<Toolchain>(std::move(settings));
  Process& process = TheProcess();
  std::lock_guard<std::mutex> lock(process.mutex);
  process.toolchain = std::move(toolchain);
  process.images.clear();
  process.libraries.clear();
  process.kernels.clear();
  ++process.generation;
}

std::uint64_t Generation() { return TheProcess().generation.load(std::memory_order_acquire); }

ImageResult Compile(const Program& program) { return ImageOf(program).get(); }

void StartCompiling(const Program& program) { ImageOf(program); }

bool WaitFor(const Program& program, double seconds) {
  const std::chrono::duration<double> time(seconds);
  return ImageOf(program).wait_for(time) == std::future_status::ready;
}

bool WaitForAll(double seconds) {
  Process& process = TheProcess();
  std::unique_lock<std::mutex> lock(process.mutex);
  return process.compiled.wait_for(lock, std::chrono::duration<double>(seconds),
                                   [&] { return process.compiling == 0; });
}

Status Kernel::AllowShared(const Driver& driver, CUdevice device, int bytes) const {
  const bool remembered = device >= 0 && device < kDevices;
  if (remembered && allowed_[device].load(std::memory_order_acquire) >= bytes) return Done{};
  const CUresult code =
      driver.cuKernelSetAttribute(kMaxDynamicSharedSizeBytes, bytes, handle_, device);
  if (code != 0) {
    return Failure{driver.Explain("cuKernelSetAttribute", code) + ": " + std::to_string(bytes) +
                   " bytes of dynamic shared memory"};
  }
  if (remembered) allowed_[device].store(bytes, std::memory_order_release);
  return Done{};
}

Result<const Kernel*> Load(const Program& program, const std::string& name) {
  Process& process = TheProcess();
  const std::string program_key = KeyOf(program);
  const std::string kernel_key = name + '\n' + program_key;
  {
    std::lock_guard<std::mutex> lock(process.mutex);
    auto found = process.kernels.find(kernel_key);
    if (found != process.kernels.end()) return found->second;
  }
  Result<const Driver*> driver = GetDriver();
  if (!driver.ok()) return driver.failure();
  ImageResult image = Compile(program);
  if (!image.ok()) return image.failure();

  std::lock_guard<std::mutex> lock(process.mutex);
  auto [library, new_library] = process.libraries.try_emplace(program_key, Failure{});
  if (new_library) library->second = LoadLibrary(**driver, **image);
  if (!library->second.ok()) return library->second.failure();
  auto [kernel, new_kernel] = process.kernels.try_emplace(kernel_key, Failure{});
  if (new_kernel) {
    CUkernel handle = nullptr;
    const CUresult code = (*driver)->cuLibraryGetKernel(&handle, *library->second, name.c_str());
    if (code == 0) {
      kernel->second = new Kernel(handle);
    } else {
      kernel->second = Failure{(*driver)->Explain("cuLibraryGetKernel", code) + ": " + name};
    }
  }
  return kernel->second;
}

}  // namespace jax_flash
