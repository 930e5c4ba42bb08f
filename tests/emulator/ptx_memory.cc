// Instructions on memory that end where they stand: plain loads and stores, atomic sums.
#include "ptx.h"

namespace emulator {

uint32 element_bytes(const Frame& f) {
  const std::string& opcode = f.instruction->opcode;
  return static_cast<uint32>(std::stoi(opcode.substr(opcode.rfind('.') + 2))) / 8;
}
void load_from(Frame& f, const unsigned char* memory, uint32 bytes) {
  for (const Argument& to : f.list(0)) {
    uint64 bits = 0;
    std::memcpy(&bits, memory, bytes);
    memory += bytes;
    f.set(to, bits);
  }
}
void store_to(Frame& f, unsigned char* memory, uint32 bytes) {
  for (const Argument& from : f.list(1)) {
    const uint64 bits = f.get(from);
    std::memcpy(memory, &bits, bytes);
    memory += bytes;
  }
}
unsigned char* global(const Frame& f, int i, uint32 bytes, uint32 alignment) {
  auto* memory = reinterpret_cast<unsigned char*>(f.get(i));
  check_global(memory, bytes, alignment, f.name());
  return memory;
}

namespace {

void load_shared(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(0).size());
  load_from(f, current->block->shared(f.get32(1), all, all, f.name()), bytes);
}
void store_shared(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(1).size());
  current->block->shared(f.get32(0), all, all, f.name());
  store_to(f, current->block->written(f.get32(0), all, f.name()), bytes);
}
void load_global(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(0).size());
  load_from(f, global(f, 1, all, all), bytes);
}
void poll_global(Frame& f) {
  poll(f.name());
  load_global(f);
}
void store_global(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(1).size());
  store_to(f, global(f, 0, all, all), bytes);
  note_progress();
}
void add_int_global(Frame& f) {
  auto* target = reinterpret_cast<uint32*>(global(f, 0, 4, 4));
  *target += f.get32(1);
  note_progress();
}
void add_float_global(Frame& f) {
  const auto values = f.list(1);
  const auto bytes = static_cast<uint32>(4 * values.size());
  auto* target = reinterpret_cast<float*>(global(f, 0, bytes, bytes));
  for (const Argument& value : values) {
    *target++ += __builtin_bit_cast(float, static_cast<uint32>(f.get(value)));
  }
  note_progress();
}

}  // namespace

const Table kMemory = {
    {"ld.shared.*", load_shared},
    {"st.shared.*", store_shared},
    {"ld.global.*", load_global},
    {"ld.acquire.gpu.global.*", poll_global},
    {"ld.relaxed.gpu.global.*", poll_global},
    {"st.global.*", store_global},
    {"st.relaxed.gpu.global.*", store_global},
    {"st.release.gpu.global.*", store_global},
    {"red.relaxed.gpu.global.add.s32", add_int_global},
    {"red.release.gpu.global.add.s32", add_int_global},
    {"red.relaxed.gpu.global.add.f32", add_float_global},
    {"red.relaxed.gpu.global.add.v2.f32", add_float_global},
    {"red.relaxed.gpu.global.add.v4.f32", add_float_global},
    {"fence.acq_rel.gpu", nothing},
};

}  // namespace emulator
