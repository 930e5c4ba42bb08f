// Owns what a handler does with the driver: tensor maps and launches on XLA's stream, and graphs of
// launches. Waits for nothing, and but for those graphs allocates nothing, so that all launches can
// be captured in a CUDA graph. Knows neither XLA nor attention. Read next: run_plan.cc.

#ifndef JAX_FLASH_CUDA_RUNTIME_LAUNCH_H_
#define JAX_FLASH_CUDA_RUNTIME_LAUNCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/jit.h"
#include "cuda/runtime/result.h"

namespace jax_flash {

// A stream whose context is current while this lives: one process may drive several GPUs, from any
// thread.
class StreamScope {
 public:
  StreamScope(const Driver& driver, CUstream stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

  const Status& status() const { return status_; }
  const Driver& driver() const { return driver_; }
  CUstream stream() const { return stream_; }
  CUcontext context() const { return context_; }
  CUdevice device() const { return device_; }
  void Redirect(CUstream stream) { stream_ = stream; }  // launches go to another of the context

 private:
  const Driver& driver_;
  CUstream stream_;
  CUcontext context_ = nullptr;
  CUdevice device_ = 0;
  bool pushed_ = false;
  Status status_ = Done{};
};

// The multiprocessors of the stream's device (of its slice, under MIG), remembered per device: the
// CTAs of a persistent kernel that run at once.
Result<std::int64_t> CountMultiprocessors(const StreamScope& scope);

// For tests: every device is taken to have so many; 0 returns to what the driver says.
void PretendMultiprocessors(int count);

struct LaunchSize {
  std::int64_t blocks;
  std::int64_t threads;
  std::int64_t shared_bytes;  // dynamic shared memory of a block
  bool overlaps = false;      // it may start before the kernel ahead has ended, for which it waits
  std::int64_t cluster = 1;   // blocks that see each other's shared memory: 1 to 8
};

// Launches `kernel(params)`; `params` is the struct that the kernel takes by value.
Status Launch(const StreamScope& scope, const Kernel& kernel, const LaunchSize& size,
              const void* params);

// Fills `words` 32-bit words with `value`.
Status Fill(const StreamScope& scope, void* target, std::uint32_t value, std::size_t words);

// Launches that were recorded as a graph.
class Recording {
 public:
  Recording(const Driver& driver, CUgraphExec exec) : driver_(driver), exec_(exec) {}
  ~Recording() { driver_.cuGraphExecDestroy(exec_); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  Status Launch(CUstream stream) const;

 private:
  const Driver& driver_;
  CUgraphExec exec_;
};

// Tells whether launches may be recorded: they become part of no graph of somebody else's, and the
// process sees no other GPU. Making or freeing a graph may wait for a GPU whose collective waits
// for a thread of another GPU, which waits for the driver. XLA makes its graphs before any GPU of a
// program begins (RendezvousAfterInitialization); a call cannot.
bool MayRecord(const StreamScope& scope);

// Records what `launches` launches in the scope, which then does not run. Null where the driver
// refuses, for want of memory say, or `launches` returns false.
std::unique_ptr<Recording> Record(StreamScope& scope, const std::function<bool()>& launches);

// A dense row-major array [B, T, N, H] seen by TMA: boxes of 128 bytes (64 columns of
// 16 bits, 32 of float32) by `box_heads` by `box_rows`, in 128-byte swizzled shared memory. Reads
// beyond the array give zero, writes there are dropped. With `box_batches` a box has so many
// batches, and in shared memory a head's rows follow each other.
struct TensorView {
  CUtensorMapDataType type;
  std::int64_t bytes;  // of an element
  const void* data;
  std::int64_t batch, rows, heads, columns;
  std::int64_t box_rows;
  std::int64_t box_heads;
  std::int64_t box_batches;  // 0: one, and a row's heads follow each other
};
// Writes the 128 bytes of the map to `map`, aligned to 64.
Status EncodeTensorMap(const Driver& driver, const TensorView& view, void* map);

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_LAUNCH_H_
