// What goes ahead of the forward kernel with segments: which blocks of keys share one with some
// queries, and with kCutsUnits which rows the units have.
//
// A document is a stretch of queries of one id. Most units that begin where documents do have one:
// if the keys of its id are consecutive, blocks of keys begin at the first of them, and no element
// is tested for its segment. Ids may have any order: where keys are scattered, elements are tested.
#pragma once

#include "sm90/forward_common.cuh"

namespace documents {

using namespace forward;

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kUnitsOfCta = kWarps / kConsumers;
inline constexpr uint32 kAllLanes = 0xffffffffu;

// The blocks of keys that share a segment with some queries; all lanes take part.
struct MetBlocks {
  SegmentRange met, one;  // of block numbers; `one`: blocks of the queries' only segment
  int met_count = 0, one_count = 0;

  __device__ __forceinline__ MetBlocks(const ForwardParams& p, int batch,
                                       const SegmentRange& queries) {
    const int blocks = ceil_div(p.kv_len, kBlockKV);
    const int2* ranges =
        reinterpret_cast<const int2*>(p.segment_ranges) + static_cast<int64>(batch) * blocks;
#pragma unroll 4
    for (int block = threadIdx.x % 32; block < blocks; block += 32) {
      const int2 range = ranges[block];
      if (queries.meets(range)) {
        met.include(block);
        ++met_count;
      }
      if (queries.is_one(range)) {
        one.include(block);
        ++one_count;
      }
    }
    met.reduce_warp();
    one.reduce_warp();
    met_count = __reduce_add_sync(kAllLanes, met_count);
    one_count = __reduce_add_sync(kAllLanes, one_count);
  }
  __device__ __forceinline__ SegmentPlan plan() const {
    SegmentPlan plan{{0, 0}, {0, 0}};
    if (met_count > 0) {
      plan.blocks = {met.low, met.high + 1};
      if (met_count <= met.high - met.low) plan.blocks.begin |= SegmentPlan::kSparse;
    }
    if (one_count > 0 && one_count == one.high + 1 - one.low) plan.one = {one.low, one.high + 1};
    return plan;
  }
};

// The keys of an id, if they are consecutive, else none. `met`: their blocks.
__device__ __forceinline__ Range keys_of(const ForwardParams& p, int batch, const MetBlocks& met,
                                         int id) {
  // Blocks that have other ids too are read, most often two: so many at most.
  constexpr int kMostRead = 16;
  if (met.met_count == 0 || met.met_count - met.one_count > kMostRead) return {0, 0};
  const int blocks = ceil_div(p.kv_len, kBlockKV), lane = threadIdx.x % 32;
  const int2* ranges =
      reinterpret_cast<const int2*>(p.segment_ranges) + static_cast<int64>(batch) * blocks;
  const int* ids = p.key_value_segments + static_cast<int64>(batch) * p.kv_len;
  const SegmentRange wanted{id, id};
  SegmentRange keys;
  int count = 0;
#pragma unroll 1
  for (int first = met.met.low; first <= met.met.high; first += 32) {
    const int block = first + lane;
    bool meets = false, is_one = false;
    if (block <= met.met.high) {
      meets = wanted.meets(ranges[block]);
      is_one = wanted.is_one(ranges[block]);
    }
    if (is_one) {
      const int end = min((block + 1) * kBlockKV, p.kv_len);
      keys.include(block * kBlockKV);
      keys.include(end - 1);
      count += end - block * kBlockKV;
    }
    uint32 left = __ballot_sync(kAllLanes, meets && !is_one);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int begin = (first + __ffs(left) - 1) * kBlockKV;
      const int end = min(begin + kBlockKV, p.kv_len);
      for (int key = begin + lane; key < end; key += 32) {
        if (ids[key] != id) continue;
        keys.include(key);
        ++count;
      }
    }
  }
  keys.reduce_warp();
  count = __reduce_add_sync(kAllLanes, count);
  const bool follow = count > 0 && count == keys.high + 1 - keys.low;
  return follow ? Range{keys.low, keys.high + 1} : Range{0, 0};
}

// ---- with kCutsUnits ----------------------------------------------------------------------------

// Finds the queries of which the one before has another id, a bit each, by a warp for
// kQueriesOfWarp of a batch row; query 0 has no bit.
inline constexpr int kQueriesOfWarp = 256;
__device__ __forceinline__ void mark_starts(const ForwardParams& p, int index) {
  const int parts = ceil_div(p.query_len, kQueriesOfWarp), lane = threadIdx.x % 32;
  const int batch = index / parts, first = (index - batch * parts) * kQueriesOfWarp;
  if (batch >= p.batch) return;
  const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
  uint32 mine = 0;
#pragma unroll
  for (int i = 0; i < kQueriesOfWarp / 32; ++i) {
    const int query = first + 32 * i + lane;
    const bool starts = query > 0 && query < p.query_len && ids[query] != ids[query - 1];
    const uint32 word = __ballot_sync(kAllLanes, starts);
    if (lane == i) mine = word;
  }
  const int words = ceil_div(p.query_len, 32), word = first / 32 + lane;
  if (lane < kQueriesOfWarp / 32 && word < words) {
    p.segment_starts[static_cast<int64>(batch) * words + word] = mine;
  }
}

// What a CTA of segment_plan shares.
struct Shared {
  int of_warps[kWarps];
  Range rows[kUnitsOfCta];
};

// What the threads before this one have, or with kBack those after it.
template <bool kBack, class Join>
__device__ __forceinline__ int joined_before(int (&of_warps)[kWarps], int mine, int none,
                                             Join join) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int all = mine;  // of the lanes from the first on
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int from = kBack ? lane + step : lane - step;
    const int other = __shfl_sync(kAllLanes, all, from & 31);
    if (from >= 0 && from < 32) all = join(all, other);
  }
  const int from = kBack ? lane + 1 : lane - 1;
  int before = __shfl_sync(kAllLanes, all, from & 31);
  if (from < 0 || from > 31) before = none;
  __syncthreads();  // of_warps has been read
  if (lane == (kBack ? 0 : 31)) of_warps[warp] = all;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (kBack ? i > warp : i < warp) before = join(before, of_warps[i]);
  }
  return before;
}

// Where documents of a batch row begin; each thread of a CTA has a share of the words.
struct Starts {
  const uint32* words;
  int begin, end;     // of the thread's words
  int before, after;  // the starts next to its own, 0 and the row's length where there are none
  int next_cut;       // the first of later threads, or the row's length

  __device__ __forceinline__ Starts(const ForwardParams& p, int batch, int (&of_warps)[kWarps]) {
    const int count = ceil_div(p.query_len, 32), share = ceil_div(count, kThreads);
    words = p.segment_starts + static_cast<int64>(batch) * count;
    begin = min(static_cast<int>(threadIdx.x) * share, count);
    end = min(begin + share, count);
    int first = p.query_len, last = 0;
    for (int i = begin; i < end; ++i) {
      if (words[i] == 0) continue;
      first = min(first, 32 * i + __ffs(words[i]) - 1);
      last = 32 * i + 31 - __clz(words[i]);
    }
    const auto smaller = [](int a, int b) { return min(a, b); };
    before = joined_before<false>(of_warps, last, 0, [](int a, int b) { return max(a, b); });
    after = joined_before<true>(of_warps, first, p.query_len, smaller);
    int cut = p.query_len;
    visit_cuts([&](int at) { cut = min(cut, at); });
    next_cut = joined_before<true>(of_warps, cut, p.query_len, smaller);
  }
  // A unit begins there: a document that is long enough begins or ends. Shorter ones are faster
  // together. Whole warpgroups have one document each without it.
  static __device__ __forceinline__ bool is_cut(int previous, int start, int next) {
    const bool apart = previous % kWarpgroupRows == 0 && start % kWarpgroupRows == 0;
    return (kCutsAligned || !apart) && max(start - previous, next - start) >= kCutDocuments;
  }
  template <class Visit>
  __device__ __forceinline__ void visit_cuts(Visit visit) const {
    int word = begin;
    uint32 left = begin < end ? words[begin] : 0;
    const auto next_start = [&] {
      while (left == 0) {
        if (++word >= end) return after;
        left = words[word];
      }
      const int start = 32 * word + __ffs(left) - 1;
      left &= left - 1;
      return start;
    };
    int previous = before, start = next_start();
#pragma unroll 1
    while (start != after) {
      const int next = next_start();
      if (is_cut(previous, start, next)) visit(start);
      previous = start;
      start = next;
    }
  }
  // The rows from a cut to the next, of the cuts among the thread's words.
  template <class Visit>
  __device__ __forceinline__ void visit_parts(Visit visit) const {
    int first = threadIdx.x == 0 ? 0 : -1;
    visit_cuts([&](int cut) {
      if (first >= 0) visit(first, cut);
      first = cut;
    });
    if (first >= 0) visit(first, next_cut);
  }
};

// The rows and plans of kUnitsOfCta units of a batch row, a warp for each warpgroup.
__device__ __forceinline__ void plan_units(const ForwardParams& p, Shared& shared) {
  auto& rows = shared.rows;
  const int ctas = ceil_div(p.query_blocks, kUnitsOfCta);
  const int batch = blockIdx.x / ctas, first_unit = (blockIdx.x - batch * ctas) * kUnitsOfCta;
  if (threadIdx.x < kUnitsOfCta) rows[threadIdx.x] = {0, 0};
  ptx::wait_for_the_kernel_ahead();  // which finds the starts and makes the ranges
  const int blocks = ceil_div(p.kv_len, kBlockKV);
  const int2* ranges =
      reinterpret_cast<const int2*>(p.segment_ranges) + static_cast<int64>(batch) * blocks;
  for (int block = 16 * threadIdx.x; block < blocks; block += 16 * kThreads) {
    ptx::prefetch(ranges + block);  // 128 bytes, for all warps
  }
  const Starts starts(p, batch, shared.of_warps);
  int count = 0;
  starts.visit_parts([&](int begin, int end) { count += ceil_div(end - begin, kUnitRows); });
  const auto sum = [](int a, int b) { return a + b; };
  int number = joined_before<false>(shared.of_warps, count, 0, sum);
  if (first_unit == 0 && threadIdx.x == kThreads - 1) atomicMax(p.unit_count, number + count);
  starts.visit_parts([&](int begin, int end) {
    const int last = first_unit + kUnitsOfCta;
    const int after = number + ceil_div(end - begin, kUnitRows);
    for (int unit = max(number, first_unit); unit < min(after, last); ++unit) {
      const int first = begin + (unit - number) * kUnitRows;
      rows[unit - first_unit] = {first, min(first + kUnitRows, end)};
    }
    number = after;
  });
  __syncthreads();

  const int warp = threadIdx.x / 32, mine = warp / kConsumers, part = warp - mine * kConsumers;
  if (mine >= kUnitsOfCta || first_unit + mine >= p.query_blocks) return;
  const Range of_unit = rows[mine];
  const int first = of_unit.begin + part * kWarpgroupRows;
  const int* ids = p.query_segments + static_cast<int64>(batch) * p.query_len;
  const SegmentRange all = segment_range(ids, of_unit.begin, of_unit.end);
  const bool is_one = all.low == all.high;
  const SegmentRange queries = segment_range(ids, first, min(first + kWarpgroupRows, of_unit.end));
  const MetBlocks met(p, batch, is_one ? all : queries);
  const Range keys = is_one ? keys_of(p, batch, met, all.low) : Range{0, 0};
  if (threadIdx.x % 32 != 0) return;
  SegmentPlan* plans = plans_of(p, batch, first_unit + mine);
  plans[part] = met.plan();
  if (part == 0) plans[kConsumers] = {of_unit, keys};
}

}  // namespace documents
