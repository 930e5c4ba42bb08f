// Reads a custom call, fills the kernel's parameters, launches. Decides nothing: what depends on
// measurements arrives as attributes from jax_flash/_tiles.py. Read next: params.h; jit.h for the
// compiler, cuda/kernels/sm90/forward.cuh for the device code.

#include "cuda/runtime/handlers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/jit.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/params.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// What to compile.
struct ProgramAttribute {
  std::string_view source;
  std::string_view header;
  std::string_view arch;
};

// The numbers of _tiles.ForwardTiles that the launch needs.
struct ForwardTilesAttribute {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t tile_q;
  std::int64_t tile_kv;
  std::int64_t packed_heads;
  std::int64_t head_group;
  bool dynamic;
  bool tma_loads;
};

// The same of _tiles.BackwardTiles.
struct BackwardTilesAttribute {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t tile_q;
  std::int64_t tile_kv;
  std::int64_t turn_parts;
  std::int64_t head_group;
  bool tma_loads;
  std::int64_t dq_row_bytes;
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_flash::ProgramAttribute,
                                      StructMember<std::string_view>("source"),
                                      StructMember<std::string_view>("header"),
                                      StructMember<std::string_view>("arch"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::ForwardTilesAttribute, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("tile_q"),
    StructMember<std::int64_t>("tile_kv"), StructMember<std::int64_t>("packed_heads"),
    StructMember<std::int64_t>("head_group"), StructMember<bool>("dynamic"),
    StructMember<bool>("tma_loads"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::BackwardTilesAttribute, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("tile_q"),
    StructMember<std::int64_t>("tile_kv"), StructMember<std::int64_t>("turn_parts"),
    StructMember<std::int64_t>("head_group"), StructMember<bool>("tma_loads"),
    StructMember<std::int64_t>("dq_row_bytes"));

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int kMaxWindow = (1 << 30) - 1;  // sums of a window and a position stay below 2^31
constexpr double kLog2E = 1.44269504088896340736;
constexpr std::int64_t kSegmentWarps = 8;  // of a block of segment_ranges and segment_plan

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

ffi::Error Invalid(const std::string& text) {
  return ffi::Error::InvalidArgument("jax_flash: " + text);
}

int ClampWindow(std::int64_t window) {
  return static_cast<int>(std::min<std::int64_t>(std::max<std::int64_t>(window, 0), kMaxWindow));
}

CUtensorMapDataType MapType(ffi::DataType dtype) {
  return dtype == ffi::BF16 ? kTensorBfloat16 : kTensorFloat16;
}

// The driver and one program on XLA's stream. Remembers the first failure; steps after it do
// nothing.
class Session {
 public:
  Session(CUstream stream, const ProgramAttribute& program)
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

  void Map(const TensorView& view, TensorMap* map) {
    if (ok()) Check(EncodeTensorMap(**driver_, view, map));
  }

  void Zero(std::int32_t* target, std::size_t words) {
    if (ok()) Check(Fill(*scope_, target, 0, words));
  }

  void Launch(const char* entry, const LaunchSize& size, const void* params) {
    if (!ok()) return;
    Result<const Kernel*> kernel = Load(program_, entry);
    if (!kernel.ok()) return Fail(kernel.error());
    Check(jax_flash::Launch(*scope_, **kernel, size, params));
  }

  // A kernel whose blocks share out `work` among them: as many as run at once on this device.
  void LaunchPersistent(const char* entry, std::int64_t work, std::int64_t threads,
                        std::int64_t shared_bytes, const void* params) {
    if (!ok()) return;
    Result<std::int64_t> count = CountMultiprocessors(*scope_);
    if (!count.ok()) return Fail(count.error());
    Launch(entry, {std::min(*count, work), threads, shared_bytes}, params);
  }

  ffi::Error error() const {
    return failure_ ? ffi::Error::Internal("jax_flash: " + *failure_) : ffi::Error::Success();
  }

 private:
  bool ok() const { return !failure_; }
  void Fail(const std::string& text) { failure_ = text; }
  void Check(const Status& status) {
    if (!status.ok()) Fail(status.error());
  }

  Result<const Driver*> driver_;
  Program program_;
  std::optional<StreamScope> scope_;
  std::optional<std::string> failure_;
};

// Scratch arrays: the results from number `first` on, in order.
class Workspaces {
 public:
  Workspaces(ffi::RemainingRets rets, std::size_t first) : rets_(rets), next_(first) {}

  template <class T>
  void Take(const char* name, std::int64_t count, T** data) {
    static_assert(sizeof(T) == 4, "float32 or int32");
    const ffi::DataType type = std::is_same_v<T, float> ? ffi::F32 : ffi::S32;
    auto buffer = rets_.get<ffi::AnyBuffer>(next_++);
    if (!buffer.has_value() || (*buffer)->element_type() != type ||
        static_cast<std::int64_t>((*buffer)->element_count()) < count) {
      if (!error_.failure()) {
        error_ = Invalid(std::string("the workspace ") + name + " is missing or has fewer than " +
                         std::to_string(count) + " elements");
      }
      return;
    }
    *data = static_cast<T*>((*buffer)->untyped_data());
  }

  const ffi::Error& error() const { return error_; }

 private:
  ffi::RemainingRets rets_;
  std::size_t next_;
  ffi::Error error_;
};

// What both passes refuse: dtypes, head dims, terms without a kernel, and sizes beyond the copy
// engine's limits and the kernels' 32-bit indices (offsets into arrays are 64-bit).
ffi::Error CheckOperands(const Operands& operands, bool tma_loads) {
  const Sizes& s = operands.sizes;
  if (operands.dtype != ffi::BF16 && operands.dtype != ffi::F16) {
    return Invalid("the CUDA kernels take bfloat16 and float16");
  }
  for (std::int64_t dim : {s.head_dim, s.value_dim}) {
    if (dim < 1 || dim > 256 || (tma_loads && dim % 8 != 0)) {
      return Invalid("the CUDA kernels take head dims up to 256" +
                     std::string(tma_loads ? " that 8 divides" : "") + ", not " +
                     std::to_string(dim));
    }
  }
  for (Term term : {kBias, kMask, kDropoutState}) {
    if (operands.terms[term]) return Invalid("the CUDA kernels take no bias, mask or dropout");
  }
  for (std::int64_t size : {s.batch, s.q_len, s.kv_len, s.q_heads, s.kv_heads}) {
    if (size > kMaxInt / 2) return Invalid("a dim of " + std::to_string(size) + " is too large");
  }
  const std::int64_t rows = CeilDiv(std::max(s.q_len, s.kv_len), 64);
  if (s.batch * s.q_heads > kMaxInt / std::max<std::int64_t>(rows, 1) / 4) {
    return Invalid("batch x heads x sequence length / 64 is beyond 2^29");
  }
  return ffi::Error::Success();
}

ffi::Error CheckNumbers(std::initializer_list<std::int64_t> positive) {
  for (std::int64_t number : positive) {
    if (number < 1 || number > kMaxInt) return Invalid("a number of `tiles` is out of range");
  }
  return ffi::Error::Success();
}

// Where the batch was symbolic, `tiles` may name more heads than there are; the kernels multiply
// this by the tiles of a head.
int ClampHeadGroup(std::int64_t head_group, std::int64_t heads) {
  return static_cast<int>(std::min(head_group, heads));
}

// The fields that the parameters of both passes share.
template <class Params>
void SetCommon(const Operands& operands, const ProblemAttribute& problem, Params* params) {
  const Sizes& s = operands.sizes;
  params->query_lengths = operands.Data<int>(kQueryLengths);
  params->key_value_lengths = operands.Data<int>(kKeyValueLengths);
  params->query_segments = operands.Data<int>(kQuerySegments);
  params->key_value_segments = operands.Data<int>(kKeyValueSegments);
  params->batch = static_cast<int>(s.batch);
  params->query_len = static_cast<int>(s.q_len);
  params->kv_len = static_cast<int>(s.kv_len);
  params->query_heads = static_cast<int>(s.q_heads);
  params->kv_heads = static_cast<int>(s.kv_heads);
  params->window_left = ClampWindow(problem.window_left);
  params->window_right = ClampWindow(problem.window_right);
  params->scale = static_cast<float>(problem.scale);
}

// Sinks are [*B, N] or [1s, N]; the lowering broadcasts what lies between.
ffi::Error SetSinks(const Operands& operands, ForwardParams* params) {
  if (!operands.terms[kSinks]) return ffi::Error::Success();
  const Sizes& s = operands.sizes;
  const auto elements = static_cast<std::int64_t>(operands.terms[kSinks]->element_count());
  if (elements != s.q_heads && elements != s.batch * s.q_heads) {
    return Invalid("the CUDA kernels take sinks of " + std::to_string(s.q_heads) +
                   " heads, for all batch rows or for each");
  }
  params->sinks = operands.Data<float>(kSinks);
  params->sinks_batch_stride = elements == s.q_heads ? 0 : s.q_heads;
  return ffi::Error::Success();
}

ffi::Error Forward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ProblemAttribute problem, ProgramAttribute program,
                   ForwardTilesAttribute tiles) {
  ForwardOperands operands;
  if (auto error = ReadForward(args, rets, problem, &operands); error.failure()) return error;
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.kv_len == 0) return Invalid("the CUDA kernels take no empty keys");
  if (auto error = CheckOperands(operands, tiles.tma_loads); error.failure()) return error;
  if (auto error = CheckNumbers({tiles.threads, tiles.tile_q, tiles.tile_kv, tiles.packed_heads,
                                 tiles.head_group, tiles.shared_bytes});
      error.failure()) {
    return error;
  }
  if (64 % tiles.packed_heads != 0 || (s.q_heads / s.kv_heads) % tiles.packed_heads != 0) {
    return Invalid("`tiles` does not fit the heads");
  }

  ForwardParams params{};
  SetCommon(operands, problem, &params);
  const bool segments = problem.Has(kQuerySegments);
  const std::int64_t key_blocks = CeilDiv(s.kv_len, tiles.tile_kv);
  params.query_blocks = static_cast<int>(CeilDiv(s.q_len * tiles.packed_heads, tiles.tile_q));
  const std::int64_t query_groups = params.query_blocks * tiles.tile_q / 64;
  Workspaces workspaces(rets, 2);
  workspaces.Take("unit_counter", 1, &params.unit_counter);
  workspaces.Take("segment_ranges", segments ? 2 * s.batch * key_blocks : 0,
                  &params.segment_ranges);
  workspaces.Take("segment_plan", segments ? 4 * s.batch * query_groups : 0, &params.segment_plan);
  if (workspaces.error().failure()) return workspaces.error();
  if (auto error = SetSinks(operands, &params); error.failure()) return error;
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out = operands.out;
  params.lse = operands.lse;
  params.l2_heads = ClampHeadGroup(tiles.head_group, s.batch * s.q_heads / tiles.packed_heads);
  params.scale_log2 = static_cast<float>(kLog2E * (problem.softcap > 0 ? problem.softcap
                                                   : problem.scale > 0 ? problem.scale
                                                                       : 1));
  params.softcap_inner =
      problem.softcap > 0 ? static_cast<float>(problem.scale / problem.softcap) : 0;

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  const std::int64_t heads = tiles.packed_heads;
  if (tiles.tma_loads) {
    session.Map({type, operands.q, s.batch, s.q_len, s.q_heads, s.head_dim, 64 / heads, heads},
                &params.query);
    session.Map({type, operands.k, s.batch, s.kv_len, s.kv_heads, s.head_dim, tiles.tile_kv, 1},
                &params.key);
    session.Map({type, operands.v, s.batch, s.kv_len, s.kv_heads, s.value_dim, tiles.tile_kv, 1},
                &params.value);
  }
  if (segments) {
    const auto launch = [&](const char* kernel, std::int64_t warps) {
      session.Launch(kernel, {CeilDiv(warps, kSegmentWarps), 32 * kSegmentWarps, 0}, &params);
    };
    launch("segment_ranges", s.batch * key_blocks);
    launch("segment_plan", s.batch * query_groups);
  } else if (tiles.dynamic) {
    session.Zero(params.unit_counter, 1);
  }
  const std::int64_t work = params.query_blocks * s.batch * (s.q_heads / heads);
  session.LaunchPersistent("flash_forward", work, tiles.threads, tiles.shared_bytes, &params);
  return session.error();
}

ffi::Error Backward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ProblemAttribute problem, bool with_dlse, bool with_dbias,
                    ProgramAttribute program, BackwardTilesAttribute tiles) {
  BackwardOperands operands;
  if (auto error = ReadBackward(args, rets, problem, with_dlse, with_dbias, &operands);
      error.failure()) {
    return error;
  }
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.q_len == 0 || s.kv_len == 0) return Invalid("the CUDA kernels take no empty sequences");
  if (auto error = CheckOperands(operands, tiles.tma_loads); error.failure()) return error;
  if (auto error = CheckNumbers({tiles.threads, tiles.tile_q, tiles.tile_kv, tiles.turn_parts,
                                 tiles.head_group, tiles.shared_bytes});
      error.failure()) {
    return error;
  }

  const bool sums_in_dq = tiles.dq_row_bytes != 0;
  if (sums_in_dq && (tiles.dq_row_bytes != s.q_heads * s.head_dim * 2 ||
                     tiles.dq_row_bytes >= kMaxInt / 128 || s.q_len % tiles.tile_q != 0 ||
                     s.head_dim % 64 != 0 || s.batch * s.q_len * s.q_heads > kMaxInt)) {
    return Invalid("these tiles are for another shape of dq");
  }

  BackwardParams params{};
  SetCommon(operands, problem, &params);
  const bool segments = problem.Has(kQuerySegments);
  const std::int64_t heads = s.batch * s.q_heads;
  const std::int64_t query_blocks = CeilDiv(s.q_len, tiles.tile_q);
  const std::int64_t key_blocks = CeilDiv(s.kv_len, tiles.tile_kv);
  const std::int64_t rows = heads * query_blocks * tiles.tile_q;
  const std::int64_t head_boxes = CeilDiv(s.head_dim, 64);
  Workspaces workspaces(rets, with_dbias ? 4 : 3);
  workspaces.Take("lse_log2", rows, &params.lse_log2);
  workspaces.Take("minus_delta", rows, &params.minus_delta);
  workspaces.Take("dq_sum", rows * (sums_in_dq ? s.head_dim / 2 : 64 * head_boxes), &params.dq_sum);
  workspaces.Take("next_unit", 1, &params.next_unit);
  workspaces.Take("turns", problem.deterministic ? heads * query_blocks * tiles.turn_parts : 0,
                  &params.turns);
  workspaces.Take("query_segment_ranges", segments ? 2 * s.batch * query_blocks : 0,
                  &params.query_segment_ranges);
  workspaces.Take("key_segment_ranges", segments ? 2 * s.batch * key_blocks : 0,
                  &params.key_segment_ranges);
  workspaces.Take("marks", s.batch * s.kv_heads * key_blocks * tiles.tile_kv / 16 * 2,
                  &params.marks);
  if (workspaces.error().failure()) return workspaces.error();
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out_data = operands.out;
  params.dout_data = operands.dout;
  params.lse = operands.lse;
  params.dlse = operands.dlse;
  params.dquery = operands.dq;
  params.dkey_data = operands.dk;
  params.dvalue_data = operands.dv;
  params.l2_heads = ClampHeadGroup(tiles.head_group, s.batch * s.kv_heads);
  params.scale_log2 =
      static_cast<float>(kLog2E * (problem.softcap > 0 ? problem.softcap : problem.scale));
  params.softcap_inner =
      problem.softcap > 0 ? static_cast<float>(problem.scale / problem.softcap) : 0;

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  const auto map = [&](const void* data, std::int64_t length, std::int64_t count, std::int64_t dim,
                       std::int64_t box_rows, TensorMap* to) {
    if (tiles.tma_loads) session.Map({type, data, s.batch, length, count, dim, box_rows, 1}, to);
  };
  map(operands.q, s.q_len, s.q_heads, s.head_dim, tiles.tile_q, &params.query);
  map(operands.k, s.kv_len, s.kv_heads, s.head_dim, tiles.tile_kv, &params.key);
  map(operands.v, s.kv_len, s.kv_heads, s.value_dim, tiles.tile_kv, &params.value);
  map(operands.dout, s.q_len, s.q_heads, s.value_dim, tiles.tile_q, &params.dout);
  map(operands.dk, s.kv_len, s.kv_heads, s.head_dim, 64, &params.dkey);
  map(operands.dv, s.kv_len, s.kv_heads, s.value_dim, 64, &params.dvalue);
  const std::int64_t tiles_of_rows = rows / 64;
  const std::int64_t units = s.batch * s.kv_heads * key_blocks;
  session.Launch("flash_backward_prepare", {tiles_of_rows, 128, 0}, &params);
  session.LaunchPersistent("flash_backward", units, tiles.threads, tiles.shared_bytes, &params);
  session.Launch("flash_backward_finish", {tiles_of_rows * head_boxes, 128, 0}, &params);
  return session.error();
}

// What both handlers take in front of their own attributes.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ProblemAttribute>("problem");
}

auto BindForward() {
  return Bind().Attr<ProgramAttribute>("program").Attr<ForwardTilesAttribute>("tiles");
}

auto BindBackward() {
  return Bind()
      .Attr<bool>("with_dlse")
      .Attr<bool>("with_dbias")
      .Attr<ProgramAttribute>("program")
      .Attr<BackwardTilesAttribute>("tiles");
}

}  // namespace

std::string ParamsAssertions() {
  const std::string why = ", \"params.h differs from that of the compiled module\");\n";
  return "static_assert(sizeof(ForwardParams) == " + std::to_string(sizeof(ForwardParams)) + why +
         "static_assert(sizeof(BackwardParams) == " + std::to_string(sizeof(BackwardParams)) + why;
}

}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaForward, jax_flash::Forward, jax_flash::BindForward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaBackward, jax_flash::Backward, jax_flash::BindBackward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
