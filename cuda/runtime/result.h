// Owns Result, a value or the text of what went wrong: the run time throws nothing and aborts
// never.

#ifndef JAX_FLASH_CUDA_RUNTIME_RESULT_H_
#define JAX_FLASH_CUDA_RUNTIME_RESULT_H_

#include <optional>
#include <string>
#include <utility>

namespace jax_flash {

struct Failure {
  std::string text;
};

template <class T>
class Result {
 public:
  Result(T value) : value_(std::move(value)) {}                   // NOLINT: implicit by design
  Result(Failure failure) : failure_(std::move(failure.text)) {}  // NOLINT: implicit by design

  bool ok() const { return value_.has_value(); }
  const T& operator*() const { return *value_; }
  const T* operator->() const { return &*value_; }
  const std::string& error() const { return failure_; }
  Failure failure() const { return Failure{failure_}; }

 private:
  std::optional<T> value_;
  std::string failure_;
};

struct Done {};
using Status = Result<Done>;

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_RESULT_H_
