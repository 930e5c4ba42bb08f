// Reads the custom calls of the mma.sync kernels, fills their parameters, launches. Decides
// nothing: what depends on measurements arrives as attributes from jax_flash/_gpu/sm80.py. Read
// next: sm80_params.h; cuda/kernels/sm80/forward.cuh and backward.cuh for the device code.

#include "cuda/runtime/families/sm80.h"

#include <cstdint>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/families/backward.h"
#include "cuda/runtime/families/halves.h"
#include "cuda/runtime/families/operands.h"
#include "cuda/runtime/families/sm80_params.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/session.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The numbers of a sm80.ForwardTiling that the launch needs.
struct Sm80ForwardLaunch {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t block_q;
  std::int64_t block_kv;
  std::int64_t l2_heads;
  bool halves;
};

// The same of a sm80.BackwardTiling: see backward.h.
struct Sm80BackwardLaunch {
  std::int64_t threads;
  std::int64_t shared_bytes;
  std::int64_t block_q;
  std::int64_t block_kv;
  std::int64_t turn_parts;
  std::int64_t dq_boxes;
  std::int64_t l2_heads;
  std::int64_t dq_row_bytes;
  std::int64_t bias_shared_bytes;
  bool stores_dbias;
  bool clears_dbias;
  bool halves;
  bool compact;
  static constexpr std::int64_t ring_sets = 0, ring_lag = 0, unit_heads = 0;  // none
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_flash::Sm80ForwardLaunch,
                                      StructMember<std::int64_t>("threads"),
                                      StructMember<std::int64_t>("shared_bytes"),
                                      StructMember<std::int64_t>("block_q"),
                                      StructMember<std::int64_t>("block_kv"),
                                      StructMember<std::int64_t>("l2_heads"),
                                      StructMember<bool>("halves"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::Sm80BackwardLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("block_q"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("turn_parts"),
    StructMember<std::int64_t>("dq_boxes"), StructMember<std::int64_t>("l2_heads"),
    StructMember<std::int64_t>("dq_row_bytes"), StructMember<std::int64_t>("bias_shared_bytes"),
    StructMember<bool>("stores_dbias"), StructMember<bool>("clears_dbias"),
    StructMember<bool>("halves"), StructMember<bool>("compact"));

namespace jax_flash {
namespace sm80 {
namespace {

namespace ffi = xla::ffi;
using namespace attention;  // of operands.h

constexpr std::int64_t kRangeWarps = 8;  // of a CTA of key_ranges
constexpr Limits kLimits{/*tma_loads=*/false, /*float32=*/true, /*head_dim=*/512};

ffi::Error Forward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ProblemAttribute problem, ProgramAttribute program, Sm80ForwardLaunch launch) {
  ForwardOperands operands;
  if (auto error = ReadForward(args, rets, problem, &operands); error.failure()) return error;
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.kv_len == 0) return Invalid("the CUDA kernels take no empty keys");
  if (auto error = CheckOperands(operands, kLimits); error.failure()) return error;
  if (auto error = CheckNumbers(
          {launch.threads, launch.shared_bytes, launch.block_q, launch.block_kv, launch.l2_heads});
      error.failure()) {
    return error;
  }

  Sm80ForwardParams params{};
  SetCommon(operands, problem, &params);
  const bool segments = problem.Has(kQuerySegments), positions = problem.Has(kQueryPositions);
  std::int64_t key_blocks = 0;
  Workspaces workspaces(rets, 2);
  workspaces.Take("key_segment_ranges", {s.batch, &key_blocks, segments ? 2 : 0},
                  &params.key_segment_ranges);
  workspaces.Take("key_position_ranges", {s.batch, key_blocks, positions ? 2 : 0},
                  &params.key_position_ranges);
  TermSizes mask;
  if (auto error = ReadTerm(operands, kMask, &mask); error.failure()) return error;
  std::int64_t mask_blocks = SetMask(operands, mask, launch.block_q, launch.block_kv,
                                     /*by_key=*/false, &workspaces, &params.mask);
  if (auto error = SetBlockMask(operands, launch.block_q, launch.block_kv, /*by_key=*/false,
                                &workspaces, &mask_blocks, &params.block_mask);
      error.failure()) {
    return error;
  }
  workspaces.CheckBlocks("keys", key_blocks, launch.block_kv, s.kv_len);
  TakeHalves(launch.halves, s, &workspaces, &params);
  if (workspaces.error().failure()) return workspaces.error();
  if (auto error = SetSinks(operands, &params); error.failure()) return error;
  TermSizes bias;
  if (auto error = SetBias(operands, problem, &bias, &params); error.failure()) return error;
  if (auto error = SetCaptures(operands, problem, &params); error.failure()) return error;
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out = operands.out;
  params.lse = operands.lse;
  params.result_scale = operands.result_scale;
  params.query_blocks = static_cast<int>(CeilDiv(s.q_len, launch.block_q));
  params.l2_heads = ClampHeads(launch.l2_heads, s.batch * s.q_heads);
  params.scale_log2 = ForwardScaleLog2(problem);

  Session session(stream, program);
  if (mask_blocks > 0) session.Launch("mask_plan", {mask_blocks, kMaskThreads, 0}, &params);
  if (segments || positions) {
    session.Launch("key_ranges", {CeilDiv(s.batch * key_blocks, kRangeWarps), 32 * kRangeWarps, 0},
                   &params);
  }
  if (launch.halves) LaunchSplit(s, 1, params, &session);
  session.Launch("flash_forward_sm80",
                 {params.query_blocks * s.batch * s.q_heads, launch.threads, launch.shared_bytes},
                 &params);
  return session.error();
}

ffi::Error Backward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ProblemAttribute problem, bool with_dlse, bool with_dbias,
                    ProgramAttribute program, Sm80BackwardLaunch launch) {
  BackwardOperands operands;
  if (auto error = ReadBackward(args, rets, problem, with_dlse, with_dbias, &operands);
      error.failure()) {
    return error;
  }
  if (operands.sizes.batch == 0 || operands.sizes.q_heads == 0) return ffi::Error::Success();
  Sm80BackwardParams params{};
  BackwardBlocks blocks;
  const Sizes& s = operands.sizes;
  const auto take_own = [&](Workspaces* workspaces) {
    TakeHalvesAndDout(launch.halves, s, workspaces, &params);
  };
  if (auto error =
          SetBackward(operands, problem, rets, launch, kLimits, &params, &blocks, take_own);
      error.failure()) {
    return error;
  }
  Session session(stream, program);
  if (launch.halves) LaunchSplit(s, 2, params, &session);
  LaunchBackward(blocks, launch, params, &session, [&](std::int64_t units) {
    session.Launch("flash_backward_sm80", {units, launch.threads, launch.shared_bytes}, &params);
  });
  return session.error();
}

auto BindForward() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ProblemAttribute>("problem")
      .Attr<ProgramAttribute>("program")
      .Attr<Sm80ForwardLaunch>("launch");
}

auto BindBackward() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ProblemAttribute>("problem")
      .Attr<bool>("with_dlse")
      .Attr<bool>("with_dbias")
      .Attr<ProgramAttribute>("program")
      .Attr<Sm80BackwardLaunch>("launch");
}

}  // namespace
}  // namespace sm80

std::string Sm80ParamsAssertions() {
  const std::string why = ", \"sm80_params.h differs from that of the compiled module\");\n";
  return "static_assert(sizeof(Sm80ForwardParams) == " + std::to_string(sizeof(Sm80ForwardParams)) +
         why + "static_assert(sizeof(Sm80BackwardParams) == " +
         std::to_string(sizeof(Sm80BackwardParams)) + why;
}

}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaSm80Forward, jax_flash::sm80::Forward,
                              jax_flash::sm80::BindForward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaSm80Backward, jax_flash::sm80::Backward,
                              jax_flash::sm80::BindBackward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
