// Owns the choice of an instruction set at run time, and per-thread scratch memory.
// Each kernels_<isa>.cc is one build of the same sources (kernels-inl.h).

#include <cstdint>
#include <cstdlib>

#include "cpu/attention.h"

#if defined(JAX_FLASH_NEONBF16)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace jax_flash::cpu {

// The build defines JAX_FLASH_<ISA> for each kernels_<isa>.cc that is in it.
extern const Kernels kPortable;
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
extern const Kernels kNeon;
extern const Kernels kNeonBf16;

namespace {

#if defined(JAX_FLASH_NEONBF16)
bool HasNeonBf16() {
#if defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16 of Linux, which old headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#endif
}
#endif

}  // namespace

int SupportedKernels(const Kernels** list, int capacity) {
  int count = 0;
  auto add = [&](const Kernels& kernels) {
    if (count < capacity) list[count++] = &kernels;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  [[maybe_unused]] const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(JAX_FLASH_AVX512BF16)
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  // A bfloat16 dot product takes 2.2 cycles on Intel's Sapphire Rapids, where two float32 vectors
  // are multiplied and added in each; on AMD's Zen 4 it takes one.
  const bool prefers_float32 = __builtin_cpu_is("intel");
  if (bf16 && !prefers_float32) add(kAvx512Bf16);
#endif
#if defined(JAX_FLASH_AVX512)
  if (avx512) add(kAvx512);
#endif
#if defined(JAX_FLASH_AVX512BF16)
  if (bf16 && prefers_float32) add(kAvx512Bf16);
#endif
#if defined(JAX_FLASH_AVX2)
  if (avx2) add(kAvx2);
#endif
#endif
#if defined(JAX_FLASH_NEONBF16)
  if (HasNeonBf16()) add(kNeonBf16);
#endif
#if defined(JAX_FLASH_NEON)
  add(kNeon);
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
