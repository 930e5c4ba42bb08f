#include "cuda/runtime/plan.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

// An element type, and what a tensor map has of it: its name in the driver, and bytes; 0: no map
// has such elements.
struct ElementType {
  std::string_view name;
  ffi::DataType type;
  CUtensorMapDataType in_map = {};
  std::int64_t bytes = 0;
};
constexpr ElementType kTypes[] = {
    {"f32", ffi::F32, kTensorFloat32, 4},
    {"f16", ffi::F16, kTensorFloat16, 2},
    {"bf16", ffi::BF16, kTensorBfloat16, 2},
    {"f8e4m3fn", ffi::F8E4M3FN, kTensorUint8, 1},
    {"s8", ffi::S8, kTensorUint8, 1},
    {"s32", ffi::S32},
    {"u32", ffi::U32},
    {"u16", ffi::U16},
    {"u8", ffi::U8},
    {"pred", ffi::PRED},
};

struct Operator {
  std::string_view text;
  Expression::Op op;
  int operands;
};
constexpr Operator kOperators[] = {
    {"+", Expression::kAdd, 2},       {"-", Expression::kSubtract, 2},
    {"*", Expression::kMultiply, 2},  {"/", Expression::kDivide, 2},
    {"%", Expression::kRemainder, 2}, {"ceil", Expression::kCeilDivide, 2},
    {"min", Expression::kMin, 2},     {"max", Expression::kMax, 2},
    {"==", Expression::kEqual, 2},    {"<=", Expression::kAtMost, 2},
    {"?", Expression::kWhere, 3},
};

constexpr std::int64_t kMostDepth = 16;  // of the stack of an expression

bool ToNumber(std::string_view word, std::int64_t* number) {
  const auto end = word.data() + word.size();
  const auto [rest, error] = std::from_chars(word.data(), end, *number);
  return error == std::errc() && rest == end;
}

// Words of a line, one after the other.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }
  std::string_view Next() {
    const std::size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return word;
  }
  // What comes before a mark, which is skipped; all without one.
  std::string_view Until(std::string_view mark) {
    const std::size_t end = std::min(rest_.find(mark), rest_.size());
    const std::string_view part = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + mark.size(), rest_.size()));
    return part;
  }

 private:
  std::string_view rest_;
};

class Reader {
 public:
  Result<Plan> Read(std::string_view text) {
    plan_.names = {"sms"};
    std::string_view rest = text;
    const auto next_line = [&rest] {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      const std::string_view line = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      return line;
    };
    const std::string first = "jax_flash plan " + std::to_string(kPlanVersion);
    if (next_line() != first) {
      return Failure{"this plan is of another version of jax_flash; expected \"" + first + "\""};
    }
    bool ended = false;
    while (!rest.empty() && !ended && failure_.empty()) {
      const std::string_view line = next_line();
      Words words(line);
      ended = line == "header";
      if (!ended) ReadLine(words.Next(), words);
      if (!failure_.empty()) failure_ += " in the line \"" + std::string(line) + "\"";
    }
    if (!ended) Fail("there is no end");
    if (plan_.none.tokens.empty()) Fail("there is no line \"none\"");
    if (plan_.programs.empty()) Fail("there is no program");
    for (Program& program : plan_.programs) program.header = rest;
    for (const PlanKernel& kernel : plan_.kernels) {
      if (kernel.program >= plan_.programs.size()) Fail("a launch is of no program");
    }
    if (!failure_.empty()) return Failure{"this plan is malformed: " + failure_};
    return std::move(plan_);
  }

 private:
  void Fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }

  void ReadLine(std::string_view kind, Words& words) {
    if (kind == "operand") {
      ReadBuffer(words, &plan_.operands);
    } else if (kind == "result") {
      ReadBuffer(words, &plan_.results);
    } else if (kind == "same") {
      const auto operand = static_cast<std::size_t>(Number(words, 0));
      const std::size_t result = Number(words, 0) - plan_.operands.size();
      if (operand >= plan_.operands.size() || result >= plan_.results.size()) {
        return Fail("no operand and result");
      }
      plan_.same.push_back({operand, result});
    } else if (kind == "let") {
      const int name = Bind(words.Next());
      Expression value = ReadExpression(words.rest(), name);
      plan_.lets.push_back({name, std::move(value)});
    } else if (kind == "none") {
      plan_.none = ReadExpression(words.rest());
    } else if (kind == "check") {
      Expression holds = ReadExpression(words.Until(" : "));
      plan_.checks.push_back({std::move(holds), std::string(words.rest())});
    } else if (kind == "scratch") {
      PlanScratch scratch;
      scratch.name = words.Next();
      scratch.type = Type(words.Next());
      while (!words.empty()) scratch.shape.push_back(ReadExpression(words.Until(", ")));
      plan_.scratch.push_back(std::move(scratch));
    } else if (kind == "params") {
      plan_.param_bytes = Number(words, 0);
      if (plan_.param_bytes > kMostParamBytes) Fail("too many parameters");
    } else if (kind == "launch") {
      ReadLaunch(words);
    } else if (kind == "zero") {
      PlanStep step{};
      step.kind = PlanStep::kZero;
      step.buffer = Buffer(words);
      step.count = ReadExpression(words.rest());
      plan_.steps.push_back(std::move(step));
    } else if (kind == "program") {
      Program program;
      program.source = words.Next();
      program.arch = words.Next();
      plan_.programs.push_back(std::move(program));
    } else {
      ReadField(kind, words);
    }
  }

  void ReadBuffer(Words& words, std::vector<PlanBuffer>* buffers) {
    PlanBuffer buffer;
    buffer.name = words.Next();
    for (Words types(words.Next()); !types.empty();) {
      buffer.types.push_back(Type(types.Until("|")));
    }
    buffer.spelled = words.rest();
    while (!words.empty()) {
      std::string_view word = words.Next();
      PlanDim dim;
      dim.leading = !word.empty() && word[0] == '*';
      if (dim.leading && !buffer.dims.empty()) return Fail("a leading dim is not the first");
      if (dim.leading) word.remove_prefix(1);
      const std::size_t colon = word.find(':');
      if (colon != word.npos) {
        dim.or_one_of = Find(word.substr(colon + 1));
        if (dim.or_one_of < 0) return Fail("a dim is not known");
        word = word.substr(0, colon);
      }
      if (!ToNumber(word, &dim.number)) {
        dim.number = -1;
        dim.name = Find(word);
        dim.binds = dim.name < 0;
        if (dim.binds) dim.name = Bind(word);
        if (!dim.binds && dim.or_one_of >= 0) return Fail("a dim has its name twice");
      } else if (dim.number < 0) {
        return Fail("a dim is negative");
      }
      buffer.dims.push_back(dim);
    }
    buffers->push_back(std::move(buffer));
  }

  void ReadLaunch(Words& words) {
    PlanStep step{};
    step.kind = PlanStep::kLaunch;
    PlanKernel kernel;
    kernel.entry = words.Next();
    kernel.program = Number(words, 0);
    step.threads = Number(words, 1);
    step.shared_bytes = Number(words, 0);
    step.cluster = Number(words, 1);
    step.overlaps = Number(words, 0) != 0;
    step.count = ReadExpression(words.rest());
    step.kernel = plan_.kernels.size();
    if (step.threads > 1024 || step.cluster > 8) Fail("a CTA or a cluster is too large");
    plan_.kernels.push_back(std::move(kernel));
    plan_.steps.push_back(std::move(step));
  }

  // Fields come ahead of the first step, or are steps.
  void ReadField(std::string_view kind, Words& words) {
    PlanField field{};
    field.offset = Number(words, 0);
    std::size_t bytes = 8;
    if (kind == "pointer") {
      field.kind = PlanField::kPointer;
      field.buffer = Buffer(words);
    } else if (kind == "int" || kind == "long") {
      field.kind = kind == "int" ? PlanField::kInt : PlanField::kLong;
      if (kind == "int") bytes = 4;
      field.value = ReadExpression(words.rest());
    } else if (kind == "map") {
      field.kind = PlanField::kMap;
      bytes = 128;
      ReadMap(words, &field);
    } else {
      return Fail("a line begins with an unknown word");
    }
    const std::size_t alignment = std::min<std::size_t>(bytes, 64);
    if (field.offset % alignment != 0 || field.offset > plan_.param_bytes ||
        bytes > plan_.param_bytes - field.offset) {
      return Fail("a parameter lies beside the others");
    }
    if (plan_.steps.empty()) {
      plan_.fields.push_back(std::move(field));
    } else if (field.kind == PlanField::kInt) {
      PlanStep step{};
      step.kind = PlanStep::kWrite;
      step.field = std::move(field);
      plan_.steps.push_back(std::move(step));
    } else {
      Fail("a step writes another parameter than an int");
    }
  }

  void ReadMap(Words& words, PlanField* field) {
    field->buffer = Buffer(words);
    PlanMap map;
    const ElementType& type = Element(words.Next());
    if (type.bytes == 0) Fail("no tensor map has such elements");
    map.type = type.in_map;
    map.bytes = type.bytes;
    map.box_rows = Number(words, 1);
    map.box_heads = Number(words, 1);
    map.box_batches = Number(words, 0);
    for (Expression& size : map.shape) size = ReadExpression(words.Until(", "));
    field->map = plan_.maps.size();
    plan_.maps.push_back(std::move(map));
  }

  std::int64_t Number(Words& words, std::int64_t least) {
    std::int64_t number = 0;
    if (!ToNumber(words.Next(), &number) || number < least || number > INT32_MAX) {
      Fail("a number is missing or out of range");
      return least;
    }
    return number;
  }

  int Buffer(Words& words) {
    const auto buffer = static_cast<std::size_t>(Number(words, 0));
    if (buffer >= plan_.operands.size() + plan_.results.size() + plan_.scratch.size()) {
      Fail("there is no such buffer");
      return 0;
    }
    return static_cast<int>(buffer);
  }

  ffi::DataType Type(std::string_view name) { return Element(name).type; }
  const ElementType& Element(std::string_view name) {
    for (const ElementType& type : kTypes) {
      if (type.name == name) return type;
    }
    Fail("there is no such element type");
    return kTypes[0];
  }

  int Find(std::string_view name) const {
    const auto found = std::find(plan_.names.begin(), plan_.names.end(), name);
    return found == plan_.names.end() ? -1 : static_cast<int>(found - plan_.names.begin());
  }
  int Bind(std::string_view name) {
    if (name.empty() || Find(name) >= 0) Fail("a name is empty or there is one twice");
    plan_.names.push_back(std::string(name));
    return static_cast<int>(plan_.names.size()) - 1;
  }

  // `own`: the name that is being given to it.
  Expression ReadExpression(std::string_view text, int own = -1) {
    Expression expression;
    std::int64_t depth = 0;
    for (Words words(text); !words.empty();) {
      const std::string_view word = words.Next();
      Expression::Token token{Expression::kNumber, 0};
      int taken = 0;
      for (const Operator& candidate : kOperators) {
        if (candidate.text == word) {
          token.op = candidate.op;
          taken = candidate.operands;
        }
      }
      if (taken == 0 && !ToNumber(word, &token.operand)) {
        token.op = Expression::kName;
        token.operand = Find(word);
        if (token.operand < 0 || token.operand == own) Fail("a name is not known");
      }
      if (depth < taken) Fail("an operand is missing");
      depth += 1 - taken;
      if (depth > kMostDepth) Fail("an expression is too deep");
      expression.tokens.push_back(token);
    }
    if (depth != 1) Fail("an expression has not one value");
    return expression;
  }

  Plan plan_;
  std::string failure_;
};

}  // namespace

Result<Plan> ReadPlan(std::string_view text) { return Reader().Read(text); }

Result<std::int64_t> Evaluate(const Expression& expression,
                              const std::vector<std::int64_t>& numbers) {
  std::int64_t stack[kMostDepth + 1];
  std::size_t depth = 0;
  for (const auto& [op, operand] : expression.tokens) {
    if (op == Expression::kNumber || op == Expression::kName) {
      stack[depth++] = op == Expression::kNumber ? operand : numbers[operand];
      continue;
    }
    if (op == Expression::kWhere) {
      depth -= 2;
      stack[depth - 1] = stack[depth - 1] != 0 ? stack[depth] : stack[depth + 1];
      continue;
    }
    const std::int64_t b = stack[--depth];
    std::int64_t& a = stack[depth - 1];
    bool beyond = false;
    switch (op) {
      case Expression::kAdd:
        beyond = __builtin_add_overflow(a, b, &a);
        break;
      case Expression::kSubtract:
        beyond = __builtin_sub_overflow(a, b, &a);
        break;
      case Expression::kMultiply:
        beyond = __builtin_mul_overflow(a, b, &a);
        break;
      case Expression::kMin:
        a = std::min(a, b);
        break;
      case Expression::kMax:
        a = std::max(a, b);
        break;
      case Expression::kEqual:
        a = a == b;
        break;
      case Expression::kAtMost:
        a = a <= b;
        break;
      default:  // a division
        if (b <= 0 || a < 0) return Failure{"a size is divided by " + std::to_string(b)};
        a = op == Expression::kRemainder ? a % b
            : op == Expression::kDivide  ? a / b
                                         : a / b + (a % b != 0);
    }
    if (beyond) return Failure{"a size is beyond 64 bits"};
  }
  return stack[0];
}

std::string_view NameOfType(ffi::DataType type) {
  for (const ElementType& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return "another type";
}

}  // namespace jax_flash
