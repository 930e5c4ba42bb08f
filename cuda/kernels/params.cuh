// What the structs of kernels' parameters are made of. The structs themselves are tables in Python,
// a family's own (jax_flash/_gpu/sm90/forward_launch.py and its neighbours), from which their text
// is made that follows the constants of the generated header.
#pragma once

// The offset of a member of a struct, bytes: NVRTC 12 has no __builtin_offsetof, C++ compilers,
// which emulate the kernels, no __INTADDR__.
#ifdef __CUDACC_RTC__
#define JF_OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)
#else
#define JF_OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif

// A CUtensorMap (cuTensorMapEncodeTiled): 128 opaque bytes.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// An array [batch, heads, queries, keys] of any of these dims or 1: elements from one index to the
// next, 0 where there is one alone.
struct Broadcast {
  const void* data;
  long long batch, head, query, key;
};

// An array that a function of the scores reads: elements from one batch row to the next, 0 where
// all share it.
struct Capture {
  const void* data;
  long long batch;
};

// The scales [pages, K] of keys or values of eight bits: elements from one page to the next, 0
// where all share them.
struct Scales {
  const float* data;
  long long page;
};

// A boolean mask, and what the kernel mask_plan makes of it for one pass (mask.cuh).
struct Mask {
  Broadcast bytes;
  unsigned* words;       // workspace: a bit for each pair
  unsigned char* flags;  // workspace: what there is to see in each block of pairs
  int batch, head;       // matrices [queries, keys] from one batch row, or head, to the next
};

// A block mask (jax_flash/block_masks.py): of each block of kMaskBlock queries and keys whether it
// is empty, full, or else which of the stored ones has its bits.
struct BlockMask {
  const int* numbers;          // [B or 1, N or 1, query blocks, key blocks]
  const unsigned short* bits;  // [B or 1, stored, kMaskBlock, kMaskBlock / 16]
  unsigned* flags;             // workspace: what there is to see in blocks of pairs, 32 in a row
  long long bits_batch;        // words from one batch row to the next
  int batch, head;             // matrices from one batch row, or head, to the next
  int stored;
  int flag_count;
};
