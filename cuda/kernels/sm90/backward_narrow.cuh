// The main backward kernel for head and value dims up to 128: dk, dv and the float32 sum of dq.
//
// A persistent CTA takes key blocks of 128 keys. Roles, one warpgroup each:
//   load     one thread fetches units, K, V, and per query block Q, -lse, dO, delta by TMA
//   score 0  keys 0..63 of the block: S^T = K Q^T, dP^T = V dO^T, P, dS; dV += P^T dO and
//   score 1  keys 64..127             dK += dS^T Q with P and dS as register operands
// dS^T crosses to the other score warpgroup through a ring of shared-memory buffers. Each takes
// half of dQ = dS K one query block late, so that neither waits for the other within a block, and
// adds it to the float32 sum by red.v4 straight from registers.
#pragma once

#include "sm90/backward_common.cuh"

namespace backward {

static_assert(kKeys == 128, "two score warpgroups of 64 keys");
static_assert(kHead <= 128 && kValue <= 128, "wider heads: backward_wide.cuh");

inline constexpr int kThreads = 384;
// 128 * (24 + 2 * 240) = 384 * 168 registers. The score role holds (kHead + kValue) / 2
// accumulators of dK and dV and kQueries / 2 each of S and dP; ptxas asks for 32 beside them.
inline constexpr int kLoadRegisters = 24;
inline constexpr int kScoreRegisters = 240;

// dQ of a query block is one or two tiles of 64 queries by 64 columns: each score warpgroup takes
// one, or 32 columns of the only one.
inline constexpr int kDqTiles = kQueries / 64 * kHeadBoxes;
static_assert(kDqTiles <= 2);
inline constexpr int kDqColumns = 32 * kDqTiles;
inline constexpr int kDqValues = kDqColumns / 2;

inline constexpr int kOutBoxes = kHeadBoxes > kValueBoxes ? kHeadBoxes : kValueBoxes;

// Shared memory, in bytes from a 1024-byte boundary. Tiles are boxes of 64 columns, 128-byte
// swizzled.
inline constexpr int kBoxK = kKeys * 128;
inline constexpr int kBoxQ = kQueries * 128;
inline constexpr int kAtK = 0;
inline constexpr int kAtV = kAtK + kHeadBoxes * kBoxK;
inline constexpr int kAtQ = kAtV + kValueBoxes * kBoxK;
inline constexpr int kAtDout = kAtQ + kStages * kHeadBoxes * kBoxQ;
inline constexpr int kAtDs = kAtDout + kStages * kValueBoxes * kBoxQ;  // [stage][q box][key][64]
inline constexpr int kDsBytes = kKeys * kQueries * 2;
inline constexpr int kAtOut = kAtDs + kScoreStages * kDsBytes;  // [score][box][64][64]
inline constexpr int kOutBytes = kOutBoxes * 64 * 128;
inline constexpr int kAtLse = kAtOut + 2 * kOutBytes;
inline constexpr int kAtDelta = kAtLse + kStages * kQueries * 4;
inline constexpr int kAtBarriers = kAtDelta + kStages * kQueries * 4;

// Barriers, named by their event.
inline constexpr int kUnitFull = 0;   // [2]
inline constexpr int kUnitEmpty = 2;  // [2]
inline constexpr int kKFull = 4;
inline constexpr int kKEmpty = 5;
inline constexpr int kVFull = 6;
inline constexpr int kVEmpty = 7;
inline constexpr int kQFull = 8;  // [kStages], and so on
inline constexpr int kQEmpty = kQFull + kStages;
inline constexpr int kDoutFull = kQEmpty + kStages;
inline constexpr int kDoutEmpty = kDoutFull + kStages;
inline constexpr int kDsFull = kDoutEmpty + kStages;
inline constexpr int kDsEmpty = kDsFull + kScoreStages;
inline constexpr int kBarriers = kDsEmpty + kScoreStages;
inline constexpr int kAtUnits = kAtBarriers + 8 * kBarriers;  // UnitRecord[2]
inline constexpr int kSharedBytes = kAtUnits + 128;

// Named barriers.
inline constexpr int kScoresBarrier = 1;  // both score warpgroups
inline constexpr int kScoreBarrier = 2;   // and 3: one score warpgroup

// Aligned as declared, so every address below is a constant plus an index.
extern __shared__ __align__(1024) char shared_memory[];

__device__ __forceinline__ uint32 shared_base() { return shared_address(shared_memory); }
__device__ __forceinline__ uint32 barrier_at(int id) {
  return shared_base() + kAtBarriers + 8 * id;
}

// A unit as the load role hands it to the others. It stays in shared memory, not in registers, for
// as long as they work on it.
struct UnitRecord {
  int stop;  // no further units
  int batch, kv_head, key0;
  int offset, query_length, kv_length;  // Visibility of the batch row
  int m0, m_end;    // first query of the walk; where it has left the block range of one head
  int total;        // query blocks of all heads of the group
  int block;        // the walk's first query block, as an index of [B, N, query block]
  int head;         // first query head of the group
  Range seen_keys;  // of the unit, that some query sees, relative to key0
  int pad[2];
};
static_assert(sizeof(UnitRecord) == 64);

__device__ __forceinline__ Visibility sight_of(const BackwardParams& p,
                                               const volatile UnitRecord& u) {
  return {u.offset, p.window_left, p.window_right, u.query_length, u.kv_length};
}
__device__ __forceinline__ volatile UnitRecord& unit_record(uint32 i) {
  return reinterpret_cast<volatile UnitRecord*>(shared_memory + kAtUnits)[i % 2];
}

// Slot and parity of the i-th use of a ring of buffers.
template <int kSlots>
__device__ __forceinline__ uint32 slot_of(uint32 i) {
  return i % kSlots;
}
template <int kSlots>
__device__ __forceinline__ uint32 parity_of(uint32 i) {
  return i / kSlots % 2;
}

__device__ __forceinline__ void set_up() {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(barrier_at(kUnitFull + i), 1);
      barrier_init(barrier_at(kUnitEmpty + i), 8);
    }
    barrier_init(barrier_at(kKFull), 1);
    barrier_init(barrier_at(kKEmpty), 8);
    barrier_init(barrier_at(kVFull), 1);
    barrier_init(barrier_at(kVEmpty), 8);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barrier_at(kQFull + i), 1);
      barrier_init(barrier_at(kQEmpty + i), 8);
      barrier_init(barrier_at(kDoutFull + i), 1);
      barrier_init(barrier_at(kDoutEmpty + i), 8);
    }
    for (int i = 0; i < kScoreStages; ++i) {
      barrier_init(barrier_at(kDsFull + i), 8);
      barrier_init(barrier_at(kDsEmpty + i), 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

// One lane arrives for its warp, after all lanes are done.
__device__ __forceinline__ void warp_arrive(uint32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// ---- load ---------------------------------------------------------------------------------------

__device__ __forceinline__ void send_unit(const BackwardParams& p, uint32 sent, int index) {
  barrier_wait(barrier_at(kUnitEmpty + slot_of<2>(sent)), parity_of<2>(sent) ^ 1);
  const bool stop = index >= unit_count(p);
  const Unit u = unit_at(p, stop ? 0 : index);
  if (threadIdx.x == 0) {
    volatile UnitRecord& r = unit_record(sent);
    r.stop = stop;
    r.batch = u.batch;
    r.kv_head = u.kv_head;
    r.key0 = u.key0;
    r.offset = u.sight.offset;
    r.query_length = u.sight.query_length;
    r.kv_length = u.sight.kv_length;
    r.m0 = first_block(u) * kQueries;
    r.m_end = (first_block(u) + kDirection * block_count(u)) * kQueries;
    r.total = block_count(u) * group_size(p);
    r.head = u.kv_head * group_size(p);
    r.block = (u.batch * p.query_heads + r.head) * query_blocks(p) + first_block(u);
    const Range seen = visible_keys<kWindowLeft, kWindowRight>(u.sight, 0, p.query_len - 1);
    r.seen_keys.begin = seen.begin - u.key0;
    r.seen_keys.end = seen.end - u.key0;
    barrier_arrive(barrier_at(kUnitFull + slot_of<2>(sent)));
  }
  __syncwarp();
}

// One box of 64 columns after the other.
template <int kBoxes, int kBoxBytes>
__device__ __forceinline__ void load_tile(uint32 tile, const TensorMap& map, uint32 full,
                                          uint64 policy, int head, int row, int batch) {
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    tma_load(tile + i * kBoxBytes, &map, full, policy, 64 * i, head, row, batch);
  }
}

__device__ __forceinline__ void load(const BackwardParams& p) {
  const bool leader = threadIdx.x == 0;
  uint32 sent = 0, iteration = 0;
  int index = blockIdx.x;
  while (true) {
    send_unit(p, sent, index);
    const volatile UnitRecord& u = unit_record(sent);
    const uint32 free = parity_of<1>(sent) ^ 1;
    ++sent;
    if (u.stop) break;
    if (leader) index = static_cast<int>(gridDim.x) + atomicAdd(p.next_unit, 1);
    index = __shfl_sync(0xffffffffu, index, 0);

    int left = u.total;
    barrier_wait(barrier_at(kKEmpty), free);
    if (left == 0) {
      barrier_wait(barrier_at(kVEmpty), free);
      if (leader) {
        barrier_arrive(barrier_at(kKFull));
        barrier_arrive(barrier_at(kVFull));
      }
      continue;
    }
    if (leader) {
      barrier_arrive_expect(barrier_at(kKFull), kHeadBoxes * kBoxK);
      load_tile<kHeadBoxes, kBoxK>(shared_base() + kAtK, p.key, barrier_at(kKFull), kEvictNormal,
                                   u.kv_head, u.key0, u.batch);
    }
    int head = u.head, m0 = u.m0, block = u.block;
    bool first = true;
    for (; left > 0; --left) {
      const uint32 slot = slot_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
      barrier_wait(barrier_at(kQEmpty + slot), parity ^ 1);
      if (leader) {
        const uint32 full = barrier_at(kQFull + slot);
        barrier_arrive_expect(full, kHeadBoxes * kBoxQ + kQueries * 4);
        load_tile<kHeadBoxes, kBoxQ>(shared_base() + kAtQ + slot * kHeadBoxes * kBoxQ, p.query,
                                     full, kEvictLast, head, m0, u.batch);
        bulk_load(shared_base() + kAtLse + slot * kQueries * 4,
                  p.lse_log2 + static_cast<int64>(block) * kQueries, kQueries * 4, full);
      }
      if (first) {
        first = false;
        barrier_wait(barrier_at(kVEmpty), free);
        if (leader) {
          barrier_arrive_expect(barrier_at(kVFull), kValueBoxes * kBoxK);
          load_tile<kValueBoxes, kBoxK>(shared_base() + kAtV, p.value, barrier_at(kVFull),
                                        kEvictNormal, u.kv_head, u.key0, u.batch);
        }
      }
      barrier_wait(barrier_at(kDoutEmpty + slot), parity ^ 1);
      if (leader) {
        const uint32 full = barrier_at(kDoutFull + slot);
        barrier_arrive_expect(full, kValueBoxes * kBoxQ + kQueries * 4);
        load_tile<kValueBoxes, kBoxQ>(shared_base() + kAtDout + slot * kValueBoxes * kBoxQ, p.dout,
                                      full, kEvictLast, head, m0, u.batch);
        bulk_load(shared_base() + kAtDelta + slot * kQueries * 4,
                  p.delta + static_cast<int64>(block) * kQueries, kQueries * 4, full);
      }
      ++iteration;
      m0 += kDirection * kQueries;
      block += kDirection;
      if (m0 == u.m_end) {
        block += query_blocks(p) + (u.m0 - m0) / kQueries;
        m0 = u.m0;
        ++head;
      }
    }
  }
}

// The i-th unit as the other roles see it; each warp gives it back with `return_unit`.
__device__ __forceinline__ const volatile UnitRecord& receive_unit(uint32 i) {
  barrier_wait(barrier_at(kUnitFull + slot_of<2>(i)), parity_of<2>(i));
  return unit_record(i);
}
__device__ __forceinline__ void return_unit(uint32 i) {
  warp_arrive(barrier_at(kUnitEmpty + slot_of<2>(i)));
}

// ---- score --------------------------------------------------------------------------------------

inline constexpr int kScores = kQueries / 2;  // elements of S^T per thread

// Do all keys [slab, slab + 64) of the unit and all queries of the block see each other? Queries
// past the length need no test: their lse makes P zero.
__device__ __forceinline__ bool is_full(const BackwardParams& p, const volatile UnitRecord& u,
                                        int slab, int m0) {
  const int key = u.key0 + slab;
  bool full =
      all_visible<kWindowLeft, kWindowRight>(sight_of(p, u), key, key + 63, m0, m0 + kQueries - 1);
  if constexpr (kHasSegments) {
    const int2 q = query_segment_range(p, u.batch, m0 / kQueries);
    const int2 k = key_segment_range(p, u.batch, u.key0 / kKeys);
    full = full && q.x == q.y && k.x == k.y && q.x == k.x;
  }
  return full;
}

// P = exp2(scale * S - lse) in place; `row` is the first of the thread's two keys.
template <bool kPartial>
__device__ __forceinline__ void probabilities(const BackwardParams& p, const volatile UnitRecord& u,
                                              float (&score)[kScores], uint32 lse, int row,
                                              int m0) {
  const int column = 2 * (threadIdx.x % 4);
  Range columns[2];  // relative to the thread's first query, m0 + column
  int key_segment[2];
  if constexpr (kPartial) {
    const Visibility sight = sight_of(p, u);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = u.key0 + row + 8 * r;
      columns[r] = key_columns<kWindowLeft, kWindowRight>(sight, key, m0 + column);
      if constexpr (kHasSegments) {
        key_segment[r] =
            p.key_value_segments[static_cast<int64>(u.batch) * p.kv_len + min(key, p.kv_len - 1)];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 minus_lse = load_shared_f2(lse + 8 * j * 4);
    int query_segment[2];
    if constexpr (kPartial && kHasSegments) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        query_segment[c] = p.query_segments[static_cast<int64>(u.batch) * p.query_len +
                                            min(m0 + 8 * j + column + c, p.query_len - 1)];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = score[4 * j + i];
      const float shift = i % 2 == 0 ? minus_lse.x : minus_lse.y;
      x = exp2_approx(fmaf(x, p.scale_log2, shift));
      if constexpr (kPartial) {
        const Range& seen = columns[i / 2];
        bool visible = 8 * j + i % 2 >= seen.begin && 8 * j + i % 2 < seen.end;
        if constexpr (kHasSegments) {
          visible = visible && query_segment[i % 2] == key_segment[i / 2];
        }
        x = visible ? x : 0.f;
      }
    }
  }
}

__device__ __forceinline__ void zero_row(uint32 tile, int boxes, int box_bytes, int row,
                                         int column_chunk) {
  for (int i = 0; i < boxes; ++i) {
    store_shared_x4(tile + i * box_bytes + row * 128 + column_chunk * 16, 0, 0, 0, 0);
  }
}

// Writes 64 rows of accumulators through shared memory to a [B, S, K, H] array.
template <int kColumns>
__device__ __forceinline__ void write_out(int score, const void* map, float (&values)[kColumns / 2],
                                          float scale, const volatile UnitRecord& u) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32 out = shared_base() + kAtOut + score * kOutBytes;
  // The previous store has read its shared memory.
  if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
  named_barrier_sync(kScoreBarrier + score, 128);
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j) {
    const float* x = values + 8 * j;
    const int chunk = 2 * (j % 4) + lane / 16;
    store_matrix_x4(
        out + j / 4 * 8192 + row * 128 + ((chunk ^ (row % 8)) * 16),
        pack<Element>(x[0] * scale, x[1] * scale), pack<Element>(x[2] * scale, x[3] * scale),
        pack<Element>(x[4] * scale, x[5] * scale), pack<Element>(x[6] * scale, x[7] * scale));
  }
  fence_async_proxy();
  named_barrier_sync(kScoreBarrier + score, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int i = 0; i < ceil_div(kColumns, 64); ++i) {
      tma_store(map, out + i * 8192, 64 * i, u.kv_head, u.key0 + 64 * score, u.batch);
    }
    bulk_commit();
  }
}

// Zeroes the keys that nobody sees: they may hold anything and must not meet a zero in a product.
__device__ __forceinline__ void hide_unseen_keys(const volatile UnitRecord& u, int which,
                                                 uint32 parity) {
  const int low = u.seen_keys.begin, high = u.seen_keys.end;
  if (low <= 0 && high >= kKeys) return;
  barrier_wait(barrier_at(kVFull), parity);
  const int slab = 64 * which;
  for (int row = slab + threadIdx.x % 128 / 8; row < slab + 64; row += 16) {
    if (row < low || row >= high) {
      zero_row(shared_base() + kAtK, kHeadBoxes, kBoxK, row, threadIdx.x % 8);
      zero_row(shared_base() + kAtV, kValueBoxes, kBoxK, row, threadIdx.x % 8);
    }
  }
  fence_async_proxy();
  named_barrier_sync(kScoreBarrier + which, 128);
}

__device__ __forceinline__ void hide_unseen_queries(int valid, uint32 q, uint32 dout) {
  for (int row = threadIdx.x % 256 / 8; row < kQueries; row += 32) {
    if (row >= valid) {
      zero_row(q, kHeadBoxes, kBoxQ, row, threadIdx.x % 8);
      zero_row(dout, kValueBoxes, kBoxQ, row, threadIdx.x % 8);
    }
  }
  fence_async_proxy();
  named_barrier_sync(kScoresBarrier, 256);
}

// a[64 keys x k] b[kQueries x k]^T with both operands K-major.
template <int kDepth>
__device__ __forceinline__ void keys_times_queries(float (&d)[kScores], uint32 keys,
                                                   uint32 queries) {
  const Descriptor a = descriptor(keys, 0, 1024), b = descriptor(queries, 0, 1024);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma_ss<Element, 0, 0>(d, a.at(i / 4 * kBoxK + i % 4 * 32), b.at(i / 4 * kBoxQ + i % 4 * 32),
                            i > 0);
  }
  wgmma_commit();
}

// d[64 keys x n] += a[64 keys x kQueries] b[kQueries x n], a in registers.
template <int kHalfN>
__device__ __forceinline__ void accumulate(float (&d)[kHalfN], uint32 (&a)[kScores / 2],
                                           uint32 rows) {
  const Descriptor b = descriptor(rows, kBoxQ, 1024);
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i) {
    wgmma_rs<Element, 1>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b.at(i * 2048), 1);
  }
  wgmma_commit();
}

// This warpgroup's half of dQ = dS K, from the dS of both.
__device__ __forceinline__ void issue_dq(float (&dq)[kDqValues], uint32 buffer, int which) {
  const uint32 ds =
      shared_base() + kAtDs + buffer * kDsBytes + (kQueries == 128 ? which * kBoxK : 0);
  const uint32 k = shared_base() + kAtK +
                   (kHeadBoxes == 2 ? which * kBoxK
                    : kDqTiles == 1 ? which * 64
                                    : 0);
  const Descriptor a = descriptor(ds, kBoxK, 1024), b = descriptor(k, kBoxK, 1024);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    wgmma_ss<Element, 1, 1>(dq, a.at(i * 2048), b.at(i * 2048), i > 0);
  }
  wgmma_commit();
}

// Deterministic sums: the units of a head add to a query block in ascending order of keys, each
// half of dQ by itself.
__device__ __forceinline__ void wait_turn(const BackwardParams& p, const volatile UnitRecord& u,
                                          const int* turn, int m0, int which) {
  if (threadIdx.x % 128 == 0) {
    // The first key block that meets these queries.
    const int first_key = kWindowLeft ? max(m0 + u.offset - p.window_left, 0) / kKeys : 0;
    const int rank = u.key0 / kKeys - first_key;
    while (load_acquire(turn) != rank) {
    }
  }
  named_barrier_sync(kScoreBarrier + which, 128);
}
__device__ __forceinline__ void pass_turn(int* turn, int which) {
  fence_gpu();
  named_barrier_sync(kScoreBarrier + which, 128);
  if (threadIdx.x % 128 == 0) add_release(turn, 1);
}

// Adds the half of dQ to the sum; `block` indexes [B, N, query block].
__device__ __forceinline__ void add_dq(const BackwardParams& p, const volatile UnitRecord& u,
                                       float (&dq)[kDqValues], int block, int m0, int which) {
  float* sum = p.dq_sum + static_cast<int64>(block) * kBlockFloats + which * 128 * kDqValues +
               threadIdx.x % 128 * 4;
  int* turn = p.turns + 2 * static_cast<int64>(block) + which;
  if constexpr (kDeterministic) wait_turn(p, u, turn, m0, which);
#pragma unroll
  for (int j = 0; j < kDqValues / 4; ++j) {
    reduce_add_x4(sum + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
  if constexpr (kDeterministic) pass_turn(turn, which);
}

// One query block. dQ of the block before it is computed here too, unless this is the unit's first.
template <bool kFirst>
__device__ __forceinline__ void score_step(const BackwardParams& p, const volatile UnitRecord& u,
                                           int which, uint32 iteration, int m0, int last_block,
                                           int last_m0, float (&dk)[kHead / 2],
                                           float (&dv)[kValue / 2]) {
  const int slab = 64 * which;
  const int warp_row = threadIdx.x / 32 % 4 * 16;
  const uint32 slot = slot_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
  const uint32 q = shared_base() + kAtQ + slot * kHeadBoxes * kBoxQ;
  const uint32 dout = shared_base() + kAtDout + slot * kValueBoxes * kBoxQ;

  barrier_wait(barrier_at(kQFull + slot), parity);
  if constexpr (kHasQueryLengths) {
    if (m0 + kQueries > u.query_length) {
      barrier_wait(barrier_at(kDoutFull + slot), parity);
      hide_unseen_queries(u.query_length - m0, q, dout);
    }
  }
  float x[kScores], dp[kScores];
  keys_times_queries<kHead>(x, shared_base() + kAtK + slab * 128, q);
  barrier_wait(barrier_at(kDoutFull + slot), parity);
  keys_times_queries<kValue>(dp, shared_base() + kAtV + slab * 128, dout);
  const bool full = is_full(p, u, slab, m0);
  wgmma_wait<1>();
  pin(x);

  const uint32 lse = shared_base() + kAtLse + slot * kQueries * 4 + threadIdx.x % 4 * 8;
  const uint32 delta = lse + (kAtDelta - kAtLse);
  uint32 probability[kScores / 2], gradient[kScores / 2];
  float slope[kSoftcap ? kScores : 1];
  if constexpr (kSoftcap) {
    apply_tanh(x, p.softcap_inner);
#pragma unroll
    for (int i = 0; i < kScores; ++i) slope[i] = 1.f - x[i] * x[i];
  }
  if (full) {
    probabilities<false>(p, u, x, lse, 0, 0);
  } else {
    probabilities<true>(p, u, x, lse, slab + warp_row + threadIdx.x % 32 / 4, m0);
  }
  if constexpr (kSoftcap) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      probability[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
      x[2 * i] *= slope[2 * i];
      x[2 * i + 1] *= slope[2 * i + 1];
    }
  }
  wgmma_wait<0>();
  pin(dp);
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 d = load_shared_f2(delta + 8 * j * 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 4 * j + 2 * r;
      if constexpr (!kSoftcap) probability[i / 2] = pack<Element>(x[i], x[i + 1]);
      gradient[i / 2] = pack<Element>(x[i] * (dp[i] - d.x), x[i + 1] * (dp[i + 1] - d.y));
    }
  }

  const uint32 buffer = slot_of<kScoreStages>(iteration);
  barrier_wait(barrier_at(kDsEmpty + buffer), parity_of<kScoreStages>(iteration) ^ 1);
  // This thread's row of the 8x8 matrices, and the 16-byte chunk of its first one.
  const int ds_row = slab + warp_row + threadIdx.x % 16;
  const uint32 ds = shared_base() + kAtDs + buffer * kDsBytes + ds_row * 128 +
                    ((threadIdx.x % 32 / 16) ^ (ds_row % 8)) * 16;
#pragma unroll
  for (int j = 0; j < kQueries / 16; ++j) {
    store_matrix_x4((ds + j / 4 * kBoxK) ^ (j % 4 * 32), gradient[4 * j], gradient[4 * j + 1],
                    gradient[4 * j + 2], gradient[4 * j + 3]);
  }
  fence_async_proxy();
  warp_arrive(barrier_at(kDsFull + buffer));

  if constexpr (kFirst) {
    wgmma_fence();
    accumulate(dv, probability, dout);
    accumulate(dk, gradient, q);
  } else {
    const uint32 last = slot_of<kScoreStages>(iteration - 1);
    float dq[kDqValues];
    barrier_wait(barrier_at(kDsFull + last), parity_of<kScoreStages>(iteration - 1));
    wgmma_fence();
    issue_dq(dq, last, which);
    accumulate(dv, probability, dout);
    accumulate(dk, gradient, q);
    wgmma_wait<2>();
    pin(dq);
    warp_arrive(barrier_at(kDsEmpty + last));
    add_dq(p, u, dq, last_block, last_m0, which);
  }
  wgmma_wait<1>();
  warp_arrive(barrier_at(kDoutEmpty + slot));
  wgmma_wait<0>();
  warp_arrive(barrier_at(kQEmpty + slot));
  pin(dk);
  pin(dv);
}

__device__ __forceinline__ void score(const BackwardParams& p, int which) {
  uint32 received = 0, iteration = 0;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    float dk[kHead / 2], dv[kValue / 2];
#pragma unroll
    for (int i = 0; i < kHead / 2; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kValue / 2; ++i) dv[i] = 0.f;

    barrier_wait(barrier_at(kKFull), parity_of<1>(received));
    hide_unseen_keys(u, which, parity_of<1>(received));
    barrier_wait(barrier_at(kVFull), parity_of<1>(received));
    if (u.total > 0) {
      int m0 = u.m0, left = u.total, block = u.block;
      score_step<true>(p, u, which, iteration, m0, 0, 0, dk, dv);
      ++iteration;
      while (--left > 0) {
        const int last_m0 = m0, last_block = block;
        m0 += kDirection * kQueries;
        block += kDirection;
        if (m0 == u.m_end) {
          block += query_blocks(p) + (u.m0 - m0) / kQueries;
          m0 = u.m0;
        }
        score_step<false>(p, u, which, iteration, m0, last_block, last_m0, dk, dv);
        ++iteration;
      }
      const uint32 last = slot_of<kScoreStages>(iteration - 1);
      float dq[kDqValues];
      barrier_wait(barrier_at(kDsFull + last), parity_of<kScoreStages>(iteration - 1));
      wgmma_fence();
      issue_dq(dq, last, which);
      wgmma_wait<0>();
      pin(dq);
      warp_arrive(barrier_at(kDsEmpty + last));
      add_dq(p, u, dq, block, m0, which);
    }
    warp_arrive(barrier_at(kKEmpty));
    warp_arrive(barrier_at(kVEmpty));
    write_out<kValue>(which, &p.dvalue, dv, 1.f, u);
    write_out<kHead>(which, &p.dkey, dk, p.scale, u);
    return_unit(received);
    ++received;
  }
  // Shared memory outlives the last store that reads it.
  if (threadIdx.x % 128 == 0) bulk_wait<0>();
}

__device__ __forceinline__ void main_kernel(const BackwardParams& p) {
  set_up();
  if (warp_index() / 4 == 0) {
    register_decrease<kLoadRegisters>();
    if (threadIdx.x < 32) load(p);
  } else {
    register_increase<kScoreRegisters>();
    score(p, warp_index() / 4 - 1);
  }
}

}  // namespace backward
