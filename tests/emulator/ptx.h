// PTX as its parser leaves it: what the instructions of ptx_*.cc are executed on.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

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

// Arguments beside each other.
class List {
 public:
  List(const Argument* first, std::size_t size) : first_(first), size_(size) {}
  std::size_t size() const { return size_; }
  const Argument& operator[](std::size_t i) const { return first_[i]; }
  const Argument* begin() const { return first_; }
  const Argument* end() const { return first_ + size_; }

 private:
  const Argument* first_;
  std::size_t size_;
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
  List list(int i) const {
    const Argument& a = argument(i);
    return a.kind == Argument::kList ? List{a.parts.data(), a.parts.size()} : List{&a, 1};
  }
};

// An opcode, with a star all that begin so, and what it does to the operands.
using Table = std::map<std::string, void (*)(Frame&)>;
extern const Table kNumbers, kMemory, kAsynchronous, kProducts;

inline void nothing(Frame&) {}

// Bytes of an element, from the opcode's last part.
uint32 element_bytes(const Frame& f);
// Values that the first operand takes from memory, and that the second gives.
void load_from(Frame& f, const unsigned char* memory, uint32 bytes);
void store_to(Frame& f, unsigned char* memory, uint32 bytes);
// Global memory at an operand's address.
unsigned char* global(const Frame& f, int i, uint32 bytes, uint32 alignment);

}  // namespace emulator
