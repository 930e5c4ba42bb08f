#include "machine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "tests/fake_cuda.h"

namespace emulator {

Thread* current = nullptr;
const Place* place = nullptr;

namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr int kResident = 3;             // CTAs at a time
constexpr std::int64_t kPolls = 30'000;  // without any progress: a deadlock
constexpr int kQuantum = 4000;           // switches until another CTA goes on

std::jmp_buf scheduler;
std::string failure;
bool reports = false;  // waiting threads tell where they are
std::int64_t polls = 0;
std::vector<unsigned char*> free_stacks;
std::vector<FakeBuffer> buffers;

enum class Order { kForward, kBackward, kRandom };
struct Policy {
  Order order = Order::kForward;
  enum { kEarly, kLate, kAnyTime } copies = kLate;
  std::mt19937_64 random;
};
Policy policy;

std::uint64_t draw(std::uint64_t count) { return policy.random() % count; }

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

void resume(Thread* thread) {
  current = thread;
  place = &thread->place;
  if (_setjmp(scheduler) == 0) {
    if (thread->started) _longjmp(thread->state, 1);
    thread->started = true;
    setcontext(&thread->start);
  }
}

// ---- reports -----------------------------------------------------------------------------------

// The device functions that the thread is in, the innermost first.
std::vector<std::string> trace_here() {
  void* frames[64];
  const int count = backtrace(frames, 64);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_sname == nullptr) continue;
    int status = 0;
    char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? text : info.dli_sname;
    std::free(text);
    if (name.rfind("emulator::", 0) == 0 || name.find("emulator::Entry") != std::string::npos) {
      continue;
    }
    int depth = 0;  // of template arguments, which are long
    std::string brief;
    for (char c : name) {
      if (c == '<') ++depth;
      if (depth == 0) brief += c;
      if (c == '>') --depth;
    }
    brief = brief.substr(0, brief.find('('));
    const auto space = brief.rfind(' ');
    if (space != std::string::npos) brief = brief.substr(space + 1);
    if (!brief.empty() && (names.empty() || names.back() != brief)) names.push_back(brief);
  }
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " < ") + name;
  return text;
}

std::string thread_name(const Thread& thread) {
  char text[96];
  std::snprintf(text, sizeof text, "CTA %u, thread %u (warp %u, lane %d)", thread.place.block.x,
                thread.place.thread.x, thread.place.thread.x / 32, thread.lane);
  return text;
}

void report_deadlock(std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text = "deadlock: no thread can go on";
  reports = true;
  for (auto& block : blocks) {
    std::map<std::string, std::vector<unsigned>> groups;
    for (Thread& thread : block->threads) {
      if (thread.done) continue;
      thread.trace.clear();
      if (thread.started) resume(&thread);
      char what[160];
      std::string waits = thread.waits_for ? thread.waits_for : "nothing";
      std::snprintf(what, sizeof what, "%s (%u, %u)", waits.c_str(), thread.details[0],
                    thread.details[1]);
      waits = what;
      const auto barrier = block->barriers.find(thread.details[0]);
      if (waits.rfind("mbarrier", 0) == 0 && barrier != block->barriers.end()) {
        const MemoryBarrier& b = barrier->second;
        std::snprintf(what, sizeof what,
                      "mbarrier at shared byte %u, parity %u: %d of %d arrivals and %lld bytes are "
                      "missing",
                      thread.details[0] - kDynamicAt, thread.details[1], b.pending, b.expected,
                      static_cast<long long>(b.bytes));
        waits = what;
      }
      groups[waits + ", in " + joined(thread.trace)].push_back(thread.place.thread.x);
    }
    for (const auto& [what, threads] : groups) {
      std::string list;
      for (std::size_t i = 0; i < threads.size();) {
        std::size_t end = i;
        while (end + 1 < threads.size() && threads[end + 1] == threads[end] + 1) ++end;
        list += (list.empty() ? "" : ", ") + std::to_string(threads[i]);
        if (end > i) list += "-" + std::to_string(threads[end]);
        i = end + 1;
      }
      text += "\n  CTA " + std::to_string(block->threads[0].place.block.x) + ", threads " + list +
              ": " + what;
    }
  }
  reports = false;
  failure = text;
}

// ---- CTAs --------------------------------------------------------------------------------------

void end_block(Block& block) {
  for (Thread& thread : block.threads) free_stacks.push_back(thread.stack);
  block.threads.clear();
}

void start_block(Block& block, unsigned index, unsigned grid, unsigned thread_count) {
  const Library& library = *block.library;
  std::memset(library.dynamic, kFakeGarbage, kSharedBytes);
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

// Runs threads of a CTA for a while. False: none can go on but by polling, and all that poll did.
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

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (failure.empty()) {
    failure = text;
    if (current != nullptr) {
      failure += "; " + thread_name(*current) + ", in " + joined(trace_here());
    }
  }
  _longjmp(scheduler, 1);
}

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

// ---- shared memory -----------------------------------------------------------------------------

unsigned char* Block::shared(uint32 address, uint32 bytes, uint32 alignment, const char* what) {
  if (address % alignment != 0) {
    fail("%s: shared address %u is not a multiple of %u", what, address, alignment);
  }
  const uint64 end = static_cast<uint64>(address) + bytes;
  if (address >= kStaticAt &&
      end <= kStaticAt + static_cast<uint64>(library->statics_end - library->statics)) {
    return library->statics + (address - kStaticAt);
  }
  if (address < kDynamicAt || end > kDynamicAt + shared_bytes) {
    fail("%s: bytes %lld to %lld of shared memory, which has %u", what,
         static_cast<long long>(address) - kDynamicAt, static_cast<long long>(end) - kDynamicAt,
         shared_bytes);
  }
  return library->dynamic + (address - kDynamicAt);
}

unsigned char* Block::written(uint32 address, uint32 bytes, const char* what) {
  unsigned char* memory = shared(address, bytes, 1, what);
  if (address < kStaticAt) {
    const uint32 first = (address - kDynamicAt) / kChunk;
    const uint32 last = (address - kDynamicAt + bytes - 1) / kChunk;
    for (uint32 chunk = first; chunk <= last; ++chunk) {
      if (writers[chunk] != current) current->unfenced.push_back(chunk);
      writers[chunk] = current;
    }
  }
  return memory;
}

unsigned char* Block::read_async(uint32 address, uint32 bytes, const char* what) {
  unsigned char* memory = shared(address, bytes, 1, what);
  if (address < kStaticAt) {
    const uint32 first = (address - kDynamicAt) / kChunk;
    const uint32 last = (address - kDynamicAt + bytes - 1) / kChunk;
    for (uint32 chunk = first; chunk <= last; ++chunk) {
      if (writers[chunk] == nullptr) continue;
      fail(
          "%s: byte %u of shared memory was written by thread %u, which has not executed "
          "fence.proxy.async since",
          what, chunk * kChunk, writers[chunk]->place.thread.x);
    }
  }
  return memory;
}

unsigned char* Block::overwritten(uint32 address, uint32 bytes, const char* what) {
  unsigned char* memory = shared(address, bytes, 1, what);
  for (uint32 i = 0; i < bytes && address < kStaticAt; i += kChunk) {
    writers[(address - kDynamicAt + i) / kChunk] = nullptr;
  }
  return memory;
}

void Thread::fence() {
  for (const uint32 chunk : unfenced) {
    if (block->writers[chunk] == this) block->writers[chunk] = nullptr;
  }
  unfenced.clear();
}

std::size_t shared_address(const void* pointer) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  const Library& library = *current->block->library;
  if (at >= library.dynamic && at <= library.dynamic + kSharedBytes) {
    return kDynamicAt + (at - library.dynamic);
  }
  if (at >= library.statics && at < library.statics_end) return kStaticAt + (at - library.statics);
  fail("__cvta_generic_to_shared of a pointer that is not into shared memory");
}

// ---- barriers ----------------------------------------------------------------------------------

MemoryBarrier& Block::barrier(uint32 address, const char* what) {
  shared(address, 8, 8, what);
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail("%s: there is no mbarrier at %u", what, address - kDynamicAt);
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
         address - kDynamicAt, b.pending, b.expected);
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

// ---- global memory -----------------------------------------------------------------------------

void check_global(const void* pointer, uint64 bytes, uint32 alignment, const char* what) {
  const auto at = reinterpret_cast<uint64>(pointer);
  if (at % alignment != 0) {
    fail("%s: global address %llx is not a multiple of %u", what,
         static_cast<unsigned long long>(at), alignment);
  }
  const FakeBuffer* near = nullptr;
  for (const FakeBuffer& buffer : buffers) {
    const auto first = reinterpret_cast<uint64>(buffer.data);
    if (at >= first && at + bytes <= first + buffer.bytes) return;
    if (at >= first && (near == nullptr || first > reinterpret_cast<uint64>(near->data))) {
      near = &buffer;
    }
  }
  if (near == nullptr) fail("%s: an address in no buffer of the call", what);
  fail("%s: %llu bytes at byte %lld of %s, which has %llu", what,
       static_cast<unsigned long long>(bytes),
       static_cast<long long>(at - reinterpret_cast<uint64>(near->data)), near->name.c_str(),
       static_cast<unsigned long long>(near->bytes));
}

// What plain loads and stores may touch besides the call's buffers.
bool is_own(uint64 at, uint64 bytes) {
  const auto inside = [=](const void* first, uint64 size) {
    const auto start = reinterpret_cast<uint64>(first);
    return at >= start && at + bytes <= start + size;
  };
  const Block& block = *current->block;
  const Library& library = *block.library;
  return inside(current->stack, kStackBytes) || inside(library.dynamic, block.shared_bytes) ||
         inside(library.statics, library.statics_end - library.statics) ||
         inside(block.params, block.kernel->params_bytes) || inside(&place, sizeof place) ||
         inside(&current->place, sizeof current->place) ||
         (inside(library.image, library.image_bytes) && !inside(library.dynamic, kSharedBytes));
}

void check_access(uint64 at, uint64 bytes, const char* what) {
  if (is_own(at, bytes)) return;
  const uint64 shared = at - reinterpret_cast<uint64>(current->block->library->dynamic);
  if (shared < kSharedBytes) {
    fail("%s: byte %llu of shared memory, which has %u", what,
         static_cast<unsigned long long>(shared), current->block->shared_bytes);
  }
  const bool vector = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
  check_global(reinterpret_cast<const void*>(at), bytes, vector ? bytes : 1, what);
}

void touch(const void* pointer, unsigned bytes) {
  check_access(reinterpret_cast<uint64>(pointer), bytes, "an atomic operation");
  note_progress();
}

// ---- the machine -------------------------------------------------------------------------------

namespace {

struct Program {
  std::vector<Library> libraries;  // one for each CTA that runs at a time
};

class Machine : public FakeMachine {
 public:
  std::string Compile(const std::string& source, const std::map<std::string, std::string>& files,
                      std::string* image) override {
    namespace fs = std::filesystem;
    const char* command = std::getenv("JAX_FLASH_EMULATOR_COMPILER");
    if (command == nullptr) return "JAX_FLASH_EMULATOR_COMPILER is not set";
    std::string folder = (fs::temp_directory_path() / "emulatorXXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) return "no temporary folder";
    const auto write = [&](const std::string& name, const std::string& text) {
      const fs::path path = fs::path(folder) / name;
      fs::create_directories(path.parent_path());
      std::ofstream(path) << text;
    };
    write("program.cu", source);
    for (const auto& [name, text] : files) write(name, text);
    const std::string log = folder + "/log";
    const std::string line = std::string(command) + " " + folder + " > " + log + " 2>&1";
    const auto read = [](const std::string& path) {
      std::ifstream file(path, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    const int code = std::system(line.c_str());
    std::string trouble;
    if (code != 0) trouble = line + " failed:\n" + read(log);
    *image = read(folder + "/program.so");
    fs::remove_all(folder);
    return trouble;
  }

  std::string Load(const std::string& image, void** program) override {
    auto* made = new Program;
    for (int i = 0; i < kResident; ++i) {
      const int file = memfd_create("kernel", 0);  // stays open: its number is part of a path
      if (file < 0 || write(file, image.data(), image.size()) < 0) return "no memory for a library";
      const std::string path = "/proc/self/fd/" + std::to_string(file);
      void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) return dlerror();
      const auto pointer = [&](const char* name) {
        return *static_cast<unsigned char**>(dlsym(library, name));
      };
      made->libraries.push_back({static_cast<unsigned char*>(dlsym(library, "emulator_shared")),
                                 pointer("emulator_statics_begin"), pointer("emulator_statics_end"),
                                 static_cast<const Kernel*>(dlsym(library, "emulator_kernels")),
                                 nullptr, 0});
      struct Search {
        const void* base;
        Library* found;
      } search{nullptr, &made->libraries.back()};
      Dl_info info;
      dladdr(search.found->kernels, &info);
      search.base = info.dli_fbase;
      dl_iterate_phdr(
          [](dl_phdr_info* object, std::size_t, void* data) {
            auto& search = *static_cast<Search*>(data);
            if (reinterpret_cast<const void*>(object->dlpi_addr) != search.base) return 0;
            search.found->image = static_cast<const unsigned char*>(search.base);
            for (int i = 0; i < object->dlpi_phnum; ++i) {
              const auto& part = object->dlpi_phdr[i];
              if (part.p_type != PT_LOAD) continue;
              search.found->image_bytes =
                  std::max<std::size_t>(search.found->image_bytes, part.p_vaddr + part.p_memsz);
            }
            return 1;
          },
          &search);
    }
    *program = made;
    return "";
  }

  bool Has(void* program, const std::string& kernel) override {
    return Find(*static_cast<Program*>(program), kernel) >= 0;
  }

  void SetBuffers(std::vector<FakeBuffer> given) override { buffers = std::move(given); }

  std::string Launch(void* program, const std::string& kernel, unsigned grid, unsigned cluster,
                     unsigned threads, unsigned shared_bytes, const void* params) override {
    const std::lock_guard<std::mutex> lock(one_at_a_time_);
    std::vector<Library>& libraries = static_cast<Program*>(program)->libraries;
    const int which = Find(*static_cast<Program*>(program), kernel);
    const Kernel& first = libraries[0].kernels[which];
    if (threads > first.max_threads) {
      return kernel + ": " + std::to_string(threads) + " threads are more than its " +
             "__launch_bounds__ of " + std::to_string(first.max_threads);
    }
    if (cluster > kResident) {
      return kernel + ": clusters of " + std::to_string(cluster) + ", of which the emulator runs " +
             std::to_string(kResident) + " CTAs at a time";
    }
    failure.clear();
    polls = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    unsigned next = 0;
    const auto start_cluster = [&](const std::vector<Block*>& members) {
      auto made = std::make_shared<Cluster>();
      made->blocks = members;
      for (Block* block : members) {
        block->cluster = made;
        start_block(*block, next++, grid, threads);
        made->running += block->running;
      }
    };
    for (std::size_t i = 0; i + cluster <= libraries.size() && next < grid; i += cluster) {
      std::vector<Block*> members;
      for (std::size_t j = i; j < i + cluster; ++j) {
        blocks.push_back(std::make_unique<Block>());
        Block& block = *blocks.back();
        block.library = &libraries[j];
        block.shared_bytes = shared_bytes;
        block.kernel = &libraries[j].kernels[which];
        block.params = params;
        members.push_back(&block);
      }
      start_cluster(members);
    }
    std::size_t at = 0, stuck = 0;
    while (!blocks.empty() && failure.empty()) {
      at = policy.order == Order::kRandom ? draw(blocks.size()) : (at + 1) % blocks.size();
      Block& block = *blocks[at];
      if (block.running > 0 && run_block(block)) {
        stuck = 0;
      } else if (++stuck > 64 * blocks.size()) {
        report_deadlock(blocks);
      }
      if (polls > kPolls) report_deadlock(blocks);
      if (block.running > 0 || !failure.empty()) continue;
      if (!block.in_flight.empty()) {
        failure = "a CTA ends with copies in flight";
        continue;
      }
      if (block.cluster->running > 0) continue;
      const std::vector<Block*> members = block.cluster->blocks;
      if (next < grid) {
        start_cluster(members);
        continue;
      }
      for (Block* member : members) {
        end_block(*member);
        blocks.erase(std::find_if(blocks.begin(), blocks.end(),
                                  [&](const auto& one) { return one.get() == member; }));
      }
      at = 0;
    }
    for (auto& block : blocks) end_block(*block);
    current = nullptr;
    return failure.empty() ? "" : kernel + ": " + failure;
  }

 private:
  static int Find(const Program& program, const std::string& name) {
    const Kernel* kernels = program.libraries[0].kernels;
    for (int i = 0; kernels[i].name != nullptr; ++i) {
      if (kernels[i].name == name) return i;
    }
    return -1;
  }

  std::mutex one_at_a_time_;
};

const bool registered = [] {
  fake_machine = new Machine;
  return true;
}();

}  // namespace
}  // namespace emulator

// The compiler calls these at each load and store of a kernel (-fsanitize=kernel-address).
#define EMULATOR_ACCESS(bytes)                                      \
  extern "C" void __asan_load##bytes##_noabort(std::uint64_t at) {  \
    emulator::check_access(at, bytes, "a load");                    \
  }                                                                 \
  extern "C" void __asan_store##bytes##_noabort(std::uint64_t at) { \
    emulator::check_access(at, bytes, "a store");                   \
  }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
extern "C" void __asan_loadN_noabort(std::uint64_t at, std::size_t bytes) {
  emulator::check_access(at, bytes, "a load");
}
extern "C" void __asan_storeN_noabort(std::uint64_t at, std::size_t bytes) {
  emulator::check_access(at, bytes, "a store");
}
extern "C" void __asan_handle_no_return() {}

// Threads in order and asynchronous work as late as possible (0); backwards and as early as
// possible (1); as drawn from the seed.
extern "C" void EmulatorSetSeed(std::uint64_t seed) {
  using namespace emulator;
  policy.order = seed == 0 ? Order::kForward : seed == 1 ? Order::kBackward : Order::kRandom;
  policy.copies = seed == 0 ? Policy::kLate : seed == 1 ? Policy::kEarly : Policy::kAnyTime;
  policy.random.seed(seed);
}

// Runs one CTA of a program's only kernel, which takes a pointer to `memory`. Returns what went
// wrong.
extern "C" const char* EmulatorRunKernel(const char* text, unsigned threads, unsigned shared_bytes,
                                         void* memory, std::uint64_t bytes) {
  static std::string trouble;
  std::string image;
  void* program = nullptr;
  trouble = fake_machine->Compile(text, {}, &image);
  if (trouble.empty()) trouble = fake_machine->Load(image, &program);
  if (!trouble.empty()) return trouble.c_str();
  fake_machine->SetBuffers({{memory, bytes, "memory"}});
  const char* name = static_cast<emulator::Program*>(program)->libraries[0].kernels[0].name;
  trouble = fake_machine->Launch(program, name, 1, 1, threads, shared_bytes, &memory);
  return trouble.c_str();
}
