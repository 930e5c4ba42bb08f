// What a launch asks of the scheduler, and what the machine's files share.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"
#include "tests/fake_cuda.h"

namespace emulator {

inline constexpr std::size_t kStackBytes = 256 << 10;

extern std::string failure;              // of the launch; empty: none so far
extern std::int64_t polls;               // without any progress
extern bool reports;                     // waiting threads tell where they are
extern std::vector<FakeBuffer> buffers;  // of the call

enum class Order { kForward, kBackward, kRandom };
struct Policy {
  Order order = Order::kForward;
  enum { kEarly, kLate, kAnyTime } copies = kLate;
  std::mt19937_64 random;
  std::uint32_t garbage = 0x44444444;  // words of dynamic shared memory where a CTA starts
};
extern Policy policy;

inline std::uint64_t draw(std::uint64_t count) { return policy.random() % count; }

// Ends what the CTA had, and begins it as number `index` of the grid.
void start_block(Block& block, unsigned index, unsigned grid, unsigned thread_count);
void end_block(Block& block);
// Runs threads of a CTA for a while. False: none can go on but by polling, and all that poll did.
bool run_block(Block& block);
// Lets a thread go on until it waits, ends or fails.
void resume(Thread* thread);
// Gives up the thread that runs.
[[noreturn]] void abandon();

// The device functions that the thread is in, the innermost first.
std::vector<std::string> trace_here();
// Makes a deadlock of these CTAs the failure.
void report_deadlock(std::vector<std::unique_ptr<Block>>& blocks);

}  // namespace emulator
