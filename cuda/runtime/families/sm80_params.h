// Arguments of the kernels in cuda/kernels/sm80, with the names that the shared headers read.
//
// The handler (sm80.cc) fills every field; a pointer whose term is absent is null and never read.
// What a kernel is specialised for is in the constants of the generated header: see the list in
// cuda/kernels/sm80/forward.cuh.
#pragma once

#include "cuda/runtime/params.h"

// flash_forward_sm80: grid = query_blocks * B * N, block and dynamic shared memory = threads and
// shared_bytes of ForwardTiling (jax_flash/_gpu/sm80.py).
struct Sm80ForwardParams {
  const void* query_data;  // [B, T, N, H]
  const void* key_data;    // [B, S, K, H]
  const void* value_data;  // [B, S, K, Hv]
  void* out;               // [B, T, N, Hv] element type of the query
  float* lse;              // [B, N, T] natural logarithm

  const int* query_lengths;        // [B]
  const int* key_value_lengths;    // [B]
  const int* query_segments;       // [B, T]
  const int* key_value_segments;   // [B, S]
  const int* query_positions;      // [B, T], with them the sides of the window are uint32
  const int* key_value_positions;  // [B, S]
  Broadcast bias;                  // only with kHasBias
  Mask mask;                       // only with kHasMaskBytes
  const float* sinks;              // [B or 1, N]
  long long sinks_batch_stride;    // elements from one batch row to the next: N, or 0 when shared
  // [B, N, 4] key word 0, key word 1, head id, batch id; [B, N, 6] and the first counters
  const unsigned* dropout_state;

  // Workspaces, smallest and largest of each block of keys, written by key_ranges: [B, ceil(S /
  // kBlockKV), 2], only with kHasSegments and kHasPositions.
  int* key_segment_ranges;
  int* key_position_ranges;

  int batch;            // B
  int query_len;        // T
  int kv_len;           // S
  int query_heads;      // N
  int kv_heads;         // K
  int query_blocks;     // ceil(T / rows of a CTA)
  int l2_heads;         // heads (of B * N) that the schedule walks together, >= 1
  int window_left;      // keys visible left of the aligned position, < 2^30; only with kWindowLeft
  int window_right;     // the same on the right; causal is 0; only with kWindowRight
  float scale;          // of the logits, before the softcap
  float scale_log2;     // log2(e) * (scale, the cap with kSoftcap, or 1 with kPreScale or kHasBias)
  float softcap_inner;  // scale / cap, only with kSoftcap
  float softcap_bias;   // 1 / cap, only with kSoftcap and kHasBias
  unsigned dropout_threshold;  // rate * 2^15, in both halves; below it a weight is dropped
  float dropout_scale;         // 1 / (1 - rate)

  // Only with kHasScoreFunction; score_ids with kHasScoreIds.
  const int* score_ids;  // [B, N, 2] batch row, head, as a function of the scores has them
  Capture captures[kMaxCaptures];  // arrays that it reads

  BlockMask block_mask;  // only with kMaskBlock

  // Only with kRest: other than 0 where the kernels of float16 copies have computed the results.
  const float* result_scale;  // []

  // Only with kHalves, written by split_float32: see halves.cuh.
  void* query_halves;
  void* key_halves;
  void* value_halves;
  float* query_factors;  // [B, N, ceil(T / 64)]
  float* key_factors;    // [B, K, ceil(S / 64)]
  float* value_factors;
};

// The backward pass: the kernels of sm80/backward.cuh, which has their grids, in its order on one
// stream, each with these parameters.
struct Sm80BackwardParams {
  const void* query_data;  // [B, T, N, H]
  const void* key_data;    // [B, S, K, H]
  const void* value_data;  // [B, S, K, Hv]
  const void* out_data;    // [B, T, N, Hv]
  const void* dout_data;   // [B, T, N, Hv]
  const float* lse;        // [B, N, T] natural logarithm
  const float* dlse;       // [B, N, T], only with kHasDlse
  void* dquery;            // [B, T, N, H]
  void* dkey_data;         // [B, S, K, H]
  void* dvalue_data;       // [B, S, K, Hv]
  void* dbias;             // of the bias's shape and type, only with kHasDbias

  // As for the forward.
  const int* query_lengths;
  const int* key_value_lengths;
  const int* query_segments;
  const int* key_value_segments;
  const int* query_positions;
  const int* key_value_positions;
  Broadcast bias;
  Mask mask;
  const unsigned* dropout_state;

  // Workspaces, all but `marks` and `dbias_sum` written by flash_backward_prepare; Q = ceil(T /
  // 64).
  float* lse_log2;     // [B, N, Q * 64]: -lse * log2(e), -inf on rows that see nothing
  float* minus_delta;  // [B, N, Q * 64]: dlse - rowsum(out * dout)
  float* dq_sum;       // [B, N, Q * 64, 64 * ceil(H / 64)] in the order of fragments, or with
                       // kDqRowBytes [B, T, N, H / 2], the other half in `dquery`; with
                       // kDeterministic the first unit writes it
  int* next_unit;      // [1], only with kDeterministic
  int* turns;          // [B, N, Q], likewise: the last block of keys that added, plus one
  int* query_segment_ranges;   // [B, Q, 2] smallest and largest id, only with kHasSegments
  int* key_segment_ranges;     // [B, ceil(S / kBlockKV), 2], likewise
  int* query_position_ranges;  // the same of positions, only with kHasPositions
  int* key_position_ranges;
  float* dbias_sum;  // [dbias_parts, bias_elements], only with several parts; or with kDbiasByHeads
                     // dS [B, heads of a launch, T, S] in 16 bits
  int*
      marks;  // [B, K, ceil(S / kBlockKV), kBlockKV / 16, 2]: are 16 rows of dk, dv not all finite?

  long long bias_elements;  // of the bias: batch rows * heads * queries * keys that it has
  int bias_batches;         // batch rows that it has: B or 1
  int bias_heads;           // N or 1
  int dbias_parts;          // CTAs that share the sums of one of its blocks

  int batch;        // B
  int query_len;    // T
  int kv_len;       // S
  int query_heads;  // N
  int kv_heads;     // K
  int l2_heads;     // heads (of B * K) that the schedule walks together, >= 1
  int window_left;  // as for the forward
  int window_right;
  float scale;
  float scale_log2;  // log2(e) * (scale, the cap with kSoftcap, or 1 with kHasBias or a function)
  float softcap_inner;
  float softcap_bias;
  unsigned dropout_threshold;
  float dropout_scale;

  // As for the forward.
  const int* score_ids;
  Capture captures[kMaxCaptures];

  BlockMask block_mask;  // only with kMaskBlock

  // Only with kRest: other than 0 where the kernels of float16 copies have computed the results.
  const float* result_scale;  // []

  // Only with kDbiasByHeads: the heads whose units this launch of the main kernel takes.
  int first_kv_head;
  int launched_kv_heads;

  // As for the forward, and of output gradients.
  void* query_halves;
  void* key_halves;
  void* value_halves;
  void* dout_halves;
  float* query_factors;
  float* key_factors;
  float* value_factors;
  float* dout_factors;
};
