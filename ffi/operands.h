// Owns the reading of a custom call on CPUs: attributes and operands as XLA hands them over,
// checked once more (ranks, shapes, dtypes, ranges), into a plain struct. The operands' order and
// the attributes are those of jax_flash/_problem.py. Calls on GPUs bring a plan instead:
// cuda/runtime/plan.h. Read next: cpu/handlers.cc.

#ifndef JAX_FLASH_FFI_OPERANDS_H_
#define JAX_FLASH_FFI_OPERANDS_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The optional operands, in the order in which they follow the others; the value is the term's bit
// in the attribute `terms`.
enum Term : int {
  kBias,
  kMask,
  kBlockNumbers,
  kBlockBits,
  kQueryLengths,
  kKeyValueLengths,
  kQuerySegments,
  kKeyValueSegments,
  kQueryPositions,
  kKeyValuePositions,
  kSinks,
  kDropoutState,
  kScoreIds,
  kTermCount,
};

// What each is like, as in jax_flash/_terms.py, which says what the columns mean.
struct TermRow {
  const char *name, *dtype, *dims, *ones;
};
inline constexpr TermRow kTerms[kTermCount] = {
    {"bias", "float", "NTS", "BNTS"},
    {"mask", "bool", "NTS", "BNTS"},
    {"block_numbers", "int32", "NIJ", "BN"},
    {"block_bits", "uint16", "CDE", "B"},
    {"query_lengths", "int32", "", ""},
    {"key_value_lengths", "int32", "", ""},
    {"query_segments", "int32", "T", ""},
    {"key_value_segments", "int32", "S", ""},
    {"query_positions", "int32", "T", ""},
    {"key_value_positions", "int32", "S", ""},
    {"sinks", "sum", "N", "B"},
    {"dropout_state", "uint32", "NW", ""},
    {"score_ids", "int32", "NU", ""},
};

std::string TermName(Term term);

// The table of terms, a line each, which jax_flash/_native.py compares with that of _terms.py.
std::vector<std::string> TermRows();

// The attribute `problem` of every custom call: jax_flash/_problem.py's Problem, its scalars.
struct ProblemAttribute {
  double scale;
  std::int64_t window_left;   // keys visible before the aligned query position; -1: all
  std::int64_t window_right;  // and after it
  bool bottom_right;
  double softcap;  // 0: none
  double dropout_rate;
  bool deterministic;
  std::int64_t terms;     // bit i: Term i is present
  std::int64_t captures;  // arrays that a function of the scores reads; -1: there is none

  bool Has(Term term) const { return terms >> term & 1; }
  bool HasFunction() const { return captures >= 0; }
};

}  // namespace jax_flash

// In the order of the fields.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_flash::ProblemAttribute, StructMember<double>("scale"),
    StructMember<std::int64_t>("window_left"), StructMember<std::int64_t>("window_right"),
    StructMember<bool>("bottom_right"), StructMember<double>("softcap"),
    StructMember<double>("dropout_rate"), StructMember<bool>("deterministic"),
    StructMember<std::int64_t>("terms"), StructMember<std::int64_t>("captures"));

namespace jax_flash {

struct Sizes {
  std::int64_t batch;  // product of the leading dims
  std::int64_t q_len, kv_len;
  std::int64_t q_heads, kv_heads;
  std::int64_t head_dim, value_dim;
};

// What both passes read. Pointers are to dense row-major arrays.
struct Operands {
  Sizes sizes;
  xla::ffi::DataType dtype;                  // of q, k, v, out and their gradients
  xla::ffi::Span<const std::int64_t> batch;  // the leading dims
  const void* q;                             // [*B, T, N, H]
  const void* k;                             // [*B, S, K, H]
  const void* v;                             // [*B, S, K, Hv]
  std::array<std::optional<xla::ffi::AnyBuffer>, kTermCount> terms;

  template <class T>
  const T* Data(Term term) const {  // null when the term is absent
    return terms[term] ? static_cast<const T*>(terms[term]->untyped_data()) : nullptr;
  }
};

struct ForwardOperands : Operands {
  void* out;   // [*B, T, N, Hv]
  float* lse;  // [*B, N, T]
};

struct BackwardOperands : Operands {
  const void* out;    // [*B, T, N, Hv]
  const float* lse;   // [*B, N, T]
  const void* dout;   // [*B, T, N, Hv]
  const float* dlse;  // [*B, N, T], or null
  void *dq, *dk, *dv;
  std::optional<xla::ffi::AnyBuffer> dbias;  // of the bias's dtype and shape
};

// What decoding reads: sizes.q_len is T, sizes.kv_len the positions that a row may have.
struct DecodeOperands : Operands {
  std::int64_t pages, page_size;
  const std::int32_t* lengths;     // [B]
  const std::int32_t* page_table;  // [B, kv_len / page_size], or null: row b has page b alone
  bool values_in_keys;             // v is null: values are the first value_dim features of k
  // For k and v of eight bits, [pages or 1, K], and as many as lie between those of two pages; else
  // null.
  const float *key_scale, *value_scale;
  std::int64_t key_scale_ld, value_scale_ld;
  bool is_float8;             // k and v are float8_e4m3fn; else int8, or q's dtype
  const void *new_k, *new_v;  // [B, T, K, H] and [B, T, K, Hv], or null
  void *k_cache, *v_cache;    // k and v, where there is something to write
  void* out;                  // [B, T, N, Hv]
  float* lse;                 // [B, N, T]
};

// Attributes of decoding beside the problem.
struct DecodeAttributes {
  bool paged, appends;
  std::int64_t value_dim;  // 0: there is a v
};

// Fills `*operands`; results beyond the named ones (workspaces) are the caller's to check.
xla::ffi::Error ReadForward(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                            const ProblemAttribute& problem, ForwardOperands* operands);
xla::ffi::Error ReadBackward(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                             const ProblemAttribute& problem, bool with_dlse, bool with_dbias,
                             BackwardOperands* operands);

xla::ffi::Error ReadDecode(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                           const ProblemAttribute& problem, const DecodeAttributes& attributes,
                           DecodeOperands* operands);

// A term of rank leading dims + n, of which any may be 1: the index of its element 0 of the row
// `batch` (flat, over the leading dims), counted in elements.
std::int64_t BroadcastRow(const Operands& operands, Term term, std::int64_t batch);

}  // namespace jax_flash

#endif  // JAX_FLASH_FFI_OPERANDS_H_
