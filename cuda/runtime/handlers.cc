// Reads a custom call, fills the kernel's parameters, launches. Decides nothing: what depends on
// the GPU or on measurements arrives as attributes from jax_flash/_tiles.py.

#include "cuda/runtime/handlers.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

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
  std::int64_t max_blocks;  // that run at once: the grid of the persistent kernel
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t cluster_size;
  std::int64_t tile_q;
  std::int64_t tile_kv;
  std::int64_t packed_heads;
  std::int64_t head_group;
  bool dynamic;
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_flash::ProgramAttribute,
                                      StructMember<std::string_view>("source"),
                                      StructMember<std::string_view>("header"),
                                      StructMember<std::string_view>("arch"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::ForwardTilesAttribute, StructMember<std::int64_t>("max_blocks"),
    StructMember<std::int64_t>("threads"), StructMember<std::int64_t>("shared_bytes"),
    StructMember<std::int64_t>("cluster_size"), StructMember<std::int64_t>("tile_q"),
    StructMember<std::int64_t>("tile_kv"), StructMember<std::int64_t>("packed_heads"),
    StructMember<std::int64_t>("head_group"), StructMember<bool>("dynamic"));

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int kMaxWindow = (1 << 30) - 1;         // sums of a window and a position stay below 2^31
constexpr std::int64_t kBlocksPerRangeBlock = 8;  // key blocks that one segment_ranges block reads

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

ffi::Error Invalid(const std::string& text) {
  return ffi::Error::InvalidArgument("jax_flash: " + text);
}

ffi::Error Internal(const std::string& text) { return ffi::Error::Internal("jax_flash: " + text); }

Program ToProgram(const ProgramAttribute& attribute) {
  return {std::string(attribute.source), std::string(attribute.header),
          std::string(attribute.arch)};
}

int ClampWindow(std::int64_t window) {
  return static_cast<int>(std::min<std::int64_t>(std::max<std::int64_t>(window, 0), kMaxWindow));
}

// The copy engine's limits and the kernels' 32-bit indices; offsets into arrays are 64-bit.
std::string WhyTooLarge(const Sizes& s) {
  for (std::int64_t size : {s.batch, s.q_len, s.kv_len, s.q_heads, s.kv_heads}) {
    if (size > kMaxInt / 2) return "a dimension of " + std::to_string(size) + " is too large";
  }
  if (s.batch * s.q_heads > kMaxInt / CeilDiv(s.q_len, 64)) {
    return "batch x heads x queries / 64 is beyond 2^31";
  }
  return "";
}

// Gets buffer `index` of the results as int32 of at least `count` elements.
ffi::Error Workspace(ffi::RemainingRets rets, std::size_t index, std::int64_t count,
                     std::int32_t** data) {
  auto buffer = rets.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value()) return Invalid("workspace " + std::to_string(index) + " is missing");
  if ((*buffer)->element_type() != ffi::S32 ||
      static_cast<std::int64_t>((*buffer)->element_count()) < count) {
    return Invalid("workspace " + std::to_string(index) + " needs " + std::to_string(count) +
                   " int32 elements");
  }
  *data = static_cast<std::int32_t*>((*buffer)->untyped_data());
  return ffi::Error::Success();
}

CUtensorMapDataType MapType(ffi::DataType dtype) {
  return dtype == ffi::BF16 ? kTensorBfloat16 : kTensorFloat16;
}

ffi::Error CheckForward(const Operands& operands, const ForwardTilesAttribute& tiles) {
  if (operands.dtype != ffi::BF16 && operands.dtype != ffi::F16) {
    return Invalid("the CUDA kernels take bfloat16 and float16");
  }
  const Sizes& s = operands.sizes;
  if (s.head_dim % 8 != 0 || s.value_dim % 8 != 0 || s.head_dim > 256 || s.value_dim > 256) {
    return Invalid("the CUDA kernels take head dims up to 256 that 8 divides, not " +
                   std::to_string(s.head_dim) + " and " + std::to_string(s.value_dim));
  }
  for (Term term : {kBias, kMask, kDropoutState}) {
    if (operands.terms[term]) return Invalid("the CUDA kernels take no bias, mask or dropout");
  }
  const std::int64_t positive[] = {tiles.max_blocks, tiles.threads,         tiles.cluster_size,
                                   tiles.tile_q,     tiles.tile_kv,         tiles.packed_heads,
                                   tiles.head_group, tiles.shared_bytes + 1};
  for (std::int64_t number : positive) {
    if (number < 1 || number > kMaxInt) return Invalid("a number of `tiles` is out of range");
  }
  if (tiles.tile_kv % tiles.cluster_size != 0 || 64 % tiles.packed_heads != 0 ||
      (s.q_heads / s.kv_heads) % tiles.packed_heads != 0 || tiles.tile_q % 64 != 0) {
    return Invalid("`tiles` does not fit the heads");
  }
  if (const std::string why = WhyTooLarge(s); !why.empty()) return Invalid(why);
  return ffi::Error::Success();
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

ffi::Error Forward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, double scale,
                   std::int64_t window_left, std::int64_t window_right, bool bottom_right,
                   double softcap, double dropout_rate, bool deterministic, std::int64_t terms,
                   ProgramAttribute program_attribute, ForwardTilesAttribute tiles) {
  const Attributes attributes{scale,   window_left,  window_right,  bottom_right,
                              softcap, dropout_rate, deterministic, terms};
  ForwardOperands operands;
  if (auto error = ReadForward(args, rets, attributes, &operands); error.failure()) return error;
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.kv_len == 0 || s.head_dim == 0 || s.value_dim == 0) {
    return Invalid("the CUDA kernels take no empty keys or values");
  }
  if (auto error = CheckForward(operands, tiles); error.failure()) return error;

  const bool segments = attributes.Has(kQuerySegments);
  const std::int64_t key_blocks = CeilDiv(s.kv_len, tiles.tile_kv);
  std::int32_t* tile_counter = nullptr;
  std::int32_t* segment_ranges = nullptr;
  if (auto error = Workspace(rets, 2, 1, &tile_counter); error.failure()) return error;
  if (auto error = Workspace(rets, 3, segments ? 2 * s.batch * key_blocks : 0, &segment_ranges);
      error.failure()) {
    return error;
  }

  Result<const Driver*> driver = GetDriver();
  if (!driver.ok()) return Internal(driver.error());
  const Program program = ToProgram(program_attribute);
  Result<const Kernel*> kernel = Load(program, "flash_forward");
  if (!kernel.ok()) return Internal(kernel.error());
  const StreamScope scope(**driver, stream);
  if (!scope.status().ok()) return Internal(scope.status().error());

  ForwardParams params{};
  const std::int64_t box_heads = tiles.packed_heads;
  const std::int64_t box_keys = tiles.tile_kv / tiles.cluster_size;
  const CUtensorMapDataType type = MapType(operands.dtype);
  const TensorView views[] = {
      {type, operands.q, s.batch, s.q_len, s.q_heads, s.head_dim, 64 / box_heads, box_heads},
      {type, operands.k, s.batch, s.kv_len, s.kv_heads, s.head_dim, box_keys, 1},
      {type, operands.v, s.batch, s.kv_len, s.kv_heads, s.value_dim, box_keys, 1}};
  TensorMap* const maps[] = {&params.query, &params.key, &params.value};
  for (int i = 0; i < 3; ++i) {
    Status encoded = EncodeTensorMap(**driver, views[i], maps[i]);
    if (!encoded.ok()) return Internal(encoded.error());
  }
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out = operands.out;
  params.lse = operands.lse;
  params.query_lengths = operands.Data<int>(kQueryLengths);
  params.key_value_lengths = operands.Data<int>(kKeyValueLengths);
  params.query_segments = operands.Data<int>(kQuerySegments);
  params.key_value_segments = operands.Data<int>(kKeyValueSegments);
  params.tile_counter = tile_counter;
  params.segment_ranges = segment_ranges;
  params.batch = static_cast<int>(s.batch);
  params.query_len = static_cast<int>(s.q_len);
  params.kv_len = static_cast<int>(s.kv_len);
  params.query_heads = static_cast<int>(s.q_heads);
  params.kv_heads = static_cast<int>(s.kv_heads);
  params.query_tiles = static_cast<int>(CeilDiv(s.q_len * tiles.packed_heads, tiles.tile_q));
  params.head_group = static_cast<int>(tiles.head_group);
  params.window_left = ClampWindow(window_left);
  params.window_right = ClampWindow(window_right);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  if (auto error = SetSinks(operands, &params); error.failure()) return error;

  if (tiles.dynamic) {
    Status zeroed = Fill(scope, tile_counter, 0, 1);
    if (!zeroed.ok()) return Internal(zeroed.error());
  }
  if (segments) {
    Result<const Kernel*> ranges = Load(program, "segment_ranges");
    if (!ranges.ok()) return Internal(ranges.error());
    const LaunchSize size{CeilDiv(key_blocks, kBlocksPerRangeBlock), s.batch, 256, 0, 1};
    Status launched = Launch(scope, **ranges, size, &params);
    if (!launched.ok()) return Internal(launched.error());
  }
  const std::int64_t work = params.query_tiles * s.batch * (s.q_heads / tiles.packed_heads);
  const std::int64_t blocks = std::min(tiles.max_blocks, work * tiles.cluster_size);
  const LaunchSize size{blocks, 1, tiles.threads, tiles.shared_bytes, tiles.cluster_size};
  Status launched = Launch(scope, **kernel, size, &params);
  return launched.ok() ? ffi::Error::Success() : Internal(launched.error());
}

ffi::Error Backward(ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "jax_flash: no CUDA backward kernel");
}

}  // namespace
}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaForward, jax_flash::Forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_flash::CUstream>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<double>("scale")
                                  .Attr<std::int64_t>("window_left")
                                  .Attr<std::int64_t>("window_right")
                                  .Attr<bool>("bottom_right")
                                  .Attr<double>("softcap")
                                  .Attr<double>("dropout_rate")
                                  .Attr<bool>("deterministic")
                                  .Attr<std::int64_t>("terms")
                                  .Attr<jax_flash::ProgramAttribute>("program")
                                  .Attr<jax_flash::ForwardTilesAttribute>("tiles"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaBackward, jax_flash::Backward,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
