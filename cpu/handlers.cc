// Owns the CPU custom calls: from XLA's operands and thread pool to the kernels' own types. The
// only file of cpu/ that knows XLA. Read next: attention.h.

#include "cpu/handlers.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/attention.h"
#include "cpu/pool_workers.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash::cpu {
namespace {

namespace ffi = xla::ffi;

DType TypeOf(ffi::DataType dtype) {
  return dtype == ffi::BF16  ? DType::kBFloat16
         : dtype == ffi::F16 ? DType::kFloat16
                             : DType::kFloat32;
}

// Inputs, and the tables they point to.
class BoundInputs {
 public:
  BoundInputs(const Operands& operands, const ProblemAttribute& problem) {
    Problem& p = inputs_.problem;
    p.dtype = TypeOf(operands.dtype);
    p.scale = static_cast<float>(problem.scale);
    p.window_left = problem.window_left;
    p.window_right = problem.window_right;
    p.bottom_right = problem.bottom_right;
    p.softcap = static_cast<float>(problem.softcap);
    p.dropout_rate = problem.dropout_rate;
    p.deterministic = problem.deterministic;
    const Sizes& s = operands.sizes;
    inputs_.shapes = {s.batch, s.q_len, s.kv_len, s.q_heads, s.kv_heads, s.head_dim, s.value_dim};
    inputs_.q = operands.q;
    inputs_.k = operands.k;
    inputs_.v = operands.v;
    if (operands.terms[kBias]) {
      inputs_.bias = Bind(operands, kBias, 3, &bias_batch_);
      inputs_.bias_dtype = TypeOf(operands.terms[kBias]->element_type());
    }
    if (operands.terms[kMask]) inputs_.mask = Bind(operands, kMask, 3, &mask_batch_);
    if (operands.terms[kBlockBits]) {
      BlockMask& blocks = inputs_.blocks;
      blocks.numbers = Bind(operands, kBlockNumbers, 3, &numbers_batch_);
      const Broadcast bits = Bind(operands, kBlockBits, 3, &bits_batch_);  // C, D, E
      blocks.bits = static_cast<const uint16_t*>(bits.data);
      blocks.bits_batch = bits.batch;
      blocks.stored = bits.heads;
      blocks.size = bits.rows;
    }
    if (operands.terms[kSinks]) inputs_.sinks = Bind(operands, kSinks, 1, &sinks_batch_);
    inputs_.q_lengths = operands.Data<int32_t>(kQueryLengths);
    inputs_.kv_lengths = operands.Data<int32_t>(kKeyValueLengths);
    inputs_.q_segments = operands.Data<int32_t>(kQuerySegments);
    inputs_.kv_segments = operands.Data<int32_t>(kKeyValueSegments);
    inputs_.q_positions = operands.Data<int32_t>(kQueryPositions);
    inputs_.kv_positions = operands.Data<int32_t>(kKeyValuePositions);
    if (problem.dropout_rate > 0) {
      inputs_.dropout_state = operands.Data<uint32_t>(kDropoutState);
      inputs_.dropout_words = operands.terms[kDropoutState]->dimensions().back();
    }
  }
  BoundInputs(const BoundInputs&) = delete;
  BoundInputs& operator=(const BoundInputs&) = delete;

  const Inputs& get() const { return inputs_; }

 private:
  // `axes` of N, T, S follow the leading dims.
  static Broadcast Bind(const Operands& operands, Term term, size_t axes,
                        std::vector<int64_t>* batch) {
    const auto dims = operands.terms[term]->dimensions();
    const size_t leading = operands.batch.size();
    Broadcast view;
    view.data = operands.terms[term]->untyped_data();
    view.heads = dims[leading];
    if (axes == 3) {
      view.rows = dims[leading + 1];
      view.keys = dims[leading + 2];
    }
    view.batch_count = 1;
    for (size_t i = 0; i < leading; ++i) view.batch_count *= dims[i];
    const int64_t plane = std::max<int64_t>(1, view.heads * view.rows * view.keys);
    batch->resize(static_cast<size_t>(operands.sizes.batch));
    for (int64_t b = 0; b < operands.sizes.batch; ++b) {
      (*batch)[static_cast<size_t>(b)] = BroadcastRow(operands, term, b) / plane;
    }
    view.batch = batch->data();
    return view;
  }

  Inputs inputs_;
  std::vector<int64_t> bias_batch_, mask_batch_, numbers_batch_, bits_batch_, sinks_batch_;
};

ffi::Error OutOfMemory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "jax_flash: no memory for the working set of the CPU kernel");
}

ffi::Error ForwardHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ProblemAttribute problem) {
  ForwardOperands operands;
  if (ffi::Error error = ReadForward(args, rets, problem, &operands); error.failure()) {
    return error;
  }
  const BoundInputs inputs(operands, problem);
  const ForwardCall call{inputs.get(), operands.out, operands.lse};
  PoolWorkers<ffi::ThreadPool> workers(pool, pool.num_threads());
  return BestKernels().forward(call, workers) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error BackwardHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ProblemAttribute problem, bool with_dlse, bool with_dbias) {
  BackwardOperands operands;
  if (ffi::Error error = ReadBackward(args, rets, problem, with_dlse, with_dbias, &operands);
      error.failure()) {
    return error;
  }
  const BoundInputs inputs(operands, problem);
  BackwardCall call;
  call.in = inputs.get();
  call.out = operands.out;
  call.lse = operands.lse;
  call.dout = operands.dout;
  call.dlse = operands.dlse;
  call.dq = operands.dq;
  call.dk = operands.dk;
  call.dv = operands.dv;
  if (operands.dbias) call.dbias = operands.dbias->untyped_data();
  PoolWorkers<ffi::ThreadPool> workers(pool, pool.num_threads());
  return BestKernels().backward(call, workers) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error DecodeHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ProblemAttribute problem, bool paged, bool appends, int64_t value_dim) {
  DecodeOperands operands;
  if (ffi::Error error = ReadDecode(args, rets, problem, {paged, appends, value_dim}, &operands);
      error.failure()) {
    return error;
  }
  const BoundInputs inputs(operands, problem);
  DecodeCall call;
  call.in = inputs.get();
  call.in.kv_lengths = operands.lengths;
  call.pages = operands.pages;
  call.page_size = operands.page_size;
  call.page_table = operands.page_table;
  call.values_in_keys = operands.values_in_keys;
  call.key_scale = operands.key_scale;
  call.value_scale = operands.value_scale;
  call.key_scale_ld = operands.key_scale_ld;
  call.value_scale_ld = operands.value_scale_ld;
  call.is_float8 = operands.is_float8;
  call.checked = true;
  call.new_k = operands.new_k;
  call.new_v = operands.new_v;
  call.k = operands.k_cache;
  call.v = operands.v_cache;
  call.out = operands.out;
  call.lse = operands.lse;
  PoolWorkers<ffi::ThreadPool> workers(pool, pool.num_threads());
  return BestKernels().decode(call, workers) ? ffi::Error::Success() : OutOfMemory();
}

// What all handlers take in front of their own attributes.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ProblemAttribute>("problem");
}

auto BindDecode() {
  return Bind().Attr<bool>("paged").Attr<bool>("appends").Attr<int64_t>("value_dim");
}

auto BindBackward() { return Bind().Attr<bool>("with_dlse").Attr<bool>("with_dbias"); }

}  // namespace
}  // namespace jax_flash::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCpuForward, jax_flash::cpu::ForwardHandler,
                              jax_flash::cpu::Bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCpuBackward, jax_flash::cpu::BackwardHandler,
                              jax_flash::cpu::BindBackward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCpuDecode, jax_flash::cpu::DecodeHandler,
                              jax_flash::cpu::BindDecode());
