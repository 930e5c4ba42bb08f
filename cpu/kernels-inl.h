// Owns the order of the kernel sources and their entry points. A kernels_<isa>.cc includes this
// after its vector operations; everything up to the Kernels it exports is private to that file, so
// that no function compiled for one instruction set is linked into the path of another.
//
// What works on a whole tile or block is not inlined (gnu::noinline): gcc 12 takes 30 % less time,
// and forwards are 1 to 4 % faster. But inlined weights of a step make decoding 5 % faster.

#include <type_traits>

#include "cpu/attention.h"
// Order matters below.
#include "cpu/gemm-inl.h"
#include "cpu/math-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/tasks-inl.h"
#include "cpu/terms-inl.h"
//
#include "cpu/forward-inl.h"
//
#include "cpu/pairing-inl.h"
//
#include "cpu/backward-inl.h"
//
#include "cpu/decode-tile-inl.h"
//
#include "cpu/decode-inl.h"

namespace jax_flash::cpu {
namespace {

#if defined(JAX_FLASH_BF16_DOT)
using DotOfBFloat16 = BFloat16Dot;
#else
using DotOfBFloat16 = Float32Dot;
#endif

// For a cache of C, eight bits.
template <class C>
bool RunDecodeOf(const DecodeCall& call, Workers& workers) {
  switch (call.in.problem.dtype) {
    case DType::kBFloat16:
      return Decode<BFloat16, Float32Dot, C>::Run(call, workers);
    case DType::kFloat16:
      return Decode<Float16, Float32Dot, C>::Run(call, workers);
    default:
      return Decode<float, Float32Dot, C>::Run(call, workers);
  }
}

bool RunDecode(const DecodeCall& call, Workers& workers) {
  if (call.key_scale) {
    return call.is_float8 ? RunDecodeOf<Float8>(call, workers) : RunDecodeOf<Int8>(call, workers);
  }
  switch (call.in.problem.dtype) {
    case DType::kBFloat16:
      return Decode<BFloat16, DotOfBFloat16>::Run(call, workers);
    case DType::kFloat16:
      return Decode<Float16, Float32Dot>::Run(call, workers);
    default:
      return Decode<float, Float32Dot>::Run(call, workers);
  }
}

// So few query rows to a kv head that packing its keys and values does not pay.
bool HasFewRows(const Inputs& in) {
  constexpr int64_t kFew = 16;
  const Shapes& s = in.shapes;
  return s.q_len * s.q_heads <= kFew * s.kv_heads && !in.bias.data && !in.mask.data &&
         !in.blocks.numbers.data && !in.kv_segments && !in.kv_positions && !in.dropout_state;
}

bool RunForward(const ForwardCall& call, Workers& workers) {
  if (HasFewRows(call.in)) {
    DecodeCall decode;
    decode.in = call.in;
    decode.pages = call.in.shapes.batch;
    decode.page_size = call.in.shapes.kv_len;
    decode.out = call.out;
    decode.lse = call.lse;
    return RunDecode(decode, workers);
  }
  switch (call.in.problem.dtype) {
    case DType::kBFloat16:
      return Forward<BFloat16, DotOfBFloat16>::Run(call, workers);
    case DType::kFloat16:
      return Forward<Float16, Float32Dot>::Run(call, workers);
    default:
      return Forward<float, Float32Dot>::Run(call, workers);
  }
}

bool RunBackward(const BackwardCall& call, Workers& workers) {
  switch (call.in.problem.dtype) {
    case DType::kBFloat16:
      return Backward<BFloat16, DotOfBFloat16>::Run(call, workers);
    case DType::kFloat16:
      return Backward<Float16, Float32Dot>::Run(call, workers);
    default:
      return Backward<float, Float32Dot>::Run(call, workers);
  }
}

}  // namespace
}  // namespace jax_flash::cpu
