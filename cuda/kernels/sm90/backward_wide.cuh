// The main backward kernel for head or value dims above 128, and for float32 in halves up to there
// (cuda/ampere.md): dk, dv and the float32 sum of dq.
//
// A persistent CTA takes blocks of 64 keys. One warpgroup cannot hold both dK and dV, so the work
// is a pipeline of roles, one warpgroup each:
//   load         one warp fetches units, K, V, and per query block Q, -lse, dO, -delta by TMA
//   probability  S^T = K Q^T, P;            dV += P^T dO, P in registers
//   gradient     dP^T = V dO^T, dS;         dK += dS^T Q, dS in registers
//   query        dQ = dS K from shared memory, added to the float32 sum by red.v4
// P goes to the gradient role in float32 and in fragment order, dS^T to the query role in a ring of
// buffers. Each product of a role is issued beside the first product of its next query block.
#pragma once

#include "backward_exact.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/backward_scores.cuh"

namespace backward {

static_assert(kKeys == 64 && kQueries == 64 && !kReadsAhead && !kSharesKeys);
static_assert(kHead <= 256 && kValue <= 256);
static_assert(!kHalves || (kHead <= 128 && kValue <= 128 && kTmaLoads), "registers");

inline constexpr int kThreads = 512;

struct WideShared : Shared {
  float4 probability[kScores / 4 * 128];  // in the order of fragments
};

// Named barriers, one per role.
inline constexpr int kProbabilityBarrier = 1;
inline constexpr int kGradientBarrier = 2;

__device__ __forceinline__ void set_up() {
  if constexpr (kCompact && !kFillsBeside) fill_numbers(blockDim.x);
  if (threadIdx.x == 0) {
    set_up_load(12, 8, 4);
    for (int i = 0; i < kScoreStages; ++i) {
      ptx::barrier_init(at(&Shared::gradient_full, i), 4);
      ptx::barrier_init(at(&Shared::gradient_empty, i), 4);
    }
    ptx::barrier_init(at(&Shared::probability_full), 4);
    ptx::barrier_init(at(&Shared::probability_empty), 4);
    ptx::barrier_init_fence();
  }
  __syncthreads();
}

// A warpgroup's 64 rows of dK or dV, in two parts if there are more than kRowColumns columns.
template <int kColumns>
struct Rows {
  static constexpr bool kSplit = kColumns > kRowColumns;
  float low[kSplit ? kRowColumns / 2 : kColumns / 2];
  float high[kSplit ? (kColumns - kRowColumns) / 2 : 1];

  __device__ __forceinline__ void clear() {
    for (float& x : low) x = 0.f;
    for (float& x : high) x = 0.f;
    pin();  // in place before the fence of the first product
  }
  // += a b; one commit group.
  __device__ __forceinline__ void accumulate(const uint32 (&a)[kScores / 2], uint32 b) {
    ptx::wgmma_fence();
    issue_accumulate(low, a, b);
    if constexpr (kSplit) issue_accumulate(high, a, b + 2 * kBoxQ);
    ptx::wgmma_commit();
  }
  // += a b of halves times the factors of a thread's two rows, with all done that has been issued;
  // with kBeside `beside` issues another group behind the first columns'.
  template <bool kBeside, class Beside>
  __device__ __forceinline__ void accumulate(const uint32 (&a)[2][kScores / 2], uint32 b,
                                             const float (&factor)[2], Beside beside) {
    constexpr uint32 kPlane = ceil_div(kColumns, kBoxColumns) * kBoxQ;
    add_product(low, a, b, kPlane, factor, [&] {
      if constexpr (kBeside) beside();
      ptx::wgmma_wait<kBeside ? 1 : 0>();
    });
    if constexpr (kSplit) {
      add_product(high, a, b + kBoxQ, kPlane, factor, [] { ptx::wgmma_wait<0>(); });
    } else if constexpr (kBeside) {
      ptx::wgmma_wait<0>();
    }
  }
  __device__ __forceinline__ void pin() {
    ptx::pin(low);
    if constexpr (kSplit) ptx::pin(high);
  }
  __device__ __forceinline__ bool is_finite() const { return all_finite(low) && all_finite(high); }

 private:
  template <int kCount, class Wait>
  static __device__ __forceinline__ void add_product(float (&to)[kCount],
                                                     const uint32 (&a)[2][kScores / 2], uint32 b,
                                                     uint32 plane, const float (&factor)[2],
                                                     Wait wait) {
    float sum[kCount];
    ptx::wgmma_fence();
    issue_product(sum, a, b, plane);
    ptx::wgmma_commit();
    wait();
    ptx::pin(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = fmaf(sum[i], factor[fragment::row(i)], to[i]);
  }
};

// Columns of dK and dV: of halves with 48 behind the first 64, 232 to 324 bytes were spilled. Tiles
// are whole boxes, zero behind the last column.
template <int kColumns>
using Sums = Rows<kHalves && kColumns == 112 ? 128 : kColumns>;

// 64 keys or values of a unit, the left operand of its scores or dP. Of halves in registers: a
// product of 64 by 64 from shared memory reads 128 bytes a cycle, which is all there is. Of more
// than 64 columns the second halves, of one product in three, are left there.
template <int kColumns, bool kHeld>
struct LeftRows {
  __device__ __forceinline__ void load(uint32) {}
  __device__ __forceinline__ void times_queries(float (&d)[kScores], uint32 tile,
                                                uint32 queries) const {
    keys_times_queries<kColumns>(d, tile, queries);
  }
};
template <int kColumns>
struct LeftRows<kColumns, true> {
  static constexpr int kSteps = kColumns / 16, kBoxes = ceil_div(kColumns, kBoxColumns);
  static constexpr int kPlanes = kColumns > 64 ? 1 : 2;
  uint32 rows[kPlanes][kSteps][4];

  __device__ __forceinline__ void load(uint32 tile) {
    const uint32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kPlanes * kSteps; ++i) {
      const int plane = i / kSteps, step = i % kSteps;
      const uint32 box = tile + (plane * kBoxes + step / 4) * kBoxK + row * kBoxRowBytes;
      ptx::load_matrix_x4(box + swizzled(step % 4 * 2 + threadIdx.x % 32 / 16, row),
                          rows[plane][step]);
    }
  }
  // As keys_times_queries.
  __device__ __forceinline__ void times_queries(float (&d)[kScores], uint32 tile,
                                                uint32 queries) const {
    const ptx::Descriptor a = ptx::descriptor(tile, 0, 0, 1024),
                          b = ptx::descriptor(queries, 0, 0, 1024);
#pragma unroll
    for (int i = 0; i < kProducts<2> * kSteps; ++i) {
      const Planes planes = planes_of<2>(i / kSteps);
      const int step = i % kSteps, inner = step % 4 * 32;
      const uint64 right = b.at((planes.right * kBoxes + step / 4) * kBoxQ + inner);
      if (planes.left < kPlanes) {
        const uint32(&left)[4] = rows[planes.left < kPlanes ? planes.left : 0][step];
        ptx::wgmma_rs<Element, 0>(d, left[0], left[1], left[2], left[3], right, i > 0);
      } else {
        ptx::wgmma_ss<Element, 0, 0>(d, a.at((kBoxes + step / 4) * kBoxK + inner), right, i > 0);
      }
    }
    ptx::wgmma_commit();
  }
};

// With kHalves: what brings back the numbers of a unit's keys or values,
__device__ __forceinline__ float factor_of_keys(const BackwardParams& p,
                                                const volatile UnitRecord& u,
                                                const float* factors) {
  if constexpr (!kHalves) return 1.f;
  return halves::factor_of(factors, u.batch * p.kv_heads + u.kv_head, p.kv_len, u.key0);
}
// and those of a step's queries and output gradients, read a step ahead.
struct StepFactors {
  float query, dout;
  __device__ __forceinline__ StepFactors(const BackwardParams& p, const volatile UnitRecord& u,
                                         const Walk& walk) {
    if constexpr (kHalves) {
      const int row = u.batch * p.query_heads + u.head + walk.head;
      query = halves::factor_of(p.query_factors, row, p.query_len, walk.m0);
      dout = halves::factor_of(p.dout_factors, row, p.query_len, walk.m0);
    }
  }
};
// P in halves, 1 at most.
inline constexpr float kProbabilityRange = 0x1p15f;

// What brings a number, bits of float32, to 2^14. What is not finite stays so.
__device__ __forceinline__ int exponent_of(int bits) {
  return bits == 0 || bits >= 0x7f800000 ? 0 : min(14 + 127 - (bits >> 23), 126);
}
__device__ __forceinline__ float inverse(float power_of_two) {
  return __int_as_float((254 << 23) - __float_as_int(power_of_two));
}

// Where output gradients are split by rows, their tile's factor is 0: elements of a thread, each
// times what brings its query's row back.
__device__ __forceinline__ bool is_by_rows(const StepFactors& factors) {
  if constexpr (kHalves) return __builtin_expect(factors.dout == 0.f, 0);
  return false;
}
__device__ __forceinline__ void times_rows(const BackwardParams& p, const volatile UnitRecord& u,
                                           int head, int m0, float (&x)[kScores]) {
  const int64 row = u.batch * p.query_heads + u.head + head;
  const int first = m0 + fragment::first_column(threadIdx.x);
  const float* rows = p.dout_row_factors + row * stored_rows(p) + first;
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    float2 factor{};
    if (!kCompact || first + 8 * j < stored_rows(p)) {
      factor = *reinterpret_cast<const float2*>(rows + 8 * j);
    }
    x[4 * j] *= factor.x;
    x[4 * j + 1] *= factor.y;
    x[4 * j + 2] *= factor.x;
    x[4 * j + 3] *= factor.y;
  }
}
// Then each key has a power of two of its own: `back` is the inverse of a thread's two.
__device__ __forceinline__ void fit_keys(float (&x)[kScores], float (&back)[2]) {
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    largest[fragment::row(i)] = fmaxf(largest[fragment::row(i)], fabsf(x[i]));
  }
  float to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    to[r] = ptx::power_of_two(exponent_of(__float_as_int(fragment::quad_maximum(largest[r]))));
    back[r] = inverse(to[r]);
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) x[i] *= to[fragment::row(i)];
}

// How dS in halves gets float16's range, by the largest of a step; in shared memory, for the query
// role, what brings it back.
template <bool kExists>
struct GradientRange {  // none
  static __device__ __forceinline__ float fit(const float (&)[kScores], uint32) { return 1.f; }
  static __device__ __forceinline__ void store(uint32, float) {}
  static __device__ __forceinline__ void split_by_rows(const float (&)[kScores], uint32,
                                                       uint32 (&)[2][kScores / 2]) {}
  static __device__ __forceinline__ void load(uint32, float (&)[2]) {}
};
template <>
struct GradientRange<true> {
  static __device__ __forceinline__ float fit(const float (&gradient)[kScores], uint32 iteration) {
    float largest = 0.f;
#pragma unroll
    for (float x : gradient) largest = fmaxf(largest, fabsf(x));
    const int of_warp = __reduce_max_sync(0xffffffffu, __float_as_int(largest));
    // Who is a step ahead writes elsewhere.
    const uint32 warps = at(&OfHalves<true>::largest, iteration % 2);
    if (threadIdx.x % 32 == 0) ptx::store_shared(warps + threadIdx.x / 32 % 4 * 4, of_warp);
    ptx::named_barrier_sync(kGradientBarrier, 128);
    const float4 four = ptx::load_shared_f4(warps);
    const int exponent =
        exponent_of(__float_as_int(fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w))));
    return ptx::power_of_two(exponent);
  }
  static __device__ __forceinline__ void store(uint32 buffer, float factor) {
    if (threadIdx.x % 128 == 0) {
      ptx::store_shared(at(&OfHalves<true>::gradient_factor, buffer), __float_as_uint(factor));
    }
  }
  // dS of a buffer that is free in halves, each query with a power of two of its own.
  static __device__ __forceinline__ void split_by_rows(const float (&gradient)[kScores],
                                                       uint32 buffer,
                                                       uint32 (&parts)[2][kScores / 2]) {
    const uint32 thread = threadIdx.x % 128, column = fragment::first_column(threadIdx.x) * 4;
    const uint32 warps = at(&Shared::gradient) + buffer * kGradientBytes;  // [4][kQueries]
    const uint32 rows = at(&OfHalves<true>::gradient_rows, buffer);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = fmaxf(fabsf(gradient[4 * j + c]), fabsf(gradient[4 * j + 2 + c]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
        }
        if (threadIdx.x % 32 < 4) {
          ptx::store_shared(warps + thread / 32 * kNumberBytes + column + (8 * j + c) * 4,
                            __float_as_uint(x));
        }
      }
    }
    ptx::named_barrier_sync(kGradientBarrier, 128);
    if (thread < kQueries) {
      uint32 largest = 0;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const uint32 x = ptx::load_shared(warps + warp * kNumberBytes + thread * 4);
        largest = largest > x ? largest : x;
      }
      ptx::store_shared(rows + thread * 4,
                        __float_as_uint(ptx::power_of_two(-exponent_of(largest))));
    }
    ptx::named_barrier_sync(kGradientBarrier, 128);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 back = ptx::load_shared_f2(rows + column + 8 * j * 4);
      const float x = inverse(back.x), y = inverse(back.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32 pair[2];
        split_pair(gradient[4 * j + 2 * r] * x, gradient[4 * j + 2 * r + 1] * y, pair,
                   halves::kOneSum);
        parts[0][2 * j + r] = pair[0];
        parts[1][2 * j + r] = pair[1];
      }
    }
  }
  // Of the two queries whose dQ a thread has.
  static __device__ __forceinline__ void load(uint32 buffer, float (&factor)[2]) {
    const uint32 bits = ptx::load_shared(at(&OfHalves<true>::gradient_factor, buffer));
    factor[0] = factor[1] = __uint_as_float(bits & 0x7fffffffu);
    if (bits == (bits & 0x7fffffffu)) return;
    const uint32 row =
        at(&OfHalves<true>::gradient_rows, buffer) + fragment::first_row(threadIdx.x) * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] *= __uint_as_float(ptx::load_shared(row + r * fragment::kRowStep * 4));
    }
  }
};
using StepRange = GradientRange<kHalves>;

// Elements of a thread in halves.
__device__ __forceinline__ void split_scores(const float (&x)[kScores], float factor,
                                             uint32 (&parts)[2][kScores / 2]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    uint32 pair[2];
    split_pair(x[2 * i] * factor, x[2 * i + 1] * factor, pair, halves::kOneSum);
    parts[0][i] = pair[0];
    parts[1][i] = pair[1];
  }
}

// Shared memory is free for the next unit's keys while dK and dV are written.
template <int kDim, int kColumns>
__device__ __forceinline__ void store_rows(const BackwardParams& p, void* array,
                                           const Rows<kColumns>& rows, float scale,
                                           const volatile UnitRecord& u) {
  store_columns<kDim>(p, array, rows.low, 0, scale, u, 0);
  if constexpr (Rows<kColumns>::kSplit) {
    store_columns<kDim>(p, array, rows.high, kRowColumns, scale, u, 0);
  }
}

__device__ __forceinline__ uint32 q_tile(uint32 slot) {
  return at(&Shared::query) + slot * kQueryBytes;
}
__device__ __forceinline__ uint32 dout_tile(uint32 slot) {
  return at(&Shared::dout) + slot * kDoutBytes;
}
// ---- probability --------------------------------------------------------------------------------

struct Probability {
  const BackwardParams& p;
  LeftRows<kHead, kHalves> keys;

  __device__ __forceinline__ void issue_scores(const volatile UnitRecord& u, float (&x)[kScores],
                                               uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::query_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kProbabilityBarrier);
    ptx::wgmma_fence();
    keys.times_queries(x, at(&Shared::key), q_tile(slot));
  }

  // Takes S^T of this query block to dV and, unless it is the unit's last, computes the next S^T.
  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration,
                                       const Walk& walk, const Walk& next, float key_factor,
                                       StepFactors& factors, float (&x)[kScores],
                                       StepDropped& dropped, Sums<kValue>& dv) {
    const uint32 slot = stage_of<kStages>(iteration);
    Step known(p, u, u.head + walk.head, walk.m0, 0);
    if constexpr (kHalves) known.set_scale(p.scale_log2 * key_factor * factors.query);
    uint32 probability[kScores / 2];
    const RowNumbers minus_lse(at(&Shared::minus_lse) + slot * kNumberBytes);
    score_to_probability(p, u, x, probability, minus_lse, 0, {}, known, dropped);
    if constexpr (!kHasSlope && !kHalves) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        probability[i] = pack_probability(x[2 * i], x[2 * i + 1]);
      }
    }
    ptx::barrier_wait(at(&Shared::probability_empty), parity_of<1>(iteration) ^ 1);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      ptx::store_shared_x4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16,
                           __float_as_uint(x[4 * j]), __float_as_uint(x[4 * j + 1]),
                           __float_as_uint(x[4 * j + 2]), __float_as_uint(x[4 * j + 3]));
    }
    release(at(&Shared::probability_full));

    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), walk.m0, kProbabilityBarrier);
    if constexpr (kHalves) {
      uint32 parts[2][kScores / 2];
      const float of_tile = factors.dout * (1 / kProbabilityRange);
      float factor[2] = {of_tile, of_tile};
      // Ahead of the branch, which what is behind it would have to wait for.
      split_scores(x, kProbabilityRange, parts);
      if (is_by_rows(factors)) {
        times_rows(p, u, walk.head, walk.m0, x);
        fit_keys(x, factor);
        split_scores(x, 1.f, parts);
      }
      dv.template accumulate<!kLast>(parts, dout_tile(slot), factor, [&] {
        issue_scores(u, x, iteration + 1, next.m0);
        factors = {p, u, next};
      });
      release(at(&Shared::dout_empty, slot));
      if constexpr (!kLast) {
        release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
        ptx::pin(x);
      }
      return;
    }
    dv.accumulate(probability, dout_tile(slot));
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(at(&Shared::dout_empty, slot));
    } else {
      issue_scores(u, x, iteration + 1, next.m0);
      draw_next(p, u, 0, walk, dropped);
      ptx::wgmma_wait<1>();
      release(at(&Shared::dout_empty, slot));
      ptx::wgmma_wait<0>();
      release(at(&Shared::query_empty, stage_of<kStages>(iteration + 1)));
      ptx::pin(x);
    }
    dv.pin();
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      Sums<kValue> dv;
      dv.clear();
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kHeadTile>(u, at(&Shared::key), 0);
          ptx::named_barrier_sync(kProbabilityBarrier, 128);
        }
        keys.load(at(&Shared::key));
        float x[kScores];
        Walk walk(p, u);
        StepDropped dropped;
        const float key_factor = factor_of_keys(p, u, p.key_factors);
        StepFactors factors(p, u, walk);
        issue_scores(u, x, iteration, walk.m0);
        draw_dropped(p, u, 0, walk, dropped);
        ptx::wgmma_wait<0>();
        release(at(&Shared::query_empty, stage_of<kStages>(iteration)));
        ptx::pin(x);
        while (walk.left > 1) {
          const Walk now = walk;
          walk.next(p, u);
          prefetch_bias(p, u, walk, 0);
          step<false>(u, iteration, now, walk, key_factor, factors, x, dropped, dv);
          ++iteration;
        }
        release(at(&Shared::key_empty));
        step<true>(u, iteration, walk, walk, key_factor, factors, x, dropped, dv);
        ++iteration;
      } else {
        release(at(&Shared::key_empty));
      }
      mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 1, dv.is_finite(),
                is_share(p, u));
      store_rows<kValueDim>(p, p.dvalue_data, dv, value_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- gradient -----------------------------------------------------------------------------------

struct Gradient {
  const BackwardParams& p;
  LeftRows<kValue, kHalves> values;

  struct UnitFactors {
    float key, value;
  };

  __device__ __forceinline__ void issue_dp(const volatile UnitRecord& u, float (&dp)[kScores],
                                           uint32 iteration, int m0) {
    const uint32 slot = stage_of<kStages>(iteration);
    ptx::barrier_wait(at(&Shared::dout_full, slot), parity_of<kStages>(iteration));
    hide_unseen_queries<kValueTile>(u, {}, dout_tile(slot), m0, kGradientBarrier);
    ptx::wgmma_fence();
    values.times_queries(dp, at(&Shared::value), dout_tile(slot));
  }

  // Takes dP^T of this query block to dK and, unless it is the unit's last, computes the next dP^T.
  template <bool kLast>
  __device__ __forceinline__ void step(const volatile UnitRecord& u, uint32 iteration, int m0,
                                       int head, const Walk& next, const UnitFactors& unit,
                                       StepFactors& factors, float (&dp)[kScores],
                                       Sums<kHead>& dk) {
    const uint32 slot = stage_of<kStages>(iteration);
    const uint32 minus_delta = at(&Shared::minus_delta) + slot * kNumberBytes + threadIdx.x % 4 * 8;
    const bool by_rows = is_by_rows(factors);
    const float factor = by_rows ? unit.value : unit.value * factors.dout;
    if (by_rows) times_rows(p, u, head, m0, dp);
    uint32 gradient[kScores / 2];
    ptx::barrier_wait(at(&Shared::probability_full), parity_of<1>(iteration));
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float4 x =
          ptx::load_shared_f4(at(&WideShared::probability) + (j * 128 + threadIdx.x % 128) * 16);
      const float2 d = ptx::load_shared_f2(minus_delta + 8 * j * 4);
      if constexpr (kHalves) {
        dp[4 * j] = x.x * fmaf(dp[4 * j], factor, d.x);
        dp[4 * j + 1] = x.y * fmaf(dp[4 * j + 1], factor, d.y);
        dp[4 * j + 2] = x.z * fmaf(dp[4 * j + 2], factor, d.x);
        dp[4 * j + 3] = x.w * fmaf(dp[4 * j + 3], factor, d.y);
        continue;
      }
      gradient[2 * j] = Multiplied::pack(score_gradient(x.x, dp[4 * j], d.x),
                                         score_gradient(x.y, dp[4 * j + 1], d.y));
      gradient[2 * j + 1] = Multiplied::pack(score_gradient(x.z, dp[4 * j + 2], d.x),
                                             score_gradient(x.w, dp[4 * j + 3], d.y));
    }
    release(at(&Shared::probability_empty));
    release(at(&Shared::dout_empty, slot));

    const uint32 buffer = stage_of<kScoreStages>(iteration);
    if constexpr (kHalves) {
      const uint32 empty = at(&Shared::gradient_empty, buffer);
      const uint32 parity = parity_of<kScoreStages>(iteration) ^ 1;
      uint32 parts[2][kScores / 2];
      const float range = StepRange::fit(dp, iteration), of_tile = inverse(range);
      float back[2] = {of_tile, of_tile};
      split_scores(dp, range, parts);
      ptx::barrier_wait(empty, parity);
      if (by_rows) StepRange::split_by_rows(dp, buffer, parts);
      const uint32 to = at(&Shared::gradient) + buffer * kGradientBytes;
      store_gradient(parts[0], to, 0);
      store_gradient(parts[1], to + kGradientPlane, 0);
      StepRange::store(buffer, by_rows ? -unit.key : back[0] * unit.key);
      release(at(&Shared::gradient_full, buffer));
      if (by_rows) {
        fit_keys(dp, back);
        split_scores(dp, 1.f, parts);
      }
      for (float& x : back) x *= factors.query;
      hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kGradientBarrier);
      dk.template accumulate<!kLast>(parts, q_tile(slot), back, [&] {
        issue_dp(u, dp, iteration + 1, next.m0);
        factors = {p, u, next};
      });
      release(at(&Shared::query_empty, slot));
      if constexpr (!kLast) ptx::pin(dp);
      return;
    }
    ptx::barrier_wait(at(&Shared::gradient_empty, buffer), parity_of<kScoreStages>(iteration) ^ 1);
    store_gradient(gradient, at(&Shared::gradient) + buffer * kGradientBytes, 0);
    release(at(&Shared::gradient_full, buffer));

    hide_unseen_queries<kHeadTile>(u, {}, q_tile(slot), m0, kGradientBarrier);
    dk.accumulate(gradient, q_tile(slot));
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(at(&Shared::query_empty, slot));
    } else {
      issue_dp(u, dp, iteration + 1, next.m0);
      ptx::wgmma_wait<1>();
      release(at(&Shared::query_empty, slot));
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
    }
    dk.pin();
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      Sums<kHead> dk;
      dk.clear();
      ptx::barrier_wait(at(&Shared::value_full), parity_of<1>(received));
      if (u.total > 0) {
        if (has_unseen_keys(u)) {
          hide_unseen_keys<kValueTile>(u, at(&Shared::value), 0);
          ptx::named_barrier_sync(kGradientBarrier, 128);
        }
        values.load(at(&Shared::value));
        float dp[kScores];
        Walk walk(p, u);
        const UnitFactors unit{factor_of_keys(p, u, p.key_factors),
                               factor_of_keys(p, u, p.value_factors)};
        StepFactors factors(p, u, walk);
        issue_dp(u, dp, iteration, walk.m0);
        ptx::wgmma_wait<0>();
        ptx::pin(dp);
        while (walk.left > 1) {
          const int m0 = walk.m0, head = walk.head;
          walk.next(p, u);
          step<false>(u, iteration, m0, head, walk, unit, factors, dp, dk);
          ++iteration;
        }
        release(at(&Shared::value_empty));
        step<true>(u, iteration, walk.m0, walk.head, walk, unit, factors, dp, dk);
        ++iteration;
      } else {
        release(at(&Shared::value_empty));
      }
      mark_rows(p, u.batch, u.kv_head, u.key0, threadIdx.x % 128 / 32 * 16, 0, dk.is_finite(),
                is_share(p, u));
      store_rows<kHeadDim>(p, p.dkey_data, dk, query_key_scale(p), u);
      return_unit(received);
      ++received;
    }
  }
};

// ---- query --------------------------------------------------------------------------------------

struct Query {
  const BackwardParams& p;

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.stop) break;
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        constexpr int kSteps = kKeys / 16;
        const uint32 buffer = stage_of<kScoreStages>(iteration);
        const ptx::Descriptor a = ptx::descriptor(at(&Shared::gradient) + buffer * kGradientBytes,
                                                  0, kGradientBytes, 1024);
        const ptx::Descriptor b = ptx::descriptor(at(&Shared::key), 0, kBoxK, 1024);
        const bool first = adds_first(p, u, walk.m0);
        Turn turn = Turn::first();
        ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
        float factor[2];
        StepRange::load(buffer, factor);
#pragma unroll
        for (int box = 0; box < kHeadBoxes; ++box) {
          float dq[32];
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kProducts<kParts> * kSteps; ++i) {
            const Planes planes = planes_of<kParts>(i / kSteps);
            const uint32 keys = i % kSteps * 2048;
            ptx::wgmma_ss<Element, 1, 1>(dq, a.at(planes.left * kGradientPlane + keys),
                                         b.at((planes.right * kHeadBoxes + box) * kBoxK + keys),
                                         i > 0);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          ptx::pin(dq);
          if constexpr (kHalves) {
#pragma unroll
            for (int i = 0; i < 32; ++i) dq[i] *= factor[fragment::row(i)];
          }
          if (box + 1 == kHeadBoxes) release(at(&Shared::gradient_empty, buffer));
          if (box == 0) turn = take_turn(iteration, 0, first);
          add_fragments(SumTile(p, walk.sum(), box), 0, dq, turn);
        }
        end_turn(iteration, 0);
        ++iteration;
      }
      release(at(&Shared::key_empty));
      return_unit(received);
      ++received;
    }
  }
};

__device__ __forceinline__ void main_kernel(const BackwardParams& p) {
  set_up();
  const int role = ptx::warp_index() / 4;
  if (role == 0) {
    ptx::register_decrease<kLoadRegisters>();
    if (kCompact && kFillsBeside && threadIdx.x < 32) {
      fill_numbers(32);
      __syncwarp();
    }
    feed(p);
  } else if (role == 1) {
    ptx::register_decrease<kQueryRegisters>();
    Query{p}.run();
  } else if (role == 2) {
    ptx::register_increase<kScoreRegisters>();
    Probability{p, {}}.run();
  } else {
    ptx::register_increase<kScoreRegisters>();
    Gradient{p, {}}.run();
  }
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::kThreads, 1)
    flash_backward(const __grid_constant__ BackwardParams p) {
  if (is_left_to_other(p)) return;
  backward::main_kernel(p);
}
