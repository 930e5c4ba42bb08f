// Reads a custom call, fills the kernel's parameters, launches. Decides nothing: what depends on
// measurements arrives as attributes from jax_flash/_gpu/sm90. Read next: sm90_params.h; jit.h
// for the compiler, cuda/kernels/sm90/forward.cuh for the device code.

#include "cuda/runtime/families/sm90.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/families/backward.h"
#include "cuda/runtime/families/halves.h"
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
  bool bias_tiles;
  bool halves;
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
  bool bias_tiles;
  bool halves;
  bool compact;
  std::int64_t ring_sets;  // whose sums of dq have a place at a time; 0: all
  std::int64_t ring_lag;
  std::int64_t unit_heads;  // query heads of a unit, whose key/value head has others; 0: all
};

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::ForwardLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("block_q"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("packed_heads"),
    StructMember<std::int64_t>("l2_heads"), StructMember<bool>("dynamic"),
    StructMember<bool>("tma_loads"), StructMember<bool>("bias_tiles"),
    StructMember<bool>("halves"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::BackwardLaunch, StructMember<std::int64_t>("threads"),
    StructMember<std::int64_t>("shared_bytes"), StructMember<std::int64_t>("block_q"),
    StructMember<std::int64_t>("block_kv"), StructMember<std::int64_t>("turn_parts"),
    StructMember<std::int64_t>("dq_boxes"), StructMember<std::int64_t>("l2_heads"),
    StructMember<bool>("tma_loads"), StructMember<std::int64_t>("dq_row_bytes"),
    StructMember<std::int64_t>("bias_shared_bytes"), StructMember<bool>("stores_dbias"),
    StructMember<bool>("clears_dbias"), StructMember<bool>("bias_tiles"),
    StructMember<bool>("halves"), StructMember<bool>("compact"),
    StructMember<std::int64_t>("ring_sets"), StructMember<std::int64_t>("ring_lag"),
    StructMember<std::int64_t>("unit_heads"));

namespace jax_flash {
namespace sm90 {
namespace {

namespace ffi = xla::ffi;
using namespace attention;  // of operands.h

// Of a CTA of segment_ranges, segment_plan, position_ranges and row_norms.
constexpr std::int64_t kRangeWarps = 8;
constexpr std::int64_t kNormRows = 64;       // of a warp of row_norms
constexpr std::int64_t kExactThreads = 384;  // of flash_forward_exact

CUtensorMapDataType MapType(ffi::DataType dtype) {
  return dtype == ffi::BF16 ? kTensorBfloat16 : kTensorFloat16;
}

// The map of a bias that TMA loads: of all queries and keys, in rows that are multiples of 16 bytes
// apart.
ffi::Error MapBias(const Operands& operands, const TermSizes& bias, std::int64_t block_q,
                   Session* session, TensorMap* map) {
  const Sizes& s = operands.sizes;
  if (!operands.terms[kBias] || bias.queries != s.q_len || bias.keys != s.kv_len) {
    return Invalid("this tiling is for a bias of all queries and keys");
  }
  const ffi::AnyBuffer& buffer = *operands.terms[kBias];
  const auto type =
      buffer.element_type() == ffi::F32 ? kTensorFloat32 : MapType(buffer.element_type());
  session->Map({type, buffer.untyped_data(), bias.batch, bias.heads, s.q_len, s.kv_len, 1, block_q},
               map);
  return ffi::Error::Success();
}

ffi::Error Forward(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ProblemAttribute problem, ProgramAttribute program, ForwardLaunch launch) {
  ForwardOperands operands;
  if (auto error = ReadForward(args, rets, problem, &operands); error.failure()) return error;
  const Sizes& s = operands.sizes;
  if (s.batch == 0 || s.q_len == 0 || s.q_heads == 0) return ffi::Error::Success();
  if (s.kv_len == 0) return Invalid("the CUDA kernels take no empty keys");
  // Rows of halves are whole pieces of 16 bytes.
  const Limits limits{launch.tma_loads && !launch.halves, launch.halves};
  if (auto error = CheckOperands(operands, limits); error.failure()) return error;
  if (auto error = CheckNumbers({launch.threads, launch.block_q, launch.block_kv,
                                 launch.packed_heads, launch.l2_heads, launch.shared_bytes});
      error.failure()) {
    return error;
  }
  if ((operands.terms[kDropoutState] || problem.HasFunction()) && launch.packed_heads != 1) {
    return Invalid("`launch` packs heads, which dropout and functions of scores do not take");
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
  const std::int64_t heads = s.q_heads / launch.packed_heads;
  workspaces.Take("unit_counter", {1}, &params.unit_counter);
  workspaces.Take("segment_ranges", {s.batch, &key_blocks, segments ? 2 : 0},
                  &params.segment_ranges);
  workspaces.Take("segment_plan", {s.batch, &query_blocks, warpgroups, segments ? 4 : 0},
                  &params.segment_plan);
  workspaces.Take("marks", {s.batch, heads, query_blocks, 4 * warpgroups}, &params.marks);
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
  TakeHalves(launch.halves, s, &workspaces, &params);
  std::int64_t query_parts = 0, key_parts = 0;  // none, unless the kernel row_norms is to run
  workspaces.Take("query_norms", {s.batch * s.q_heads, &query_parts}, &params.query_norms);
  workspaces.Take("key_norms", {s.batch * s.kv_heads, &key_parts}, &params.key_norms);
  const bool norms = query_parts > 0;
  if (norms) {
    workspaces.CheckBlocks("rows of queries", query_parts, kNormRows, s.q_len);
    workspaces.CheckBlocks("rows of keys", key_parts, kNormRows, s.kv_len);
  }
  if (workspaces.error().failure()) return workspaces.error();
  if (auto error = SetSinks(operands, &params); error.failure()) return error;
  params.query_blocks = static_cast<int>(query_blocks);
  params.query_data = operands.q;
  params.key_data = operands.k;
  params.value_data = operands.v;
  params.out = operands.out;
  params.lse = operands.lse;
  params.result_scale = operands.result_scale;
  params.l2_heads = ClampHeads(launch.l2_heads, s.batch * heads);
  TermSizes bias;
  if (auto error = SetBias(operands, problem, &bias, &params); error.failure()) return error;
  if (auto error = SetCaptures(operands, problem, &params); error.failure()) return error;
  params.scale_log2 = ForwardScaleLog2(problem);

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  if (launch.tma_loads) {
    const std::int64_t packed = launch.packed_heads;
    const auto map = [&](const void* rows, const void* halves, std::int64_t length,
                         std::int64_t heads, std::int64_t dim, std::int64_t box_rows,
                         std::int64_t box_heads, TensorMap* to) {
      const void* data = launch.halves ? halves : rows;
      const std::int64_t columns = launch.halves ? HalfColumns(dim) : dim;
      const std::int64_t rows_of_head = launch.halves ? 2 : 1;
      session.Map({type, data, s.batch, length, rows_of_head * heads, columns, box_rows, box_heads},
                  to);
    };
    map(operands.q, params.query_halves, s.q_len, s.q_heads, s.head_dim, 64 / packed, packed,
        &params.query);
    map(operands.k, params.key_halves, s.kv_len, s.kv_heads, s.head_dim, launch.block_kv, 1,
        &params.key);
    map(operands.v, params.value_halves, s.kv_len, s.kv_heads, s.value_dim, launch.block_kv, 1,
        &params.value);
  }
  if (launch.bias_tiles) {
    auto error = MapBias(operands, bias, launch.block_q, &session, &params.bias_map);
    if (error.failure()) return error;
  }
  if (launch.halves) LaunchSplit(s, 1, params, &session);
  if (mask_blocks > 0) session.LaunchBeside("mask_plan", {mask_blocks, kMaskThreads, 0}, &params);
  const auto run = [&](const char* kernel, std::int64_t warps) {
    session.LaunchBeside(kernel, {CeilDiv(warps, kRangeWarps), 32 * kRangeWarps, 0}, &params);
  };
  if (positions) run("position_ranges", s.batch * (key_blocks + query_blocks * warpgroups));
  if (segments) {
    run("segment_ranges", s.batch * key_blocks);
    run("segment_plan", s.batch * query_blocks * warpgroups);
  } else if (norms) {
    run("row_norms", s.batch * (s.q_heads * query_parts + s.kv_heads * key_parts));
  } else if (launch.dynamic && (mask_blocks == 0 || positions)) {  // else mask_plan does it
    session.LaunchBeside("flash_forward_begin", {1, 32, 0}, &params);
  }
  const std::int64_t units = query_blocks * s.batch * heads;
  session.LaunchPersistent("flash_forward", units, launch.threads, launch.shared_bytes, &params,
                           /*overlaps=*/launch.dynamic && !segments);
  session.LaunchBeside(
      "flash_forward_exact",
      {session.AtOnce(units * 4 * warpgroups), kExactThreads, 0, /*overlaps=*/true}, &params);
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
  BackwardParams params{};
  BackwardBlocks blocks;
  // Rows of halves are whole pieces of 16 bytes.
  const Limits limits{launch.tma_loads && !launch.halves, launch.halves};
  const auto take_own = [&](Workspaces* workspaces) {
    TakeHalvesAndDout(launch.halves, s, workspaces, &params);
    workspaces->Take("dout_row_factors",
                     {s.batch * s.q_heads, !launch.halves   ? 0
                                           : launch.compact ? StoredRows(s.q_len, launch.block_q)
                                                            : 64 * CeilDiv(s.q_len, 64)},
                     &params.dout_row_factors);
    const std::int64_t rings = launch.ring_sets > 0 ? 1 : 0;
    const std::int64_t tiles = CeilDiv(s.q_len, launch.block_q) * (launch.block_q / 64);
    params.ring_sets = static_cast<int>(launch.ring_sets);
    params.ring_lag = static_cast<int>(launch.ring_lag);
    const std::int64_t shared = launch.unit_heads > 0 ? 1 : 0;
    const std::int64_t unit_heads = shared ? launch.unit_heads : s.q_heads / s.kv_heads;
    params.ring_heads = params.ring_sets * params.l2_heads * static_cast<int>(unit_heads);
    workspaces->Take("ring_counts", {s.batch * (s.q_heads / unit_heads), 2 * rings},
                     &params.ring_counts);
    workspaces->Take("dq_marks", {s.batch * s.q_heads, tiles, launch.dq_boxes * rings},
                     &params.dq_marks);
    const std::int64_t slabs =
        s.batch * s.kv_heads * CeilDiv(s.kv_len, launch.block_kv) * (launch.block_kv / 64) * shared;
    const std::int64_t boxes = CeilDiv(s.head_dim, 64) + CeilDiv(s.value_dim, 64);
    workspaces->Take("key_sums", {slabs, boxes, 64 * 64}, &params.key_sums);
    workspaces->Take("key_turns", {problem.deterministic ? slabs : 0}, &params.key_turns);
  };
  if (auto error = SetBackward(operands, problem, rets, launch, limits, &params, &blocks, take_own);
      error.failure()) {
    return error;
  }

  Session session(stream, program);
  const auto type = MapType(operands.dtype);
  const auto map = [&](const void* data, std::int64_t length, std::int64_t count, std::int64_t dim,
                       std::int64_t box_rows, TensorMap* to) {
    if (launch.tma_loads) session.Map({type, data, s.batch, length, count, dim, box_rows, 1}, to);
  };
  const auto map_read = [&](const void* rows, const void* halves, std::int64_t length,
                            std::int64_t count, std::int64_t dim, std::int64_t box_rows,
                            TensorMap* to) {
    if (launch.halves) {
      map(halves, length, 2 * count, HalfColumns(dim), box_rows, to);
    } else {
      map(rows, length, count, dim, box_rows, to);
    }
  };
  map_read(operands.q, params.query_halves, s.q_len, s.q_heads, s.head_dim, launch.block_q,
           &params.query);
  map_read(operands.k, params.key_halves, s.kv_len, s.kv_heads, s.head_dim, launch.block_kv,
           &params.key);
  map_read(operands.v, params.value_halves, s.kv_len, s.kv_heads, s.value_dim, launch.block_kv,
           &params.value);
  map_read(operands.dout, params.dout_halves, s.q_len, s.q_heads, s.value_dim, launch.block_q,
           &params.dout);
  if (problem.split == kWhole && !launch.halves) {
    map(operands.dk, s.kv_len, s.kv_heads, s.head_dim, 64, &params.dkey);
    map(operands.dv, s.kv_len, s.kv_heads, s.value_dim, 64, &params.dvalue);
  }
  if (launch.bias_tiles) {
    TermSizes bias;
    if (auto error = ReadTerm(operands, kBias, &bias); error.failure()) return error;
    auto error = MapBias(operands, bias, launch.block_q, &session, &params.bias_map);
    if (error.failure()) return error;
  }
  if (launch.ring_sets > 0) {
    map(operands.dq, s.q_len, s.q_heads, s.head_dim, 16, &params.dquery_map);
  }
  const bool full = problem.window_left < 0 && problem.window_right < 0;
  if (launch.halves && full && !problem.deterministic) {
    // Units of one length: the last ones would be of few CTAs.
    const std::int64_t ctas = session.AtOnce(kMaxInt), rest = ctas > 0 ? blocks.units % ctas : 0;
    const std::int64_t shares =
        rest == 0 ? 0 : std::min(ctas / rest, CeilDiv(s.q_len, launch.block_q));
    if (shares > 1) {
      params.shared_units = static_cast<int>(rest);
      params.shares = static_cast<int>(shares);
    }
  }
  if (launch.halves) LaunchSplit(s, 2, params, &session, params.shared_units);
  if (params.shares > 1) blocks.units += params.shared_units * (params.shares - 1);
  LaunchBackward(blocks, launch, params, &session, [&](std::int64_t units) {
    session.LaunchPersistent("flash_backward", units, launch.threads, launch.shared_bytes, &params);
  });
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
}  // namespace sm90

std::string Sm90ParamsAssertions() {
  const std::string why = ", \"sm90_params.h differs from that of the compiled module\");\n";
  return "static_assert(sizeof(ForwardParams) == " + std::to_string(sizeof(ForwardParams)) + why +
         "static_assert(sizeof(BackwardParams) == " + std::to_string(sizeof(BackwardParams)) + why;
}

}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaForward, jax_flash::sm90::Forward,
                              jax_flash::sm90::BindForward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashCudaBackward, jax_flash::sm90::Backward,
                              jax_flash::sm90::BindBackward(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
