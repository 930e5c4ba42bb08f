// Owns the interface of the CPU attention kernels: what to compute, on which arrays, with which
// threads. Nothing here knows XLA. Read next: forward-inl.h, pairing-inl.h, decode-tile-inl.h,
// decode-inl.h, dispatch.cc.
#ifndef JAX_FLASH_CPU_ATTENTION_H_
#define JAX_FLASH_CPU_ATTENTION_H_

#include <cstdint>

namespace jax_flash::cpu {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Letters as in jax.nn.dot_product_attention: query [B, T, N, H], key [B, S, K, H],
// value [B, S, K, Hv]; leading batch dimensions are flattened into B.
struct Shapes {
  int64_t batch = 0;      // B
  int64_t q_len = 0;      // T
  int64_t kv_len = 0;     // S
  int64_t q_heads = 0;    // N
  int64_t kv_heads = 0;   // K, divides N
  int64_t head_dim = 0;   // H
  int64_t value_dim = 0;  // Hv
};

// Meaning of a call, shapes aside. Row i sees key j iff -left <= j - (i + offset) <= right with
// offset = 0 (top left) or key length - query length (bottom right), within both lengths, with
// equal segment ids and a true mask. Positions, where given, stand in place of i + offset and j.
struct Problem {
  DType dtype = DType::kFloat32;  // of q, k, v, out and their gradients
  float scale = 1.0f;
  int64_t window_left = -1;   // -1: unbounded
  int64_t window_right = -1;  // -1: unbounded; causal is 0
  bool bottom_right = false;
  float softcap = 0.0f;        // 0: none
  double dropout_rate = 0.0;   // in [0, 1)
  bool deterministic = false;  // the same bits with any number of threads
};

// An array that broadcasts to [B, N, T, S]: strides in elements, 0 along a broadcast axis. `batch`
// maps each of the B flattened batch rows to its row among `batch_count` stored ones (leading
// dimensions may broadcast one by one, so a single stride would not do).
struct Broadcast {
  const void* data = nullptr;
  const int64_t* batch = nullptr;  // [B]
  int64_t batch_count = 1;
  int64_t heads = 1, rows = 1, keys = 1;  // stored extents: 1 or N, 1 or T, 1 or S

  // Inlined always: a shared copy could be one compiled for an instruction set that is not there.
  __attribute__((always_inline)) int64_t Offset(int64_t b, int64_t n, int64_t t) const {
    return ((batch[b] * heads + (heads == 1 ? 0 : n)) * rows + (rows == 1 ? 0 : t)) * keys;
  }
};

// A block mask: of each block of `size` queries and keys kEmptyBlock, kFullBlock, or which of the
// stored ones has its bits.
inline constexpr int32_t kEmptyBlock = -2, kFullBlock = -1;
struct BlockMask {
  Broadcast numbers;                    // int32; rows and keys are those of blocks; null: absent
  const uint16_t* bits = nullptr;       // [bits_batch's, stored, size, size / 16]
  const int64_t* bits_batch = nullptr;  // [B], as Broadcast::batch
  int64_t stored = 0;
  int64_t size = 0;

  // The numbers of the blocks that query t of head n is in, by block of keys.
  __attribute__((always_inline)) const int32_t* RowAt(int64_t b, int64_t n, int64_t t) const {
    return static_cast<const int32_t*>(numbers.data) + numbers.Offset(b, n, t / size);
  }
  // The bits of query t in a stored block.
  __attribute__((always_inline)) const uint16_t* WordsAt(int64_t b, int64_t t,
                                                         int32_t number) const {
    const int64_t block = bits_batch[b] * stored + (number < stored ? number : stored - 1);
    return bits + (block * size + t % size) * (size / 16);
  }
};

struct Inputs {
  Problem problem;
  Shapes shapes;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  Broadcast bias;  // data null: absent
  DType bias_dtype = DType::kFloat32;
  Broadcast mask;  // bytes, nonzero: visible; data null: absent
  BlockMask blocks;
  const int32_t* q_lengths = nullptr;     // [B]
  const int32_t* kv_lengths = nullptr;    // [B]
  const int32_t* q_segments = nullptr;    // [B, T], with kv_segments or neither
  const int32_t* kv_segments = nullptr;   // [B, S]
  const int32_t* q_positions = nullptr;   // [B, T], with kv_positions or neither
  const int32_t* kv_positions = nullptr;  // [B, S]
  Broadcast sinks;                        // float32; heads = N, rows = keys = 1
  // [B, N, words]: key0, key1, head id, batch id; of 6 words also the counters of query 0 and key 0
  const uint32_t* dropout_state = nullptr;
  int64_t dropout_words = 4;
};

struct ForwardCall {
  Inputs in;
  void* out = nullptr;   // [B, T, N, Hv]
  float* lse = nullptr;  // [B, N, T]; of a row that sees nothing -inf, or its sink
};

struct BackwardCall {
  Inputs in;
  const void* out = nullptr;    // [B, T, N, Hv]
  const float* lse = nullptr;   // [B, N, T], sinks included
  const void* dout = nullptr;   // [B, T, N, Hv]
  const float* dlse = nullptr;  // [B, N, T] or null
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  void* dbias = nullptr;  // bias's shape and dtype, or null
};

// Attention of few rows of queries to keys and values in pages, [P, S, K, H] and [P, S, K, Hv]:
// position p of batch row b is in slot p % S of page table[b][p / S]. in.shapes.kv_len is the
// number of positions that a row may have. Bias, mask, segments and dropout are absent.
struct DecodeCall {
  Inputs in;
  int64_t pages = 0, page_size = 0;
  const int32_t* page_table = nullptr;  // [B, kv_len / page_size]; null: row b has page b alone
  // For caches of eight bits: they hold a key or value over its scale; null where they are q's
  // dtype. Between the scales [K] of two pages lie so many; 0: all pages have the same.
  const float* key_scale = nullptr;
  const float* value_scale = nullptr;  // null where values are in keys
  int64_t key_scale_ld = 0, value_scale_ld = 0;
  bool is_float8 = false;       // e4m3fn; else int8
  bool values_in_keys = false;  // v[..] is the first Hv features of k[..]; in.v is null
  // Rows longer than kv_len, or without a page for a position they need, get nan where this is set.
  bool checked = false;
  const void* new_k =
      nullptr;  // [B, T, K, H] in q's dtype, written to the queries' positions first; or null
  const void* new_v = nullptr;  // [B, T, K, Hv]
  void* k = nullptr;            // in.k and in.v, where there is something to write
  void* v = nullptr;
  void* out = nullptr;   // [B, T, N, Hv]
  float* lse = nullptr;  // [B, N, T]
};

// Threads that share the indices of a loop. Run returns when every body has returned.
class Workers {
 public:
  virtual ~Workers() = default;
  virtual int64_t count() const = 0;
  virtual void Run(int64_t tasks, void (*body)(void* context, int64_t index), void* context) = 0;
};

// One build of the kernels. All return false when memory could not be had.
struct Kernels {
  const char* name;
  bool (*forward)(const ForwardCall& call, Workers& workers);
  bool (*backward)(const BackwardCall& call, Workers& workers);
  bool (*decode)(const DecodeCall& call, Workers& workers);
};

// The fastest build that this processor runs.
const Kernels& BestKernels();

// Every build that this processor runs, best first; writes at most `capacity` and returns how many.
int SupportedKernels(const Kernels** list, int capacity);

// Memory of the calling thread, 64-byte aligned, valid until its next call; kept between calls.
// Null when it could not be had.
void* ThreadScratch(int64_t bytes);

}  // namespace jax_flash::cpu

#endif  // JAX_FLASH_CPU_ATTENTION_H_
