// Runs a plan on XLA's stream: checks the buffers, fills the kernels' parameters, launches.
// Allocates nothing there but what is recorded, waits for nothing, and decides nothing: plan.h says
// what a plan has, and jax_flash/_gpu makes it. Read next: launch.h, jit.h.

#include "cuda/runtime/run_plan.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/jit.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/plan.h"
#include "cuda/runtime/result.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

// What was recorded of a plan. A launch takes the host 3.3 µs on an H200 (2026-11-28), a graph of
// one to seven 1.3; calls from Python come again and again with the same buffers. So such calls
// are recorded once they have come so often that the 50 to 110 µs of that are little. Where more
// sets of buffers take turns than are remembered, none comes twice, and none is recorded.
class Recordings {
 public:
  using Key = std::vector<std::uint64_t>;  // all that launches follow from, beside the plan

  // Launches what was recorded under a key; or tells, by `*due`, that it is to be recorded.
  bool Launch(const Key& key, CUstream stream, bool* due) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry* entry = Find(key);
    if (entry == nullptr) {
      entry = &entries_[next_++ % kKept];
      *entry = {key, 0, nullptr};
    }
    if (entry->recording != nullptr) return entry->recording->Launch(stream).ok();
    *due = ++entry->calls == kCalls;
    return false;
  }

  void Keep(const Key& key, std::unique_ptr<Recording> recording) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Entry* entry = Find(key)) entry->recording = std::move(recording);
  }

 private:
  static constexpr int kCalls = 16;
  static constexpr unsigned kKept = 4;  // a recording takes 80 to 160 KB of the GPU
  struct Entry {
    Key key;
    int calls = 0;
    std::unique_ptr<Recording> recording;
  };

  Entry* Find(const Key& key) {
    for (Entry& entry : entries_) {
      if (entry.key == key) return &entry;
    }
    return nullptr;
  }

  std::mutex mutex_;
  Entry entries_[kKept];
  unsigned next_ = 0;
};

// A plan as read, and its kernels as loaded.
struct ReadyPlan {
  std::string text;
  Result<Plan> plan = Failure{};
  // Kernels of `generation` (jit.h), null before they are asked for.
  std::unique_ptr<std::atomic<const Kernel*>[]> kernels;
  std::atomic<std::uint64_t> generation{0};
  Recordings recordings;
};

// The plans of this process by their text. Never destroyed: XLA's threads may still call when the
// process exits. A call's text stays where it is as long as its program lives, so its place is
// remembered, and compared.
class Plans {
 public:
  ReadyPlan* Find(std::string_view text) {
    std::lock_guard<std::mutex> lock(mutex_);
    ReadyPlan*& placed = by_place_[text.data()];
    if (placed != nullptr && placed->text == text) return placed;
    std::unique_ptr<ReadyPlan>& ready = by_text_[std::string(text)];
    if (ready == nullptr) {
      ready = std::make_unique<ReadyPlan>();
      ready->text = text;
      ready->plan = ReadPlan(ready->text);
      if (ready->plan.ok()) {
        ready->kernels =
            std::make_unique<std::atomic<const Kernel*>[]>(ready->plan->kernels.size());
      }
    }
    placed = ready.get();
    return placed;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, ReadyPlan*> by_place_;
  std::unordered_map<std::string, std::unique_ptr<ReadyPlan>> by_text_;
};

Plans& ThePlans() {
  static auto* plans = new Plans;
  return *plans;
}

// The run of one call. Remembers the first failure; what comes after it does nothing.
class Run {
 public:
  Run(ReadyPlan* ready, CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : ready_(*ready), plan_(*ready->plan), stream_(stream), args_(args), rets_(rets) {
    numbers_.resize(plan_.names.size());
  }

  ffi::Error Do() {
    Bind();
    if (!failed_ && Number(plan_.none) == 0) return Error();
    Open();
    bool due = false;
    if (!failed_ && Replay(&due)) return Error();
    for (const PlanName& let : plan_.lets) numbers_[let.name] = Number(let.value);
    for (const PlanCheck& check : plan_.checks) {
      if (!failed_ && Number(check.holds) == 0 && !failed_) Invalid(check.text);
    }
    CheckScratch();
    if (failed_ || !due || !RecordSteps()) TakeSteps();
    return Error();
  }

 private:
  void Invalid(const std::string& text) {
    if (failed_) return;
    failed_ = true;
    error_ = ffi::Error::InvalidArgument("jax_flash: " + text);
  }
  void Internal(const std::string& text) {
    if (failed_) return;
    failed_ = true;
    error_ = ffi::Error::Internal("jax_flash: " + text);
  }
  void Check(const Status& status) {
    if (!status.ok()) Internal(status.error());
  }
  ffi::Error Error() { return failed_ ? error_ : ffi::Error::Success(); }

  std::int64_t Number(const Expression& expression) {
    if (failed_) return 0;
    const Result<std::int64_t> value = Evaluate(expression, numbers_);
    if (!value.ok()) {
      Invalid(value.error());
      return 0;
    }
    return *value;
  }

  // Reads operands and results, whose dims are the first numbers.
  void Bind() {
    if (args_.size() != plan_.operands.size()) {
      return Invalid(std::to_string(args_.size()) + " operands, expected " +
                     std::to_string(plan_.operands.size()));
    }
    const std::size_t results = plan_.results.size() + plan_.scratch.size();
    if (rets_.size() != results) {
      return Invalid(std::to_string(rets_.size()) + " results, expected " +
                     std::to_string(results));
    }
    data_.reserve(args_.size() + results);
    for (std::size_t i = 0; i < plan_.operands.size(); ++i) {
      Bind(plan_.operands[i], args_.get<ffi::AnyBuffer>(i));
    }
    for (std::size_t i = 0; i < plan_.results.size(); ++i) {
      auto result = rets_.get<ffi::AnyBuffer>(i);
      if (result.has_error()) return Invalid("a result is no buffer");
      Bind(plan_.results[i], **result);
    }
    for (const auto& [operand, result] : plan_.same) {
      // XLA was told that these are one; else what is read would miss what is written.
      if (!failed_ && data_[operand] != data_[plan_.operands.size() + result]) {
        Invalid(plan_.operands[operand].name + " of operands and results is not one buffer");
      }
    }
  }

  void Bind(const PlanBuffer& row, ffi::ErrorOr<ffi::AnyBuffer> read) {
    if (failed_) return;
    if (read.has_error()) return Invalid(row.name + " is no buffer");
    const ffi::AnyBuffer& buffer = *read;
    const auto dims = buffer.dimensions();
    const std::size_t leading = !row.dims.empty() && row.dims[0].leading ? 1 : 0;
    const std::size_t rest = row.dims.size() - leading;
    bool fits = leading ? dims.size() >= rest : dims.size() == rest;
    const std::size_t ahead = fits ? dims.size() - rest : 0;
    for (std::size_t i = 0; fits && i < row.dims.size(); ++i) {
      std::int64_t dim = 1;
      if (i < leading) {
        for (std::size_t j = 0; j < ahead; ++j) fits &= !__builtin_mul_overflow(dim, dims[j], &dim);
      } else {
        dim = dims[ahead + i - leading];
      }
      fits = fits && Fits(row.dims[i], dim);
    }
    if (!fits) return Invalid(row.name + " has shape " + Show(dims) + ", expected " + Show(row));
    const ffi::DataType type = buffer.element_type();
    bool typed = false;
    for (const ffi::DataType own : row.types) typed |= own == type;
    if (!typed) {
      return Invalid(row.name + " is " + std::string(NameOfType(type)) + ", expected " +
                     std::string(NameOfType(row.types[0])));
    }
    data_.push_back(buffer.untyped_data());
  }

  bool Fits(const PlanDim& dim, std::int64_t size) {
    if (dim.name < 0) return size == dim.number;
    if (!dim.binds) return size == numbers_[dim.name];
    if (dim.or_one_of >= 0 && size != 1 && size != numbers_[dim.or_one_of]) return false;
    numbers_[dim.name] = size;
    return true;
  }

  // Dims that other buffers have named by their numbers, others by their names.
  std::string Show(const PlanBuffer& row) const {
    std::string text = "[";
    for (const PlanDim& dim : row.dims) {
      text += text.size() > 1 ? ", " : "";
      text += dim.leading ? "*" : "";
      const int other = dim.or_one_of;
      text += dim.name < 0 ? std::to_string(dim.number)
              : !dim.binds ? std::to_string(numbers_[dim.name])
              : other >= 0 ? "1 or " + std::to_string(numbers_[other])
                           : plan_.names[dim.name];
    }
    return text + "]";
  }
  static std::string Show(ffi::Span<const std::int64_t> dims) {
    std::string text = "[";
    for (std::int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
    return text + "]";
  }

  // Makes the stream's device current and counts its multiprocessors.
  void Open() {
    if (failed_) return;
    driver_ = GetDriver();
    if (!driver_.ok()) return Internal(driver_.error());
    scope_.emplace(**driver_, stream_);
    Check(scope_->status());
    if (failed_) return;
    const Result<std::int64_t> count = CountMultiprocessors(*scope_);
    if (!count.ok()) return Internal(count.error());
    numbers_[0] = *count;
  }

  // Launches what was recorded of such a call. A graph of XLA's takes the launches themselves.
  bool Replay(bool* due) {
    if (!MayRecord(*scope_)) return false;
    key_ = {reinterpret_cast<std::uint64_t>(scope_->context()), Generation()};
    for (const std::int64_t number : numbers_) key_.push_back(static_cast<std::uint64_t>(number));
    for (void* data : data_) key_.push_back(reinterpret_cast<std::uint64_t>(data));
    for (std::size_t i = plan_.results.size(); i < rets_.size(); ++i) {
      auto buffer = rets_.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return false;
      key_.push_back(reinterpret_cast<std::uint64_t>((*buffer)->untyped_data()));
      key_.push_back((*buffer)->element_count());
    }
    return ready_.recordings.Launch(key_, stream_, due);
  }

  bool RecordSteps() {
    auto recording = Record(*scope_, [this] {
      TakeSteps();
      return !failed_;
    });
    failed_ = false;  // what cannot be recorded may run
    if (recording == nullptr || !recording->Launch(stream_).ok()) return false;
    ready_.recordings.Keep(key_, std::move(recording));
    return true;
  }

  void TakeSteps() {
    for (const PlanField& field : plan_.fields) Write(field);
    for (const PlanStep& step : plan_.steps) Take(step);
  }

  void CheckScratch() {
    for (std::size_t i = 0; i < plan_.scratch.size() && !failed_; ++i) {
      const PlanScratch& row = plan_.scratch[i];
      auto buffer = rets_.get<ffi::AnyBuffer>(plan_.results.size() + i);
      bool fits = buffer.has_value() && (*buffer)->element_type() == row.type &&
                  (*buffer)->dimensions().size() == row.shape.size();
      std::string expected;
      for (std::size_t axis = 0; axis < row.shape.size(); ++axis) {
        const std::int64_t size = Number(row.shape[axis]);
        fits = fits && (*buffer)->dimensions()[axis] == size;
        expected += (axis == 0 ? "" : ", ") + std::to_string(size);
      }
      if (!fits) {
        return Invalid("the workspace " + row.name + " is missing or not " +
                       std::string(NameOfType(row.type)) + " [" + expected + "]");
      }
      data_.push_back((*buffer)->untyped_data());
    }
  }

  template <class T>
  void Put(std::size_t offset, T value) {
    std::memcpy(params_ + offset, &value, sizeof value);
  }

  void Write(const PlanField& field) {
    if (failed_) return;
    if (field.kind == PlanField::kPointer) return Put(field.offset, data_[field.buffer]);
    if (field.kind == PlanField::kMap) return WriteMap(field);
    const std::int64_t value = Number(field.value);
    if (field.kind == PlanField::kLong) return Put(field.offset, value);
    if (value < INT32_MIN || value > UINT32_MAX) {
      return Invalid("a parameter of " + std::to_string(value) + " is beyond 32 bits");
    }
    Put(field.offset, static_cast<std::uint32_t>(value));
  }

  void WriteMap(const PlanField& field) {
    const PlanMap& map = plan_.maps[field.map];
    std::int64_t sizes[4];
    for (int i = 0; i < 4; ++i) sizes[i] = Number(map.shape[i]);
    for (std::int64_t size : sizes) {
      if (size == 0) return;
    }
    if (failed_) return;
    const TensorView view{map.type, map.bytes, data_[field.buffer], sizes[0],      sizes[1],
                          sizes[2], sizes[3],  map.box_rows,        map.box_heads, map.box_batches};
    Check(EncodeTensorMap(**driver_, view, params_ + field.offset));
  }

  void Take(const PlanStep& step) {
    if (step.kind == PlanStep::kWrite) return Write(step.field);
    const std::int64_t count = Number(step.count);
    if (failed_ || count == 0) return;
    if (step.kind == PlanStep::kZero) {
      return Check(Fill(*scope_, data_[step.buffer], 0, static_cast<std::size_t>(count)));
    }
    if (count < 0 || count > INT32_MAX) {
      return Invalid("a grid of " + std::to_string(count) + " CTAs is out of range");
    }
    const Kernel* kernel = Loaded(step.kernel);
    if (kernel == nullptr) return;
    const LaunchSize size{count, step.threads, step.shared_bytes, step.overlaps, step.cluster};
    Check(Launch(*scope_, *kernel, size, params_));
  }

  const Kernel* Loaded(std::size_t index) {
    std::atomic<const Kernel*>& kept = ready_.kernels[index];
    const std::uint64_t generation = Generation();
    if (ready_.generation.load() != generation) {
      for (std::size_t i = 0; i < plan_.kernels.size(); ++i) ready_.kernels[i].store(nullptr);
      ready_.generation.store(generation);
    }
    const Kernel* kernel = kept.load();
    if (kernel != nullptr) return kernel;
    const PlanKernel& row = plan_.kernels[index];
    const Result<const Kernel*> loaded = Load(plan_.programs[row.program], row.entry);
    if (!loaded.ok()) {
      Internal(loaded.error());
      return nullptr;
    }
    kept.store(*loaded);
    return *loaded;
  }

  ReadyPlan& ready_;
  const Plan& plan_;
  CUstream stream_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::vector<std::int64_t> numbers_;
  std::vector<void*> data_;  // of operands, results and scratch arrays
  Recordings::Key key_;
  Result<const Driver*> driver_ = Failure{};
  std::optional<StreamScope> scope_;
  bool failed_ = false;
  ffi::Error error_;
  alignas(64) unsigned char params_[kMostParamBytes] = {};
};

ffi::Error RunPlan(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   std::string_view plan) {
  ReadyPlan* ready = ThePlans().Find(plan);
  if (!ready->plan.ok()) return ffi::Error::InvalidArgument("jax_flash: " + ready->plan.error());
  return Run(ready, stream, args, rets).Do();
}

}  // namespace
}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaRunPlan, jax_flash::RunPlan,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_flash::CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("plan"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
