// What emulated kernels ask of the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace emulator {

inline constexpr int kSharedBytes = 227 << 10;  // dynamic, that a CTA may have

// ---- asm statements ----------------------------------------------------------------------------

class Instructions;
struct Code {
  const char* ptx;
  const Instructions* parsed = nullptr;  // at its first execution
};
struct Operand {
  void* target;  // null: an input
  unsigned bytes;
  std::uint64_t bits;
};
template <class Value>
Operand input(const Value& value) {
  Operand result{nullptr, sizeof(Value), 0};
  static_assert(sizeof(Value) <= 8);
  std::memcpy(&result.bits, &value, sizeof(Value));
  return result;
}
template <class Value>
Operand output(Value& value) {
  Operand result = input(value);
  result.target = const_cast<std::remove_volatile_t<Value>*>(&value);
  return result;
}
void run(Code& code, std::initializer_list<Operand> operands);

// ---- kernels -----------------------------------------------------------------------------------

struct Kernel {
  const char* name;
  void (*run)(const void* params);
  unsigned params_bytes, max_threads;
};
template <auto kKernel>
struct Entry;
template <class Params, void (*kKernel)(Params)>
struct Entry<kKernel> {
  static constexpr unsigned kBytes = sizeof(Params);
  static void run(const void* params) { kKernel(*static_cast<const Params*>(params)); }
};

// ---- the thread that runs ----------------------------------------------------------------------

struct Index {
  unsigned x, y, z;
};
struct Place {
  Index thread, block, block_dim, grid_dim;
};
extern const Place* place;

enum class Vote { kAny, kAll, kBallot };
unsigned vote(unsigned mask, bool mine, Vote kind);
enum class Exchange { kIndex, kXor, kUp, kDown };
unsigned exchange(unsigned mask, unsigned mine, unsigned by, int width, Exchange kind);
enum class Reduction { kAdd, kMin, kMax, kMinSigned, kMaxSigned, kAnd, kOr, kXor };
unsigned reduce(unsigned mask, unsigned mine, Reduction kind);
void sync_warp(unsigned mask);
// What __syncthreads and its variants count: the threads that gave true, and all.
struct Count {
  int yes, all;
};
Count sync_threads(bool mine);
std::size_t shared_address(const void* pointer);
// Checks that the memory is one that the thread may touch, before an atomic operation on it.
void touch(const void* pointer, unsigned bytes);

}  // namespace emulator
