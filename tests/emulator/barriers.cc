// Where threads meet: barriers of a CTA, a cluster and a warp.
#include <algorithm>

#include "machine.h"

namespace emulator {

// ---- barriers ----------------------------------------------------------------------------------

MemoryBarrier& Block::barrier(uint32 address, const char* what) {
  shared(address, 8, 8, what);
  const auto found = barriers.find(address & kOwn);
  if (found == barriers.end()) {
    fail("%s: there is no mbarrier at %u", what, (address & kOwn) - kDynamicAt);
  }
  return found->second;
}

void Block::settle(MemoryBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
  note_progress();
  std::vector<Thread*> waiting;
  waiting.swap(barrier.waiting);
  for (Thread* thread : waiting) wake(thread);
}

void Block::arrive(uint32 address, int count, const char* what) {
  MemoryBarrier& b = barrier(address, what);
  if (count < 1 || count > b.pending) {
    fail("%s: %d arrivals at the mbarrier at %u, where %d of %d are missing", what, count,
         (address & kOwn) - kDynamicAt, b.pending, b.expected);
  }
  b.pending -= count;
  settle(b);
}

void Block::complete_bytes(uint32 address, std::int64_t bytes, const char* what) {
  MemoryBarrier& b = barrier(address, what);
  b.bytes -= bytes;
  settle(b);
}

void Cluster::settle() {
  if (arrived == 0 || arrived < running) return;
  phase ^= 1;
  arrived = 0;
  note_progress();
  std::vector<Thread*> woken;
  woken.swap(waiting);
  for (Thread* thread : woken) wake(thread);
}

Count Block::named_barrier(int id, int threads, bool waits, bool yes) {
  if (id < 0 || id > 15) fail("bar: there is no barrier %d", id);
  NamedBarrier& barrier = named[id];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) {
    fail("bar %d: %d threads are expected here, %d elsewhere", id, threads, barrier.expected);
  }
  barrier.yes += yes;
  if (++barrier.arrived < threads) {
    if (!waits) return {};
    barrier.waiting.push_back(current);
    wait("bar", static_cast<uint32>(id), static_cast<uint32>(threads));
    return counts[id];
  }
  counts[id] = {barrier.yes, threads};
  const Count result = counts[id];
  std::vector<Thread*> waiting;
  waiting.swap(barrier.waiting);
  barrier = {};
  note_progress();
  for (Thread* thread : waiting) wake(thread);
  return result;
}

Count sync_threads(bool mine) {
  return current->block->named_barrier(0, static_cast<int>(current->block->threads.size()), true,
                                       mine);
}

// ---- warps -------------------------------------------------------------------------------------

void sync_warp(unsigned mask) {
  int nothing = 0;
  meet(mask, "__syncwarp", nothing, [](int*(&)[32]) {});
}

unsigned vote(unsigned mask, bool mine, Vote kind) {
  unsigned given = mine;
  const char* what = kind == Vote::kAny   ? "__any_sync"
                     : kind == Vote::kAll ? "__all_sync"
                                          : "__ballot_sync";
  meet(mask, what, given, [&](unsigned*(&all)[32]) {
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1) ballot |= *all[i] << i;
    }
    const unsigned result = kind == Vote::kAny   ? ballot != 0
                            : kind == Vote::kAll ? ballot == mask
                                                 : ballot;
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1) *all[i] = result;
    }
  });
  return given;
}

unsigned exchange(unsigned mask, unsigned mine, unsigned by, int width, Exchange kind) {
  struct Given {
    unsigned value, by, result;
  } given{mine, by, 0};
  meet(mask, "__shfl_sync", given, [&](Given*(&all)[32]) {
    for (unsigned i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      const unsigned first = i & ~static_cast<unsigned>(width - 1), own = all[i]->by;
      unsigned from = i;
      switch (kind) {
        case Exchange::kIndex:
          from = first + own % width;
          break;
        case Exchange::kXor:
          from = (i ^ own) < first + width ? i ^ own : i;
          break;
        case Exchange::kUp:
          from = i - first >= own ? i - own : i;
          break;
        case Exchange::kDown:
          from = i - first + own < static_cast<unsigned>(width) ? i + own : i;
      }
      if (!(mask >> from & 1)) fail("__shfl_sync reads lane %u, which takes no part", from);
      all[i]->result = all[from]->value;
    }
  });
  return given.result;
}

unsigned reduce(unsigned mask, unsigned mine, Reduction kind) {
  unsigned given = mine;
  meet(mask, "__reduce_sync", given, [&](unsigned*(&all)[32]) {
    bool first = true;
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      const unsigned x = *all[i];
      const int a = static_cast<int>(sum), b = static_cast<int>(x);
      switch (first ? Reduction::kOr : kind) {
        case Reduction::kAdd:
          sum += x;
          break;
        case Reduction::kMin:
          sum = std::min(sum, x);
          break;
        case Reduction::kMax:
          sum = std::max(sum, x);
          break;
        case Reduction::kMinSigned:
          sum = static_cast<unsigned>(std::min(a, b));
          break;
        case Reduction::kMaxSigned:
          sum = static_cast<unsigned>(std::max(a, b));
          break;
        case Reduction::kAnd:
          sum &= x;
          break;
        case Reduction::kOr:
          sum |= x;
          break;
        case Reduction::kXor:
          sum ^= x;
      }
      first = false;
    }
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1) *all[i] = sum;
    }
  });
  return given;
}

}  // namespace emulator
