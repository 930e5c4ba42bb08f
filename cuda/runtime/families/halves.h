// float32 as two float16, which the kernel split_float32 writes ahead of others: its workspaces and
// launch. See cuda/kernels/halves.cuh.
#pragma once

#include <cstdint>

#include "cuda/runtime/families/operands.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/session.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"

namespace jax_flash::attention {

constexpr std::int64_t kSplitThreads = 256, kSplitRows = 64;  // of a CTA of split_float32

// Columns of each of the two planes of a row: whole pieces of 16 bytes.
inline std::int64_t HalfColumns(std::int64_t dim) { return 8 * CeilDiv(dim, 8); }

// Where split_float32 writes rows of `dim` numbers, and a factor for 64 of them.
inline void TakeHalves(bool halves, std::int64_t batch, std::int64_t length, std::int64_t heads,
                       std::int64_t dim, const char* rows_name, const char* factors_name,
                       Workspaces* workspaces, void** rows, float** factors) {
  int* data = nullptr;
  workspaces->Take(rows_name, {batch, length, heads, halves ? HalfColumns(dim) : 0}, &data);
  *rows = data;
  workspaces->Take(factors_name, {batch * heads, halves ? CeilDiv(length, kSplitRows) : 0},
                   factors);
}

// Of queries, keys and values.
template <class Params>
void TakeHalves(bool halves, const Sizes& s, Workspaces* workspaces, Params* params) {
  TakeHalves(halves, s.batch, s.q_len, s.q_heads, s.head_dim, "query_halves", "query_factors",
             workspaces, &params->query_halves, &params->query_factors);
  TakeHalves(halves, s.batch, s.kv_len, s.kv_heads, s.head_dim, "key_halves", "key_factors",
             workspaces, &params->key_halves, &params->key_factors);
  TakeHalves(halves, s.batch, s.kv_len, s.kv_heads, s.value_dim, "value_halves", "value_factors",
             workspaces, &params->value_halves, &params->value_factors);
}

// And of the output's gradient.
template <class Params>
void TakeHalvesAndDout(bool halves, const Sizes& s, Workspaces* workspaces, Params* params) {
  TakeHalves(halves, s, workspaces, params);
  TakeHalves(halves, s.batch, s.q_len, s.q_heads, s.value_dim, "dout_halves", "dout_factors",
             workspaces, &params->dout_halves, &params->dout_factors);
}

// Of so many arrays like the queries, and of keys and values; and CTAs besides.
template <class Params>
void LaunchSplit(const Sizes& s, std::int64_t like_queries, Params& params, Session* session,
                 std::int64_t besides = 0) {
  const std::int64_t queries = s.q_heads * CeilDiv(s.q_len, kSplitRows);
  const std::int64_t keys = s.kv_heads * CeilDiv(s.kv_len, kSplitRows);
  session->LaunchBeside("split_float32",
                        {s.batch * (like_queries * queries + 2 * keys) + besides, kSplitThreads, 0},
                        &params);
}

}  // namespace jax_flash::attention
