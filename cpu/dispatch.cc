// Owns the choice of an instruction set at run time, and per-thread scratch memory.
// Each kernels_<isa>.cc is one build of the same sources (kernels-inl.h).

#include <cstdint>
#include <cstdlib>

#include "cpu/attention.h"

namespace jax_flash::cpu {

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

int SupportedKernels(const Kernels** list, int capacity) {
  int count = 0;
  auto add = [&](const Kernels& kernels) {
    if (count < capacity) list[count++] = &kernels;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  // A bfloat16 dot product takes 2.2 cycles on Intel's Sapphire Rapids, where two float32 vectors
  // are multiplied and added in each; on AMD's Zen 4 it takes one.
  const bool prefers_float32 = __builtin_cpu_is("intel");
  if (bf16 && !prefers_float32) add(kAvx512Bf16);
  if (avx512) add(kAvx512);
  if (bf16 && prefers_float32) add(kAvx512Bf16);
  if (avx2) add(kAvx2);
#endif
  add(kPortable);
  return count;
}

const Kernels& BestKernels() {
  static const Kernels* const best = [] {
    const Kernels* first = nullptr;
    SupportedKernels(&first, 1);
    return first;
  }();
  return *best;
}

namespace {

struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void* ThreadScratch(int64_t bytes) {
  thread_local Scratch scratch;
  if (bytes > scratch.bytes) {
    std::free(scratch.data);
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.data = std::aligned_alloc(4096, static_cast<size_t>(rounded));
    scratch.bytes = scratch.data ? rounded : 0;
  }
  return scratch.data;
}

}  // namespace jax_flash::cpu
