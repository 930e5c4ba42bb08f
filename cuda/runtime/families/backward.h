// What the handlers of the backward pass of every family make of a call: checks, the parameters and
// workspaces that their kernels share by name, and the launches around the main kernel.
//
// `Launch` are the numbers of a family's BackwardTiling: block_q, block_kv, turn_parts, dq_boxes
// (of 64 columns, in a row of dq), l2_heads, unit_heads, ring_sets, ring_lag, threads,
// shared_bytes, dq_row_bytes, bias_shared_bytes, stores_dbias, clears_dbias, compact (scratch of
// the rows and columns that there are, not of whole blocks). `Params` is as sm90_params.h has
// BackwardParams, but for the maps.

#ifndef JAX_FLASH_CUDA_RUNTIME_FAMILIES_BACKWARD_H_
#define JAX_FLASH_CUDA_RUNTIME_FAMILIES_BACKWARD_H_

#include <algorithm>
#include <cstdint>

#include "cuda/runtime/families/operands.h"
#include "cuda/runtime/session.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash::attention {

// Of a CTA that sums over batch rows: cuda/kernels/backward_bias_sum.cuh.
inline constexpr std::int64_t kBatchKeys = 64;

// What is launched how often.
struct BackwardBlocks {
  std::int64_t mask;          // CTAs of mask_plan
  std::int64_t query_pieces;  // of 64 rows, of all heads
  std::int64_t units;         // blocks of keys, of all key/value heads; of one with `kv_heads`
  // Key/value heads of each launch of the main kernel, whose dS is kept until it is summed over the
  // batch rows; 0: one launch of all.
  std::int64_t kv_heads;
  // CTAs that sum the gradient of a bias, 0 without one or if it is stored; of one key/value head
  // with `kv_heads`.
  std::int64_t bias;
  std::int64_t dbias_words;  // of 32 bits, to zero ahead
  std::int64_t finish;  // tiles of dq, slabs of keys that the main kernel leaves to the last one
};

// Of a compact tiling, rows of the numbers that go with queries: as in backward_common.cuh.
inline std::int64_t StoredRows(std::int64_t length, std::int64_t block) {
  return length <= block ? 4 * CeilDiv(length, 4) : block * CeilDiv(length, block);
}

// A family's own workspaces come last: take_own(workspaces).
template <class Launch, class Params, class TakeOwn>
ffi::Error SetBackward(const BackwardOperands& operands, const ProblemAttribute& problem,
                       ffi::RemainingRets rets, const Launch& launch, const Limits& limits,
                       Params* params, BackwardBlocks* blocks, TakeOwn take_own) {
  const Sizes& s = operands.sizes;
  const bool with_dbias = operands.dbias.has_value();
  if (s.q_len == 0 || s.kv_len == 0) return Invalid("the CUDA kernels take no empty sequences");
  if (auto error = CheckOperands(operands, limits); error.failure()) return error;
  if (auto error = CheckNumbers({launch.threads, launch.block_q, launch.block_kv, launch.turn_parts,
                                 launch.dq_boxes, launch.l2_heads, launch.shared_bytes});
      error.failure()) {
    return error;
  }

  const bool sums_in_dq = launch.dq_row_bytes != 0;
  const bool wide_dq = operands.dtype == ffi::F32 || problem.split != kWhole;  // float32
  if (sums_in_dq &&
      (launch.compact || launch.dq_row_bytes != s.q_heads * s.head_dim * (wide_dq ? 4 : 2) ||
       launch.dq_row_bytes >= kMaxInt / 128 || s.q_len % launch.block_q != 0 ||
       s.head_dim % 64 != 0)) {
    return Invalid("this tiling is for another shape of dq");
  }
  if ((sums_in_dq || launch.compact) && s.batch * s.q_len * s.q_heads > kMaxInt) {
    return Invalid("this tiling is for fewer rows of dq");
  }

  SetCommon(operands, problem, params);
  const bool segments = problem.Has(kQuerySegments);
  const std::int64_t heads = s.batch * s.q_heads;
  const std::int64_t kv_heads = s.batch * s.kv_heads;
  // A dq of float32 holds its sum.
  const bool all_in_dq = wide_dq && (sums_in_dq || launch.compact);
  const std::int64_t columns = all_in_dq        ? 0
                               : launch.compact ? s.head_dim
                               : sums_in_dq     ? s.head_dim / 2
                                                : 64 * launch.dq_boxes;
  std::int64_t query_blocks = 0, key_blocks = 0;
  // A unit walks all query heads of a key/value head, or so many of them: a part.
  const std::int64_t group = s.q_heads / s.kv_heads;
  const std::int64_t unit_heads = launch.unit_heads > 0 ? launch.unit_heads : group;
  if (launch.unit_heads < 0 || group % unit_heads != 0)
    return Invalid("`launch` does not fit the heads");
  const std::int64_t parts = heads / unit_heads;
  params->l2_heads = ClampHeads(launch.l2_heads, parts);
  std::int64_t sum_heads = heads, left_heads = heads;
  if (launch.ring_sets != 0) {
    if (sums_in_dq || launch.compact || problem.deterministic || problem.split != kWhole ||
        launch.ring_lag < 1 || launch.ring_lag >= launch.ring_sets) {
      return Invalid("this tiling is for another sum of dq");
    }
    const std::int64_t set = params->l2_heads * unit_heads;
    sum_heads = std::min(heads, launch.ring_sets * set);
    left_heads = heads - std::max<std::int64_t>(CeilDiv(heads, set) - launch.ring_lag, 0) * set;
  }
  Workspaces workspaces(rets, with_dbias ? 4 : 3);
  workspaces.Take("turns", {heads, &query_blocks, problem.deterministic ? launch.turn_parts : 0},
                  &params->turns);
  const std::int64_t blocked = query_blocks * launch.block_q;
  const std::int64_t numbers = launch.compact ? StoredRows(s.q_len, launch.block_q) : blocked;
  workspaces.Take("lse_log2", {heads, numbers}, &params->lse_log2);
  workspaces.Take("minus_delta", {heads, numbers}, &params->minus_delta);
  workspaces.Take("dq_sum", {sum_heads, launch.compact ? s.q_len : blocked, columns},
                  &params->dq_sum);
  workspaces.Take("next_unit", {1}, &params->next_unit);
  workspaces.Take("query_segment_ranges", {s.batch, query_blocks, segments ? 2 : 0},
                  &params->query_segment_ranges);
  workspaces.Take("key_segment_ranges", {s.batch, &key_blocks, segments ? 2 : 0},
                  &params->key_segment_ranges);
  const bool positions = problem.Has(kQueryPositions);
  workspaces.Take("query_position_ranges", {s.batch, query_blocks, positions ? 2 : 0},
                  &params->query_position_ranges);
  workspaces.Take("key_position_ranges", {s.batch, key_blocks, positions ? 2 : 0},
                  &params->key_position_ranges);
  workspaces.Take(
      "marks",
      {kv_heads, launch.compact ? CeilDiv(s.kv_len, 16) : key_blocks * launch.block_kv / 16, 2},
      &params->marks);
  TermSizes mask;
  if (auto error = ReadTerm(operands, kMask, &mask); error.failure()) return error;
  blocks->mask = SetMask(operands, mask, launch.block_q, launch.block_kv, /*by_key=*/true,
                         &workspaces, &params->mask);
  if (auto error = SetBlockMask(operands, launch.block_q, launch.block_kv, /*by_key=*/true,
                                &workspaces, &blocks->mask, &params->block_mask);
      error.failure()) {
    return error;
  }
  TermSizes bias;
  if (auto error = SetBias(operands, problem, &bias, params); error.failure()) return error;
  if (auto error = SetCaptures(operands, problem, params); error.failure()) return error;
  std::int64_t dbias_parts = 0, dbias_kept = 0;
  workspaces.Take("dbias_sum", {&dbias_parts, &dbias_kept}, &params->dbias_sum);
  workspaces.CheckBlocks("queries", query_blocks, launch.block_q, s.q_len);
  workspaces.CheckBlocks("keys", key_blocks, launch.block_kv, s.kv_len);
  workspaces.CheckBlocks("columns of dq", launch.dq_boxes, 64, s.head_dim);
  take_own(&workspaces);
  if (workspaces.error().failure()) return workspaces.error();
  params->query_data = operands.q;
  params->key_data = operands.k;
  params->value_data = operands.v;
  params->out_data = operands.out;
  params->dout_data = operands.dout;
  params->lse = operands.lse;
  params->dlse = operands.dlse;
  params->dquery = operands.dq;
  if (all_in_dq) params->dq_sum = static_cast<float*>(operands.dq);
  params->dkey_data = operands.dk;
  params->dvalue_data = operands.dv;
  params->result_scale = operands.result_scale;
  blocks->kv_heads = blocks->bias = blocks->dbias_words = 0;
  blocks->units = parts * key_blocks;
  if (with_dbias) {
    const std::int64_t pairs = s.batch * s.q_heads * s.q_len * s.kv_len;
    if (launch.stores_dbias && problem.split != kWhole) {
      return Invalid("a call that is split sums the gradient of a bias");
    }
    const bool by_heads = launch.stores_dbias && dbias_parts > 0;
    if (by_heads && launch.unit_heads > 0) {
      return Invalid("heads whose dS is kept are whole groups");
    }
    if (by_heads ? bias.batch != 1 || bias.elements() * s.batch != pairs ||
                       dbias_parts > s.kv_heads || dbias_kept * s.kv_heads != pairs / 2
        : launch.stores_dbias
            ? bias.elements() * (bias.batch == 1 ? s.batch : 1) != pairs
            : dbias_parts < 1 || dbias_kept != (dbias_parts > 1 ? bias.elements() : 0)) {
      return Invalid("the workspace dbias_sum or the tiling does not fit the bias");
    }
    if (launch.stores_dbias && s.kv_len % 4 != 0) {
      return Invalid("dS is stored in rows of whole fours");
    }
    params->dbias = operands.dbias->untyped_data();
    params->bias_elements = bias.elements();
    params->bias_batches = static_cast<int>(bias.batch);
    params->bias_heads = static_cast<int>(bias.heads);
    params->dbias_parts = by_heads ? 0 : static_cast<int>(dbias_parts);
    if (by_heads) {
      blocks->kv_heads = params->launched_kv_heads = static_cast<int>(dbias_parts);
      blocks->units = s.batch * key_blocks;
      blocks->bias = s.q_heads / s.kv_heads * query_blocks * CeilDiv(s.kv_len, kBatchKeys);
    }
    if (launch.clears_dbias) {  // of the query's type
      blocks->dbias_words = operands.dtype == ffi::F32 ? bias.elements() : bias.elements() / 2;
    }
    if (!launch.stores_dbias && bias.elements() > 0) {
      blocks->bias = bias.parts() * (bias.queries == 1 ? 1 : query_blocks) *
                     (bias.keys == 1 ? 1 : key_blocks) * dbias_parts;
    }
  }
  const bool scaled_first = problem.Has(kBias) || problem.HasFunction();
  params->scale_log2 = static_cast<float>(kLog2E * (problem.softcap > 0 ? problem.softcap
                                                    : scaled_first      ? 1
                                                                        : problem.scale));
  blocks->query_pieces = heads * query_blocks * launch.block_q / 64;
  blocks->finish = blocks->query_pieces / heads * left_heads * launch.dq_boxes;
  if (launch.unit_heads > 0) blocks->finish += kv_heads * key_blocks * (launch.block_kv / 64);
  return ffi::Error::Success();
}

// Launches all kernels, the main one by `launch_main(units)`. Its errors are the session's.
template <class Launch, class Params, class LaunchMain>
void LaunchBackward(const BackwardBlocks& blocks, const Launch& launch, Params& params,
                    Session* session, LaunchMain launch_main) {
  if (blocks.mask > 0) session->LaunchBeside("mask_plan", {blocks.mask, kMaskThreads, 0}, &params);
  if (blocks.dbias_words > 0) {
    session->Zero(static_cast<std::int32_t*>(params.dbias), blocks.dbias_words);
  }
  if (!launch.halves) {  // else split_float32 does it
    session->LaunchBeside("flash_backward_prepare", {blocks.query_pieces, 128, 0}, &params);
  }
  if (blocks.kv_heads == 0) launch_main(blocks.units);
  const int kv_heads = static_cast<int>(blocks.kv_heads);
  for (int first = 0; kv_heads > 0 && first < params.kv_heads; first += kv_heads) {
    const int count = std::min(kv_heads, params.kv_heads - first);
    params.first_kv_head = first;
    params.launched_kv_heads = count;
    launch_main(blocks.units * count);
    session->LaunchBeside("flash_backward_bias", {blocks.bias * count, 2 * launch.block_kv, 0},
                          &params);
  }
  session->LaunchBeside("flash_backward_finish", {blocks.finish, 128, 0}, &params);
  if (blocks.bias > 0 && blocks.kv_heads == 0) {
    session->LaunchBeside("flash_backward_bias",
                          {blocks.bias, 2 * launch.block_kv, launch.bias_shared_bytes}, &params);
    if (params.dbias_parts > 1) {
      session->LaunchBeside("flash_backward_bias_sum", {CeilDiv(params.bias_elements, 256), 256, 0},
                            &params);
    }
  }
}

}  // namespace jax_flash::attention

#endif  // JAX_FLASH_CUDA_RUNTIME_FAMILIES_BACKWARD_H_
