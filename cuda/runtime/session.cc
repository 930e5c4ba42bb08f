#include "cuda/runtime/session.h"

#include <algorithm>

namespace jax_flash {

Session::Session(CUstream stream, const ProgramAttribute& program)
    : driver_(GetDriver()),
      program_{std::string(program.source), std::string(program.header), std::string(program.arch)},
      beside_(program_) {
  if (!program.beside.empty()) beside_.source = program.beside;
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
  Launch(program_, entry, size, params);
}

void Session::LaunchBeside(const char* entry, const LaunchSize& size, const void* params) {
  Launch(beside_, entry, size, params);
}

std::int64_t Session::AtOnce(std::int64_t work) {
  if (!ok()) return 0;
  Result<std::int64_t> count = CountMultiprocessors(*scope_);
  if (!count.ok()) {
    Fail(count.error());
    return 0;
  }
  return std::min(*count, work);
}

void Session::Launch(const Program& program, const char* entry, const LaunchSize& size,
                     const void* params) {
  if (!ok()) return;
  Result<const Kernel*> kernel = Load(program, entry);
  if (!kernel.ok()) return Fail(kernel.error());
  Check(jax_flash::Launch(*scope_, **kernel, size, params));
}

void Session::LaunchPersistent(const char* entry, std::int64_t work, std::int64_t threads,
                               std::int64_t shared_bytes, const void* params, bool overlaps) {
  Launch(entry, {AtOnce(work), threads, shared_bytes, overlaps}, params);
}

xla::ffi::Error Session::error() const {
  return failure_ ? xla::ffi::Error::Internal("jax_flash: " + *failure_)
                  : xla::ffi::Error::Success();
}

void Session::Check(const Status& status) {
  if (!status.ok()) Fail(status.error());
}

}  // namespace jax_flash
