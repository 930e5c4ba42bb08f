// Owns the small part of the CUDA driver's and NVRTC's C interfaces that the run time calls: types,
// constants, and two tables of entry points filled by dlopen. Declared here so that the module
// builds without CUDA headers and imports on a machine without a driver. Layouts and numbers are
// those of cuda.h and nvrtc.h, unchanged from CUDA 12.0 to 13. Read next: jit.h, launch.h.

#ifndef JAX_FLASH_CUDA_RUNTIME_DRIVER_H_
#define JAX_FLASH_CUDA_RUNTIME_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_flash {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;  // a CUkernel is launched as one
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

enum CUdevice_attribute : int { kMultiprocessorCount = 16 };
enum CUfunctionAttribute : int { kMaxDynamicSharedSizeBytes = 8 };
enum CUstreamFlags : unsigned { kNonBlocking = 1 };
enum CUstreamCaptureMode : int { kCaptureRelaxed = 2 };
enum CUtensorMapDataType : int {
  kTensorUint8 = 0,
  kTensorFloat16 = 6,
  kTensorFloat32 = 7,
  kTensorBfloat16 = 9
};
enum CUtensorMapInterleave : int { kInterleaveNone = 0 };
enum CUtensorMapSwizzle : int { kSwizzle128B = 3 };
enum CUtensorMapL2Promotion : int { kL2Promotion128B = 2 };
enum CUtensorMapOutOfBounds : int { kFillZero = 0 };

enum CUlaunchAttributeID : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char padding[4];
  union {
    char bytes[64];
    int allowed;
    unsigned dimensions[3];
  } value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

// Entry points of libcuda, by the names exported since CUDA 12.0.
struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuGetErrorName)(CUresult code, const char** name);
  CUresult (*cuGetErrorString)(CUresult code, const char** text);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuDeviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device);
  CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, void* jit_options,
                                void** jit_values, unsigned jit_count, void* library_options,
                                void** library_values, unsigned library_count);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelSetAttribute)(CUfunctionAttribute attribute, int value, CUkernel kernel,
                                   CUdevice device);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params,
                               void** extra);
  CUresult (*cuMemsetD32Async)(CUdeviceptr target, unsigned value, std::size_t count,
                               CUstream stream);
  CUresult (*cuDeviceGetCount)(int* count);  // that the process sees
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamIsCapturing)(CUstream stream, int* status);  // 0: it does not
  CUresult (*cuStreamBeginCapture)(CUstream stream, CUstreamCaptureMode mode);
  CUresult (*cuStreamEndCapture)(CUstream stream, CUgraph* graph);
  CUresult (*cuGraphInstantiateWithFlags)(CUgraphExec* exec, CUgraph graph,
                                          unsigned long long flags);
  CUresult (*cuGraphDestroy)(CUgraph graph);
  CUresult (*cuGraphExecDestroy)(CUgraphExec exec);
  CUresult (*cuGraphLaunch)(CUgraphExec exec, CUstream stream);
  CUresult (*cuTensorMapEncodeTiled)(void* map, CUtensorMapDataType type, unsigned rank,
                                     void* address, const std::uint64_t* dims,
                                     const std::uint64_t* strides, const unsigned* box,
                                     const unsigned* element_strides,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2Promotion promotion, CUtensorMapOutOfBounds fill);

  // "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE (invalid argument)"
  std::string Explain(const char* call, CUresult code) const;
};

using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;

struct Nvrtc {
  int version = 0;  // 1000 * major + 10 * minor, as the driver counts
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult code);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* source, const char* name,
                                    int header_count, const char* const* headers,
                                    const char* const* header_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int option_count,
                                     const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, std::size_t* size);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, std::size_t* size);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
};

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_DRIVER_H_
