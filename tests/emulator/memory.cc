// What a thread may touch: shared memory, global memory, its own.
#include "scheduler.h"

namespace emulator {

// ---- shared memory -----------------------------------------------------------------------------

// The address in a CTA's shared memory, without the number that its addresses have.
uint32 Block::own(uint32 address, const char* what) const {
  if (address >> kCtaShift == rank) return address & kOwn;
  fail("%s: shared address %u is of CTA %u of the cluster, not of CTA %u", what, address & kOwn,
       address >> kCtaShift, rank);
}

unsigned char* Block::shared(uint32 address, uint32 bytes, uint32 alignment, const char* what) {
  address = own(address, what);
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
  address &= kOwn;
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
  address &= kOwn;
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
  address &= kOwn;
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
  const std::size_t number = std::size_t{current->block->rank} << kCtaShift;
  if (at >= library.dynamic && at <= library.dynamic + kSharedBytes) {
    return number + kDynamicAt + (at - library.dynamic);
  }
  if (at >= library.statics && at < library.statics_end) {
    return number + kStaticAt + (at - library.statics);
  }
  fail("__cvta_generic_to_shared of a pointer that is not into shared memory");
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

namespace {

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

// Called at each load and store.
inline void check_access(uint64 at, uint64 bytes, const char* what) {
  if (is_own(at, bytes)) return;
  const uint64 shared = at - reinterpret_cast<uint64>(current->block->library->dynamic);
  if (shared < kSharedBytes) {
    fail("%s: byte %llu of shared memory, which has %u", what,
         static_cast<unsigned long long>(shared), current->block->shared_bytes);
  }
  const bool vector = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
  check_global(reinterpret_cast<const void*>(at), bytes, vector ? bytes : 1, what);
}

}  // namespace

void touch(const void* pointer, unsigned bytes) {
  check_access(reinterpret_cast<uint64>(pointer), bytes, "an atomic operation");
  note_progress();
}

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
