#include "cuda/runtime/launch.h"

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace jax_flash {
namespace {

constexpr int kDevices = 64;  // beyond that the driver is asked on each call
std::array<std::atomic<int>, kDevices> multiprocessors{};
std::atomic<int> pretended{0};

}  // namespace

StreamScope::StreamScope(const Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {
  if (CUresult code = driver_.cuStreamGetCtx(stream_, &context_); code != 0) {
    status_ = Failure{driver_.Explain("cuStreamGetCtx", code)};
    return;
  }
  CUcontext current = nullptr;
  driver_.cuCtxGetCurrent(&current);
  if (current != context_) {
    if (CUresult code = driver_.cuCtxPushCurrent(context_); code != 0) {
      status_ = Failure{driver_.Explain("cuCtxPushCurrent", code)};
      return;
    }
    pushed_ = true;
  }
  if (CUresult code = driver_.cuCtxGetDevice(&device_); code != 0) {
    status_ = Failure{driver_.Explain("cuCtxGetDevice", code)};
  }
}

StreamScope::~StreamScope() {
  CUcontext popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent(&popped);
}

Result<std::int64_t> CountMultiprocessors(const StreamScope& scope) {
  if (const int count = pretended.load(std::memory_order_relaxed)) return std::int64_t{count};
  const CUdevice device = scope.device();
  const bool remembered = device >= 0 && device < kDevices;
  int count = remembered ? multiprocessors[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    const CUresult code = scope.driver().cuDeviceGetAttribute(&count, kMultiprocessorCount, device);
    if (code != 0) return Failure{scope.driver().Explain("cuDeviceGetAttribute", code)};
    if (remembered) multiprocessors[device].store(count, std::memory_order_relaxed);
  }
  return std::int64_t{count};
}

void PretendMultiprocessors(int count) { pretended.store(count, std::memory_order_relaxed); }

Status Launch(const StreamScope& scope, const Kernel& kernel, const LaunchSize& size,
              const void* params) {
  const int shared = static_cast<int>(size.shared_bytes);
  if (Status allowed = kernel.AllowShared(scope.driver(), scope.device(), shared); !allowed.ok()) {
    return allowed;
  }
  CUlaunchConfig config{};
  config.grid_x = static_cast<unsigned>(size.blocks);
  config.grid_y = config.grid_z = 1;
  config.block_x = static_cast<unsigned>(size.threads);
  config.block_y = config.block_z = 1;
  config.shared_bytes = static_cast<unsigned>(size.shared_bytes);
  config.stream = scope.stream();
  CUlaunchAttribute attributes[2]{};
  config.attributes = attributes;
  if (size.overlaps) {
    CUlaunchAttribute& overlap = attributes[config.attribute_count++];
    overlap.id = kProgrammaticStreamSerialization;
    overlap.value.allowed = 1;
  }
  if (size.cluster > 1) {
    CUlaunchAttribute& cluster = attributes[config.attribute_count++];
    cluster.id = kClusterDimension;
    cluster.value.dimensions[0] = static_cast<unsigned>(size.cluster);
    cluster.value.dimensions[1] = cluster.value.dimensions[2] = 1;
  }
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult code =
      scope.driver().cuLaunchKernelEx(&config, kernel.function(), arguments, nullptr);
  if (code == 0) return Done{};
  return Failure{scope.driver().Explain("cuLaunchKernelEx", code) + ": " +
                 std::to_string(size.blocks) + " blocks of " + std::to_string(size.threads) +
                 " threads, " + std::to_string(size.shared_bytes) + " bytes of shared memory"};
}

Status Fill(const StreamScope& scope, void* target, std::uint32_t value, std::size_t words) {
  const auto address = reinterpret_cast<CUdeviceptr>(target);
  const CUresult code = scope.driver().cuMemsetD32Async(address, value, words, scope.stream());
  if (code == 0) return Done{};
  return Failure{scope.driver().Explain("cuMemsetD32Async", code)};
}

Status Recording::Launch(CUstream stream) const {
  const CUresult code = driver_.cuGraphLaunch(exec_, stream);
  if (code == 0) return Done{};
  return Failure{driver_.Explain("cuGraphLaunch", code)};
}

bool MayRecord(const StreamScope& scope) {
  int status = 0;
  int devices = 0;
  if (scope.driver().cuStreamIsCapturing(scope.stream(), &status) != 0 || status != 0) return false;
  return scope.driver().cuDeviceGetCount(&devices) == 0 && devices == 1;
}

std::unique_ptr<Recording> Record(StreamScope& scope, const std::function<bool()>& launches) {
  static auto* mutex = new std::mutex;
  static auto* recorders = new std::unordered_map<CUcontext, CUstream>;  // which run nothing
  const Driver& driver = scope.driver();
  const std::lock_guard<std::mutex> lock(*mutex);
  CUstream& recorder = (*recorders)[scope.context()];
  if (recorder == nullptr && driver.cuStreamCreate(&recorder, kNonBlocking) != 0) return nullptr;
  if (driver.cuStreamBeginCapture(recorder, kCaptureRelaxed) != 0) return nullptr;
  const CUstream stream = scope.stream();
  scope.Redirect(recorder);
  const bool launched = launches();
  scope.Redirect(stream);
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  if (driver.cuStreamEndCapture(recorder, &graph) != 0) return nullptr;
  if (launched && driver.cuGraphInstantiateWithFlags(&exec, graph, 0) != 0) exec = nullptr;
  driver.cuGraphDestroy(graph);
  return exec == nullptr ? nullptr : std::make_unique<Recording>(driver, exec);
}

Status EncodeTensorMap(const Driver& driver, const TensorView& view, void* map) {
  const auto bytes = static_cast<std::uint64_t>(view.bytes);
  const auto columns = static_cast<std::uint64_t>(view.columns);
  const auto heads = static_cast<std::uint64_t>(view.heads);
  const auto rows = static_cast<std::uint64_t>(view.rows);
  std::uint64_t dims[] = {columns, heads, rows, static_cast<std::uint64_t>(view.batch)};
  std::uint64_t strides[] = {columns * bytes, heads * columns * bytes,
                             rows * heads * columns * bytes};  // of all dims but the first
  unsigned box[] = {static_cast<unsigned>(128 / bytes), static_cast<unsigned>(view.box_heads),
                    static_cast<unsigned>(view.box_rows), 1};
  if (view.box_batches > 0) {
    std::swap(dims[1], dims[2]);
    std::swap(strides[0], strides[1]);
    std::swap(box[1], box[2]);
    box[3] = static_cast<unsigned>(view.box_batches);
  }
  const unsigned steps[] = {1, 1, 1, 1};
  const CUresult code = driver.cuTensorMapEncodeTiled(
      map, view.type, 4, const_cast<void*>(view.data), dims, strides, box, steps, kInterleaveNone,
      kSwizzle128B, kL2Promotion128B, kFillZero);
  if (code == 0) return Done{};
  return Failure{driver.Explain("cuTensorMapEncodeTiled", code) + ": array [" +
                 std::to_string(view.batch) + ", " + std::to_string(view.rows) + ", " +
                 std::to_string(view.heads) + ", " + std::to_string(view.columns) + "], " +
                 std::to_string(view.box_rows) + " rows of " + std::to_string(view.box_heads) +
                 " heads a box, batches " + std::to_string(view.box_batches)};
}

}  // namespace jax_flash
