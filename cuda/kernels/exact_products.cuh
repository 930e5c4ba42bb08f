// Products of 16 rows by one warp from global memory, for rows that are computed again
// (forward_exact.cuh, backward_exact.cuh): of 16 rows of another array, and of such rows with
// weights, of which those that are zero touch nothing.
//
// 16-bit elements are multiplied by mma.sync: a lane reads 16 bytes, and dims and columns are in
// the order that follows from it. Float32 and float8 are multiplied without tensor cores.
#pragma once

#include "fragment.cuh"
#include "rows.cuh"

namespace exact {

inline constexpr int kRows = 16;  // of either array in a product
inline constexpr int kBoxColumns = 64;

template <class Of>
inline constexpr bool kByTensor = sizeof(typename Of::Bits) == 2;

using Scores = float[8];  // of 16 x 16, in the order of fragments

__device__ __forceinline__ int lane() { return ptx::opaque(threadIdx.x) % 32; }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < kInfinity; }
// The column of element i of Scores.
__device__ __forceinline__ int column_of(int i) {
  return fragment::first_column(lane()) + fragment::column(i);
}

// Eight numbers of a row, whose first element has the index `row`, from `column` on; zeros past its
// end.
template <class Of, int kDim>
__device__ __forceinline__ Eight load_eight(const void* array, int64 row, int column) {
  const auto* from = static_cast<const typename Of::Bits*>(array) + row;
  if constexpr (kSame<Of, Float32>) {
    return load_piece<kDim>(from, column);
  } else {
    Eight eight;
    if constexpr (kSame<Of, Float8>) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        eight.x[i] = column + i < kDim ? Of::unpack(from[column + i]) : 0.0f;
      }
    } else {
      const uint4 piece = load_piece<kDim>(from, column);
      const uint32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        eight.x[i] = Of::unpack_low(pairs[i / 2]);
        eight.x[i + 1] = Of::unpack_high(pairs[i / 2]);
      }
    }
    return eight;
  }
}
template <class To>
__device__ __forceinline__ typename PieceOf<To>::Type piece_of(const Eight& eight) {
  if constexpr (kSame<To, Float32>) {
    return eight;
  } else {
    const auto& x = eight.x;
    return make_uint4(To::pack(x[0], x[1]), To::pack(x[2], x[3]), To::pack(x[4], x[5]),
                      To::pack(x[6], x[7]));
  }
}

// Rows of whole 16 bytes on their way into L1, which begin at row_at(i), i to 16. Without it, every
// load of a step waited for L2: a step of 16 keys took 11,000 clocks.
template <class Of, int kDim, class RowAt>
__device__ __forceinline__ void prefetch_rows(const void* data, RowAt row_at) {
  constexpr int kBytes = sizeof(typename Of::Bits), kLines = ceil_div(kDim * kBytes, 128);
  if constexpr (kDim * kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < ceil_div(kRows * kLines, 32); ++i) {
      const int index = lane() + 32 * i;
      if (kRows * kLines % 32 != 0 && index >= kRows * kLines) continue;
      const auto* bytes = static_cast<const unsigned char*>(data);
      ptx::prefetch(bytes + row_at(index / kLines) * kBytes + index % kLines * 128);
    }
  }
}

// d = 16 rows times 16 others. `left`: where the lane's two rows begin; right_at(i): where row i of
// the others does.
template <class Of, int kDim, int kUnrolled, class RightAt>
__device__ __forceinline__ void multiply_rows(Scores& d, const void* left_data,
                                              const int64 (&left)[2], const void* right_data,
                                              RightAt right_at) {
#pragma unroll
  for (float& x : d) x = 0.0f;
  if constexpr (kByTensor<Of>) {
    const auto* a = static_cast<const uint16*>(left_data);
    const auto* b = static_cast<const uint16*>(right_data);
    const int64 right[2] = {right_at(lane() / 4), right_at(8 + lane() / 4)};
#pragma unroll kUnrolled
    for (int step = 0; step < ceil_div(kDim, 32); ++step) {
      const int dim = 32 * step + 8 * (lane() % 4);
      const uint4 x = load_piece<kDim>(a + left[0], dim), y = load_piece<kDim>(a + left[1], dim);
      const uint32 low[4] = {x.x, y.x, x.y, y.y}, high[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 z = load_piece<kDim>(b + right[i], dim);
        ptx::multiply_add<kSame<Of, BFloat16>>(d, 4 * i, low, z.x, z.y);
        ptx::multiply_add<kSame<Of, BFloat16>>(d, 4 * i, high, z.z, z.w);
      }
    }
  } else {
    int64 right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) right[i] = right_at(column_of(4 * (i / 2) + i % 2));
#pragma unroll 1
    for (int dim = 0; dim < kDim; dim += 8) {
      const Eight rows[2] = {load_eight<Of, kDim>(left_data, left[0], dim),
                             load_eight<Of, kDim>(left_data, left[1], dim)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Eight x = load_eight<Of, kDim>(right_data, right[i], dim);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float& sum = d[fragment::element(i / 2, row, i % 2)];
#pragma unroll
          for (int j = 0; j < 8; ++j) sum = fmaf(rows[row].x[j], x.x[j], sum);
        }
      }
    }
  }
}

// Sums of weights times rows of kDim elements, kBoxes * 64 columns of them. A lane has two rows, as
// in fragments, and of every 64 columns 16 side by side.
template <class Of, int kDim, int kBoxes>
struct Sums {
  int column0;
  float values[32 * kBoxes];

  __device__ __forceinline__ void begin(int first_column) {
    column0 = first_column;
#pragma unroll
    for (float& x : values) x = 0.0f;
  }
  __device__ __forceinline__ void scale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 32 * kBoxes; ++i) values[i] *= factor[fragment::row(i)];
  }
  // Calls visit(column, eight), by reference, for every eight columns of a row of the lane.
  template <class Visit>
  __device__ __forceinline__ void visit(int row, Visit visit) {
#pragma unroll
    for (int part = 0; part < 2 * kBoxes; ++part) {
      Eight eight;
#pragma unroll
      for (int i = 0; i < 8; ++i) eight.x[i] = values[element(part, row, i)];
      visit(column(part), eight);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[element(part, row, i)] = eight.x[i];
    }
  }
  // Stores `factor` times a row.
  template <class To>
  __device__ __forceinline__ void store(int row, typename To::Bits* to, float factor) {
    visit(row, [&](int column, const Eight& eight) {
      Eight x;
#pragma unroll
      for (int i = 0; i < 8; ++i) x.x[i] = eight.x[i] * factor;
      if (column < kDim) store_piece<kDim>(to, column, piece_of<To>(x));
    });
  }
  // What a lane reads of the rows that weights are multiplied by, which begin at right_at(i), i to
  // 16: for tensor cores ahead, so that other work hides its latency.
  struct Ahead {
    uint32 words[kByTensor<Of> ? kBoxes : 1][4][4];  // of rows 2c, 2c + 1, 2c + 8 and 2c + 9
  };
  template <class RightAt>
  __device__ __forceinline__ Ahead load(const void* right_data, RightAt right_at) const {
    Ahead ahead;
    if constexpr (kByTensor<Of>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto* row =
            static_cast<const uint16*>(right_data) + right_at(column_of(4 * (i / 2) + i % 2));
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const uint4 piece = load_piece<kDim>(row, column0 + kBoxColumns * box + 8 * (lane() / 4));
          uint32(&words)[4] = ahead.words[box][i];
          words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
        }
      }
    }
    return ahead;
  }
  // Adds weights times these rows, where bit i of `seen` is set for element i of the weights; else
  // the weight is zero. Returns whether a row of the lane has met a number that is not finite.
  // `too_large`: a weight of the warp leaves the range of the elements, tensor cores have no part.
  template <class RightAt>
  __device__ __forceinline__ bool add(const Scores& weights, uint32 seen, Ahead& ahead,
                                      const void* right_data, RightAt right_at,
                                      bool too_large = false) {
    uint32 single = 0xffff;  // rows to be added by themselves
    const bool by_tensor = kByTensor<Of> && !too_large;
    if constexpr (kByTensor<Of>) {
      if (by_tensor) single = add_finite(weights, ahead);
    }
    bool met = false;
#pragma unroll 1
    for (; single != 0; single &= single - 1) {
      met |= add_single(weights, seen, __ffs(single) - 1, right_data, right_at, by_tensor);
    }
    return met;
  }

 private:
  // Part 0 and 1 of a box are columns 0 and 8 on of the lane's 16.
  __device__ __forceinline__ int column(int part) const {
    return column0 + part / 2 * kBoxColumns + 16 * (lane() % 4) + 8 * (part % 2);
  }
  static constexpr int element(int part, int row, int i) {
    return 32 * (part / 2) + fragment::element(i, row, part % 2);
  }
  // Zeros for those of a pair of elements that are not finite.
  static __device__ __forceinline__ uint32 finite_of(uint32 pair) {
    const uint32 low = pair & 0xffffu, high = pair & 0xffff0000u;
    return (Of::accumulate_nonfinite(0, low) == 0 ? low : 0) |
           (Of::accumulate_nonfinite(0, high) == 0 ? high : 0);
  }
  // Adds weights times what is finite. Returns the rows that have other elements, a bit each.
  __device__ __forceinline__ uint32 add_finite(const Scores& weights, Ahead& ahead) {
    uint32 left[4], flaw[4] = {}, flawed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = Of::pack(weights[2 * i], weights[2 * i + 1]);
#pragma unroll
      for (int j = 0; j < 4 * kBoxes; ++j) {
        flaw[i] = Of::accumulate_nonfinite(flaw[i], ahead.words[j / 4][i][j % 4]);
      }
    }
    if (__any_sync(0xffffffffu, (flaw[0] | flaw[1] | flaw[2] | flaw[3]) != 0)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32 lanes = __ballot_sync(0xffffffffu, flaw[i] != 0);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (lanes & 0x11111111u << c) flawed |= 1u << (2 * c + i / 2 * 8 + i % 2);
        }
#pragma unroll
        for (int j = 0; j < 4 * kBoxes; ++j) {
          uint32& word = ahead.words[j / 4][i][j % 4];
          word = finite_of(word);
        }
      }
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // column j of every eight
        uint32 pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32 one = ahead.words[box][2 * i][j / 2];
          const uint32 other = ahead.words[box][2 * i + 1][j / 2];
          pair[i] = j % 2 == 0 ? (one & 0xffffu) | other << 16 : one >> 16 | (other & 0xffff0000u);
        }
        ptx::multiply_add<kSame<Of, BFloat16>>(values, 32 * box + 4 * j, left, pair[0], pair[1]);
      }
    }
    return flawed;
  }
  // Adds row `of` of the others to the rows that see it: all of it, or what is not finite where
  // tensor cores have added the rest.
  template <class RightAt>
  __device__ __forceinline__ bool add_single(const Scores& weights, uint32 seen, int of,
                                             const void* right_data, RightAt right_at,
                                             bool by_tensor) {
    const int owner = (lane() & ~3) | of % 8 / 2;
    const uint32 of_owner = __shfl_sync(0xffffffffu, seen, owner);
    float weight[2];
    bool sees[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int at = fragment::element(of / 8, row, of % 2);
      float mine = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i == at) mine = weights[i];
      }
      weight[row] = __shfl_sync(0xffffffffu, mine, owner);
      sees[row] = of_owner >> at & 1;
    }
    if (!__any_sync(0xffffffffu, sees[0] || sees[1])) return false;
    const int64 at = right_at(of);
    bool met = false;
#pragma unroll
    for (int part = 0; part < 2 * kBoxes; ++part) {
      const Eight x = load_eight<Of, kDim>(right_data, at, column(part));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool finite = is_finite(x.x[i]);
        met = met || (!finite && (sees[0] || sees[1]));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float& sum = values[element(part, row, i)];
          if (sees[row] && !(by_tensor && finite)) sum = fmaf(weight[row], x.x[i], sum);
        }
      }
    }
    return met;
  }
};

}  // namespace exact
