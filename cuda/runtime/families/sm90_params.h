// Arguments of the kernels in cuda/kernels/sm90 and of the headers that they share.
//
// The handlers (sm90.cc) fill every field; a pointer whose term is absent is null and never read.
// What a kernel is specialised for (element type, head dims, tiles, which terms exist) is not here
// but in the constants of the generated header: see the list in cuda/kernels/sm90/forward.cuh.
#pragma once

#include "cuda/runtime/params.h"

// flash_forward: grid = (number of CTAs), block = 128 * (kConsumers + 1) threads, dynamic shared
// memory = ForwardTiling.shared_bytes (jax_flash/_gpu/sm90/forward.py).
struct ForwardParams {
  // Rank-4 maps over row-major arrays [B, rows, heads, dim]; sizes (dim, heads, rows, B), strides
  // in bytes (dim*2, heads*dim*2, rows*heads*dim*2), SWIZZLE_128B, L2 promotion 128 B, zero fill.
  // Empty without kTmaLoads.
  TensorMap query;  // [B, T, N, H]  box (64, kPackedHeads, 64 / kPackedHeads, 1)
  TensorMap key;    // [B, S, K, H]  box (64, 1, kBlockKV, 1)
  TensorMap value;  // [B, S, K, Hv] box (64, 1, kBlockKV, 1)

  // The same arrays, for loads without TMA and for rows that are computed again without tensor
  // cores, because values hidden from them are not finite.
  const void* query_data;  // [B, T, N, H]
  const void* key_data;    // [B, S, K, H]
  const void* value_data;  // [B, S, K, Hv]
  void* out;               // [B, T, N, Hv] element type of the query
  float* lse;              // [B, N, T] natural logarithm

  const int* query_lengths;       // [B]
  const int* key_value_lengths;   // [B]
  const int* query_segments;      // [B, T]
  const int* key_value_segments;  // [B, S]
  Broadcast bias;                 // only with kHasBias
  Mask mask;                      // only with kHasMaskBytes
  const float* sinks;             // [B or 1, N]
  long long sinks_batch_stride;   // elements from one batch row to the next: N, or 0 when shared
  // [B, N, 4] key word 0, key word 1, head id, batch id; [B, N, 6] and the first counters
  const unsigned* dropout_state;

  // Workspaces. marks, [units of the schedule, 4 * kConsumers]: of the 16 rows of each warp those
  // that came out with NaN or infinity, for flash_forward_exact; bit 4 * r is row r, bit 4 * r + 1
  // row r + 8. unit_counter: one int, zero at launch, only with kDynamic (with kHasSegments
  // segment_ranges zeroes it). Only with kHasSegments, written by the kernels segment_ranges and
  // segment_plan that run first on the same stream: segment_ranges, int2[B * ceil(S / kBlockKV)],
  // and segment_plan, int4[B * query_blocks * kConsumers].
  unsigned* marks;
  int* unit_counter;
  int* segment_ranges;
  int* segment_plan;

  int batch;            // B
  int query_len;        // T
  int kv_len;           // S
  int query_heads;      // N
  int kv_heads;         // K
  int query_blocks;     // ceil(T * kPackedHeads / (64 * kConsumers))
  int l2_heads;         // heads (of B * N / kPackedHeads) that the schedule walks together, >= 1
  int window_left;      // keys visible left of the aligned position, < 2^30; only with kWindowLeft
  int window_right;     // the same on the right; causal is 0; only with kWindowRight
  float scale;          // of the logits, before the softcap
  float scale_log2;     // log2(e) * (scale, the cap with kSoftcap, or 1 with kPreScale or kHasBias)
  float softcap_inner;  // scale / cap, only with kSoftcap
  float softcap_bias;   // 1 / cap, only with kSoftcap and kHasBias
  unsigned dropout_threshold;  // rate * 2^15, in both halves; below it a weight is dropped
  float dropout_scale;         // 1 / (1 - rate)

  // Only with kHasPositions, where the sides of the window are uint32. The ranges, smallest and
  // largest position of a block of keys and of a warpgroup's rows, are written by position_ranges.
  const int* query_positions;      // [B, T]
  const int* key_value_positions;  // [B, S]
  int* key_position_ranges;        // [B, ceil(S / kBlockKV), 2]
  int* query_position_ranges;      // [B, query_blocks * kConsumers, 2]

  // Only with kHasScoreFunction; score_ids with kHasScoreIds.
  const int* score_ids;  // [B, N, 2] batch row, head, as a function of the scores has them
  Capture captures[kMaxCaptures];  // arrays that it reads

  BlockMask block_mask;  // only with kMaskBlock

  // Sizes (S, T, heads, batch rows) of the bias; box (128 bytes, 64 * kConsumers, 1, 1). Only with
  // kBiasTiles. At the end, so that other fields lie where they do without.
  TensorMap bias_map;

  // Only with kCarried: what results are multiplied by, and 0 where float16 copies do not hold the
  // operands and other kernels compute.
  const float* result_scale;  // []

  // Only with kHalves, written by split_float32: see halves.cuh. Then the maps are of these.
  void* query_halves;
  void* key_halves;
  void* value_halves;
  float* query_factors;  // [B, N, ceil(T / 64)]
  float* key_factors;    // [B, K, ceil(S / 64)]
  float* value_factors;

  // Only with kFades, written by row_norms: of 64 rows each the largest norm, bits of float32.
  int* query_norms;  // [B, N, ceil(T / 64)]
  int* key_norms;    // [B, K, ceil(S / 64)]
};

// The backward pass: flash_backward_prepare, flash_backward, flash_backward_finish, in this order
// on one stream, each with these parameters. Grids, blocks and workspace sizes: sm90/backward.cuh.
struct BackwardParams {
  // Rank-4 maps as for the forward.
  TensorMap query;   // [B, T, N, H]  box (64, 1, kBlockQ, 1)
  TensorMap key;     // [B, S, K, H]  box (64, 1, kBlockKV, 1)
  TensorMap value;   // [B, S, K, Hv] box (64, 1, kBlockKV, 1)
  TensorMap dout;    // [B, T, N, Hv] box (64, 1, kBlockQ, 1)
  TensorMap dkey;    // [B, S, K, H]  box (64, 1, 64, 1), written by the kernel for heads up to 128
  TensorMap dvalue;  // [B, S, K, Hv] box (64, 1, 64, 1), written

  // The same arrays, for loads without TMA and for rows that are computed again without tensor
  // cores, because values hidden from them are not finite.
  const void* query_data;  // [B, T, N, H]
  const void* key_data;    // [B, S, K, H]
  const void* value_data;  // [B, S, K, Hv]
  const void* out_data;    // [B, T, N, Hv]
  const void* dout_data;   // [B, T, N, Hv]
  const float* lse;        // [B, N, T] natural logarithm
  const float* dlse;       // [B, N, T], only with kHasDlse
  void* dquery;            // [B, T, N, H]
  void* dkey_data;         // [B, S, K, H]   the arrays of the maps dkey and dvalue
  void* dvalue_data;       // [B, S, K, Hv]
  void* dbias;             // of the bias's shape and type, only with kHasDbias

  const int* query_lengths;       // [B]
  const int* key_value_lengths;   // [B]
  const int* query_segments;      // [B, T]
  const int* key_value_segments;  // [B, S]
  Broadcast bias;                 // only with kHasBias
  Mask mask;                      // only with kHasMaskBytes
  // [B, N, 4] key word 0, key word 1, head id, batch id; [B, N, 6] and the first counters
  const unsigned* dropout_state;

  // Workspaces, all but `marks` written by flash_backward_prepare; Q = ceil(T / kBlockQ) query
  // blocks.
  float* lse_log2;     // [B, N, Q * kBlockQ]: -lse * log2(e), -inf on rows that see nothing
  float* minus_delta;  // [B, N, Q * kBlockQ]: dlse - rowsum(out * dout)
  float* dq_sum;       // [B, N, Q * kBlockQ, 64 * ceil(H / 64)] in the order of fragments, or
                       // with kDqRowBytes [B, T, N, H / 2], the other half in `dquery`; with
                       // kDeterministic the first unit writes it
  int* next_unit;      // [1], zero at the start of each launch of the main kernel
  int* turns;          // [B, N, Q, kTurnParts], only with kDeterministic
  int* query_segment_ranges;  // [B, Q, 2] smallest and largest id, only with kHasSegments
  int* key_segment_ranges;    // [B, ceil(S / kBlockKV), 2], likewise
  float* dbias_sum;           // [dbias_parts, bias_elements], only with several parts; or with
                              // kDbiasByHeads dS [B, heads of a launch, T, S] in 16 bits
  int* marks;  // [B, K, ceil(S / kBlockKV), kBlockKV / 16, 2]: are 16 rows of dk, dv not all finite

  long long bias_elements;  // of the bias: batch rows * heads * queries * keys that it has
  int bias_batches;         // batch rows that it has: B or 1
  int bias_heads;           // N or 1
  int dbias_parts;          // CTAs that share the sums of one of its blocks

  int batch;        // B
  int query_len;    // T
  int kv_len;       // S
  int query_heads;  // N
  int kv_heads;     // K
  int l2_heads;     // units of a block of keys that the schedule walks together, >= 1
  int window_left;  // as for the forward
  int window_right;
  float scale;                 // of the logits, before the softcap
  float scale_log2;            // log2(e) * (scale, the cap with kSoftcap, or 1 with kHasBias)
  float softcap_inner;         // scale / cap, only with kSoftcap
  float softcap_bias;          // 1 / cap, only with kSoftcap and kHasBias
  unsigned dropout_threshold;  // rate * 2^15, in both halves; below it a weight is dropped
  float dropout_scale;         // 1 / (1 - rate)

  // As for the forward; the ranges are of blocks, written by flash_backward_prepare.
  const int* query_positions;
  const int* key_value_positions;
  int* key_position_ranges;    // [B, ceil(S / kBlockKV), 2]
  int* query_position_ranges;  // [B, Q, 2]

  // Only with kHasScoreFunction; score_ids with kHasScoreIds.
  const int* score_ids;  // [B, N, 2] batch row, head, as a function of the scores has them
  Capture captures[kMaxCaptures];  // arrays that it reads

  BlockMask block_mask;  // only with kMaskBlock

  TensorMap bias_map;  // as for the forward; box (128 bytes, kBlockQ, 1, 1)

  // Only with kCarried: what results are multiplied by, and 0 where float16 copies do not hold the
  // operands and other kernels compute.
  const float* result_scale;  // []

  // Only with kDbiasByHeads: the heads whose units this launch of the main kernel takes.
  int first_kv_head;
  int launched_kv_heads;

  // Only with kHalves, as for the forward.
  void* query_halves;
  void* key_halves;
  void* value_halves;
  void* dout_halves;
  float* query_factors;  // [B, N, ceil(T / 64)]
  float* key_factors;    // [B, K, ceil(S / 64)]
  float* value_factors;
  float* dout_factors;
  float* dout_row_factors;  // [B, N, 64 * ceil(T / 64)]

  // The last units, each of which so many CTAs share; 0: none. Not with kDeterministic or a window.
  int shared_units;
  int shares;

  // Only with kRing: kernels/sm90/backward_ring.cuh.
  TensorMap dquery_map;  // [B, T, N, H] box (64, 1, 16, 1), written
  int* ring_counts;      // [B * N / unit's heads, 2] of each set of l2_heads: units added, finished
  int* dq_marks;         // [B, N, Q, kBlockQ / 64 * ceil(H / 64)]: is a tile of dq not all finite?
  int ring_heads;        // query heads that have a place in dq_sum at a time: of ring_sets sets
  int ring_sets;
  int ring_lag;  // sets between a unit's and the one whose dq it finishes

  // Only with kUnitHeads: several units add to dk and dv of a block of keys.
  float* key_sums;  // [B, K, ceil(S / kBlockKV), kBlockKV / 64, ceil(H / 64) + ceil(Hv / 64), 64,
                    // 64] in the order of fragments; with kDeterministic the first unit writes it
  int* key_turns;   // [B, K, ceil(S / kBlockKV), kBlockKV / 64] units that have added, only with
                    // kDeterministic
};
