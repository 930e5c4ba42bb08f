// Arguments of the kernels in cuda/kernels/sm80, with the names that the shared headers read.
//
// The handler (sm80.cc) fills every field; a pointer whose term is absent is null and never read.
// What a kernel is specialised for is in the constants of the generated header: see the list in
// cuda/kernels/sm80/forward.cuh.
#pragma once

#include "cuda/runtime/params.h"

// flash_forward_sm80: grid = query_blocks * B * N, block = 128 threads, dynamic shared memory =
// ForwardTiling.shared_bytes (jax_flash/_gpu/sm80.py).
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
  const unsigned* dropout_state;   // [B, N, 4] key word 0, key word 1, head id, batch id

  // Workspaces, smallest and largest of each block of keys, written by key_ranges: [B, ceil(S /
  // kBlockKV), 2], only with kHasSegments and kHasPositions.
  int* key_segment_ranges;
  int* key_position_ranges;

  int batch;            // B
  int query_len;        // T
  int kv_len;           // S
  int query_heads;      // N
  int kv_heads;         // K
  int query_blocks;     // ceil(T / (64 * kRowTiles))
  int l2_heads;         // heads (of B * N) that the schedule walks together, >= 1
  int window_left;      // keys visible left of the aligned position, < 2^30; only with kWindowLeft
  int window_right;     // the same on the right; causal is 0; only with kWindowRight
  float scale;          // of the logits, before the softcap
  float scale_log2;     // log2(e) * (scale, the cap with kSoftcap, or 1 with kPreScale or kHasBias)
  float softcap_inner;  // scale / cap, only with kSoftcap
  float softcap_bias;   // 1 / cap, only with kSoftcap and kHasBias
  unsigned dropout_threshold;  // rate * 2^15, in both halves; below it a weight is dropped
  float dropout_scale;         // 1 / (1 - rate)

  BlockMask block_mask;  // only with kMaskBlock
};
