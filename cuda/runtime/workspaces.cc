#include "cuda/runtime/workspaces.h"

#include <string>

namespace jax_flash {

namespace ffi = xla::ffi;

void* Workspaces::Take(const char* name, std::initializer_list<ScratchDim> dims,
                       ffi::DataType type) {
  auto buffer = rets_.get<ffi::AnyBuffer>(next_++);
  bool fits = buffer.has_value() && (*buffer)->element_type() == type &&
              (*buffer)->dimensions().size() == dims.size();
  std::string expected;
  std::size_t axis = 0;
  for (const ScratchDim& dim : dims) {
    const std::int64_t have = fits ? (*buffer)->dimensions()[axis] : 0;
    if (dim.read_ != nullptr) {
      *dim.read_ = have;
    } else {
      fits = fits && have == dim.size_;
    }
    expected += (axis++ == 0 ? "" : ", ") + (dim.read_ ? "any" : std::to_string(dim.size_));
  }
  if (fits) return (*buffer)->untyped_data();
  if (!error_.failure()) {
    error_ = ffi::Error::InvalidArgument(std::string("jax_flash: the workspace ") + name +
                                         " is missing or not " +
                                         (type == ffi::F32  ? "float32 ["
                                          : type == ffi::U8 ? "uint8 ["
                                                            : "int32 [") +
                                         expected + "]");
  }
  return nullptr;
}

void Workspaces::CheckBlocks(const char* of, std::int64_t blocks, std::int64_t size,
                             std::int64_t length) {
  if (error_.failure() || ((blocks - 1) * size < length && length <= blocks * size)) return;
  error_ = ffi::Error::InvalidArgument("jax_flash: workspaces for " + std::to_string(blocks) +
                                       " blocks of " + std::to_string(size) + " " + of +
                                       ", of which there are " + std::to_string(length));
}

}  // namespace jax_flash
