// Instructions on registers: moves, comparisons, arithmetic, conversions.
#include "numbers.h"
#include "ptx.h"

namespace emulator {
namespace {

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
    f.set(results[0], half(0));
    f.set(results[1], half(16));
  }
}
bool less(float x, float y) { return x < y; }
bool greater_or_unordered(float x, float y) { return !(x <= y); }

}  // namespace

const Table kNumbers = {
    // Registers.
    {"mov.u32", [](Frame& f) { f.set(0, f.get(1)); }},
    {"mov.b32",
     [](Frame& f) {
       if (f.argument(0).kind == Argument::kList) {  // splits
         f.set(f.list(0)[0], f.get32(1) & 0xffff);
         return f.set(f.list(0)[1], f.get32(1) >> 16);
       }
       const bool joins = f.argument(1).kind == Argument::kList;
       f.set(0, joins ? f.get(f.list(1)[0]) | f.get(f.list(1)[1]) << 16 : f.get(1));
     }},
    {"mov.b64",
     [](Frame& f) {
       const auto halves = f.list(1);
       f.set(0, halves.size() == 2 ? f.get(halves[0]) | f.get(halves[1]) << 32 : f.get(1));
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
    {"setmaxnreg*", [](Frame& f) { current->warp->registers = f.get32(0); }},
    // Numbers.
    {"ex2.approx.ftz.f32",
     [](Frame& f) { f.set_float(0, flushed(std::exp2(flushed(f.get_float(1))))); }},
    {"lg2.approx.ftz.f32", [](Frame& f) { f.set_float(0, std::log2(flushed(f.get_float(1)))); }},
    {"sqrt.approx.ftz.f32", [](Frame& f) { f.set_float(0, std::sqrt(flushed(f.get_float(1)))); }},
    {"rcp.approx.ftz.f32",
     [](Frame& f) { f.set_float(0, flushed(1.0f / flushed(f.get_float(1)))); }},
    {"tanh.approx.f32", [](Frame& f) { f.set_float(0, std::tanh(f.get_float(1))); }},
    {"cvt.rn.bf16x2.f32", [](Frame& f) { convert_bfloat16(f, false); }},
    {"cvt.rn.relu.bf16x2.f32", [](Frame& f) { convert_bfloat16(f, true); }},
    {"cvt.rn.f16x2.f32", [](Frame& f) { convert_float16(f, false); }},
    {"cvt.rn.relu.f16x2.f32", [](Frame& f) { convert_float16(f, true); }},
    {"cvt.rn.f16x2.e4m3x2",
     [](Frame& f) {
       f.set(0, to_float16(from_float8(f.get32(1) & 0xff)) |
                    to_float16(from_float8(f.get32(1) >> 8 & 0xff)) << 16);
     }},
    {"cvt.rn.satfinite.e4m3x2.f32",
     [](Frame& f) { f.set(0, to_float8(f.get_float(1)) << 8 | to_float8(f.get_float(2))); }},
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
};

}  // namespace emulator
