// PTX: the text of asm statements, parsed once and executed by each thread.
#include "ptx.h"

namespace emulator {

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

void (*find(const std::string& opcode))(Frame&) {
  const Table* const tables[] = {&kNumbers, &kMemory, &kAsynchronous, &kProducts};
  for (const Table* table : tables) {
    const auto exact = table->find(opcode);
    if (exact != table->end()) return exact->second;
  }
  for (const Table* table : tables) {
    for (const auto& [name, execute] : *table) {
      const std::string start = name.substr(0, name.size() - 1);
      if (name.back() == '*' && opcode.compare(0, start.size(), start) == 0) return execute;
    }
  }
  fail("ptx: tests/emulator has no instruction %s", opcode.c_str());
}

}  // namespace
}  // namespace emulator
