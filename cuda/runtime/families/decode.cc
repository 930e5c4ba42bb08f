// Reads the custom call of decoding, fills the kernels' parameters, launches. Decides nothing: what
// depends on measurements arrives as attributes from jax_flash/_gpu/decode.py. Read next:
// decode_params.h; cuda/kernels/decode_cta.cuh for the device code.

#include "cuda/runtime/families/decode.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/families/decode_params.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/session.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The numbers of a DecodeTiling that the launch needs.
struct DecodeLaunch {
  std::int64_t threads;
  std::int64_t merge_threads;
  std::int64_t shared_bytes;
  std::int64_t heads;      // kv heads of a CTA
  std::int64_t head_rows;  // and query rows of each
  std::int64_t block_kv;
  std::int64_t box_rows;
  std::int64_t cluster;  // CTAs that share a unit and no others do; 1: parts of a line
  bool tma;              // loads by it; the second kernel starts before the first ends (sm_90)
  double rotary_base;    // 0: queries and new keys are not rotated here
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::DecodeLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("merge_threads"), StructMember<std::int64_t>("shared_bytes"),
    StructMember<std::int64_t>("heads"), StructMember<std::int64_t>("head_rows"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("box_rows"),
    StructMember<std::int64_t>("cluster"), StructMember<bool>("tma"),
    StructMember<double>("rotary_base"));

namespace jax_flash {
namespace decode {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr std::int64_t kMaxWindow = (1 << 30) - 1;
constexpr double kLog2E = 1.44269504088896340736;

ffi::Error Invalid(const std::string& text) {
  return ffi::Error::InvalidArgument("jax_flash: " + text);
}

// What the kernels cannot: their dtypes, TMA's limits and 32-bit indices.
ffi::Error Check(const DecodeOperands& operands, const DecodeLaunch& launch) {
  const Sizes& s = operands.sizes;
  const bool is_split = operands.dtype == ffi::F32;
  if (operands.dtype != ffi::BF16 && operands.dtype != ffi::F16 && !is_split) {
    return Invalid("the CUDA kernels take bfloat16, float16 and float32");
  }
  if (launch.tma && (is_split || s.head_dim % 8 != 0 || s.value_dim % 8 != 0)) {
    return Invalid("by TMA kernels of decoding take 16 bits and dims that 8 divides, not " +
                   std::to_string(s.head_dim) + " and " + std::to_string(s.value_dim));
  }
  for (std::int64_t number :
       {launch.threads, launch.merge_threads, launch.shared_bytes, launch.heads, launch.head_rows,
        launch.block_kv, launch.box_rows, launch.cluster}) {
    if (number < 1 || number > kMaxInt) return Invalid("a number of `launch` is out of range");
  }
  if (launch.cluster > 8) return Invalid("clusters have at most 8 CTAs");
  if (launch.box_rows > 256 || launch.block_kv % launch.box_rows != 0 ||
      (launch.box_rows != launch.block_kv && operands.page_size % launch.box_rows != 0)) {
    return Invalid("`launch` does not fit pages of " + std::to_string(operands.page_size));
  }
  if (operands.page_table != nullptr && operands.page_size % launch.box_rows != 0) {
    return Invalid("`launch` does not fit pages of " + std::to_string(operands.page_size));
  }
  // Elements of q in a row; positions, with a block beyond the end.
  const std::int64_t most = kMaxInt / 2;
  for (std::int64_t size : {s.kv_len, operands.pages, s.q_len * s.q_heads * s.head_dim,
                            s.q_len * s.kv_heads * s.head_dim, s.batch}) {
    if (size > most) return Invalid("a dim of " + std::to_string(size) + " is too large");
  }
  return ffi::Error::Success();
}

ffi::Error Decode(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ProblemAttribute problem, bool paged, bool appends, std::int64_t value_dim,
                  ProgramAttribute program, DecodeLaunch launch) {
  DecodeOperands operands;
  if (auto error = ReadDecode(args, rets, problem, {paged, appends, value_dim}, &operands);
      error.failure()) {
    return error;
  }
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (auto error = Check(operands, launch); error.failure()) return error;

  DecodeParams params{};
  const std::int64_t rows = s.q_len * (s.q_heads / s.kv_heads);
  if (s.kv_heads % launch.heads != 0) return Invalid("`launch` does not fit the kv heads");
  params.row_groups = static_cast<int>((rows + launch.head_rows - 1) / launch.head_rows);
  if (s.kv_len / launch.block_kv + 2 > kMaxInt / s.batch) {
    return Invalid("batch x cache length is too large");
  }
  std::int64_t ctas = 0;
  const std::int64_t columns = (s.value_dim + 15) / 16 * 16;
  Workspaces workspaces(rets, !appends ? 2 : operands.values_in_keys ? 3 : 4);
  const std::int64_t shares = s.kv_heads / launch.heads * params.row_groups;
  params.shares = static_cast<int>(shares);
  const bool in_clusters = launch.cluster > 1;
  if (in_clusters) {
    if (s.batch > kMaxInt / (shares * launch.cluster)) return Invalid("too many clusters");
    ctas = s.batch * shares * launch.cluster;
  } else {
    workspaces.Take("partial_out", {&ctas, 2, launch.heads * launch.head_rows, columns},
                    &params.partial_out);
    workspaces.Take("partial_rows", {ctas, 2, launch.heads * launch.head_rows, 2},
                    &params.partial_rows);
    if (workspaces.error().failure()) return workspaces.error();
    params.parts = static_cast<int>(std::min(ctas / shares, kMaxInt / shares));
    if (params.parts < 1) return Invalid("the workspace partial_out has too few CTAs");
    ctas = params.parts * shares;
  }

  params.key_data = operands.k;
  params.value_data = operands.values_in_keys ? nullptr : operands.v;
  params.query = operands.q;
  params.lengths = operands.lengths;
  params.page_table = operands.page_table;
  params.new_key = operands.new_k;
  params.new_value = operands.new_v;
  params.key_cache = operands.k_cache;
  params.value_cache = operands.v_cache;
  params.out = operands.out;
  params.lse = operands.lse;
  if (operands.terms[kSinks]) {
    const auto count = static_cast<std::int64_t>(operands.terms[kSinks]->element_count());
    if (count != s.q_heads && count != s.batch * s.q_heads) {
      return Invalid("sinks need one batch row, or all");
    }
    params.sinks = operands.Data<float>(kSinks);
    params.sinks_batch_stride = count == s.q_heads ? 0 : s.q_heads;
  }
  params.batch = static_cast<int>(s.batch);
  params.query_len = static_cast<int>(s.q_len);
  params.query_heads = static_cast<int>(s.q_heads);
  params.kv_heads = static_cast<int>(s.kv_heads);
  params.pages = static_cast<int>(operands.pages);
  params.page_size = static_cast<int>(operands.page_size);
  params.columns =
      static_cast<int>(paged ? s.kv_len / std::max<std::int64_t>(operands.page_size, 1) : 1);
  params.window_left =
      static_cast<int>(std::clamp<std::int64_t>(problem.window_left, 0, kMaxWindow));
  params.softcap_inner =
      problem.softcap > 0 ? static_cast<float>(problem.scale / problem.softcap) : 0;
  params.scale_log2 =
      static_cast<float>(kLog2E * (problem.softcap > 0 ? problem.softcap : problem.scale));
  if (launch.rotary_base > 0) {
    const std::int64_t half = s.head_dim / 2;
    if (s.head_dim % 16 != 0 || half > kMostFrequencies) {
      return Invalid("the CUDA kernels rotate head dims up to 256 that 16 divides");
    }
    for (std::int64_t h = 0; h < half; ++h) {
      params.frequencies[h] = static_cast<float>(
          std::pow(launch.rotary_base, -static_cast<double>(h) / static_cast<double>(half)));
    }
  }

  Session session(stream, program);
  const auto map = [&](const void* data, std::int64_t dim, TensorMap* to) {
    const auto type = operands.dtype == ffi::BF16 ? kTensorBfloat16 : kTensorFloat16;
    session.Map(
        {type, data, operands.pages, operands.page_size, s.kv_heads, dim, launch.box_rows, 1}, to);
  };
  if (launch.tma && operands.pages > 0 &&
      operands.page_size > 0) {  // else all rows are refused or empty
    map(operands.k, s.head_dim, &params.key);
    if (!operands.values_in_keys) map(operands.v, s.value_dim, &params.value);
  }
  session.Launch("flash_decode",
                 {ctas, launch.threads, launch.shared_bytes, /*overlaps=*/false, launch.cluster},
                 &params);
  if (!in_clusters) {
    session.Launch("flash_decode_merge", {ctas, launch.merge_threads, 0, /*overlaps=*/launch.tma},
                   &params);
  }
  return session.error();
}

auto BindDecode() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ProblemAttribute>("problem")
      .Attr<bool>("paged")
      .Attr<bool>("appends")
      .Attr<std::int64_t>("value_dim")
      .Attr<ProgramAttribute>("program")
      .Attr<DecodeLaunch>("launch");
}

}  // namespace
}  // namespace decode

std::string DecodeParamsAssertions() {
  return "static_assert(sizeof(DecodeParams) == " + std::to_string(sizeof(DecodeParams)) +
         ", \"decode_params.h differs from that of the compiled module\");\n";
}

}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaDecode, jax_flash::decode::Decode,
                              jax_flash::decode::BindDecode(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
