// A CUDA driver and an NVRTC that run nothing and write down what they are asked: one library with
// the names of both, for test_run_plan.py. It refuses what a driver would refuse of this.
//
// Also what XLA calls on its CPU platform in place of the CUDA handlers. It passes the calls on to
// them with made-up addresses of the buffers, call << 40 | (index + 1) << 32 for operands and then
// results, and with a stream, which that platform lacks. Notes are lines of JSON.
//
// With tests/emulator linked to it there is a machine: then it compiles and runs what is launched,
// addresses are the buffers' own, and nothing is noted.

#include "tests/fake_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/driver.h"
#include "xla/ffi/api/c_api.h"

using namespace jax_flash;  // NOLINT: the types of the driver's interface

namespace jax_flash {
struct _nvrtcProgram {
  std::string text;
  std::map<std::string, std::string> files;
  std::string image, log;
};
struct CUlib_st {
  std::string program;
  void* loaded;  // by the machine
};
struct CUkern_st {
  CUlib_st* library;
  std::string name;
  int shared_bytes = 48 << 10;  // dynamic, that a block may have
};
}  // namespace jax_flash

namespace {

constexpr CUresult kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                   kLaunchFailed = 719;
const auto kContext = reinterpret_cast<CUcontext>(0x11);
const auto kStream = reinterpret_cast<CUstream>(0x22);
const auto kRecorder = reinterpret_cast<CUstream>(0x33);
bool same_addresses = false;
int devices = 1;     // that are seen
std::string before;  // notes, while the recorder captures
CUcontext current_context = nullptr;
CUdevice current_device = 0;
constexpr int kMultiprocessors[] = {20, 50};  // of the two devices
std::string notes;
std::string trouble;       // of the machine
std::mutex kernels_mutex;  // programs are compiled side by side
std::string kernels;       // the text of all files that NVRTC was given
std::uint64_t calls = 0;

XLA_FFI_Handler* handler;
constexpr std::size_t kMostParamBytes = 4096;  // that a handler has room for, plan.h

static_assert(sizeof(FakeMap) <= 128);

std::string Hex(const void* data, std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) {
    const unsigned byte = static_cast<const unsigned char*>(data)[i];
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string List(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (std::int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

XLA_FFI_Error* StreamGet(XLA_FFI_Stream_Get_Args* args) {
  args->stream = kStream;
  return nullptr;
}

// A call's operands or results with addresses of their own; notes of shape and dtype, and what the
// bytes add up to. Results are filled with their index + 1, for a machine with garbage.
class Buffers {
 public:
  Buffers(void** buffers, std::int64_t count, std::uint64_t first, const Buffers* operands)
      : copies_(count), pointers_(count) {
    const bool results = operands != nullptr;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
      const std::vector<std::int64_t> dims(buffer.dims, buffer.dims + buffer.rank);
      std::int64_t bytes = buffer.dtype == XLA_FFI_DataType_F32        ? 4
                           : buffer.dtype == XLA_FFI_DataType_S32      ? 4
                           : buffer.dtype == XLA_FFI_DataType_U32      ? 4
                           : buffer.dtype == XLA_FFI_DataType_U8       ? 1
                           : buffer.dtype == XLA_FFI_DataType_PRED     ? 1
                           : buffer.dtype == XLA_FFI_DataType_S8       ? 1
                           : buffer.dtype == XLA_FFI_DataType_F8E4M3FN ? 1
                                                                       : 2;
      for (std::int64_t dim : dims) bytes *= dim;
      auto* data = static_cast<unsigned char*>(buffer.data);
      if (bytes > 0) data_.push_back(data);
      const bool fills = results && bytes > 0 && !operands->Has(data);  // in place
      copies_[i] = buffer;
      pointers_[i] = &copies_[i];
      if (fake_machine != nullptr) {
        if (fills) std::memset(data, kFakeGarbage, bytes);
        ranges.push_back({data, static_cast<std::uint64_t>(bytes),
                          (results ? "result " : "operand ") + std::to_string(i)});
        continue;
      }
      if (fills) std::memset(data, static_cast<int>(i + 1), bytes);
      std::int64_t sum = 0;
      for (std::int64_t at = 0; at < bytes; ++at) sum += data[at];
      notes_ += std::string(notes_.empty() ? "" : ", ") +
                "{\"dtype\": " + std::to_string(buffer.dtype) + ", \"dims\": " + List(dims) +
                ", \"bytes\": " + std::to_string(bytes) + ", \"sum\": " + std::to_string(sum) + "}";
      copies_[i].data = reinterpret_cast<void*>(calls << 40 | (first + i + 1) << 32);
    }
  }
  void** pointers() { return pointers_.data(); }
  bool Has(const void* data) const {
    return std::find(data_.begin(), data_.end(), data) != data_.end();
  }
  std::string notes() const { return "[" + notes_ + "]"; }
  std::vector<FakeBuffer> ranges;  // for a machine

 private:
  std::vector<XLA_FFI_Buffer> copies_;
  std::vector<void*> pointers_;
  std::vector<const void*> data_;
  std::string notes_;
};

XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
  if (frame->ctx == nullptr) return handler(frame);  // XLA asks for the version
  if (!same_addresses || calls == 0) ++calls;
  Buffers operands(frame->args.args, frame->args.size, 0, nullptr);
  Buffers results(frame->rets.rets, frame->rets.size, frame->args.size, &operands);
  if (fake_machine != nullptr) {
    std::vector<FakeBuffer> all = operands.ranges;
    all.insert(all.end(), results.ranges.begin(), results.ranges.end());
    fake_machine->SetBuffers(std::move(all));
  }
  notes += "{\"event\": \"call\", \"number\": " + std::to_string(calls) +
           ", \"operands\": " + operands.notes() + ", \"results\": " + results.notes() + "}\n";
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = StreamGet;
  XLA_FFI_CallFrame copy = *frame;
  copy.api = &api;
  copy.args.args = operands.pointers();
  copy.rets.rets = results.pointers();
  return handler(&copy);
}

}  // namespace

extern "C" {

// ---- for the test ------------------------------------------------------------------------------

void FakeSetHandler(XLA_FFI_Handler* of_calls) { handler = of_calls; }
void FakeSetDevice(int device) { current_device = device; }
void FakeSetDevices(int count) { devices = count; }
void FakeKeepAddresses(bool same) { same_addresses = same; }
XLA_FFI_Error* FakeCall(XLA_FFI_CallFrame* frame) { return Call(frame); }
const char* FakeTakeNotes() {
  static std::string taken;
  taken = std::move(notes);
  notes.clear();
  return taken.c_str();
}

// ---- libcuda -----------------------------------------------------------------------------------

CUresult cuInit(unsigned) { return 0; }
CUresult cuGetErrorName(CUresult code, const char** name) {
  *name = code == kInvalidValue     ? "CUDA_ERROR_INVALID_VALUE"
          : code == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == kNotFound       ? "CUDA_ERROR_NOT_FOUND"
          : code == kLaunchFailed   ? "CUDA_ERROR_LAUNCH_FAILED"
                                    : "CUDA_ERROR_INVALID_HANDLE";
  return 0;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = trouble.empty() ? "refused by tests/fake_cuda.cc" : trouble.c_str();
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current_context;
  return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  current_context = context;
  return 0;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = current_context;
  current_context = nullptr;
  return 0;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device;
  return current_context == kContext ? 0 : kInvalidContext;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute != kMultiprocessorCount || device < 0 || device > 1) return kInvalidValue;
  *value = kMultiprocessors[device];
  return 0;
}
CUresult cuDeviceGetCount(int* count) {
  *count = devices;
  return 0;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  *context = kContext;
  return stream == kStream ? 0 : kInvalidHandle;
}
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, void*, void**, unsigned, void*,
                           void**, unsigned) {
  if (fake_machine == nullptr) {
    *library = new CUlib_st{static_cast<const char*>(code), nullptr};
    return 0;
  }
  // A library of the host, in front of it its size.
  std::uint64_t size = 0;
  std::memcpy(&size, code, sizeof size);
  void* loaded = nullptr;
  trouble =
      fake_machine->Load(std::string(static_cast<const char*>(code) + sizeof size, size), &loaded);
  if (!trouble.empty()) return kInvalidValue;
  *library = new CUlib_st{"", loaded};
  return 0;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  const std::string declaration = std::string(" ") + name + "(const __grid_constant__ ";
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  const bool found = fake_machine != nullptr ? fake_machine->Has(library->loaded, name)
                                             : kernels.find(declaration) != std::string::npos;
  if (!found) return kNotFound;
  *kernel = new CUkern_st{library, name};
  return 0;
}
CUresult cuKernelSetAttribute(CUfunctionAttribute attribute, int value, CUkernel kernel, CUdevice) {
  if (attribute != kMaxDynamicSharedSizeBytes || value > 227 << 10) return kInvalidValue;
  kernel->shared_bytes = value;
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                          void** extra) {
  const auto* kernel = reinterpret_cast<CUkernel>(function);
  const auto& c = *config;
  const unsigned threads = c.block_x * c.block_y * c.block_z;
  if (current_context != kContext) return kInvalidContext;
  if (c.stream != kStream && c.stream != kRecorder) return kInvalidHandle;
  if (c.grid_x < 1 || c.grid_x > 0x7fffffff || c.grid_y < 1 || c.grid_y > 65535 || c.grid_z < 1 ||
      c.grid_z > 65535 || threads < 1 || threads > 1024 || extra != nullptr ||
      static_cast<int>(c.shared_bytes) > kernel->shared_bytes) {
    return kInvalidValue;
  }
  unsigned cluster = 1;
  bool overlaps = false;
  for (unsigned i = 0; i < c.attribute_count; ++i) {
    if (c.attributes[i].id == kProgrammaticStreamSerialization) {
      overlaps = c.attributes[i].value.allowed != 0;
    }
    if (c.attributes[i].id == kClusterDimension) cluster = c.attributes[i].value.dimensions[0];
  }
  if (cluster < 1 || cluster > 8 || c.grid_x % cluster != 0) {
    return kInvalidValue;
  }
  if (fake_machine != nullptr) {
    trouble = fake_machine->Launch(kernel->library->loaded, kernel->name, c.grid_x, cluster,
                                   threads, c.shared_bytes, params[0]);
    return trouble.empty() ? 0 : kLaunchFailed;
  }
  const std::string& program = kernel->library->program;
  notes += "{\"event\": \"launch\", \"entry\": \"" + kernel->name + "\", \"program\": \"" +
           Hex(program.data(), program.size()) +
           "\", \"grid\": " + List({c.grid_x, c.grid_y, c.grid_z}) +
           ", \"block\": " + List({c.block_x, c.block_y, c.block_z}) +
           ", \"shared\": " + std::to_string(c.shared_bytes) +
           ", \"cluster\": " + std::to_string(cluster) +
           ", \"overlaps\": " + (overlaps ? "true" : "false") + ", \"params\": \"" +
           Hex(params[0], kMostParamBytes) + "\"}\n";
  return 0;
}
CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, std::size_t count, CUstream stream) {
  if (current_context != kContext) return kInvalidContext;
  if (stream != kStream && stream != kRecorder) return kInvalidHandle;
  if (fake_machine != nullptr) {
    std::fill_n(reinterpret_cast<unsigned*>(target), count, value);
    return 0;
  }
  notes += "{\"event\": \"fill\", \"target\": " + std::to_string(target) +
           ", \"value\": " + std::to_string(value) + ", \"words\": " + std::to_string(count) +
           "}\n";
  return 0;
}
// A graph is the notes of what it launches, before and after it is ready. A machine has none.
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  if (fake_machine == nullptr) *stream = kRecorder;
  return fake_machine == nullptr ? 0 : kInvalidValue;
}
CUresult cuStreamIsCapturing(CUstream, int* status) { return *status = 0; }
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) { return notes.swap(before), 0; }
CUresult cuStreamEndCapture(CUstream, CUgraph* graph) {
  notes.swap(before);
  *graph = reinterpret_cast<CUgraph>(new std::string(std::exchange(before, "")));
  return 0;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  *exec = reinterpret_cast<CUgraphExec>(graph);
  return 0;
}
CUresult cuGraphDestroy(CUgraph) { return 0; }
CUresult cuGraphExecDestroy(CUgraphExec) { return 0; }
CUresult cuGraphLaunch(CUgraphExec exec, CUstream) {
  notes += "{\"event\": \"graph\"}\n" + *reinterpret_cast<std::string*>(exec);
  return 0;
}
CUresult cuTensorMapEncodeTiled(void* map, CUtensorMapDataType type, unsigned rank, void* address,
                                const std::uint64_t* dims, const std::uint64_t* strides,
                                const unsigned* box, const unsigned* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2Promotion, CUtensorMapOutOfBounds) {
  FakeMap made{};
  made.address = address;
  bool right = reinterpret_cast<std::uint64_t>(map) % 64 == 0 && rank == 4 &&
               reinterpret_cast<std::uint64_t>(address) % 16 == 0 &&
               interleave == kInterleaveNone &&
               (swizzle != kSwizzle128B || box[0] * (type == kTensorFloat32 ? 4
                                                     : type == kTensorUint8 ? 1
                                                                            : 2) <=
                                               128);
  for (int i = 0; right && i < 4; ++i) {
    right = dims[i] >= 1 && dims[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 &&
            element_strides[i] == 1 &&
            (i == 3 || (strides[i] % 16 == 0 && strides[i] < 1ull << 40));
  }
  if (!right) return kInvalidValue;
  std::memcpy(made.dims, dims, sizeof made.dims);
  std::memcpy(made.strides, strides, sizeof made.strides);
  std::memcpy(made.box, box, sizeof made.box);
  made.type = type;
  made.swizzle = swizzle;
  std::memcpy(map, &made, sizeof made);
  return 0;
}

// ---- libnvrtc: without a machine the text of a program is its machine code ---------------------

nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(nvrtcResult) { return ""; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char*, int count,
                               const char* const* files, const char* const* names) {
  *program = new _nvrtcProgram{source};
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels.clear();
  for (int i = 0; i < count; ++i) {
    kernels += files[i];
    (*program)->files[names[i]] = files[i];
  }
  return 0;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  return 0;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int, const char* const*) {
  if (fake_machine == nullptr) {
    program->image = program->text + '\0';
    return 0;
  }
  std::string library;
  program->log = fake_machine->Compile(program->text, program->files, &library);
  const std::uint64_t size = library.size();
  program->image = std::string(reinterpret_cast<const char*>(&size), sizeof size) + library;
  return program->log.empty() ? 0 : 6;
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* size) {
  *size = program->image.size();
  return 0;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  std::memcpy(cubin, program->image.data(), program->image.size());
  return 0;
}

}  // extern "C"
