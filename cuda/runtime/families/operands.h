// What the handlers of attention of every family make of a call: checks, and the fields that their
// kernels' parameters share by name.

#ifndef JAX_FLASH_CUDA_RUNTIME_FAMILIES_OPERANDS_H_
#define JAX_FLASH_CUDA_RUNTIME_FAMILIES_OPERANDS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "cuda/runtime/params.h"
#include "cuda/runtime/workspaces.h"
#include "ffi/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash::attention {

namespace ffi = xla::ffi;

inline constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
inline constexpr int kMaxWindow = (1 << 30) - 1;  // sums of a window and a position stay below 2^31
inline constexpr double kLog2E = 1.44269504088896340736;
inline std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline ffi::Error Invalid(const std::string& text) {
  return ffi::Error::InvalidArgument("jax_flash: " + text);
}

inline int ClampWindow(std::int64_t window) {
  return static_cast<int>(std::min<std::int64_t>(std::max<std::int64_t>(window, 0), kMaxWindow));
}

// Of positions, in the bits of a uint32: no two are farther apart.
inline int ClampDistance(std::int64_t window) {
  return static_cast<int>(static_cast<std::uint32_t>(
      std::min<std::int64_t>(std::max<std::int64_t>(window, 0), 0xffffffff)));
}

// What a family's kernels take.
struct Limits {
  bool tma_loads = false;
  bool float32 = false;
  std::int64_t head_dim = 256;
};

// What all kernels refuse: dtypes, head dims, and sizes beyond TMA's limits and the kernels' 32-bit
// indices (offsets into arrays are 64-bit).
inline ffi::Error CheckOperands(const Operands& operands, const Limits& limits) {
  const Sizes& s = operands.sizes;
  const auto [tma_loads, float32, head_dim] = limits;
  if (operands.dtype != ffi::BF16 && operands.dtype != ffi::F16 &&
      !(float32 && operands.dtype == ffi::F32)) {
    return Invalid("the CUDA kernels take bfloat16 and float16" +
                   std::string(float32 ? " and float32" : ""));
  }
  for (std::int64_t dim : {s.head_dim, s.value_dim}) {
    if (dim < 1 || dim > head_dim || (tma_loads && dim % 8 != 0)) {
      return Invalid("the CUDA kernels take head dims up to " + std::to_string(head_dim) +
                     std::string(tma_loads ? " that 8 divides" : "") + ", not " +
                     std::to_string(dim));
    }
  }
  for (std::int64_t size : {s.batch, s.q_len, s.kv_len, s.q_heads, s.kv_heads}) {
    if (size > kMaxInt / 2) return Invalid("a dim of " + std::to_string(size) + " is too large");
  }
  // Marks of 16 rows, in blocks of up to 192 of a head, have numbers of 32 bits: one row takes 12,
  // in the backward 16.
  const std::int64_t rows = CeilDiv(std::max(s.q_len, s.kv_len), 64) + 2;
  if (s.batch * s.q_heads > kMaxInt / 8 / rows) {
    return Invalid("batch x heads x (sequence length / 64 + 2) is beyond 2^28");
  }
  return ffi::Error::Success();
}

inline ffi::Error CheckNumbers(std::initializer_list<std::int64_t> positive) {
  for (std::int64_t number : positive) {
    if (number < 1 || number > kMaxInt) return Invalid("a number of `launch` is out of range");
  }
  return ffi::Error::Success();
}

// Where the batch was symbolic, `launch` may name more heads than there are; the kernels multiply
// this by the blocks of a head.
inline int ClampHeads(std::int64_t l2_heads, std::int64_t heads) {
  return static_cast<int>(std::min(l2_heads, heads));
}

// The fields that the parameters of both passes share.
template <class Params>
void SetCommon(const Operands& operands, const ProblemAttribute& problem, Params* params) {
  const Sizes& s = operands.sizes;
  params->query_lengths = operands.Data<int>(kQueryLengths);
  params->key_value_lengths = operands.Data<int>(kKeyValueLengths);
  params->query_segments = operands.Data<int>(kQuerySegments);
  params->key_value_segments = operands.Data<int>(kKeyValueSegments);
  params->batch = static_cast<int>(s.batch);
  params->query_len = static_cast<int>(s.q_len);
  params->kv_len = static_cast<int>(s.kv_len);
  params->query_heads = static_cast<int>(s.q_heads);
  params->kv_heads = static_cast<int>(s.kv_heads);
  params->query_positions = operands.Data<int>(kQueryPositions);
  params->key_value_positions = operands.Data<int>(kKeyValuePositions);
  const auto window = problem.Has(kQueryPositions) ? ClampDistance : ClampWindow;
  params->window_left = window(problem.window_left);
  params->window_right = window(problem.window_right);
  params->scale = static_cast<float>(problem.scale);
  params->dropout_state = operands.Data<unsigned>(kDropoutState);
  params->dropout_threshold =
      static_cast<unsigned>(std::lround(problem.dropout_rate * 0x8000)) * 0x10001u;
  params->dropout_scale = static_cast<float>(1 / (1 - problem.dropout_rate));
  params->score_ids = operands.Data<int>(kScoreIds);
}

// Captured arrays are [*B or 1s, elements]; the lowering broadcasts what lies between.
template <class Params>
ffi::Error SetCaptures(const Operands& operands, const ProblemAttribute& problem, Params* params) {
  for (std::int64_t i = 0; i < problem.captures; ++i) {
    const ffi::AnyBuffer& buffer = *operands.captures[i];
    const auto elements = static_cast<std::int64_t>(buffer.element_count());
    const std::int64_t own = buffer.dimensions().back();
    if (elements != own && elements != own * operands.sizes.batch) {
      return Invalid("a captured array needs one batch row, or all");
    }
    params->captures[i] = {buffer.untyped_data(), elements == own ? 0 : own};
  }
  return ffi::Error::Success();
}

// Sinks are [*B, N] or [1s, N]; the lowering broadcasts what lies between.
template <class Params>
ffi::Error SetSinks(const Operands& operands, Params* params) {
  if (!operands.terms[kSinks]) return ffi::Error::Success();
  const Sizes& s = operands.sizes;
  const auto elements = static_cast<std::int64_t>(operands.terms[kSinks]->element_count());
  if (elements != s.q_heads && elements != s.batch * s.q_heads) {
    return Invalid("the CUDA kernels take sinks of " + std::to_string(s.q_heads) +
                   " heads, for all batch rows or for each");
  }
  params->sinks = operands.Data<float>(kSinks);
  params->sinks_batch_stride = elements == s.q_heads ? 0 : s.q_heads;
  return ffi::Error::Success();
}

// A term [*B or 1s, N or 1, T or 1, S or 1]; the lowering broadcasts what lies between.
struct TermSizes {
  std::int64_t batch, heads, queries, keys;

  std::int64_t parts() const { return batch * heads; }
  std::int64_t elements() const { return batch * heads * queries * keys; }
};
inline ffi::Error ReadTerm(const Operands& operands, Term term, TermSizes* sizes) {
  *sizes = {0, 0, 0, 0};
  if (!operands.terms[term]) return ffi::Error::Success();
  const auto dims = operands.terms[term]->dimensions();
  const std::size_t leading = operands.batch.size();
  *sizes = {1, dims[leading], dims[leading + 1], dims[leading + 2]};
  for (std::size_t i = 0; i < leading; ++i) sizes->batch *= dims[i];
  if (sizes->batch != 1 && sizes->batch != operands.sizes.batch) {
    return Invalid(TermName(term) + " needs one batch row, or all");
  }
  return ffi::Error::Success();
}

// Distances in elements.
inline Broadcast BroadcastOf(const Operands& operands, Term term, const TermSizes& s) {
  if (!operands.terms[term]) return {};
  const auto step = [](std::int64_t size, std::int64_t elements) {
    return static_cast<long long>(size == 1 ? 0 : elements);
  };
  return {operands.Data<void>(term), step(s.batch, s.heads * s.queries * s.keys),
          step(s.heads, s.queries * s.keys), step(s.queries, s.keys), step(s.keys, 1)};
}

// What the parameters of both passes have of the bias, and the unit of the logits with one.
template <class Params>
ffi::Error SetBias(const Operands& operands, const ProblemAttribute& problem, TermSizes* sizes,
                   Params* params) {
  if (auto error = ReadTerm(operands, kBias, sizes); error.failure()) return error;
  params->bias = BroadcastOf(operands, kBias, *sizes);
  params->softcap_inner =
      problem.softcap > 0 ? static_cast<float>(problem.scale / problem.softcap) : 0;
  if (operands.terms[kBias] && problem.softcap > 0) {
    params->softcap_bias = static_cast<float>(1 / problem.softcap);
  }
  return ffi::Error::Success();
}

// The bits of a block of so many columns, padded to words that one thread loads at once.
inline std::int64_t MaskWords(std::int64_t columns, std::int64_t block) {
  return columns == 1 || block <= 32 ? 1 : block <= 64 ? 2 : 4;
}

// Fills `mask` and takes its workspaces. Returns the CTAs of mask_plan. `by_key`: the backward's
// layout, keys before queries.
inline std::int64_t SetMask(const Operands& operands, const TermSizes& s, std::int64_t block_q,
                            std::int64_t block_kv, bool by_key, Workspaces* workspaces,
                            Mask* mask) {
  mask->bytes = BroadcastOf(operands, kMask, s);
  mask->batch = static_cast<int>(s.batch > 1 ? s.heads : 0);
  mask->head = s.heads > 1 ? 1 : 0;
  const std::int64_t query_blocks = CeilDiv(s.queries, block_q);
  const std::int64_t key_blocks = CeilDiv(s.keys, block_kv);
  const std::int64_t rows = by_key ? s.keys : query_blocks;
  const std::int64_t blocks = by_key ? query_blocks : key_blocks;
  const std::int64_t words = s.parts() == 0 ? 0
                             : by_key       ? MaskWords(s.queries, block_q)
                                            : block_q * MaskWords(s.keys, block_kv);
  workspaces->Take("mask_words", {s.parts(), rows, blocks, words}, &mask->words);
  workspaces->Take(
      "mask_flags",
      {s.parts(), by_key ? key_blocks : query_blocks, by_key ? query_blocks : key_blocks},
      &mask->flags);
  return s.parts() * query_blocks * key_blocks;
}
inline constexpr std::int64_t kMaskThreads = 128;  // of a CTA of mask_plan

// Fills `mask` and takes its workspace; as SetMask, whose kernel this one's flags are made by.
inline ffi::Error SetBlockMask(const Operands& operands, std::int64_t block_q,
                               std::int64_t block_kv, bool by_key, Workspaces* workspaces,
                               std::int64_t* mask_blocks, BlockMask* mask) {
  TermSizes numbers, bits;  // bits: stored blocks, queries, words
  if (auto error = ReadTerm(operands, kBlockNumbers, &numbers); error.failure()) return error;
  if (auto error = ReadTerm(operands, kBlockBits, &bits); error.failure()) return error;
  const Sizes& s = operands.sizes;
  const std::int64_t parts = numbers.parts();
  const std::int64_t query_blocks = CeilDiv(s.q_len, block_q);
  const std::int64_t key_blocks = CeilDiv(s.kv_len, block_kv);
  const std::int64_t rows = parts == 0 ? 0 : by_key ? key_blocks : query_blocks;
  const std::int64_t groups = parts == 0 ? 0 : CeilDiv(by_key ? query_blocks : key_blocks, 32);
  const std::int64_t flags = parts * rows * groups * 32;  // threads that make one each
  if (bits.heads > kMaxInt || flags > kMaxInt) return Invalid("the block mask is too large");
  workspaces->Take("block_flags", {parts, rows, groups, 4}, &mask->flags);
  mask->numbers = operands.Data<int>(kBlockNumbers);
  mask->bits = operands.Data<unsigned short>(kBlockBits);
  mask->bits_batch = BroadcastOf(operands, kBlockBits, bits).batch;
  mask->batch = static_cast<int>(numbers.batch > 1 ? numbers.heads : 0);
  mask->head = numbers.heads > 1 ? 1 : 0;
  mask->stored = static_cast<int>(bits.heads);
  mask->flag_count = static_cast<int>(flags);
  *mask_blocks += CeilDiv(flags, kMaskThreads);
  return ffi::Error::Success();
}

// The unit of the forward's scores, `scale_log2` of its parameters.
inline float ForwardScaleLog2(const ProblemAttribute& problem) {
  const bool scaled_first = problem.scale <= 0 || problem.Has(kBias) || problem.HasFunction();
  return static_cast<float>(kLog2E * (problem.softcap > 0 ? problem.softcap
                                      : scaled_first      ? 1
                                                          : problem.scale));
}

}  // namespace jax_flash::attention

#endif  // JAX_FLASH_CUDA_RUNTIME_FAMILIES_OPERANDS_H_
