// What the two main kernels share: units of work, the load role, and the arithmetic of S^T tiles.
//
// A unit is a block of keys of one key/value head with all query blocks that see it. The plan role
// hands units out, the load role feeds the others: K and V once, Q, -lse, dO and -delta per query
// block. Tiles are boxes of 64 columns in 128-byte-swizzled shared memory.
#pragma once

#include "sm90/backward_common.cuh"
#include "sm90/unaligned.cuh"

namespace backward {

inline constexpr int kBoxK = kKeys * kBoxRowBytes;
inline constexpr int kBoxQ = kQueries * kBoxRowBytes;

// Shared memory: barriers and units, then tiles. The main kernel goes on at kAtOwn.
inline constexpr int kAtBarriers = 0;
inline constexpr int kAtUnits = 512;  // UnitRecord[2]
inline constexpr int kAtK = 1024;
inline constexpr int kAtV = kAtK + kHeadBoxes * kBoxK;
inline constexpr int kAtQ = kAtV + kValueBoxes * kBoxK;
inline constexpr int kAtDout = kAtQ + kStages * kHeadBoxes * kBoxQ;
inline constexpr int kAtLse = kAtDout + kStages * kValueBoxes * kBoxQ;
inline constexpr int kAtDelta = kAtLse + kStages * kQueries * 4;
inline constexpr int kAtOwn = round_up(kAtDelta + kStages * kQueries * 4, 1024);

// Without TMA two warps load; the turns of the deterministic mode leave one. Each arrives at the
// barrier of a tile; the numbers that come with Q and dO take one arrival more.
inline constexpr int kLoadWarps = kTmaLoads || kDeterministic ? 1 : 2;
inline constexpr int kKeyArrivals = kLoadWarps;
inline constexpr int kQueryArrivals = kTmaLoads ? 1 : kLoadWarps + 1;

inline constexpr int kTurns = 8;  // turns that may have come, deterministic mode
static_assert(kTurnParts <= kTurns);

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
inline constexpr int kDsFull = kDoutEmpty + kStages;  // [kScoreStages]
inline constexpr int kDsEmpty = kDsFull + kScoreStages;
inline constexpr int kTurnFull = kDsEmpty + kScoreStages;  // [kTurns]
inline constexpr int kTurnEmpty = kTurnFull + kTurns;
inline constexpr int kTurnTaken = kTurnEmpty + kTurns;
inline constexpr int kOwnBarriers = kTurnTaken + kTurns;
static_assert(kAtBarriers + 8 * (kOwnBarriers + 2) <= kAtUnits);

// Aligned as declared, so every address below is a constant plus an index.
extern __shared__ __align__(1024) char shared_memory[];

__device__ __forceinline__ uint32 shared_base() { return shared_address(shared_memory); }
__device__ __forceinline__ uint32 barrier_at(int id) {
  return shared_base() + kAtBarriers + 8 * id;
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

// One lane arrives for its warp, after all lanes are done.
__device__ __forceinline__ void warp_arrive(uint32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// A unit as the plan role hands it to the others. It stays in shared memory, not in registers, for
// as long as they work on it.
struct UnitRecord {
  int stop;  // no further units
  int batch, kv_head, key0;
  int offset, query_length, kv_length;  // Visibility of the batch row
  int m0;                               // first query of the walk
  int total;                            // its steps: query blocks of all heads of the group
  int block;                            // its first query block, as an index of [B, N, query block]
  int head, heads;                      // first query head of the group, their number
  Range seen_keys;                      // of the unit, that some query sees, relative to key0
  Range seen_queries;                   // that see some key
};
static_assert(sizeof(UnitRecord) == 64);

__device__ __forceinline__ Visibility sight_of(const BackwardParams& p,
                                               const volatile UnitRecord& u) {
  return {u.offset, p.window_left, p.window_right, u.query_length, u.kv_length};
}
__device__ __forceinline__ volatile UnitRecord& unit_record(uint32 i) {
  return reinterpret_cast<volatile UnitRecord*>(shared_memory + kAtUnits)[i % 2];
}

// Barriers of the roles of warpgroup 0. The arguments count the arrivals that give a unit, K and V
// back.
__device__ __forceinline__ void set_up_load(int unit_readers, int key_readers, int value_readers) {
  for (int i = 0; i < 2; ++i) {
    barrier_init(barrier_at(kUnitFull + i), 1);
    barrier_init(barrier_at(kUnitEmpty + i), unit_readers + kLoadWarps + (kDeterministic ? 2 : 0));
  }
  barrier_init(barrier_at(kKFull), kKeyArrivals);
  barrier_init(barrier_at(kKEmpty), key_readers);
  barrier_init(barrier_at(kVFull), kKeyArrivals);
  barrier_init(barrier_at(kVEmpty), value_readers);
  for (int i = 0; i < kStages; ++i) {
    barrier_init(barrier_at(kQFull + i), kQueryArrivals);
    barrier_init(barrier_at(kQEmpty + i), 8);  // warps of two warpgroups
    barrier_init(barrier_at(kDoutFull + i), kQueryArrivals);
    barrier_init(barrier_at(kDoutEmpty + i), 8);
  }
  for (int i = 0; i < kTurns; ++i) {
    barrier_init(barrier_at(kTurnFull + i), 1);
    barrier_init(barrier_at(kTurnEmpty + i), 1);
    barrier_init(barrier_at(kTurnTaken + i), 4);  // warps of the one warpgroup that adds
  }
}

// The walk over query blocks, as the record has it.
__device__ __forceinline__ void set_walk(const BackwardParams& p, volatile UnitRecord& r,
                                         const Range& blocks) {
  const int first = first_block(blocks), count = blocks.end - blocks.begin;
  r.m0 = first * kQueries;
  r.total = count * r.heads;
  r.block = (r.batch * p.query_heads + r.head) * query_blocks(p) + first;
}

__device__ __forceinline__ void send_unit(const BackwardParams& p, uint32 sent, int index) {
  const bool leader = threadIdx.x % 32 == 0;
  barrier_wait(barrier_at(kUnitEmpty + slot_of<2>(sent)), parity_of<2>(sent) ^ 1);
  volatile UnitRecord& r = unit_record(sent);
  const bool stop = index >= unit_count(p);
  const Unit u = unit_at(p, stop ? 0 : index);
  if (leader) {
    r.stop = stop;
    r.batch = u.batch;
    r.kv_head = u.kv_head;
    r.key0 = u.key0;
    r.offset = u.sight.offset;
    r.query_length = u.sight.query_length;
    r.kv_length = u.sight.kv_length;
    r.heads = group_size(p);
    r.head = u.kv_head * r.heads;
    const Range seen = visible_keys<kWindowLeft, kWindowRight>(u.sight, 0, p.query_len - 1);
    r.seen_keys.begin = seen.begin - u.key0;
    r.seen_keys.end = seen.end - u.key0;
    // Rows past the end of the array read as zero.
    const Range seeing = visible_queries<kWindowLeft, kWindowRight>(u.sight, 0, p.kv_len - 1);
    r.seen_queries.begin = seeing.begin;
    r.seen_queries.end = seeing.end == p.query_len ? 0x7fffffff : seeing.end;
    set_walk(p, r, u.blocks);
  }
  // In deterministic mode a unit takes its turn at every block of its range.
  if constexpr (kHasSegments && !kDeterministic) {
    __syncwarp();
    const Range met = narrow_by_segments(p, r.batch, r.key0, u.blocks);
    if (leader) set_walk(p, r, met);
  }
  if (leader) barrier_arrive(barrier_at(kUnitFull + slot_of<2>(sent)));
  __syncwarp();
}

// Hands out units until there are no more.
__device__ __forceinline__ void plan(const BackwardParams& p) {
  uint32 sent = 0;
  int index = blockIdx.x;
  while (true) {
    send_unit(p, sent, index);
    if (index >= unit_count(p)) break;
    ++sent;
    if (threadIdx.x % 32 == 0) index = static_cast<int>(gridDim.x) + atomicAdd(p.next_unit, 1);
    index = __shfl_sync(0xffffffffu, index, 0);
  }
}

// A walk over the query blocks of a unit, each with all heads of the group: units of one group stay
// together, whatever their lengths, and find what they load in L2.
struct Walk {
  int left, m0, block;
  int head = 0;  // of the group
  __device__ __forceinline__ explicit Walk(const volatile UnitRecord& u)
      : left(u.total), m0(u.m0), block(u.block) {}
  __device__ __forceinline__ void next(const BackwardParams& p, const volatile UnitRecord& u) {
    --left;
    block += query_blocks(p);
    if (++head == u.heads) {
      block += kDirection - head * query_blocks(p);
      m0 += kDirection * kQueries;
      head = 0;
    }
  }
};

// The i-th unit as the other roles see it; each warp gives it back with `return_unit`.
__device__ __forceinline__ const volatile UnitRecord& receive_unit(uint32 i) {
  barrier_wait(barrier_at(kUnitFull + slot_of<2>(i)), parity_of<2>(i));
  return unit_record(i);
}
__device__ __forceinline__ void return_unit(uint32 i) {
  warp_arrive(barrier_at(kUnitEmpty + slot_of<2>(i)));
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

// K or V of a unit.
template <int kDim>
__device__ __forceinline__ void load_keys(const BackwardParams& p, const volatile UnitRecord& u,
                                          uint32 tile, const TensorMap& map, const void* array,
                                          uint32 full) {
  if constexpr (kTmaLoads) {
    constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
    if (threadIdx.x == 0) {
      barrier_arrive_expect(full, kBoxes * kBoxK);
      load_tile<kBoxes, kBoxK>(tile, map, full, kEvictNormal, u.kv_head, u.key0, u.batch);
    }
  } else {
    const int64 row = (static_cast<int64>(u.batch) * p.kv_len + u.key0) * p.kv_heads + u.kv_head;
    copy_rows<kDim, kKeys, kLoadWarps>(tile, static_cast<const uint16*>(array) + row * kDim,
                                       static_cast<int64>(p.kv_heads) * kDim, p.kv_len - u.key0);
    warp_arrive(full);
  }
}

// Q or dO of a query block, and the number that goes with each row: -lse or -delta.
template <int kDim>
__device__ __forceinline__ void load_queries(const BackwardParams& p, uint32 tile,
                                             const TensorMap& map, const void* array,
                                             uint32 numbers, const float* source, uint32 full,
                                             int head, int row, int batch) {
  constexpr int kBoxes = ceil_div(kDim, kBoxColumns);
  if (threadIdx.x == 0) {
    barrier_arrive_expect(full, (kTmaLoads ? kBoxes * kBoxQ : 0) + kQueries * 4);
    if constexpr (kTmaLoads) {
      load_tile<kBoxes, kBoxQ>(tile, map, full, kEvictLast, head, row, batch);
    }
    bulk_load(numbers, source, kQueries * 4, full);
  }
  if constexpr (!kTmaLoads) {
    const int64 at = (static_cast<int64>(batch) * p.query_len + row) * p.query_heads + head;
    copy_rows<kDim, kQueries, kLoadWarps>(tile, static_cast<const uint16*>(array) + at * kDim,
                                          static_cast<int64>(p.query_heads) * kDim,
                                          p.query_len - row);
    warp_arrive(full);
  }
}

__device__ __forceinline__ void load(const BackwardParams& p) {
  uint32 received = 0, iteration = 0;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    const uint32 free = parity_of<1>(received) ^ 1;
    if (u.total == 0) {
      barrier_wait(barrier_at(kKEmpty), free);
      barrier_wait(barrier_at(kVEmpty), free);
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(barrier_at(kKFull));
        barrier_arrive(barrier_at(kVFull));
      }
    }
    bool first = true;
    for (Walk walk(u); walk.left > 0; walk.next(p, u)) {
      const int head = u.head + walk.head, m0 = walk.m0, block = walk.block;
      const uint32 slot = slot_of<kStages>(iteration), parity = parity_of<kStages>(iteration);
      barrier_wait(barrier_at(kQEmpty + slot), parity ^ 1);
      load_queries<kHeadDim>(p, shared_base() + kAtQ + slot * kHeadBoxes * kBoxQ, p.query,
                             p.query_data, shared_base() + kAtLse + slot * kQueries * 4,
                             p.lse_log2 + static_cast<int64>(block) * kQueries,
                             barrier_at(kQFull + slot), head, m0, u.batch);
      // K and V come after the first Q and dO, whose buffers the unit before gives back earlier.
      if (first) {
        barrier_wait(barrier_at(kKEmpty), free);
        load_keys<kHeadDim>(p, u, shared_base() + kAtK, p.key, p.key_data, barrier_at(kKFull));
      }
      barrier_wait(barrier_at(kDoutEmpty + slot), parity ^ 1);
      load_queries<kValueDim>(p, shared_base() + kAtDout + slot * kValueBoxes * kBoxQ, p.dout,
                              p.dout_data, shared_base() + kAtDelta + slot * kQueries * 4,
                              p.minus_delta + static_cast<int64>(block) * kQueries,
                              barrier_at(kDoutFull + slot), head, m0, u.batch);
      if (first) {
        first = false;
        barrier_wait(barrier_at(kVEmpty), free);
        load_keys<kValueDim>(p, u, shared_base() + kAtV, p.value, p.value_data, barrier_at(kVFull));
      }
      ++iteration;
    }
    return_unit(received);
    ++received;
  }
}

// ---- S^T tiles: 64 keys by kQueries ----------------------------------------------------------

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

// P = exp2(scale * S - lse) in place; `row` is the first of the thread's two keys. With a softcap S
// is tanh(scale * S / cap): P goes to `probability`, rounded, and S becomes P times the cap's
// slope.
template <bool kPartial>
__device__ __forceinline__ void probabilities(const BackwardParams& p, const volatile UnitRecord& u,
                                              float (&score)[kScores],
                                              uint32 (&probability)[kScores / 2], uint32 lse,
                                              int row, int m0) {
  const int column = 2 * (threadIdx.x % 4);
  Range columns[2];                             // relative to the thread's first query, m0 + column
  int key_segment[2], segments[kQueries / 32];  // of query m0 + 32 i + lane
  if constexpr (kPartial) {
    if constexpr (kHasSegments) {
#pragma unroll
      for (int i = 0; i < kQueries / 32; ++i) {
        const int query = min(m0 + 32 * i + static_cast<int>(threadIdx.x) % 32, p.query_len - 1);
        segments[i] = p.query_segments[static_cast<int64>(u.batch) * p.query_len + query];
      }
    }
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
        query_segment[c] = __shfl_sync(0xffffffffu, segments[j / 4], 8 * (j % 4) + column + c);
      }
    }
    float slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = score[4 * j + i];
      if constexpr (kSoftcap) slope[i] = 1.f - x * x;
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
    if constexpr (kSoftcap) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        probability[i / 2] = pack<Element>(score[i], score[i + 1]);
        score[i] *= slope[2 * r];
        score[i + 1] *= slope[2 * r + 1];
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

// Zeroes those of the keys [slab, slab + 64) that nobody sees, by one warpgroup: they may hold
// anything and must not meet a zero in a product.
template <int kBoxes>
__device__ __forceinline__ void hide_unseen_keys(const volatile UnitRecord& u, uint32 tile,
                                                 int slab) {
  const int low = u.seen_keys.begin, high = u.seen_keys.end;
  for (int row = slab + threadIdx.x % 128 / 8; row < slab + 64; row += 16) {
    if (row < low || row >= high) zero_row(tile, kBoxes, kBoxK, row, threadIdx.x % 8);
  }
  fence_async_proxy();
}
__device__ __forceinline__ bool has_unseen_keys(const volatile UnitRecord& u) {
  return u.seen_keys.begin > 0 || u.seen_keys.end < kKeys;
}

// Likewise the queries of a block that see no key, in a tile of Q or dO. Every warpgroup that reads
// the tile calls, before its first product with it: rows that another one zeroed stay zero.
inline constexpr bool kHidesQueries = kHasQueryLengths || kWindowLeft || kWindowRight;
template <int kBoxes>
__device__ __forceinline__ void hide_unseen_queries(const volatile UnitRecord& u, uint32 tile,
                                                    int m0, int named_barrier) {
  if constexpr (kHidesQueries) {
    const int low = u.seen_queries.begin, high = u.seen_queries.end;
    if (m0 >= low && m0 + kQueries <= high) return;
    for (int row = threadIdx.x % 128 / 8; row < kQueries; row += 16) {
      if (m0 + row < low || m0 + row >= high) zero_row(tile, kBoxes, kBoxQ, row, threadIdx.x % 8);
    }
    fence_async_proxy();
    named_barrier_sync(named_barrier, 128);
  }
}

// From S^T to P, as `probabilities` has it.
__device__ __forceinline__ void score_to_probability(const BackwardParams& p,
                                                     const volatile UnitRecord& u,
                                                     float (&x)[kScores],
                                                     uint32 (&probability)[kScores / 2], uint32 lse,
                                                     int slab, int m0) {
  if constexpr (kSoftcap) apply_tanh(x, p.softcap_inner);
  const int row = slab + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  if (is_full(p, u, slab, m0)) {
    probabilities<false>(p, u, x, probability, lse, row, m0);
  } else {
    probabilities<true>(p, u, x, probability, lse, row, m0);
  }
}

// Stores dS^T of the keys [slab, slab + 64) for wgmma to read it as dS, MN-major.
__device__ __forceinline__ void store_gradient(const uint32 (&gradient)[kScores / 2], uint32 tile,
                                               int slab) {
  // This thread's row of the 8x8 matrices, and the 16-byte chunk of its first one.
  const int row = slab + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
  const uint32 at = tile + row * kBoxRowBytes + ((threadIdx.x % 32 / 16) ^ (row % 8)) * 16;
#pragma unroll
  for (int j = 0; j < kQueries / 16; ++j) {
    store_matrix_x4((at + j / 4 * kBoxK) ^ (j % 4 * 32), gradient[4 * j], gradient[4 * j + 1],
                    gradient[4 * j + 2], gradient[4 * j + 3]);
  }
  fence_async_proxy();
}

// Writes a warpgroup's 64 rows of accumulators, rounded, into boxes of 64 rows each.
template <int kCount>
__device__ __forceinline__ void stage_rows(const float (&values)[kCount], float scale, uint32 tile,
                                           int box_bytes) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    const float* x = values + 8 * j;
    const int chunk = 2 * (j % 4) + threadIdx.x % 32 / 16;
    store_matrix_x4(
        tile + j / 4 * box_bytes + row * kBoxRowBytes + ((chunk ^ (row % 8)) * 16),
        pack<Element>(x[0] * scale, x[1] * scale), pack<Element>(x[2] * scale, x[3] * scale),
        pack<Element>(x[4] * scale, x[5] * scale), pack<Element>(x[6] * scale, x[7] * scale));
  }
  fence_async_proxy();
}

// d = (d if accumulate) + a[64 keys x k] b[kQueries x k]^T with both operands K-major. The fence
// before it is the caller's.
template <int kDepth>
__device__ __forceinline__ void keys_times_queries(float (&d)[kScores], uint32 keys, uint32 queries,
                                                   bool accumulate = false) {
  const Descriptor a = descriptor(keys, 0, 1024), b = descriptor(queries, 0, 1024);
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma_ss<Element, 0, 0>(d, a.at(i / 4 * kBoxK + i % 4 * 32), b.at(i / 4 * kBoxQ + i % 4 * 32),
                            accumulate || i > 0);
  }
  wgmma_commit();
}

// d[64 keys x n] += a[64 keys x kQueries] b[kQueries x n], a in registers; no commit.
template <int kHalfN>
__device__ __forceinline__ void issue_accumulate(float (&d)[kHalfN], const uint32 (&a)[kScores / 2],
                                                 uint32 rows) {
  const Descriptor b = descriptor(rows, kBoxQ, 1024);
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i) {
    wgmma_rs<Element, 1>(d, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b.at(i * 2048), 1);
  }
}

// ---- dq -----------------------------------------------------------------------------------------

// Deterministic sums: the units of a head add to a query block in ascending order of keys, and the
// first stores. Two warps keep the order beside the warpgroups that add: this one waits until the
// units before have added,
__device__ __forceinline__ int turn_of(const BackwardParams& p, const volatile UnitRecord& u,
                                       int m0) {
  // The first block of keys that these queries see.
  const int first = kWindowLeft ? max(m0 + u.offset - p.window_left, 0) / kKeys : 0;
  return u.key0 / kKeys - first;
}
__device__ __forceinline__ void wait_turns(const BackwardParams& p) {
  const int part = threadIdx.x % 32;
  uint32 received = 0, turn = part;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    for (Walk walk(u); walk.left > 0; walk.next(p, u)) {
      const int rank = turn_of(p, u, walk.m0);
      bool waits = part < kTurnParts;
      if (waits) {
        barrier_wait(barrier_at(kTurnEmpty + slot_of<kTurns>(turn)), parity_of<kTurns>(turn) ^ 1);
      }
      while (__any_sync(0xffffffffu, waits)) {
        if (waits && load_acquire(p.turns + walk.block * kTurnParts + part) == rank) {
          barrier_arrive(barrier_at(kTurnFull + slot_of<kTurns>(turn)));
          waits = false;
        }
      }
      turn += kTurnParts;
    }
    return_unit(received);
    ++received;
  }
}

// and this one tells the next unit when this unit's additions are visible to it.
__device__ __forceinline__ void pass_turns(const BackwardParams& p) {
  const bool leader = threadIdx.x % 32 == 0;
  uint32 received = 0, turn = 0;
  while (true) {
    const volatile UnitRecord& u = receive_unit(received);
    if (u.stop) break;
    for (Walk walk(u); walk.left > 0; walk.next(p, u)) {
      int* counters = p.turns + walk.block * kTurnParts;
      for (int part = 0; part < kTurnParts;) {
        const auto taken = [&](int i) {
          return barrier_at(kTurnTaken + slot_of<kTurns>(turn + i));
        };
        const auto parity = [&](int i) { return parity_of<kTurns>(turn + i); };
        barrier_wait(taken(part), parity(part));
        int end = part + 1;  // of those that one fence serves
        while (end < kTurnParts && uniform(barrier_test(taken(end), parity(end)))) ++end;
        if (leader) fence_gpu();
        for (; part < end; ++part) {
          if (leader) {
            add_relaxed(counters + part, 1);
            barrier_arrive(barrier_at(kTurnEmpty + slot_of<kTurns>(turn + part)));
          }
        }
      }
      turn += kTurnParts;
    }
    return_unit(received);
    ++received;
  }
}

// The roles of warpgroup 0.
__device__ __forceinline__ void feed(const BackwardParams& p) {
  const int warp = warp_index();
  if (warp < kLoadWarps) {
    load(p);
  } else if (warp == 3) {
    plan(p);
  } else if (kDeterministic && warp == 1) {
    wait_turns(p);
  } else if (kDeterministic && warp == 2) {
    pass_turns(p);
  }
}

// ---- dk, dv -------------------------------------------------------------------------------------

// Writes columns of the keys [slab, slab + 64) of dK or dV, rounded, straight from the accumulators
// of a warpgroup: no shared memory is taken.
template <int kDim, int kCount>
__device__ __forceinline__ void store_columns(const BackwardParams& p, void* array,
                                              const float (&values)[kCount], int first_column,
                                              float scale, const volatile UnitRecord& u, int slab) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32 pieces[4 * ceil_div(2 * kCount, 32)];
    gather_row<Element>(values, r, scale, pieces);
    const int row = u.key0 + slab + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    if (row < p.kv_len) {
      uint16* to = static_cast<uint16*>(array) +
                   ((static_cast<int64>(u.batch) * p.kv_len + row) * p.kv_heads + u.kv_head) * kDim;
#pragma unroll
      for (int g = 0; g < ceil_div(2 * kCount, 32); ++g) {
        const int column = first_column + 8 * (4 * g + static_cast<int>(threadIdx.x) % 4);
        if (column < kDim) {
          store_piece<kDim>(
              to, column,
              uint4{pieces[4 * g], pieces[4 * g + 1], pieces[4 * g + 2], pieces[4 * g + 3]});
        }
      }
    }
  }
}

// Adds a warpgroup's accumulators to the sum, in their own order; `first`: nothing is there yet.
template <int kCount>
__device__ __forceinline__ void add_fragments(float* sum, const float (&values)[kCount],
                                              bool first) {
  float* mine = sum + threadIdx.x % 128 * 4;
  if (kDeterministic && first) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      *reinterpret_cast<float4*>(mine + j * 512) =
          float4{values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]};
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      reduce_add_x4(mine + j * 512, values[4 * j], values[4 * j + 1], values[4 * j + 2],
                    values[4 * j + 3]);
    }
  }
}
__device__ __forceinline__ void take_turn(uint32 iteration, int part) {
  if constexpr (kDeterministic) {
    const uint32 turn = iteration * kTurnParts + part;
    barrier_wait(barrier_at(kTurnFull + slot_of<kTurns>(turn)), parity_of<kTurns>(turn));
  }
}
__device__ __forceinline__ void end_turn(uint32 iteration, int part) {
  if constexpr (kDeterministic) {
    warp_arrive(barrier_at(kTurnTaken + slot_of<kTurns>(iteration * kTurnParts + part)));
  }
}

}  // namespace backward
