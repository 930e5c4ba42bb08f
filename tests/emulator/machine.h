// The machine that a kernel's text runs on: CTAs of threads, shared memory, barriers, copies and
// products in flight. ptx_*.cc execute instructions on it. Read __init__.py first.
//
// Threads are fibers, all of one host thread. They are switched where they wait for each other and
// nowhere else, so each runs as far as it may before any other does a thing: what no barrier
// orders happens in the order that the seed draws.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "api.h"

namespace emulator {

using uint32 = std::uint32_t;
using uint64 = std::uint64_t;

// Gives the launch up: the thread that runs gets no further.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Block;
struct Warp;

// A matrix product of a warpgroup, as one of its threads has it.
struct Product {
  int columns;
  bool bfloat16, float8, accumulates, a_in_registers, a_transposed, b_transposed;
  uint64 a, b;          // descriptors
  uint32 registers[4];  // operand a
  float* accumulators;  // garbage while the product is in flight
  uint64 number;        // of those that the thread has issued

  bool same_as(const Product& o) const {
    return columns == o.columns && bfloat16 == o.bfloat16 && float8 == o.float8 &&
           accumulates == o.accumulates && a_in_registers == o.a_in_registers &&
           a_transposed == o.a_transposed && b_transposed == o.b_transposed && a == o.a &&
           b == o.b && number == o.number;
  }
};
struct ProductGroup {
  std::vector<Product> products;
  bool computed;
};
// What accumulators hold of products in flight.
struct Accumulators {
  std::vector<float> values;
  int products = 0;
};

// What a thread has asked for that takes place later.
using Action = std::function<void()>;
struct Groups {  // of asynchronous actions
  std::vector<Action> open;
  std::list<std::vector<Action>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  // Runs the oldest groups until no more than `pending` remain.
  void wait(std::size_t pending);
};

struct Thread {
  Place place;
  Block* block;
  Warp* warp;
  int lane;
  bool started = false, done = false;
  const char* waits_for = nullptr;  // null: it can run
  uint32 details[2];
  std::jmp_buf state;
  ucontext_t start;
  unsigned char* stack;
  bool arrived = false;      // at the cluster's barrier, and has not waited since
  uint32 arrived_phase = 0;  // of that barrier

  std::vector<Product> open_products;  // issued, not yet committed
  std::deque<ProductGroup> groups;     // in flight
  std::unordered_map<float*, Accumulators> accumulators;
  uint64 products_issued = 0;
  Groups copies;                   // cp.async
  uint32 tests = 0;                // of mbarriers
  Groups bulk;                     // cp.async.bulk to global memory
  std::vector<uint32> unfenced;    // chunks of shared memory that it wrote
  std::vector<std::string> trace;  // where it waits, in a report

  void fence();  // orders these writes before the reads of products and TMA
};

// Lanes that come together in one instruction.
struct Meeting {
  uint32 mask, arrived = 0;
  const char* what;
  void* given[32];
};
struct Warp {
  Thread* lanes[32] = {};
  int running = 0;                  // lanes that wait for nothing
  unsigned registers = 0;           // of a lane
  std::vector<Thread*> converging;  // lanes that are to look at an mbarrier when there is none
  std::list<Meeting> meetings;
};

struct MemoryBarrier {
  int expected, pending;
  std::int64_t bytes = 0;
  uint32 phase = 0;
  std::vector<Thread*> waiting;
};
// CTAs that see each other's shared memory, and meet.
struct Cluster {
  std::vector<Block*> blocks;
  int running = 0, arrived = 0;  // threads: that have not ended, that wait or may go on
  uint32 phase = 0;
  std::vector<Thread*> waiting;

  void settle();
};
struct NamedBarrier {
  int expected = 0, arrived = 0, yes = 0;
  std::vector<Thread*> waiting;
};

// A copy of the program's library: the shared memory of one CTA at a time.
struct Library {
  unsigned char* dynamic;
  unsigned char *statics, *statics_end;
  const Kernel* kernels;
  const unsigned char* image;  // all of it, constants included
  std::size_t image_bytes;
};

inline constexpr uint32 kDynamicAt = 1024, kStaticAt = 1 << 20, kChunk = 16;
// Addresses of shared memory have their CTA's number in its cluster in the bits above these, as on
// a GPU (seen on an H100: what is made of an address, a descriptor of wgmma, must leave it out).
inline constexpr uint32 kCtaShift = 24, kOwn = (1u << kCtaShift) - 1;

struct Block {
  Library* library;
  std::shared_ptr<Cluster> cluster;  // its own, if there are no clusters
  uint32 rank;                       // its number there
  unsigned shared_bytes;             // dynamic
  const Kernel* kernel;
  const void* params;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Thread*> ready, polling;
  std::vector<Action> in_flight;  // copies by TMA
  std::unordered_map<uint32, MemoryBarrier> barriers;
  NamedBarrier named[16];
  Count counts[16];              // of the barriers' last rounds
  int running;                   // threads that have not ended
  std::vector<Thread*> writers;  // of each chunk: who wrote it and has not fenced since
  // The products that each warpgroup has issued, which are the same for its warps.
  struct Issued {
    Product product;
    int warps;  // that have computed their part
  };
  std::vector<std::unordered_map<uint64, Issued>> issued;

  uint32 own(uint32 address, const char* what) const;
  // Shared memory that an instruction touches.
  unsigned char* shared(uint32 address, uint32 bytes, uint32 alignment, const char* what);
  // The same for a write of the thread that runs, and for a read by the asynchronous proxy.
  unsigned char* written(uint32 address, uint32 bytes, const char* what);
  unsigned char* read_async(uint32 address, uint32 bytes, const char* what);
  unsigned char* overwritten(uint32 address, uint32 bytes, const char* what);  // by TMA
  MemoryBarrier& barrier(uint32 address, const char* what);
  void arrive(uint32 address, int count, const char* what);
  void complete_bytes(uint32 address, std::int64_t bytes, const char* what);
  void settle(MemoryBarrier& barrier);
  Count named_barrier(int id, int threads, bool waits, bool yes);
};

extern Thread* current;

// Stops the thread until `wake`.
void wait(const char* what, uint32 detail0 = 0, uint32 detail1 = 0);
void wake(Thread* thread);
// Waits for the phase of this parity. A lane looks at the barrier when all lanes of its warp wait:
// a GPU brings lanes together again behind a branch, so none runs ahead through barriers that
// others have not come to.
void wait_barrier(uint32 address, uint32 parity);
// Lets all others go on first: the thread looks at memory that they may change.
void poll(const char* what);
// Something happened that a poll may have waited for.
void note_progress();
// Starts a copy that ends at any time from now on.
void start_copy(Action action);
// Whether what may happen now happens now rather than late.
bool happens_early();
bool may_happen_early();

// Lanes of `mask` come together; the last one runs `finish` on what all have given.
template <class Given, class Finish>
void meet(uint32 mask, const char* what, Given& mine, const Finish& finish) {
  Warp& warp = *current->warp;
  const int lane = current->lane;
  if (!(mask >> lane & 1)) fail("%s: lane %d is not in its mask 0x%x", what, lane, mask);
  auto meeting = warp.meetings.begin();
  while (meeting != warp.meetings.end() && meeting->mask != mask) ++meeting;
  if (meeting == warp.meetings.end()) {
    meeting = warp.meetings.insert(meeting, Meeting{mask, 0, what, {}});
  }
  if (meeting->what != what && std::string(meeting->what) != what) {
    fail("lanes of a warp meet in %s and %s", meeting->what, what);
  }
  meeting->given[lane] = &mine;
  meeting->arrived |= 1u << lane;
  if (meeting->arrived != mask) return wait(what, mask, 0);
  Given* given[32];
  for (int i = 0; i < 32; ++i) given[i] = static_cast<Given*>(meeting->given[i]);
  warp.meetings.erase(meeting);
  finish(given);
  for (int i = 0; i < 32; ++i) {
    if (i != lane && mask >> i & 1) wake(warp.lanes[i]);
  }
}

// Global memory: that of the custom call's buffers.
void check_global(const void* pointer, uint64 bytes, uint32 alignment, const char* what);

}  // namespace emulator
