// Threads as fibers: who runs when, and how a CTA begins and ends.
#include "scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace emulator {

Thread* current = nullptr;
const Place* place = nullptr;
std::string failure;
std::int64_t polls = 0;
bool reports = false;
std::vector<FakeBuffer> buffers;
Policy policy;

namespace {

constexpr int kQuantum = 4000;  // switches until another CTA goes on

std::jmp_buf scheduler;
std::vector<unsigned char*> free_stacks;

unsigned char* take_stack() {
  if (!free_stacks.empty()) {
    unsigned char* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
  }
  const std::size_t page = sysconf(_SC_PAGESIZE);
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  mprotect(memory, page, PROT_NONE);  // below a stack that grows downwards
  return static_cast<unsigned char*>(memory) + page;
}

// A lane stops.
void rest(Warp& warp) {
  if (--warp.running > 0) return;
  std::vector<Thread*> converging;
  converging.swap(warp.converging);
  for (Thread* thread : converging) {
    MemoryBarrier& barrier = thread->block->barriers.at(thread->details[0]);
    if (barrier.phase == thread->details[1]) {
      barrier.waiting.push_back(thread);
    } else {
      wake(thread);
    }
  }
}

void leave() {
  if (_setjmp(current->state) == 0) _longjmp(scheduler, 1);
}

// A lane's, where the CTA has a multiprocessor for itself, as all kernels with setmaxnreg have.
unsigned registers_of_lane(std::size_t threads) {
  return static_cast<unsigned>(std::min<std::size_t>(65536 / threads / 8 * 8, 255));
}

// Warps that ask for more than those of the CTA have left wait for ever.
void check_registers(const Block& block) {
  const std::size_t had = registers_of_lane(block.threads.size()) * block.warps.size();
  std::size_t asked = 0;
  for (const Warp& warp : block.warps) asked += warp.registers;
  if (asked > had) {
    fail("setmaxnreg: warps ask for %zu registers of a lane, the CTA has %zu", asked, had);
  }
}

void begin() {
  Block& block = *current->block;
  block.kernel->run(block.params);
  Thread& thread = *current;
  if (!thread.open_products.empty() || !thread.groups.empty()) {
    fail("a thread ends with products in flight");
  }
  if (!thread.bulk.open.empty() || !thread.bulk.committed.empty()) {
    fail("a thread ends before its bulk stores have read shared memory");
  }
  const auto& groups = thread.copies.committed;  // there may be nothing in the last ones
  if (!thread.copies.open.empty() ||
      !std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group.empty(); })) {
    fail("a thread ends with cp.async in flight");
  }
  if (block.running == 1) check_registers(block);
  thread.done = true;
  --block.running;
  Cluster& cluster = *block.cluster;
  --cluster.running;
  if (thread.arrived && thread.arrived_phase == cluster.phase) --cluster.arrived;
  cluster.settle();
  rest(*thread.warp);
  note_progress();
  _longjmp(scheduler, 1);
}

}  // namespace

void resume(Thread* thread) {
  current = thread;
  place = &thread->place;
  if (_setjmp(scheduler) == 0) {
    if (thread->started) _longjmp(thread->state, 1);
    thread->started = true;
    setcontext(&thread->start);
  }
}

void abandon() { _longjmp(scheduler, 1); }

// ---- CTAs --------------------------------------------------------------------------------------

void end_block(Block& block) {
  for (Thread& thread : block.threads) free_stacks.push_back(thread.stack);
  block.threads.clear();
}

void start_block(Block& block, unsigned index, unsigned grid, unsigned thread_count) {
  const Library& library = *block.library;
  std::fill_n(reinterpret_cast<std::uint32_t*>(library.dynamic), kSharedBytes / 4, policy.garbage);
  if (library.statics != nullptr) {
    std::memset(library.statics, kFakeGarbage, library.statics_end - library.statics);
  }
  block.barriers.clear();
  for (NamedBarrier& barrier : block.named) barrier = {};
  block.in_flight.clear();
  block.ready.clear();
  block.polling.clear();
  block.writers.assign(kSharedBytes / kChunk, nullptr);
  block.issued.assign((thread_count + 127) / 128, {});
  end_block(block);
  block.threads.resize(thread_count);
  block.warps.clear();
  block.warps.resize((thread_count + 31) / 32);
  for (Warp& warp : block.warps) warp.registers = registers_of_lane(thread_count);
  block.running = static_cast<int>(thread_count);
  for (unsigned i = 0; i < thread_count; ++i) {
    Thread& thread = block.threads[i];
    thread.place = {{i, 0, 0}, {index, 0, 0}, {thread_count, 1, 1}, {grid, 1, 1}};
    thread.block = &block;
    thread.warp = &block.warps[i / 32];
    thread.lane = static_cast<int>(i % 32);
    thread.warp->lanes[thread.lane] = &thread;
    ++thread.warp->running;
    thread.stack = take_stack();
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack;
    thread.start.uc_stack.ss_size = kStackBytes;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, begin, 0);
    block.ready.push_back(&thread);
  }
  if (policy.order == Order::kBackward) std::reverse(block.ready.begin(), block.ready.end());
}

namespace {

Thread* take(std::vector<Thread*>& threads) {
  Thread* thread;
  if (policy.order == Order::kRandom) {
    std::swap(threads[draw(threads.size())], threads.back());
  }
  // A stack, not a queue: what has just become possible happens first.
  thread = threads.back();
  threads.pop_back();
  return thread;
}

void deliver(Block& block) {
  std::size_t which = 0;
  if (policy.order == Order::kBackward) which = block.in_flight.size() - 1;
  if (policy.order == Order::kRandom) which = draw(block.in_flight.size());
  Action action = std::move(block.in_flight[which]);
  block.in_flight.erase(block.in_flight.begin() + static_cast<std::ptrdiff_t>(which));
  current = nullptr;  // no thread's doing
  if (_setjmp(scheduler) == 0) action();
  note_progress();
}

}  // namespace

bool run_block(Block& block) {
  int left = policy.order == Order::kRandom ? 1 + static_cast<int>(draw(2 * kQuantum)) : kQuantum;
  while (failure.empty() && block.running > 0) {
    if (left-- == 0) return true;
    if (!block.in_flight.empty() && policy.copies == Policy::kAnyTime && draw(16) == 0) {
      deliver(block);
    } else if (!block.ready.empty()) {
      resume(take(block.ready));
    } else if (!block.in_flight.empty()) {
      deliver(block);
    } else {
      if (block.polling.empty()) return false;
      const std::int64_t before = polls;
      std::swap(block.ready, block.polling);
      for (Thread* thread : block.ready) {
        thread->waits_for = nullptr;
        ++thread->warp->running;
      }
      polls = before + 1;
      return true;
    }
  }
  return true;
}

// ---- waiting -----------------------------------------------------------------------------------

void Groups::wait(std::size_t pending) {
  while (committed.size() > pending) {
    const std::vector<Action> group = std::move(committed.front());
    committed.pop_front();
    for (const Action& action : group) action();
  }
}

void wait(const char* what, uint32 detail0, uint32 detail1) {
  Thread& thread = *current;
  thread.waits_for = what;
  thread.details[0] = detail0;
  thread.details[1] = detail1;
  rest(*thread.warp);
  leave();
  while (reports) {
    thread.trace = trace_here();
    leave();
  }
}

void wake(Thread* thread) {
  thread->waits_for = nullptr;
  ++thread->warp->running;
  thread->block->ready.push_back(thread);
}

void wait_barrier(uint32 address, uint32 parity) {
  current->warp->converging.push_back(current);
  wait("mbarrier", address, parity);
}

void poll(const char* what) {
  current->block->polling.push_back(current);
  wait(what);
}

void note_progress() { polls = 0; }

bool happens_early() {
  return policy.copies == Policy::kEarly || (policy.copies == Policy::kAnyTime && draw(2) == 0);
}

bool may_happen_early() { return policy.copies != Policy::kLate; }

void start_copy(Action action) {
  if (policy.copies == Policy::kEarly) return action();
  current->block->in_flight.push_back(std::move(action));
}

}  // namespace emulator
