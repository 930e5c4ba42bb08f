// Owns the reading of scratch arrays. Python shapes them (Plan.workspaces), and their dims are
// where handlers learn how many blocks there are. Read next: families/sm90.cc.

#ifndef JAX_FLASH_CUDA_RUNTIME_WORKSPACES_H_
#define JAX_FLASH_CUDA_RUNTIME_WORKSPACES_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// One dim of a scratch array: of a size that is known, or read from the array.
class ScratchDim {
 public:
  ScratchDim(std::int64_t size) : size_(size) {}   // NOLINT: implicit by design
  ScratchDim(std::int64_t* read) : read_(read) {}  // NOLINT: implicit by design

 private:
  friend class Workspaces;
  std::int64_t size_ = 0;
  std::int64_t* read_ = nullptr;
};

// The results of a custom call from number `first` on, in order. Remembers the first error.
class Workspaces {
 public:
  Workspaces(xla::ffi::RemainingRets rets, std::size_t first) : rets_(rets), next_(first) {}

  void Take(const char* name, std::initializer_list<ScratchDim> dims, float** data) {
    *data = static_cast<float*>(Take(name, dims, xla::ffi::F32));
  }
  void Take(const char* name, std::initializer_list<ScratchDim> dims, int** data) {
    *data = static_cast<int*>(Take(name, dims, xla::ffi::S32));
  }

  void Take(const char* name, std::initializer_list<ScratchDim> dims, unsigned** data) {
    *data = static_cast<unsigned*>(Take(name, dims, xla::ffi::S32));
  }
  void Take(const char* name, std::initializer_list<ScratchDim> dims, unsigned char** data) {
    *data = static_cast<unsigned char*>(Take(name, dims, xla::ffi::U8));
  }

  // Checks that blocks of `size` rows, as many as were read, are those of `length` rows.
  void CheckBlocks(const char* of, std::int64_t blocks, std::int64_t size, std::int64_t length);

  const xla::ffi::Error& error() const { return error_; }

 private:
  void* Take(const char* name, std::initializer_list<ScratchDim> dims, xla::ffi::DataType type);

  xla::ffi::RemainingRets rets_;
  std::size_t next_;
  xla::ffi::Error error_;
};

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_WORKSPACES_H_
