// Instructions on matrices: wgmma, mma.sync, and what moves the fragments of a warp.
#include "numbers.h"
#include "ptx.h"
#include "tests/fake_cuda.h"

namespace emulator {
namespace {

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
  // Where 16 bytes lie: elements k to k + 7 of i, or i to i + 7 of k if transposed.
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
        std::memcpy(bits, block.read_async(at | block.rank << kCtaShift, 16, "wgmma"), 16);
        for (uint32 j = 0; j < 8; ++j) {
          const float x = kFrom(bits[j]);
          (transposed_ ? elements[a * pitch + b + j] : elements[(b + j) * pitch + a]) = x;
        }
      }
    }
  }
  // The same of float8, never transposed: elements[k][i] of 32 k.
  void read_float8(uint32 first, uint32 count, float* elements, uint32 pitch) const {
    Block& block = *current->block;
    for (uint32 i = 0; i < count; ++i) {
      for (uint32 half = 0; half < 2; ++half) {
        const uint32 at = chunk(first + i, 8 * half);
        unsigned char bits[16];
        std::memcpy(bits, block.read_async(at | block.rank << kCtaShift, 16, "wgmma"), 16);
        for (uint32 j = 0; j < 16; ++j) {
          elements[(16 * half + j) * pitch + i] = from_float8(bits[j]);
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

// A sum as Hopper's tensor cores make it of float8: all that is added has the exponent of the
// largest, and keeps 13 bits behind it, without rounding. (Measured of H100 and H800, DeepSeek-V3,
// arXiv:2412.19437: about 14 bits. Here the sum of one instruction, accumulators included, is made
// so; what is known of the order within is less.)
float short_sum(const float* added, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(added[i])) {
      float sum = 0;
      for (int j = 0; j < count; ++j) sum += added[j];
      return sum;
    }
    largest = std::max(largest, std::fabs(added[i]));
  }
  if (largest == 0) return 0;
  int exponent = 0;
  std::frexp(largest, &exponent);
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += std::trunc(std::ldexp(double{added[i]}, 14 - exponent));
  return static_cast<float>(std::ldexp(sum, exponent - 14));
}
// 16 rows of a product of float8.
void multiply_float8(const Product* (&lanes)[32], Accumulators* (&sums_of)[32], uint32 warp) {
  const Product& first = *lanes[0];
  const auto columns = static_cast<uint32>(first.columns);
  static float a[32][16], b[32][256];
  if (first.a_in_registers) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 16; ++i) {  // of four registers the first and third are of one row
        const int row = lane / 4 + i / 4 % 2 * 8, k = lane % 4 * 4 + i / 8 * 16 + i % 4;
        a[k][row] = from_float8(lanes[lane]->registers[i / 4] >> i % 4 * 8 & 0xff);
      }
    }
  } else {
    Matrix(first.a, false).read_float8(warp % 4 * 16, 16, a[0], 16);
  }
  Matrix(first.b, false).read_float8(0, columns, b[0], 256);
  for (int lane = 0; lane < 32; ++lane) {
    for (uint32 i = 0; i < columns / 2; ++i) {
      const uint32 row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float& sum = sums_of[lane]->values[i];
      float added[33] = {first.accumulates ? sum : 0.0f};
      for (int k = 0; k < 32; ++k) added[k + 1] = a[k][row] * b[k][column];
      sum = short_sum(added, 33);
    }
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
    first.float8     ? multiply_float8(products, sums, warp)
    : first.bfloat16 ? multiply<from_bfloat16>(products, sums, warp)
                     : multiply<from_float16>(products, sums, warp);
  }
  for (int lane = 0; lane < 32; ++lane) of(lane).computed = true;
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.TYPE.TYPE
//   {accumulators}, a or {a}, b, accumulates, scale a, scale b, (transposed a,) transposed b
// and of float8 k32, without the last two.
void issue_product(Frame& f) {
  const std::string& opcode = f.instruction->opcode;
  Product product{};
  product.columns = std::stoi(opcode.substr(opcode.find(".m64n") + 5));
  product.bfloat16 = opcode.find(".bf16.bf16") != std::string::npos;
  product.float8 = opcode.find("k32.f32.e4m3.e4m3") != std::string::npos;
  if (!product.float8 && !product.bfloat16 && opcode.find(".f16.f16") == std::string::npos) {
    fail("ptx: %s: of these types only f32 from bf16, f16 or e4m3 is known", f.name());
  }
  const auto sums = f.list(0);
  product.a_in_registers = f.argument(1).kind == Argument::kList;
  if (static_cast<int>(sums.size()) * 2 != product.columns ||
      f.arguments() != (product.float8           ? 6
                        : product.a_in_registers ? 7
                                                 : 8)) {
    fail("ptx: %s: wrong number of operands", f.name());
  }
  if (f.get32(4) != 1 || f.get32(5) != 1) fail("ptx: %s: a negated operand", f.name());
  if (product.a_in_registers) {
    const auto registers = f.list(1);
    if (registers.size() != 4) fail("ptx: %s: operand a has 4 registers", f.name());
    for (int i = 0; i < 4; ++i) product.registers[i] = static_cast<uint32>(f.get(registers[i]));
  } else {
    product.a = f.get(1);
    product.a_transposed = !product.float8 && f.get(6) != 0;
  }
  product.b = f.get(2);
  product.accumulates = f.get(3) != 0;
  product.b_transposed = !product.float8 && f.get(product.a_in_registers ? 6 : 7) != 0;
  product.number = current->products_issued++;
  product.accumulators = static_cast<float*>(f.operands[sums[0].number].target);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (f.operands[sums[i].number].target != product.accumulators + i) {
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
    for (int i = 0; i < count; ++i) given.registers[i] = static_cast<uint32>(f.get(registers[i]));
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
    for (int i = 0; i < count; ++i) f.set(registers[i], given.registers[i]);
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
  for (std::size_t i = 0; i < a.size(); ++i) given.a[i] = static_cast<uint32>(f.get(a[i]));
  for (std::size_t i = 0; i < b.size(); ++i) given.b[i] = static_cast<uint32>(f.get(b[i]));
  for (int i = 0; i < 4; ++i) {
    given.c[i] = __builtin_bit_cast(float, static_cast<uint32>(f.get(c[i])));
  }
  const int depth = static_cast<int>(8 * b.size());
  meet(0xffffffffu, f.name(), given, [=](Given*(&all)[32]) {
    float a[16][16], b[16][8], sums[16][8];
    for (int k = 0; k < depth; ++k) {
      const int lane = k % 8 / 2, shift = k % 2 * 16;
      for (int row = 0; row < 16; ++row) {
        a[row][k] = kFrom(all[row % 8 * 4 + lane]->a[row / 8 + k / 8 * 2] >> shift & 0xffff);
      }
      for (int column = 0; column < 8; ++column) {
        b[k][column] = kFrom(all[column * 4 + lane]->b[k / 8] >> shift & 0xffff);
      }
    }
    const auto element = [&](int lane, int i) -> float& {
      return sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    };
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) element(lane, i) = all[lane]->c[i];
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < depth; ++k) {
        for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) all[lane]->c[i] = element(lane, i);
    }
  });
  for (int i = 0; i < 4; ++i) f.set(d[i], __builtin_bit_cast(uint32, given.c[i]));
}

}  // namespace

const Table kProducts = {
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

}  // namespace emulator
