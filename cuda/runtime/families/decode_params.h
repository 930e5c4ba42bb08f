// What the handler of decoding hands to its kernels. Plain C++ for both compilers; what a kernel is
// specialised by is not here but in the constants of the generated header: see the list in
// cuda/kernels/decode_cta.cuh.
#pragma once

#include "cuda/runtime/params.h"

inline constexpr int kMostFrequencies = 128;

// flash_decode and flash_decode_merge, one after the other on one stream: grid = ctas each, those
// of a part side by side, parts * shares of them.
struct DecodeParams {
  // Rank-4 maps as for the forward, over [P, page, K, dim]; box (64, 1, kBoxRows, 1). On sm_90
  // alone.
  TensorMap key;
  TensorMap value;  // empty with kValuesInKeys

  const void* key_data;    // [P, page, K, H], the same without maps
  const void* value_data;  // [P, page, K, Hv]
  const void* query;       // [B, T, N, H]
  const int* lengths;      // [B]
  const int* page_table;   // [B, columns], only with kPaged; else row b has page b alone
  const void* new_key;     // [B, T, K, H], only with kAppends
  const void* new_value;   // [B, T, K, Hv], likewise, but with kValuesInKeys
  const float* sinks;      // [B or 1, N], only with kHasSinks
  void* key_cache;         // [P, page, K, H], written with kAppends
  void* value_cache;       // [P, page, K, Hv]
  void* out;               // [B, T, N, Hv] element type of the query
  float* lse;              // [B, N, T] natural logarithm

  // Workspaces of flash_decode for flash_decode_merge, of units that several CTAs share: weighted
  // values, and of each row its base and its sum.
  float* partial_out;   // [ctas, 2, share rows, 16 * ceil(Hv / 16)]
  float* partial_rows;  // [ctas, 2, share rows, 2]

  long long sinks_batch_stride;  // elements from one batch row to the next: N, or 0 when shared
  int batch;                     // B
  int query_len;                 // T
  int query_heads;               // N
  int kv_heads;                  // K
  int pages;                     // P
  int page_size;                 // positions in each
  int columns;                   // of the page table; 1 without
  int row_groups;                // CTAs that share the keys of a kv head: ceil(T * N / K / rows)
  int shares;                    // CTAs of a part of all blocks: K / kHeads * row_groups
  int parts;                     // at most
  int window_left;               // positions visible before a query's own; only with kWindowLeft
  float scale_log2;              // log2(e) * (scale, or the cap with kSoftcap)
  float softcap_inner;           // scale / cap, only with kSoftcap
  // Only with kRotates: radians from one position to the next, of features h and h + H / 2.
  float frequencies[kMostFrequencies];
};
