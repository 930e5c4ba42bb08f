// Owns the reading of a plan: the text by which Python (jax_flash/_gpu/plan.py) tells what a custom
// call launches. A plan is read once, when a call first comes with its text, and checked whole:
// what is malformed, or of another version, is an error. Knows no attention. Read next:
// run_plan.cc.

#ifndef JAX_FLASH_CUDA_RUNTIME_PLAN_H_
#define JAX_FLASH_CUDA_RUNTIME_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/runtime/driver.h"
#include "cuda/runtime/jit.h"
#include "cuda/runtime/result.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

inline constexpr int kPlanVersion = 1;
inline constexpr std::size_t kMostParamBytes = 4096;  // that a kernel takes, on every GPU

// A whole number that follows from others, in reverse Polish notation.
struct Expression {
  enum Op : std::uint8_t {
    kNumber,  // operand: the number
    kName,    // operand: an index into the numbers by name
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,  // floor, of what is not negative
    kRemainder,
    kCeilDivide,
    kMin,
    kMax,
    kEqual,
    kAtMost,
    kWhere,  // a, or b where the condition in front of them is 0
  };
  struct Token {
    Op op;
    std::int64_t operand;
  };
  std::vector<Token> tokens;
};

// One dim of a buffer, or with `leading` the product of all dims before those that follow.
struct PlanDim {
  bool leading = false;
  std::int64_t number = -1;  // the dim; or -1, and
  int name = -1;             // an index into the numbers by name, and
  bool binds = false;        // this dim is that number; or else it has to be as much
  int or_one_of = -1;        // binds: it is 1, or as much as this other
};

struct PlanBuffer {
  std::string name;
  std::vector<xla::ffi::DataType> types;
  std::vector<PlanDim> dims;
  std::string spelled;  // the dims, for errors
};

struct PlanScratch {
  std::string name;
  xla::ffi::DataType type;
  std::vector<Expression> shape;
};

struct PlanCheck {
  Expression holds;
  std::string text;
};

struct PlanName {
  int name;
  Expression value;
};

// What is written among the parameters.
struct PlanField {
  enum Kind : std::uint8_t { kPointer, kInt, kLong, kMap };
  Kind kind;
  std::size_t offset;
  int buffer;        // of operands, results and scratch arrays in order; of pointers and maps
  Expression value;  // of ints and longs
  std::size_t map;   // an index
};

struct PlanMap {
  CUtensorMapDataType type;
  std::int64_t bytes;  // of an element
  std::int64_t box_rows, box_heads, box_batches;
  Expression shape[4];  // batch, rows, heads, columns
};

// A step writes a field, zeroes words of a buffer, or launches.
struct PlanStep {
  enum Kind : std::uint8_t { kLaunch, kZero, kWrite };
  Kind kind;
  PlanField field;     // of kWrite
  int buffer;          // of kZero
  Expression count;    // CTAs, or words
  std::size_t kernel;  // an index, of kLaunch
  std::int64_t threads, shared_bytes, cluster;
  bool overlaps;
};

struct PlanKernel {
  std::size_t program;
  std::string entry;
};

struct Plan {
  std::vector<std::string> names;  // of numbers; the first is the GPU's multiprocessors
  std::vector<PlanBuffer> operands, results;
  std::vector<std::pair<std::size_t, std::size_t>> same;  // of these, one array
  std::vector<PlanName> lets;
  Expression none;  // 0: there is nothing to compute
  std::vector<PlanCheck> checks;
  std::vector<PlanScratch> scratch;
  std::size_t param_bytes = 0;
  std::vector<PlanField> fields;
  std::vector<PlanMap> maps;
  std::vector<PlanStep> steps;
  std::vector<PlanKernel> kernels;
  std::vector<Program> programs;
};

Result<Plan> ReadPlan(std::string_view text);

// The value; or an error, where it is beyond 64 bits or something is divided by 0.
Result<std::int64_t> Evaluate(const Expression& expression,
                              const std::vector<std::int64_t>& numbers);

// XLA's name of an element type as plans have it: "f32".
std::string_view NameOfType(xla::ffi::DataType type);

}  // namespace jax_flash

#endif  // JAX_FLASH_CUDA_RUNTIME_PLAN_H_
