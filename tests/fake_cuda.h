// What tests/fake_cuda.cc writes into tensor maps, and what may run launches in its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct FakeMap {
  void* address;
  std::uint64_t dims[4], strides[3];
  unsigned box[4];
  int type, swizzle;
};

// An operand or result of the custom call that runs.
struct FakeBuffer {
  const void* data;
  std::uint64_t bytes;
  std::string name;
};

// In each byte of memory that nobody has written: 784 in bfloat16, 785 in float32, 4.3 in float16.
// Not NaN: rows that come out as NaN are computed again and would be right.
inline constexpr unsigned char kFakeGarbage = 0x44;

// A GPU with its compiler. Without one, launches are noted; with one they run, on the true buffers.
// Texts that are returned say what went wrong, empty ones that nothing did.
class FakeMachine {
 public:
  virtual ~FakeMachine() = default;
  virtual std::string Compile(const std::string& source,
                              const std::map<std::string, std::string>& files,
                              std::string* image) = 0;
  virtual std::string Load(const std::string& image, void** program) = 0;
  virtual bool Has(void* program, const std::string& kernel) = 0;
  virtual std::string Launch(void* program, const std::string& kernel, unsigned grid,
                             unsigned cluster, unsigned threads, unsigned shared_bytes,
                             const void* params) = 0;
  virtual void SetBuffers(std::vector<FakeBuffer> buffers) = 0;
};
inline FakeMachine* fake_machine = nullptr;
