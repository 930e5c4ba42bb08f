// Owns the driver and one program on XLA's stream, as a handler uses them: tensor maps, fills,
// launches. Every family's handlers go through here. Read next: launch.h, jit.h; families/sm90.cc.

#ifndef JAX_FLASH_CUDA_RUNTIME_SESSION_H_
#define JAX_FLASH_CUDA_RUNTIME_SESSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/jit.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/params.h"
#include "cuda/runtime/result.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// What to compile: Plan.program of jax_flash/_gpu/family.py.
struct ProgramAttribute {
  std::string_view source;
  std::string_view header;
  std::string_view arch;
  std::string_view beside;  // the source of another program with the same header, or none
};

// Remembers the first failure; steps after it do nothing.
class Session {
 public:
  Session(CUstream stream, const ProgramAttribute& program);

  void Map(const TensorView& view, TensorMap* map);
  void Zero(std::int32_t* target, std::size_t words);
  void Launch(const char* entry, const LaunchSize& size, const void* params);
  // The same of the program beside the main one, where there is one.
  void LaunchBeside(const char* entry, const LaunchSize& size, const void* params);
  // The CTAs that share out `work` among them: as many as run at once on this device.
  std::int64_t AtOnce(std::int64_t work);
  void LaunchPersistent(const char* entry, std::int64_t work, std::int64_t threads,
                        std::int64_t shared_bytes, const void* params, bool overlaps = false);

  xla::ffi::Error error() const;

 private:
  bool ok() const { return !failure_; }
  void Fail(const std::string& text) { failure_ = text; }
  void Check(const Status& status);
  void Launch(const Program& program, const char* entry, const LaunchSize& size,
              const void* params);

  Result<const Driver*> driver_;
  Program program_, beside_;
  std::optional<StreamScope> scope_;
  std::optional<std::string> failure_;
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_flash::ProgramAttribute,
                                      StructMember<std::string_view>("source"),
                                      StructMember<std::string_view>("header"),
                                      StructMember<std::string_view>("arch"),
                                      StructMember<std::string_view>("beside"));

#endif  // JAX_FLASH_CUDA_RUNTIME_SESSION_H_
