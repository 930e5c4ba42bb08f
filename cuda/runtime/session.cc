#include "cuda/runtime/session.h"

#include <algorithm>

namespace jax_flash {

Session::Session(CUstream stream, const ProgramAttribute& program)
    : driver_(GetDriver()),
      program_{std::string(program.source), std::string(program.header),
               std::string(program.arch)} {
  if (driver_.ok()) {
    scope_.emplace(**driver_, stream);
    Check(scope_->status());
  } else {
    Fail(driver_.error());
  }
}

void Session::Map(const TensorView& view, TensorMap* map) {
  if (ok()) Check(EncodeTensorMap(**driver_, view, map));
}

void Session::Zero(std::int32_t* target, std::size_t words) {
  if (ok()) Check(Fill(*scope_, target, 0, words));
}

void Session::Launch(const char* entry, const LaunchSize& size, const void* params) {
  if (!ok()) return;
  Result<const Kernel*> kernel = Load(program_, entry);
  if (!kernel.ok()) return Fail(kernel.error());
  Check(jax_flash::Launch(*scope_, **kernel, size, params));
}

void Session::LaunchPersistent(const char* entry, std::int64_t work, std::int64_t threads,
                               std::int64_t shared_bytes, const void* params) {
  if (!ok()) return;
  Result<std::int64_t> count = CountMultiprocessors(*scope_);
  if (!count.ok()) return Fail(count.error());
  Launch(entry, {std::min(*count, work), threads, shared_bytes}, params);
}

xla::ffi::Error Session::error() const {
  return failure_ ? xla::ffi::Error::Internal("jax_flash: " + *failure_)
                  : xla::ffi::Error::Success();
}

void Session::Check(const Status& status) {
  if (!status.ok()) Fail(status.error());
}

}  // namespace jax_flash
