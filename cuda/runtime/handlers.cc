#include "cuda/runtime/handlers.h"

#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

ffi::Error Forward(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::InvalidArgument("jax_flash: no CUDA kernel takes this call");
}

}  // namespace
}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaForward, jax_flash::Forward,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaBackward, jax_flash::Forward,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
