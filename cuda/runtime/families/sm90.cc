// Reads a custom call, fills the kernel's parameters, launches. Decides nothing: what depends on
// measurements arrives as attributes from jax_flash/_gpu/sm90.py. Read next: sm90_params.h; jit.h
// for the compiler, cuda/kernels/sm90/forward.cuh for the device code.

#include "cuda/runtime/families/sm90.h"

#include <cstdint>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/families/operands.h"
#include "cuda/runtime/families/sm90_params.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/session.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The numbers of a sm90.ForwardTiling that the launch needs.
struct ForwardLaunch {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t block_q;  // rows: positions times packed heads
  std::int64_t block_kv;
  std::int64_t packed_heads;
  std::int64_t l2_heads;
  bool dynamic;
  bool tma_loads;
};

// The same of a sm90.BackwardTiling.
struct BackwardLaunch {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t block_q;
  std::int64_t block_kv;
  std::int64_t turn_parts;
  std::int64_t dq_boxes;  // of 64 columns, in a row of dq
  std::int64_t l2_heads;
  bool tma_loads;
  std::int64_t dq_row_bytes;
  std::int64_t bias_shared_bytes;
  bool stores_dbias;
  bool clears_dbias;
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::ForwardLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("block_q"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("packed_heads"),
    StructMember<std::int64_t>("l2_heads"), StructMember<bool>("dynamic"),
    StructMember<bool>("tma_loads"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::BackwardLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("block_q"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("turn_parts"),
    StructMember<std::int64_t>("dq_boxes"), StructMember<std::int64_t>("l2_heads"),
    StructMember<bool>("tma_loads"), StructMember<std::int64_t>("dq_row_bytes"),
    StructMember<std::int64_t>("bias_shared_bytes"), StructMember<bool>("stores_dbias"),
    StructMember<bool>("clears_dbias"));

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;
using namespace attention;  // of operands.h

// Of a CTA of segment_ranges, segment_plan and position_ranges.
constexpr std::int64_t kRangeWarps = 8;

CUtensorMapDataType MapType(ffi::DataType dtype) {
  return dtype == ffi::BF16 ? kTensorBfloat16 : kTensorFloat16;
}

ffi::Error Forward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ProblemAttribute problem, ProgramAttribute program, ForwardLaunch launch) {
  ForwardOperands operands;
  if (auto error = ReadForward(args, rets, problem, &operands); error.failure()) return error;
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.kv_len == 0) return Invalid("the CUDA kernels take no empty keys");
  if (auto error = CheckOperands(operands, launch.tma_loads); error.failure()) return error;
  if (auto error = CheckNumbers({launch.threads, launch.block_q, launch.block_kv,
                                 launch.packed_heads, launch.l2_heads, launch.shared_bytes});
      error.failure()) {
    return error;
  }
  if (operands.terms[kDropoutState] && launch.packed_heads != 1) {
    return Invalid("`launch` packs heads, which dropout does not take");
  }
  if (64 % launch.packed_heads != 0 || (s.q_heads / s.kv_heads) % launch.packed_heads != 0) {
    return Invalid("`launch` does not fit the heads");
  }

  ForwardParams params{};
  SetCommon(operands, problem, &params);
  const bool segments = problem.Has(kQuerySegments);
  std::int64_t query_blocks = 0, key_blocks = 0;
  const std::int64_t warpgroups = launch.block_q / 64;
  Workspaces workspaces(rets, 2);
  workspaces.Take("unit_counter", {1}, &params.unit_counter);
  workspaces.Take("segment_ranges", {s.batch, &key_blocks, segments ? 2 : 0},
                  &params.segment_ranges);
  workspaces.Take("segment_plan", {s.batch, &query_blocks, warpgroups, segments ? 4 : 0},
                  &params.segment_plan);
  const bool positions = problem.Has(kQueryPositions);
  workspaces.Take("key_position_ranges", {s.batch, key_blocks, positions ? 2 : 0},
                  &params.key_position_ranges);
  workspaces.Take("query_position_ranges", {s.batch, query_blocks, warpgroups, positions ? 2 : 0},
                  &params.query_position_ranges);
  TermSizes mask;
  if (auto error = ReadTerm(operands, kMask, &mask); error.failure()) return error;
  std::int64_t mask_blocks =
      SetMask(operands, mask, 64, launch.block_kv, /*by_key=*/false, &workspaces, &params.mask);
  if (auto error = SetBlockMask(operands, 64, launch.block_kv, /*by_key=*/false, &workspaces,
                                &mask_blocks, &params.block_mask);
      error.failure()) {
    return error;
  }
  workspaces.CheckBlocks("keys", key_blocks, launch.block_kv, s.kv_len);
  workspaces.CheckBlocks("query rows", query_blocks, launch.block_q, s.q_len * launch.packed_heads);
  if (workspaces.error().failure()) return workspaces.error();
  if (auto error = SetSinks(operands, &params); error.failure()) return error;
  params.query_blocks = static_cast<int>(query_blocks);
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out = operands.out;
  params.lse = operands.lse;
  params.l2_heads = ClampHeads(launch.l2_heads, s.batch * s.q_heads / launch.packed_heads);
  TermSizes bias;
  if (auto error = SetBias(operands, problem, &bias, &params); error.failure()) return error;
  params.scale_log2 = ForwardScaleLog2(problem);

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  const std::int64_t heads = launch.packed_heads;
  if (launch.tma_loads) {
    session.Map({type, operands.q, s.batch, s.q_len, s.q_heads, s.head_dim, 64 / heads, heads},
                &params.query);
    session.Map({type, operands.k, s.batch, s.kv_len, s.kv_heads, s.head_dim, launch.block_kv, 1},
                &params.key);
    session.Map({type, operands.v, s.batch, s.kv_len, s.kv_heads, s.value_dim, launch.block_kv, 1},
                &params.value);
  }
  if (mask_blocks > 0) session.Launch("mask_plan", {mask_blocks, kMaskThreads, 0}, &params);
  const auto run = [&](const char* kernel, std::int64_t warps) {
    session.Launch(kernel, {CeilDiv(warps, kRangeWarps), 32 * kRangeWarps, 0}, &params);
  };
  if (positions) run("position_ranges", s.batch * (key_blocks + query_blocks * warpgroups));
  if (segments) {
    run("segment_ranges", s.batch * key_blocks);
    run("segment_plan", s.batch * query_blocks * warpgroups);
  } else if (launch.dynamic) {
    session.Zero(params.unit_counter, 1);
  }
  const std::int64_t units = query_blocks * s.batch * (s.q_heads / heads);
  session.LaunchPersistent("flash_forward", units, launch.threads, launch.shared_bytes, &params);
  return session.error();
}

ffi::Error Backward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ProblemAttribute problem, bool with_dlse, bool with_dbias,
                    ProgramAttribute program, BackwardLaunch launch) {
  BackwardOperands operands;
  if (auto error = ReadBackward(args, rets, problem, with_dlse, with_dbias, &operands);
      error.failure()) {
    return error;
  }
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.q_len == 0 || s.kv_len == 0) return Invalid("the CUDA kernels take no empty sequences");
  if (auto error = CheckOperands(operands, launch.tma_loads); error.failure()) return error;
  if (auto error = CheckNumbers({launch.threads, launch.block_q, launch.block_kv, launch.turn_parts,
                                 launch.dq_boxes, launch.l2_heads, launch.shared_bytes});
      error.failure()) {
    return error;
  }

  const bool sums_in_dq = launch.dq_row_bytes != 0;
  if (sums_in_dq && (launch.dq_row_bytes != s.q_heads * s.head_dim * 2 ||
                     launch.dq_row_bytes >= kMaxInt / 128 || s.q_len % launch.block_q != 0 ||
                     s.head_dim % 64 != 0 || s.batch * s.q_len * s.q_heads > kMaxInt)) {
    return Invalid("this tiling is for another shape of dq");
  }

  BackwardParams params{};
  SetCommon(operands, problem, &params);
  const bool segments = problem.Has(kQuerySegments);
  const std::int64_t heads = s.batch * s.q_heads;
  const std::int64_t kv_heads = s.batch * s.kv_heads;
  const std::int64_t columns = sums_in_dq ? s.head_dim / 2 : 64 * launch.dq_boxes;
  std::int64_t query_blocks = 0, key_blocks = 0;
  Workspaces workspaces(rets, with_dbias ? 4 : 3);
  workspaces.Take("lse_log2", {heads, &query_blocks, launch.block_q}, &params.lse_log2);
  workspaces.Take("minus_delta", {heads, query_blocks, launch.block_q}, &params.minus_delta);
  workspaces.Take("dq_sum", {heads, query_blocks, launch.block_q, columns}, &params.dq_sum);
  workspaces.Take("next_unit", {1}, &params.next_unit);
  workspaces.Take("turns", {heads, query_blocks, problem.deterministic ? launch.turn_parts : 0},
                  &params.turns);
  workspaces.Take("query_segment_ranges", {s.batch, query_blocks, segments ? 2 : 0},
                  &params.query_segment_ranges);
  workspaces.Take("key_segment_ranges", {s.batch, &key_blocks, segments ? 2 : 0},
                  &params.key_segment_ranges);
  const bool positions = problem.Has(kQueryPositions);
  workspaces.Take("query_position_ranges", {s.batch, query_blocks, positions ? 2 : 0},
                  &params.query_position_ranges);
  workspaces.Take("key_position_ranges", {s.batch, key_blocks, positions ? 2 : 0},
                  &params.key_position_ranges);
  workspaces.Take("marks", {kv_heads, key_blocks, launch.block_kv / 16, 2}, &params.marks);
  TermSizes mask;
  if (auto error = ReadTerm(operands, kMask, &mask); error.failure()) return error;
  std::int64_t mask_blocks = SetMask(operands, mask, launch.block_q, launch.block_kv,
                                     /*by_key=*/true, &workspaces, &params.mask);
  if (auto error = SetBlockMask(operands, launch.block_q, launch.block_kv, /*by_key=*/true,
                                &workspaces, &mask_blocks, &params.block_mask);
      error.failure()) {
    return error;
  }
  TermSizes bias;
  if (auto error = SetBias(operands, problem, &bias, &params); error.failure()) return error;
  std::int64_t dbias_parts = 0, dbias_kept = 0;
  workspaces.Take("dbias_sum", {&dbias_parts, &dbias_kept}, &params.dbias_sum);
  workspaces.CheckBlocks("queries", query_blocks, launch.block_q, s.q_len);
  workspaces.CheckBlocks("keys", key_blocks, launch.block_kv, s.kv_len);
  workspaces.CheckBlocks("columns of dq", launch.dq_boxes, 64, s.head_dim);
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
  params.l2_heads = ClampHeads(launch.l2_heads, kv_heads);
  if (with_dbias) {
    const std::int64_t pairs = s.batch * s.q_heads * s.q_len * s.kv_len;
    if (launch.stores_dbias
            ? bias.elements() != pairs || s.kv_len % 4 != 0
            : dbias_parts < 1 || dbias_kept != (dbias_parts > 1 ? bias.elements() : 0)) {
      return Invalid("the workspace dbias_sum or the tiling does not fit the bias");
    }
    params.dbias = operands.dbias->untyped_data();
    params.bias_elements = bias.elements();
    params.bias_batches = static_cast<int>(bias.batch);
    params.bias_heads = static_cast<int>(bias.heads);
    params.dbias_parts = static_cast<int>(dbias_parts);
  }
  params.scale_log2 = static_cast<float>(kLog2E * (problem.softcap > 0  ? problem.softcap
                                                   : problem.Has(kBias) ? 1
                                                                        : problem.scale));

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  const auto map = [&](const void* data, std::int64_t length, std::int64_t count, std::int64_t dim,
                       std::int64_t box_rows, TensorMap* to) {
    if (launch.tma_loads) session.Map({type, data, s.batch, length, count, dim, box_rows, 1}, to);
  };
  map(operands.q, s.q_len, s.q_heads, s.head_dim, launch.block_q, &params.query);
  map(operands.k, s.kv_len, s.kv_heads, s.head_dim, launch.block_kv, &params.key);
  map(operands.v, s.kv_len, s.kv_heads, s.value_dim, launch.block_kv, &params.value);
  map(operands.dout, s.q_len, s.q_heads, s.value_dim, launch.block_q, &params.dout);
  map(operands.dk, s.kv_len, s.kv_heads, s.head_dim, 64, &params.dkey);
  map(operands.dv, s.kv_len, s.kv_heads, s.value_dim, 64, &params.dvalue);
  const std::int64_t pieces = heads * query_blocks * launch.block_q / 64;  // of 64 rows
  const std::int64_t units = kv_heads * key_blocks;
  if (mask_blocks > 0) session.Launch("mask_plan", {mask_blocks, kMaskThreads, 0}, &params);
  if (with_dbias && launch.clears_dbias) {  // two elements a word
    session.Zero(static_cast<std::int32_t*>(params.dbias), bias.elements() / 2);
  }
  session.Launch("flash_backward_prepare", {pieces, 128, 0}, &params);
  session.LaunchPersistent("flash_backward", units, launch.threads, launch.shared_bytes, &params);
  session.Launch("flash_backward_finish", {pieces * launch.dq_boxes, 128, 0}, &params);
  if (with_dbias && !launch.stores_dbias && bias.elements() > 0) {
    const std::int64_t blocks =
        bias.parts() * (bias.queries == 1 ? 1 : query_blocks) * (bias.keys == 1 ? 1 : key_blocks);
    session.Launch("flash_backward_bias",
                   {blocks * dbias_parts, 2 * launch.block_kv, launch.bias_shared_bytes}, &params);
    if (dbias_parts > 1) {
      session.Launch("flash_backward_bias_sum", {CeilDiv(bias.elements(), 256), 256, 0}, &params);
    }
  }
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
  return Bind().Attr<ProgramAttribute>("program").Attr<ForwardLaunch>("launch");
}

auto BindBackward() {
  return Bind()
      .Attr<bool>("with_dlse")
      .Attr<bool>("with_dbias")
      .Attr<ProgramAttribute>("program")
      .Attr<BackwardLaunch>("launch");
}

}  // namespace

std::string Sm90ParamsAssertions() {
  const std::string why = ", \"sm90_params.h differs from that of the compiled module\");\n";
  return "static_assert(sizeof(ForwardParams) == " + std::to_string(sizeof(ForwardParams)) + why +
         "static_assert(sizeof(BackwardParams) == " + std::to_string(sizeof(BackwardParams)) + why;
}

}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaForward, jax_flash::Forward, jax_flash::BindForward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaBackward, jax_flash::Backward, jax_flash::BindBackward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
