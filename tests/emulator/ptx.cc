// PTX: the text of asm statements, parsed once and executed by each thread.
//
// An instruction is a row of `kInstructions` below: its opcode and what it does to the operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/runtime/driver.h"
#include "machine.h"
#include "tests/fake_cuda.h"

namespace emulator {

// ---- text --------------------------------------------------------------------------------------

struct Argument {
  enum { kRegister, kImmediate, kList, kMemory, kSink, kSpecial } kind;
  int number = 0;          // of the register
  bool predicate = false;  // a register declared as such
  uint64 value = 0;
  std::string name;             // of what is special
  std::vector<Argument> parts;  // of a list; of an address, which is their sum
};

class Frame;
struct Instruction {
  std::string opcode;
  void (*execute)(Frame&);
  std::vector<Argument> arguments;
  int guard = -1;  // a predicate's register
  bool guard_is = true;
};

class Instructions {
 public:
  explicit Instructions(const char* ptx, int operands);
  std::vector<Instruction> list;
  std::map<std::string, int> labels;
  int registers;

 private:
  struct Local {
    int number;
    bool predicate;
  };
  std::map<std::string, Local> locals_;
  const char* at_;

  void skip_space() {
    while (*at_ == ' ' || *at_ == '\n' || *at_ == '\t') ++at_;
  }
  std::string word(const char* more) {
    const char* start = at_;
    while (std::isalnum(*at_) || *at_ == '_' || (*at_ != 0 && std::strchr(more, *at_))) ++at_;
    return std::string(start, at_);
  }
  Argument primary();
  Argument argument();
  void declare();
};

class Frame {
 public:
  const Instruction* instruction;
  const Operand* operands;
  int operand_count;
  uint64 registers[192];
  int jump = -1;
  const Instructions* code;

  const Argument& argument(int i) const { return instruction->arguments[i]; }
  std::size_t arguments() const { return instruction->arguments.size(); }
  const char* name() const { return instruction->opcode.c_str(); }

  uint64 get(const Argument& a) const {
    if (a.kind == Argument::kRegister) return registers[a.number];
    if (a.kind == Argument::kImmediate) return a.value;
    if (a.kind == Argument::kMemory) {
      uint64 sum = 0;
      for (const Argument& part : a.parts) sum += get(part);
      return sum;
    }
    if (a.kind == Argument::kSpecial) {
      if (a.name == "laneid") return current->lane;
      if (a.name == "tid.x") return current->place.thread.x;
      if (a.name == "ctaid.x") return current->place.block.x;
    }
    fail("ptx: %s: an operand that has no value", name());
  }
  uint64 get(int i) const { return get(argument(i)); }
  uint32 get32(int i) const { return static_cast<uint32>(get(i)); }
  float get_float(int i) const { return __builtin_bit_cast(float, get32(i)); }

  void set(const Argument& a, uint64 bits) {
    if (a.kind == Argument::kSink) return;
    if (a.kind != Argument::kRegister) fail("ptx: %s: an operand that cannot be written", name());
    registers[a.number] = bits;
    if (a.number < operand_count) {
      const Operand& operand = operands[a.number];
      if (operand.target == nullptr) fail("ptx: %s writes an input", name());
      std::memcpy(operand.target, &bits, operand.bytes);
    }
  }
  void set(int i, uint64 bits) { set(argument(i), bits); }
  void set_float(int i, float value) { set(i, __builtin_bit_cast(uint32, value)); }

  // A list's parts, or the operand itself.
  std::vector<const Argument*> list(int i) const {
    std::vector<const Argument*> result;
    const Argument& a = argument(i);
    if (a.kind != Argument::kList) return {&a};
    for (const Argument& part : a.parts) result.push_back(&part);
    return result;
  }
};

namespace {
void (*find(const std::string& opcode))(Frame&);
}

Instructions::Instructions(const char* ptx, int operands) : registers(operands), at_(ptx) {
  for (skip_space(); *at_ != 0; skip_space()) {
    if (*at_ == '{' || *at_ == '}' || *at_ == ';') {
      ++at_;
      continue;
    }
    Instruction instruction;
    if (*at_ == '@') {
      ++at_;
      instruction.guard_is = *at_ != '!';
      if (!instruction.guard_is) ++at_;
      instruction.guard = primary().number;
      skip_space();
    }
    instruction.opcode = word(".:");
    if (instruction.opcode.empty()) fail("ptx: cannot read %s", at_);
    if (instruction.opcode.back() == ':') {
      instruction.opcode.pop_back();
      labels[instruction.opcode] = static_cast<int>(list.size());
      continue;
    }
    if (instruction.opcode == ".reg") {
      declare();
      continue;
    }
    instruction.execute = find(instruction.opcode);
    for (skip_space(); *at_ != ';' && *at_ != 0; skip_space()) {
      instruction.arguments.push_back(argument());
      skip_space();
      if (*at_ == ',') ++at_;
    }
    list.push_back(std::move(instruction));
  }
  if (registers > 192) fail("ptx: too many registers in %s", ptx);
}

void Instructions::declare() {  // .reg .b32 x, y;
  skip_space();
  const bool predicate = word(".") == ".pred";
  while (*at_ != ';') {
    skip_space();
    locals_[word("")] = {registers++, predicate};
    skip_space();
    if (*at_ == ',') ++at_;
  }
}

Argument Instructions::primary() {
  skip_space();
  Argument result{Argument::kRegister};
  if (*at_ == '{' || *at_ == '[') {
    const bool memory = *at_ == '[';
    result.kind = memory ? Argument::kMemory : Argument::kList;
    ++at_;
    for (skip_space(); *at_ != '}' && *at_ != ']'; skip_space()) {
      if (*at_ == 0) fail("ptx: a bracket is not closed");
      result.parts.push_back(primary());
      skip_space();
      if (*at_ == ',' || *at_ == '+') ++at_;
    }
    ++at_;
  } else if (*at_ == '%' && at_[1] == '%') {
    at_ += 2;
    result.kind = Argument::kSpecial;
    result.name = word(".");
  } else if (*at_ == '%') {
    ++at_;
    result.number = std::stoi(word(""));
  } else if (std::isdigit(*at_) || *at_ == '-') {
    const bool negative = *at_ == '-';
    if (negative) ++at_;
    std::string digits = word("");
    const bool is_unsigned = digits.back() == 'U' || digits.back() == 'u';
    if (is_unsigned) digits.pop_back();
    result.kind = Argument::kImmediate;
    result.value = std::stoull(digits, nullptr, 0);
    if (negative) result.value = -result.value;
  } else {
    const std::string name = word("");
    const auto local = locals_.find(name);
    if (name == "_") {
      result.kind = Argument::kSink;
    } else if (local != locals_.end()) {
      result.number = local->second.number;
      result.predicate = local->second.predicate;
    } else {  // a label, perhaps
      result.kind = Argument::kSpecial;
      result.name = name;
    }
  }
  return result;
}

Argument Instructions::argument() {
  Argument first = primary();
  skip_space();
  if (*at_ != '|') return first;
  ++at_;
  Argument pair{Argument::kList};
  pair.parts = {first, primary()};
  return pair;
}

void run(Code& code, std::initializer_list<Operand> operands) {
  if (code.parsed == nullptr) {
    code.parsed = new Instructions(code.ptx, static_cast<int>(operands.size()));
  }
  const Instructions& instructions = *code.parsed;
  Frame frame;
  frame.operands = operands.begin();
  frame.operand_count = static_cast<int>(operands.size());
  frame.code = &instructions;
  for (int i = 0; i < frame.operand_count; ++i) frame.registers[i] = frame.operands[i].bits;
  for (std::size_t at = 0; at < instructions.list.size();) {
    const Instruction& instruction = instructions.list[at++];
    if (instruction.guard >= 0 &&
        (frame.registers[instruction.guard] != 0) != instruction.guard_is) {
      continue;
    }
    frame.instruction = &instruction;
    frame.jump = -1;
    instruction.execute(frame);
    if (frame.jump >= 0) at = static_cast<std::size_t>(frame.jump);
  }
}

namespace {

// ---- numbers -----------------------------------------------------------------------------------

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float from_bfloat16(uint32 bits) { return __builtin_bit_cast(float, bits << 16); }
uint32 to_bfloat16(float x) {
  uint32 bits = __builtin_bit_cast(uint32, x);
  if (std::isnan(x)) return 0x7fff;
  bits += 0x7fff + (bits >> 16 & 1);
  return bits >> 16;
}
float compute_float16(uint32 bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  float x;
  if (exponent == 31) {
    x = fraction != 0 ? NAN : INFINITY;
  } else {
    x = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                      : std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  }
  return bits & 0x8000 ? -x : x;
}
struct Float16Table {
  float values[0x10000];
  Float16Table() {
    for (uint32 bits = 0; bits < 0x10000; ++bits) values[bits] = compute_float16(bits);
  }
};
const Float16Table float16_table;
float from_float16(uint32 bits) { return float16_table.values[bits & 0xffff]; }
uint32 to_float16(double x) {
  const uint32 sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  x = std::fabs(x);
  if (x == 0) return sign;
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent, -13);
  const double steps = std::nearbyint(std::ldexp(x, 11 - exponent));
  if (exponent > 16 || std::ldexp(steps, exponent - 11) > 65504) return sign | 0x7c00;
  return sign | ((exponent + 13) * 0x400 + static_cast<uint32>(steps));
}

template <class Function>
uint32 by_halves(const Function& function) {
  return (function(0) & 0xffff) | function(16) << 16;
}

void convert_bfloat16(Frame& f, bool relu) {
  const auto one = [&](int i) {
    const float x = f.get_float(i);
    return relu && (x < 0 || x == 0) ? 0 : to_bfloat16(x);
  };
  f.set(0, one(1) << 16 | one(2));
}
void convert_float16(Frame& f, bool relu) {
  const auto one = [&](int i) {
    const float x = f.get_float(i);
    return relu && (x < 0 || x == 0) ? 0 : to_float16(x);
  };
  f.set(0, one(1) << 16 | one(2));
}
template <float (*kFrom)(uint32), class To>
void fma_halves(Frame& f, const To& to) {
  f.set(0, by_halves([&](int shift) -> uint32 {
          const auto x = [&](int i) { return double{kFrom(f.get32(i) >> shift & 0xffff)}; };
          return to(x(1) * x(2) + x(3));
        }));
}
template <class Compare>
void compare_halves(Frame& f, const Compare& compare, bool as_mask) {
  const auto half = [&](int shift) {
    return compare(from_float16(f.get32(1) >> shift & 0xffff),
                   from_float16(f.get32(2) >> shift & 0xffff));
  };
  if (as_mask) {
    f.set(0, (half(0) ? 0xffffu : 0) | (half(16) ? 0xffff0000u : 0));
  } else {
    const auto results = f.list(0);
    f.set(*results[0], half(0));
    f.set(*results[1], half(16));
  }
}
bool less(float x, float y) { return x < y; }
bool greater_or_unordered(float x, float y) { return !(x <= y); }

// ---- plain memory ------------------------------------------------------------------------------

// Bytes of an element, from the opcode's last part.
uint32 element_bytes(const Frame& f) {
  const std::string& opcode = f.instruction->opcode;
  return static_cast<uint32>(std::stoi(opcode.substr(opcode.rfind('.') + 2))) / 8;
}
void load_from(Frame& f, const unsigned char* memory, uint32 bytes) {
  for (const Argument* to : f.list(0)) {
    uint64 bits = 0;
    std::memcpy(&bits, memory, bytes);
    memory += bytes;
    f.set(*to, bits);
  }
}
void store_to(Frame& f, unsigned char* memory, uint32 bytes) {
  for (const Argument* from : f.list(1)) {
    const uint64 bits = f.get(*from);
    std::memcpy(memory, &bits, bytes);
    memory += bytes;
  }
}
void load_shared(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(0).size());
  load_from(f, current->block->shared(f.get32(1), all, all, f.name()), bytes);
}
void store_shared(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(1).size());
  current->block->shared(f.get32(0), all, all, f.name());
  store_to(f, current->block->written(f.get32(0), all, f.name()), bytes);
}
// Addresses of a cluster have the CTA's number in it, from 1 on, in the bits above these.
constexpr int kCtaShift = 24;
void map_to_cluster(Frame& f) {
  const uint32 cta = f.get32(2);
  if (cta >= current->block->cluster->blocks.size()) fail("%s: there is no CTA %u", f.name(), cta);
  f.set(0, f.get32(1) | (cta + 1) << kCtaShift);
}
// [destination], values, [barrier], both of one CTA of the cluster.
void store_async(Frame& f) {
  const uint32 bytes = element_bytes(f), all = bytes * static_cast<uint32>(f.list(1).size());
  const uint32 address = f.get32(0), barrier = f.get32(2), cta = address >> kCtaShift;
  if (cta == 0 || barrier >> kCtaShift != cta) {
    fail("%s: the place and the mbarrier are not in one CTA of the cluster", f.name());
  }
  constexpr uint32 kOwn = (1u << kCtaShift) - 1;
  Block* block = current->block->cluster->blocks[cta - 1];
  if (block->running == 0) fail("%s: CTA %u of the cluster has ended", f.name(), cta - 1);
  block->shared(address & kOwn, all, all, f.name());
  block->barrier(barrier & kOwn, f.name());
  std::vector<unsigned char> values(all);
  store_to(f, values.data(), bytes);
  const char* name = f.name();
  const Action action = [=] {
    std::memcpy(block->overwritten(address & kOwn, all, name), values.data(), all);
    block->complete_bytes(barrier & kOwn, all, name);
  };
  if (may_happen_early() && happens_early()) return action();
  block->in_flight.push_back(action);
}
void arrive_in_cluster(Frame& f) {
  Cluster& cluster = *current->block->cluster;
  if (current->arrived) fail("%s: a second time without a wait", f.name());
  current->arrived = true;
  current->arrived_phase = cluster.phase;
  ++cluster.arrived;
  cluster.settle();
}
void wait_for_cluster(Frame& f) {
  Cluster& cluster = *current->block->cluster;
  if (!current->arrived) fail("%s: without an arrival", f.name());
  current->arrived = false;
  if (cluster.phase != current->arrived_phase) return;
  cluster.waiting.push_back(current);
  wait("barrier.cluster");
}
unsigned char* global(const Frame& f, int i, uint32 bytes, uint32 alignment) {
  auto* memory = reinterpret_cast<unsigned char*>(f.get(i));
  check_global(memory, bytes, alignment, f.name());
  return memory;
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
  for (const Argument* value : values) {
    *target++ += __builtin_bit_cast(float, static_cast<uint32>(f.get(*value)));
  }
  note_progress();
}

// ---- cp.async ----------------------------------------------------------------------------------

// [destination], [source], bytes (, bytes to copy or a predicate that says to copy none).
void copy_async(Frame& f) {
  const uint32 destination = f.get32(0), bytes = f.get32(2);
  const uint64 source = f.get(1);
  uint32 copied = bytes;
  if (f.arguments() > 3) {
    copied = f.argument(3).predicate ? (f.get(3) != 0 ? 0 : bytes) : f.get32(3);
  }
  if (copied > bytes) fail("%s: %u of %u bytes", f.name(), copied, bytes);
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("%s: %u bytes", f.name(), bytes);
  current->block->shared(destination, bytes, bytes, f.name());
  if (source % bytes != 0) fail("%s: the source is not a multiple of %u", f.name(), bytes);
  const char* name = f.name();
  Action action = [=] {
    unsigned char* target = current->block->written(destination, bytes, name);
    const auto* from = reinterpret_cast<const unsigned char*>(source);
    if (copied > 0) check_global(from, copied, 1, name);
    std::memset(target, 0, bytes);
    if (copied > 0) std::memcpy(target, from, copied);
  };
  if (happens_early()) return action();
  current->copies.open.push_back(std::move(action));
}

// [barrier]: an arrival when this thread's copies so far have taken place, which then do so by
// themselves; no wait_group of the thread counts them any more.
void arrive_after_copies(Frame& f) {
  Thread* thread = current;
  Groups& copies = thread->copies;
  copies.commit();
  const auto groups = std::move(copies.committed);
  copies.committed.clear();
  const uint32 barrier = f.get32(0);
  thread->block->barrier(barrier, f.name());
  const char* name = f.name();
  start_copy([=] {
    Thread* const other = current;
    current = thread;
    for (const auto& group : groups) {
      for (const Action& action : group) action();
    }
    current = other;
    thread->block->arrive(barrier, 1, name);
  });
}

// ---- mbarriers ---------------------------------------------------------------------------------

void init_barrier(Frame& f) {
  Block& block = *current->block;
  block.shared(f.get32(0), 8, 8, f.name());
  const auto count = static_cast<int>(f.get32(1));
  if (count < 1) fail("%s: %d arrivals", f.name(), count);
  const auto old = block.barriers.find(f.get32(0));
  if (old != block.barriers.end() && !old->second.waiting.empty()) {
    fail("%s: threads wait at the mbarrier", f.name());
  }
  block.barriers[f.get32(0)] = {count, count, 0, 0, {}};
}
void arrive(Frame& f) {  // _, [barrier] (, count)
  current->block->arrive(f.get32(1), f.arguments() > 2 ? static_cast<int>(f.get32(2)) : 1,
                         f.name());
}
void expect(Frame& f) {  // [barrier], bytes
  current->block->barrier(f.get32(0), f.name()).bytes += f.get32(1);
}
void arrive_expect(Frame& f) {  // _, [barrier], bytes
  current->block->barrier(f.get32(1), f.name()).bytes += f.get32(2);
  current->block->arrive(f.get32(1), 1, f.name());
}
void test_barrier(Frame& f) {  // done, [barrier], parity
  const MemoryBarrier& barrier = current->block->barrier(f.get32(1), f.name());
  // Who asks again and again lets others go on.
  const bool asks_again = ++current->tests % 8 == 0;
  if (barrier.phase == (f.get32(2) & 1) && (asks_again || happens_early())) poll(f.name());
  f.set(0, barrier.phase != (f.get32(2) & 1));
}
void wait_until(Frame& f) {  // done, [barrier], parity
  current->block->barrier(f.get32(1), f.name());
  wait_barrier(f.get32(1), f.get32(2) & 1);
  f.set(0, 1);
}

// ---- TMA ---------------------------------------------------------------------------------------

const FakeMap& tensor_map(const Frame& f, uint64 address) {
  if (address % 64 != 0) fail("%s: the tensor map is not a multiple of 64", f.name());
  const auto& map = *reinterpret_cast<const FakeMap*>(address);
  if (map.address == nullptr) fail("%s: an empty tensor map", f.name());
  return map;
}

// Visits the pieces of a box that lie side by side in both memories: their place in the box in
// bytes, the element of the array or null, elements.
struct Box {
  const FakeMap* map;
  int start[4];
  uint32 element() const { return map->type == jax_flash::kTensorFloat32 ? 4 : 2; }  // bytes
  uint32 bytes() const { return element() * map->box[0] * map->box[1] * map->box[2] * map->box[3]; }
};
Box box_of(const Frame& f, const Argument& memory) {
  if (memory.parts.size() != 2 || memory.parts[1].parts.size() != 4) {
    fail("%s: a map and four coordinates are needed", f.name());
  }
  Box box{&tensor_map(f, f.get(memory.parts[0])), {}};
  bool inside = true;
  for (int i = 0; i < 4; ++i) {
    box.start[i] = static_cast<int>(f.get(memory.parts[1].parts[i]));
    inside = inside && box.start[i] > -static_cast<std::int64_t>(box.map->box[i]) &&
             (i == 0 || i == 2 || box.start[i] < static_cast<std::int64_t>(box.map->dims[i]));
  }
  if (!inside) {
    fail(
        "%s: the box at column %d, head %d, row %d, batch %d lies outside of [%llu, %llu, %llu, "
        "%llu]",
        f.name(), box.start[0], box.start[1], box.start[2], box.start[3],
        static_cast<unsigned long long>(box.map->dims[3]),
        static_cast<unsigned long long>(box.map->dims[2]),
        static_cast<unsigned long long>(box.map->dims[1]),
        static_cast<unsigned long long>(box.map->dims[0]));
  }
  return box;
}
template <class Visit>
void visit_chunks(const Box& box, uint32 shared, const Visit& visit) {
  const FakeMap& map = *box.map;
  const uint32 size = box.element(), each = kChunk / size, chunks = map.box[0] / each;
  for (uint32 row = 0; row < map.box[2]; ++row) {
    for (uint32 head = 0; head < map.box[1]; ++head) {
      for (uint32 chunk = 0; chunk < chunks; ++chunk) {
        uint32 at = shared + ((row * map.box[1] + head) * chunks + chunk) * kChunk;
        if (map.swizzle == 3) at ^= (at >> 7 & 7) << 4;
        const std::int64_t c[4] = {box.start[0] + chunk * each, box.start[1] + head,
                                   box.start[2] + row, box.start[3]};
        const auto dims = [&](int i) { return static_cast<std::int64_t>(map.dims[i]); };
        bool inside = true;
        for (int i = 0; i < 4; ++i) inside = inside && c[i] >= 0 && c[i] < dims(i);
        const std::int64_t elements = inside ? std::min<std::int64_t>(dims(0) - c[0], each) : 0;
        auto* data = static_cast<unsigned char*>(map.address) + size * c[0] +
                     c[1] * map.strides[0] + c[2] * map.strides[1] + c[3] * map.strides[2];
        visit(at, data, static_cast<uint32>(size * elements));
      }
    }
  }
}
uint32 box_alignment(const Box& box) { return box.map->swizzle == 0 ? 16 : 128; }

// [destination], [map, {coordinates}], [barrier] (, policy)
void load_box(Frame& f) {
  const Box box = box_of(f, f.argument(1));
  const uint32 destination = f.get32(0), barrier = f.get32(2);
  Block* block = current->block;
  block->shared(destination, box.bytes(), box_alignment(box), f.name());
  block->barrier(barrier, f.name());
  const char* name = f.name();
  start_copy([=] {
    visit_chunks(box, destination, [&](uint32 at, const unsigned char* data, uint32 bytes) {
      unsigned char* target = block->overwritten(at, kChunk, name);
      std::memset(target, 0, kChunk);
      std::memcpy(target, data, bytes);
    });
    block->complete_bytes(barrier, box.bytes(), name);
  });
}
// [destination], [source], bytes, [barrier]
void load_bulk(Frame& f) {
  const uint32 destination = f.get32(0), bytes = f.get32(2), barrier = f.get32(3);
  Block* block = current->block;
  if (bytes % 16 != 0 || bytes == 0) fail("%s: %u bytes", f.name(), bytes);
  block->shared(destination, bytes, 16, f.name());
  block->barrier(barrier, f.name());
  const unsigned char* source = global(f, 1, bytes, 16);
  const char* name = f.name();
  start_copy([=] {
    std::memcpy(block->overwritten(destination, bytes, name), source, bytes);
    block->complete_bytes(barrier, bytes, name);
  });
}
// [map, {coordinates}], [source]
void store_box(Frame& f) {
  const Box box = box_of(f, f.argument(0));
  const uint32 source = f.get32(1);
  Block* block = current->block;
  block->shared(source, box.bytes(), box_alignment(box), f.name());
  const char* name = f.name();
  Action action = [=] {
    visit_chunks(box, source, [&](uint32 at, unsigned char* data, uint32 bytes) {
      if (bytes > 0) std::memcpy(data, block->read_async(at, kChunk, name), bytes);
    });
  };
  if (happens_early()) {
    action();
    action = [] {};
  }
  current->bulk.open.push_back(std::move(action));
}

// ---- wgmma -------------------------------------------------------------------------------------

// The operand that a descriptor tells of: where element (i, k) lies, i a row of a or a column of b.
class Matrix {
 public:
  Matrix(uint64 bits, bool transposed)
      : start_(static_cast<uint32>(bits & 0x3fff) * 16),
        leading_(static_cast<uint32>(bits >> 16 & 0x3fff) * 16),
        stride_(static_cast<uint32>(bits >> 32 & 0x3fff) * 16),
        width_(bits >> 62 == 1   ? 128
               : bits >> 62 == 2 ? 64
               : bits >> 62 == 3 ? 32
                                 : 16),
        transposed_(transposed) {
    if (bits >> 49 & 7) fail("wgmma: a descriptor with a base offset");
  }
  // Of 16 bytes: elements k to k + 7 of i, or i to i + 7 of k if transposed.
  uint32 chunk(uint32 i, uint32 k) const {
    uint32 at = start_;
    if (!transposed_) {
      at += i / 8 * stride_ + i % 8 * width_;
      at += width_ == 16 ? k / 8 * leading_ : k * 2;
    } else if (width_ == 16) {
      at += i / 8 * stride_ + k / 8 * leading_ + k % 8 * 16;
    } else {
      const uint32 columns = width_ / 2;
      at += i / columns * leading_ + i % columns * 2 + k / 8 * stride_ + k % 8 * width_;
    }
    return at ^ ((at >> 7 & (width_ / 16 - 1)) << 4);
  }
  // elements[k][i] of `count` from `first` on.
  template <float (*kFrom)(uint32)>
  void read(uint32 first, uint32 count, float* elements, uint32 pitch) const {
    Block& block = *current->block;
    for (uint32 a = 0; a < (transposed_ ? 16 : count); ++a) {
      for (uint32 b = 0; b < (transposed_ ? count : 16); b += 8) {
        const uint32 at = transposed_ ? chunk(first + b, a) : chunk(first + a, b);
        std::uint16_t bits[8];
        std::memcpy(bits, block.read_async(at, 16, "wgmma"), 16);
        for (uint32 j = 0; j < 8; ++j) {
          const float x = kFrom(bits[j]);
          (transposed_ ? elements[a * pitch + b + j] : elements[(b + j) * pitch + a]) = x;
        }
      }
    }
  }

 private:
  uint32 start_, leading_, stride_, width_;
  bool transposed_;
};

// 16 rows of one product, those of a warp, whose lanes are all there.
template <float (*kFrom)(uint32)>
void multiply(const Product* (&lanes)[32], Accumulators* (&sums_of)[32], uint32 warp) {
  const Product& first = *lanes[0];
  const auto columns = static_cast<uint32>(first.columns);
  static float a[16][16], b[16][256], sums[16][256];
  if (first.a_in_registers) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i / 4 * 8 + i % 2;
        a[k][row] = kFrom(lanes[lane]->registers[i / 2] >> i % 2 * 16 & 0xffff);
      }
    }
  } else {
    Matrix(first.a, first.a_transposed).read<kFrom>(warp % 4 * 16, 16, a[0], 16);
  }
  Matrix(first.b, first.b_transposed).read<kFrom>(0, columns, b[0], 256);
  const auto element = [&](int lane, uint32 i) -> float& {
    return sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (uint32 i = 0; i < columns / 2; ++i) {
      element(lane, i) = first.accumulates ? sums_of[lane]->values[i] : 0.0f;
    }
  }
  for (uint32 row = 0; row < 16; ++row) {
    for (uint32 k = 0; k < 16; ++k) {
      const float x = a[k][row];
      for (uint32 i = 0; i < columns; ++i) sums[row][i] += x * b[k][i];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (uint32 i = 0; i < columns / 2; ++i) sums_of[lane]->values[i] = element(lane, i);
  }
}

// Computes a warp's i-th group in flight.
void compute_group(Thread* (&lanes)[32], std::size_t group) {
  Block& block = *current->block;
  const uint32 warp = current->place.thread.x / 32;
  const auto of = [&](int lane) -> ProductGroup& { return lanes[lane]->groups[group]; };
  if (of(0).computed) return;
  for (std::size_t i = 0; i < of(0).products.size(); ++i) {
    const Product* products[32];
    Accumulators* sums[32];
    for (int lane = 0; lane < 32; ++lane) {
      if (of(lane).products.size() != of(0).products.size()) {
        fail("wgmma: lanes of a warp have issued different numbers of products");
      }
      products[lane] = &of(lane).products[i];
      sums[lane] = &lanes[lane]->accumulators.at(products[lane]->accumulators);
      if (!products[lane]->same_as(*products[0])) fail("wgmma: the operands differ in a warp");
    }
    const Product& first = *products[0];
    auto& issued = block.issued[warp / 4];
    const auto known = issued.try_emplace(first.number, Block::Issued{first, 0}).first;
    if (!known->second.product.same_as(first)) fail("wgmma: the operands differ in a warpgroup");
    if (++known->second.warps == 4) issued.erase(known);
    first.bfloat16 ? multiply<from_bfloat16>(products, sums, warp)
                   : multiply<from_float16>(products, sums, warp);
  }
  for (int lane = 0; lane < 32; ++lane) of(lane).computed = true;
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.TYPE.TYPE
//   {accumulators}, a or {a}, b, accumulates, scale a, scale b, (transposed a,) transposed b
void issue_product(Frame& f) {
  const std::string& opcode = f.instruction->opcode;
  Product product{};
  product.columns = std::stoi(opcode.substr(opcode.find(".m64n") + 5));
  product.bfloat16 = opcode.find(".bf16.bf16") != std::string::npos;
  if (!product.bfloat16 && opcode.find(".f16.f16") == std::string::npos) {
    fail("ptx: %s: of these types only f32 from bf16 or f16 is known", f.name());
  }
  const auto sums = f.list(0);
  product.a_in_registers = f.argument(1).kind == Argument::kList;
  if (static_cast<int>(sums.size()) * 2 != product.columns ||
      f.arguments() != (product.a_in_registers ? 7 : 8)) {
    fail("ptx: %s: wrong number of operands", f.name());
  }
  if (f.get32(4) != 1 || f.get32(5) != 1) fail("ptx: %s: a negated operand", f.name());
  if (product.a_in_registers) {
    const auto registers = f.list(1);
    if (registers.size() != 4) fail("ptx: %s: operand a has 4 registers", f.name());
    for (int i = 0; i < 4; ++i) product.registers[i] = static_cast<uint32>(f.get(*registers[i]));
  } else {
    product.a = f.get(1);
    product.a_transposed = f.get(6) != 0;
  }
  product.b = f.get(2);
  product.accumulates = f.get(3) != 0;
  product.b_transposed = f.get(product.a_in_registers ? 6 : 7) != 0;
  product.number = current->products_issued++;
  product.accumulators = static_cast<float*>(f.operands[sums[0]->number].target);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (f.operands[sums[i]->number].target != product.accumulators + i) {
      fail("ptx: %s: the accumulators are not one array", f.name());
    }
  }
  Accumulators& flying = current->accumulators[product.accumulators];
  if (flying.products++ == 0) {
    flying.values.assign(product.accumulators, product.accumulators + sums.size());
    // Nobody's until they are waited for.
    std::memset(product.accumulators, kFakeGarbage, sums.size() * sizeof(float));
  }
  current->open_products.push_back(product);
}
void commit_products(Frame& f) {
  current->groups.push_back({std::move(current->open_products), false});
  current->open_products.clear();
  if (!may_happen_early()) return;
  meet(0xffffffffu, f.name(), *current, [](Thread*(&lanes)[32]) {
    if (!happens_early()) return;
    for (std::size_t i = 0; i < lanes[0]->groups.size(); ++i) compute_group(lanes, i);
  });
}
void wait_products(Frame& f) {
  const std::size_t pending = f.get32(0);
  meet(0xffffffffu, f.name(), *current, [=](Thread*(&lanes)[32]) {
    for (Thread* lane : lanes) {
      if (lane->groups.size() != lanes[0]->groups.size()) {
        fail("wgmma: lanes of a warp have committed different numbers of groups");
      }
    }
    while (lanes[0]->groups.size() > pending) {
      compute_group(lanes, 0);
      for (Thread* lane : lanes) {
        for (const Product& product : lane->groups.front().products) {
          const auto flying = lane->accumulators.find(product.accumulators);
          if (--flying->second.products > 0) continue;
          std::copy(flying->second.values.begin(), flying->second.values.end(),
                    product.accumulators);
          lane->accumulators.erase(flying);
        }
        lane->groups.pop_front();
      }
    }
  });
}

// ---- matrices of a warp ------------------------------------------------------------------------

// Lane 4 r + c holds elements 2c and 2c + 1 of row r of 8 x 8.
std::uint16_t element_of(const uint32 (&registers)[32], int row, int column) {
  return static_cast<std::uint16_t>(registers[row * 4 + column / 2] >> column % 2 * 16);
}
struct Matrices {  // of one lane
  uint32 address;
  uint32 registers[4];
};
void transpose_matrix(Frame& f) {
  uint32 given = f.get32(1);
  meet(0xffffffffu, f.name(), given, [](uint32*(&all)[32]) {
    uint32 registers[32];
    for (int lane = 0; lane < 32; ++lane) registers[lane] = *all[lane];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      *all[lane] = element_of(registers, column, row) |
                   static_cast<uint32>(element_of(registers, column + 1, row)) << 16;
    }
  });
  f.set(0, given);
}
// stmatrix and ldmatrix, x1 to x4: lane 8 m + r has the address of row r of matrix m.
void move_matrices(Frame& f, bool stores) {
  const bool transposed = f.instruction->opcode.find(".trans") != std::string::npos;
  const auto registers = f.list(stores ? 1 : 0);
  const auto count = static_cast<int>(registers.size());
  Matrices given{f.get32(stores ? 0 : 1), {}};
  if (stores) {
    for (int i = 0; i < count; ++i) given.registers[i] = static_cast<uint32>(f.get(*registers[i]));
  }
  const char* name = f.name();
  meet(0xffffffffu, name, given, [=](Matrices*(&all)[32]) {
    Block& block = *current->block;
    for (int m = 0; m < count; ++m) {
      for (int row = 0; row < 8; ++row) {
        const uint32 address = all[8 * m + row]->address;
        unsigned char* memory = block.shared(address, 16, 16, name);
        if (stores) block.written(address, 16, name);
        for (int column = 0; column < 8; ++column) {
          const int r = transposed ? column : row, c = transposed ? row : column;
          uint32& held = all[r * 4 + c / 2]->registers[m];
          const int shift = c % 2 * 16;
          std::uint16_t bits = static_cast<std::uint16_t>(held >> shift);
          if (stores) {
            std::memcpy(memory + 2 * column, &bits, 2);
          } else {
            std::memcpy(&bits, memory + 2 * column, 2);
            held = (held & ~(0xffffu << shift)) | static_cast<uint32>(bits) << shift;
          }
        }
      }
    }
  });
  if (!stores) {
    for (int i = 0; i < count; ++i) f.set(*registers[i], given.registers[i]);
  }
}

// mma.sync.aligned.m16n8kK.row.col.f32.TYPE.TYPE.f32 {d}, {a}, {b}, {c}, K 8 or 16.
template <float (*kFrom)(uint32)>
void multiply_in_warp(Frame& f) {
  struct Given {
    uint32 a[4], b[2];
    float c[4];
  } given{};
  const auto a = f.list(1), b = f.list(2), c = f.list(3), d = f.list(0);
  if (a.size() != 2 * b.size() || a.size() > 4 || c.size() != 4 || d.size() != 4) {
    fail("ptx: %s: wrong number of operands", f.name());
  }
  for (std::size_t i = 0; i < a.size(); ++i) given.a[i] = static_cast<uint32>(f.get(*a[i]));
  for (std::size_t i = 0; i < b.size(); ++i) given.b[i] = static_cast<uint32>(f.get(*b[i]));
  for (int i = 0; i < 4; ++i) {
    given.c[i] = __builtin_bit_cast(float, static_cast<uint32>(f.get(*c[i])));
  }
  const int depth = static_cast<int>(8 * b.size());
  meet(0xffffffffu, f.name(), given, [=](Given*(&all)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = all[lane]->c[i];
        for (int k = 0; k < depth; ++k) {
          const Given& of_a = *all[row % 8 * 4 + k % 8 / 2];
          const Given& of_b = *all[column * 4 + k % 8 / 2];
          sum += kFrom(of_a.a[row / 8 + k / 8 * 2] >> k % 2 * 16 & 0xffff) *
                 kFrom(of_b.b[k / 8] >> k % 2 * 16 & 0xffff);
        }
        all[lane]->c[i] = sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) f.set(*d[i], __builtin_bit_cast(uint32, given.c[i]));
}

// ---- the table ---------------------------------------------------------------------------------

void nothing(Frame&) {}
void named_barrier(Frame& f, bool waits) {
  const auto count =
      f.arguments() > 1 ? f.get32(1) : static_cast<uint32>(current->block->threads.size());
  if (count % 32 != 0 || count == 0) fail("%s: %u threads", f.name(), count);
  current->block->named_barrier(static_cast<int>(f.get32(0)), static_cast<int>(count), waits,
                                false);
}

// An opcode; with a star, all that begin so.
const std::map<std::string, void (*)(Frame&)> kInstructions = {
    // Registers.
    {"mov.u32", [](Frame& f) { f.set(0, f.get(1)); }},
    {"mov.b32", [](Frame& f) { f.set(0, f.get(1)); }},
    {"mov.b64",
     [](Frame& f) {
       const auto halves = f.list(1);
       f.set(0, halves.size() == 2 ? f.get(*halves[0]) | f.get(*halves[1]) << 32 : f.get(1));
     }},
    {"setp.eq.u32", [](Frame& f) { f.set(0, f.get32(1) == f.get32(2)); }},
    {"setp.ne.b32", [](Frame& f) { f.set(0, f.get32(1) != f.get32(2)); }},
    {"setp.ne.u32", [](Frame& f) { f.set(0, f.get32(1) != f.get32(2)); }},
    {"selp.u32", [](Frame& f) { f.set(0, f.get(3) != 0 ? f.get(1) : f.get(2)); }},
    {"selp.b32", [](Frame& f) { f.set(0, f.get(3) != 0 ? f.get(1) : f.get(2)); }},
    {"bra", [](Frame& f) { f.jump = f.code->labels.at(f.argument(0).name); }},
    {"bmsk.clamp.b32",
     [](Frame& f) {
       const uint32 first = std::min(f.get32(1), 32u), count = std::min(f.get32(2), 32u);
       f.set(0, static_cast<uint32>(((1ull << count) - 1) << first));
     }},
    {"prmt.b32",
     [](Frame& f) {
       const uint64 both = f.get(2) << 32 | f.get32(1);
       uint32 result = 0;
       for (int i = 0; i < 4; ++i) {
         const uint32 selector = f.get32(3) >> 4 * i & 15;
         const uint32 byte = both >> 8 * (selector & 7) & 0xff;
         result |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
       }
       f.set(0, result);
     }},
    {"setmaxnreg*", nothing},
    // Numbers.
    {"ex2.approx.ftz.f32",
     [](Frame& f) { f.set_float(0, flushed(std::exp2(flushed(f.get_float(1))))); }},
    {"lg2.approx.ftz.f32", [](Frame& f) { f.set_float(0, std::log2(flushed(f.get_float(1)))); }},
    {"rcp.approx.ftz.f32",
     [](Frame& f) { f.set_float(0, flushed(1.0f / flushed(f.get_float(1)))); }},
    {"tanh.approx.f32", [](Frame& f) { f.set_float(0, std::tanh(f.get_float(1))); }},
    {"cvt.rn.bf16x2.f32", [](Frame& f) { convert_bfloat16(f, false); }},
    {"cvt.rn.relu.bf16x2.f32", [](Frame& f) { convert_bfloat16(f, true); }},
    {"cvt.rn.f16x2.f32", [](Frame& f) { convert_float16(f, false); }},
    {"cvt.rn.relu.f16x2.f32", [](Frame& f) { convert_float16(f, true); }},
    {"cvt.f32.f16", [](Frame& f) { f.set_float(0, from_float16(f.get32(1))); }},
    {"fma.rn.bf16x2",
     [](Frame& f) {
       fma_halves<from_bfloat16>(f, [](double x) { return to_bfloat16(static_cast<float>(x)); });
     }},
    {"fma.rn.f16x2", [](Frame& f) { fma_halves<from_float16>(f, to_float16); }},
    {"abs.f16x2", [](Frame& f) { f.set(0, f.get32(1) & 0x7fff7fff); }},
    {"set.lt.u32.f16x2", [](Frame& f) { compare_halves(f, less, true); }},
    {"set.gtu.u32.f16x2", [](Frame& f) { compare_halves(f, greater_or_unordered, true); }},
    {"setp.lt.f16x2", [](Frame& f) { compare_halves(f, less, false); }},
    {"setp.gtu.f16x2", [](Frame& f) { compare_halves(f, greater_or_unordered, false); }},
    // Memory.
    {"ld.shared.*", load_shared},
    {"mapa.shared::cluster.u32", map_to_cluster},
    {"st.shared.*", store_shared},
    {"st.async.shared::cluster.mbarrier::complete_tx::bytes.*", store_async},
    {"ld.global.*", load_global},
    {"ld.acquire.gpu.global.*", poll_global},
    {"ld.relaxed.gpu.global.*", poll_global},
    {"st.global.*", store_global},
    {"st.relaxed.gpu.global.*", store_global},
    {"st.release.gpu.global.*", store_global},
    {"red.relaxed.gpu.global.add.s32", add_int_global},
    {"red.release.gpu.global.add.s32", add_int_global},
    {"red.relaxed.gpu.global.add.f32", add_float_global},
    {"red.relaxed.gpu.global.add.v4.f32", add_float_global},
    {"fence.acq_rel.gpu", nothing},
    // Kernels run one after the other.
    {"griddepcontrol.launch_dependents", nothing},
    {"griddepcontrol.wait", nothing},
    {"prefetch.global.L2", nothing},
    {"cp.async.bulk.prefetch.tensor.4d.L2.global.tile", nothing},
    {"prefetch.tensormap", nothing},
    // cp.async.
    {"cp.async.ca.shared.global", copy_async},
    {"cp.async.cg.shared.global", copy_async},
    {"cp.async.commit_group", [](Frame&) { current->copies.commit(); }},
    {"cp.async.wait_group", [](Frame& f) { current->copies.wait(f.get32(0)); }},
    {"cp.async.wait_all",
     [](Frame&) {
       current->copies.commit();
       current->copies.wait(0);
     }},
    // Barriers.
    {"bar.sync", [](Frame& f) { named_barrier(f, true); }},
    {"bar.arrive", [](Frame& f) { named_barrier(f, false); }},
    {"cp.async.mbarrier.arrive.noinc.shared::cta.b64", arrive_after_copies},
    {"mbarrier.init.shared::cta.b64", init_barrier},
    {"mbarrier.arrive.shared::cta.b64", arrive},
    {"mbarrier.expect_tx.relaxed.cta.shared::cta.b64", expect},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", arrive_expect},
    {"mbarrier.test_wait.parity.shared::cta.b64", test_barrier},
    {"mbarrier.try_wait.parity.shared::cta.b64", wait_until},
    {"fence.mbarrier_init.release.cluster", nothing},
    {"barrier.cluster.arrive.relaxed", arrive_in_cluster},
    {"barrier.cluster.wait.acquire", wait_for_cluster},
    {"fence.proxy.async.shared::cta", [](Frame&) { current->fence(); }},
    // TMA and bulk copies.
    {"cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
     ".L2::cache_hint",
     load_box},
    {"cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group", store_box},
    {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", load_bulk},
    {"cp.async.bulk.commit_group", [](Frame&) { current->bulk.commit(); }},
    {"cp.async.bulk.wait_group.read", [](Frame& f) { current->bulk.wait(f.get32(0)); }},
    {"cp.async.bulk.wait_group", [](Frame& f) { current->bulk.wait(f.get32(0)); }},
    // Matrices.
    {"wgmma.fence.sync.aligned", nothing},
    {"wgmma.mma_async.sync.aligned.m64*", issue_product},
    {"wgmma.commit_group.sync.aligned", commit_products},
    {"wgmma.wait_group.sync.aligned", wait_products},
    {"movmatrix.sync.aligned.m8n8.trans.b16", transpose_matrix},
    {"stmatrix.sync.aligned.m8n8.*", [](Frame& f) { move_matrices(f, true); }},
    {"ldmatrix.sync.aligned.m8n8.*", [](Frame& f) { move_matrices(f, false); }},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", multiply_in_warp<from_bfloat16>},
    {"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", multiply_in_warp<from_bfloat16>},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", multiply_in_warp<from_float16>},
};

void (*find(const std::string& opcode))(Frame&) {
  const auto exact = kInstructions.find(opcode);
  if (exact != kInstructions.end()) return exact->second;
  for (const auto& [name, execute] : kInstructions) {
    const std::string start = name.substr(0, name.size() - 1);
    if (name.back() == '*' && opcode.compare(0, start.size(), start) == 0) return execute;
  }
  fail("ptx: tests/emulator/ptx.cc has no instruction %s", opcode.c_str());
}

}  // namespace
}  // namespace emulator
