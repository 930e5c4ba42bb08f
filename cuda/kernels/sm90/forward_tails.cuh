// Tails (kTails): beside pages that all tokens see, each token sees positions of its own request.
//
// A warp and a warpgroup of each CTA are for tails alone, while the others compute the pages in
// common: those wait for tensor cores, these for memory. An item is a token's query heads of one kv
// head, up to 16 rows. Products have keys and values on the left, since 64 rows are the fewest that
// wgmma has there, and the item's rows on the right: S^T = K Q^T, O^T = V^T P^T. Results are the
// last batch rows, one for each request.
//
// Juravsky et al., Hydragen (arXiv:2402.05099), has the two parts as two kernels.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

// A token's query heads of a kv head, or some of them: kItemRows from `head` on.
struct TailItem {
  int request, token, head;
  Tail tail;
  __device__ __forceinline__ TailItem(const ForwardParams& p, int index) {
    const int heads = p.query_heads / kItemRows, row = index / heads;
    head = (index - row * heads) * kItemRows;
    request = row / p.query_len;
    token = row - request * p.query_len;
    tail = tail_of(p, request, token);
  }
  static __device__ __forceinline__ int count(const ForwardParams& p) {
    return p.requests * p.query_len * (p.query_heads / kItemRows);
  }
};

// Templates, of TailBuffers<true>: others have none.
template <class Buffers>
__device__ __forceinline__ void init_barriers(Buffers& buffers) {
  for (int stage = 0; stage < kTailStages; ++stage) {
    ptx::barrier_init(ptx::shared_address(&buffers.full[stage]), 1);
    ptx::barrier_init(ptx::shared_address(&buffers.empty[stage]), 4);
  }
}

// The warp that loads tails.
template <class Buffers>
struct TailLoader {
  const ForwardParams& p;
  Buffers& buffers;
  Ring<kTailStages, false> ring;

  __device__ __forceinline__ void run() {
    const int items = TailItem::count(p), lane = ptx::fresh_lane();
#pragma unroll 1
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      const TailItem item(p, i);
      const int kv_head = kv_head_of(p, item.head);
      const int* table = p.own_table + static_cast<int64>(item.tail.request) * p.own_columns;
#pragma unroll 1
      for (int first = item.tail.first; first < item.tail.end; first += kTailKeys) {
        const int row = lane * kPageRows, column = (first + row) / kPageSize;
        const int pieces = min(ceil_div(item.tail.end - first, kPageRows), kTailPieces);
        int page = 0;
        if (lane < pieces) page = min(max(table[min(column, p.own_columns - 1)], 0), p.pages - 1);
        const int slot = (first + row) % kPageSize;
        load<kHeadDim>(p.key, kv_head, page, row, slot, pieces);
        load<kValueDim>(p.value, kv_head, page, row, slot, pieces);
      }
    }
  }
  // A stage by all lanes: each has a piece of kPageRows keys.
  template <int kDim>
  __device__ __forceinline__ void load(const TensorMap& map, int kv_head, int page, int row,
                                       int slot, int pieces) {
    const int lane = ptx::fresh_lane(), stage = ring.stage();
    const uint32 full = ptx::shared_address(&buffers.full[stage]);
    if (lane == 0) {
      ptx::barrier_wait(ptx::shared_address(&buffers.empty[stage]), ring.parity() ^ 1);
      ptx::barrier_arrive_expect(full, pieces * kKeyBlockBytes<kDim, kPageRows>);
    }
    __syncwarp();
    if (lane < pieces) {
      fetch_piece<kDim, kTailKeys>(map, ptx::shared_address(buffers.blocks[stage]), full,
                                   ptx::kEvictFirst, kv_head, page, row, slot);
    }
    __syncwarp();
    ring.advance();
  }
};

// An item's queries on their way: a thread has pieces of 16 bytes. Rows are eight or 16, of which
// some repeat others.
struct TailQueries {
  static constexpr int kChunks = kHeadBoxes * 8;  // pieces of a row
  static constexpr int kPieces = ceil_div(8 * kTailGroups * kChunks, 128);

  uint4 pieces[kPieces];

  __device__ __forceinline__ void fetch(const ForwardParams& p, const TailItem& item) {
    const int64 first = query_row(p, item.request, item.token, item.head);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = threadIdx.x % 128 + 128 * i, row = piece / kChunks % kItemRows;
      const int column = piece % kChunks * 8;
      pieces[i] = make_uint4(0, 0, 0, 0);
      if (column < kHeadDim) {
        const uint16* rows = static_cast<const uint16*>(p.query_data) + (first + row) * kHeadDim;
        pieces[i] = *reinterpret_cast<const uint4*>(rows + column);
      }
    }
  }
  // `tile`: where they come to lie, swizzled, boxes one behind the other.
  __device__ __forceinline__ void store(uint32 tile) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = threadIdx.x % 128 + 128 * i, row = piece / kChunks;
      const uint32 chunk = piece % kChunks;
      if (row >= 8 * kTailGroups) break;
      const uint32 at = tile + (chunk / 8 * 8 * kTailGroups + row) * kBoxRowBytes;
      ptx::store_shared_x4(at + swizzled(chunk % 8, row), pieces[i].x, pieces[i].y, pieces[i].z,
                           pieces[i].w);
    }
  }
};

// The warpgroup that computes tails, 128 threads. A thread has two rows of a product's 64, which
// are keys or columns of values, and two columns of eight, which are rows of the item.
template <class Element, class Buffers>
struct TailWarpgroup {
  using KeyBlockOfTail = KeyTile<kHeadDim, kTailKeys, kWholeRows>;
  using ValueBlockOfTail = KeyTile<kValueDim, kTailKeys, kWholeRows>;
  static constexpr int kRows = 2 * kTailGroups;  // of the item, of this thread
  static constexpr int kBarrier = kWarpgroupBarrier + kConsumers;

  const ForwardParams& p;
  Buffers& buffers;
  Ring<kTailStages, false> ring;
  float output[kValueBoxes][8];
  float base[kRows], sum[kRows];

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32 % 4; }
  // The thread's first row of a product, and row `i` of the item among its own.
  __device__ __forceinline__ int first_row() const { return fragment::first_row(threadIdx.x); }
  __device__ __forceinline__ int item_row(int i) const {
    return i / 2 * 8 + fragment::first_column(threadIdx.x) + i % 2;
  }
  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(kBarrier, 128); }
  __device__ __forceinline__ void wait_full() const {
    ptx::barrier_wait(ptx::shared_address(&buffers.full[ring.stage()]), ring.parity());
  }
  __device__ __forceinline__ void release() {
    const uint32 empty = ptx::shared_address(&buffers.empty[ring.stage()]);
    if (ptx::kEveryLaneArrives || lane() == 0) ptx::lane_arrive(empty);
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const int items = TailItem::count(p);
    int index = blockIdx.x;
    if (index >= items) return;
    TailItem item(p, index);
    TailQueries queries;
    queries.fetch(p, item);
#pragma unroll 1
    while (true) {
      queries.store(ptx::shared_address(buffers.query));
      ptx::fence_async_proxy();
      meet();
      index += gridDim.x;
      const TailItem next(p, min(index, items - 1));
      queries.fetch(p, next);
      attend(item);
      if (index >= items) return;
      item = next;
    }
  }

  __device__ __forceinline__ void attend(const TailItem& item) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      base[i] = kNegativeInfinity;
      sum[i] = 0.0f;
    }
#pragma unroll
    for (auto& box : output) {
#pragma unroll
      for (float& x : box) x = 0.0f;
    }
#pragma unroll 1
    for (int left = item.tail.keys(); left > 0; left -= kTailKeys) step(left);
    finish(item);
  }

  // One block of keys, of which `left` or all are the token's.
  __device__ __forceinline__ void step(int left) {
    float scores[8];
    wait_full();
    multiply_keys(scores);
    release();
    float largest[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[fragment::element(i / 2, half, i % 2)];
        const bool sees = first_row() + fragment::kRowStep * half < left;
        score = sees ? score * p.scale_log2 : kNegativeInfinity;
      }
      largest[i] = fmaxf(scores[fragment::element(i / 2, 0, i % 2)],
                         scores[fragment::element(i / 2, 1, i % 2)]);
    }
    over_warpgroup(largest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float now = fmaxf(base[i], largest[i]);
      const float from = now == kNegativeInfinity ? 0.0f : now;  // of all scores: nothing is added
      const float correction = ptx::exp2_approx(base[i] - from);
      base[i] = now;
      sum[i] *= correction;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = fragment::element(i / 2, half, i % 2);
        scores[at] = ptx::exp2_approx(scores[at] - from);
        sum[i] += scores[at];
#pragma unroll
        for (auto& box : output) box[at] *= correction;
      }
    }
    const uint32 tile = ptx::shared_address(buffers.weights);
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row, key;
        const uint32 pair = transpose(scores, i, half, row, key);
        ptx::store_shared(tile + row * kBoxRowBytes + swizzled(key / 8u, row) + key % 8 * 2, pair);
      }
    }
    wait_full();
    if (left < kTailKeys) clear_values(left);
    ptx::fence_async_proxy();
    meet();
    multiply_values();
    release();
  }
  // Two elements side by side of a row of the item, i or i + 1 of the thread's, of lanes whose rows
  // of the product are neighbours; `column`: the first one's.
  __device__ __forceinline__ uint32 transpose(const float (&of)[8], int i, int half, int& row,
                                              int& column) const {
    const bool odd = lane() & 4;
    const float low = of[fragment::element(i / 2, half, 0)];
    const float high = of[fragment::element(i / 2, half, 1)];
    const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
    row = item_row(i) + odd;
    column = first_row() - odd + fragment::kRowStep * half;
    return odd ? Element::pack(other, high) : Element::pack(low, other);
  }
  // Combines what all threads have of each row of the item.
  template <class Of>
  __device__ __forceinline__ void over_warpgroup(float (&values)[kRows], Of of) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        values[i] = of(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
      }
      if (lane() < 4) buffers.exchange[warp()][item_row(i)] = values[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = buffers.exchange[0][item_row(i)];
#pragma unroll
      for (int other = 1; other < 4; ++other) {
        values[i] = of(values[i], buffers.exchange[other][item_row(i)]);
      }
    }
  }

  // Eight rows of the item stand for 16: both groups of eight are the same in shared memory.
  static constexpr int kGroupBytes = kTailGroups == 2 ? 8 * kBoxRowBytes : 0;
  __device__ __forceinline__ void multiply_keys(float (&scores)[8]) const {
    const auto query = ptx::descriptor(ptx::shared_address(buffers.query), 0, 0, kGroupBytes);
    const auto key = ptx::descriptor(ptx::shared_address(buffers.blocks[ring.stage()]), 0, 0,
                                     KeyBlockOfTail::kGroupBytes);
#pragma unroll
    for (float& x : scores) x = 0.0f;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < ceil_div(kHeadDim, 16); ++i) {
      const int box = i / 4, inner = i % 4 * 32;
      ptx::wgmma_ss<Element, 0, 0>(scores, key.at(box * KeyBlockOfTail::kBoxBytes + inner),
                                   query.at(box * 8 * kTailGroups * kBoxRowBytes + inner), i > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(scores);
  }
  __device__ __forceinline__ void multiply_values() {
    const auto weights = ptx::descriptor(ptx::shared_address(buffers.weights), 0, 0, kGroupBytes);
    const auto value = ptx::descriptor(ptx::shared_address(buffers.blocks[ring.stage()]), 0,
                                       ValueBlockOfTail::kBoxBytes, ValueBlockOfTail::kGroupBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int box = 0; box < kValueBoxes; ++box) {
#pragma unroll
      for (int i = 0; i < kTailKeys / 16; ++i) {
        ptx::wgmma_ss<Element, 1, 0>(
            output[box],
            value.at(box * ValueBlockOfTail::kBoxBytes + i * 2 * ValueBlockOfTail::kGroupBytes),
            weights.at(32 * i), 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& box : output) ptx::pin(box);
  }
  // Values behind the token's last may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_values(int left) const {
    const uint32 tile = ptx::shared_address(buffers.blocks[ring.stage()]);
    const int pieces = (kTailKeys - left) * (kBoxRowBytes / 16);
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < pieces * kValueBoxes; i += 128) {
      const int box = i / pieces;
      ptx::store_shared_x4(tile + ValueBlockOfTail::chunk(box, left, i - box * pieces), 0, 0, 0, 0);
    }
  }

  // Stores the item's results: 0 and -inf where the token sees nothing of its own.
  __device__ __forceinline__ void finish(const TailItem& item) const {
    float total[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) total[i] = sum[i];
    over_warpgroup(total, [](float a, float b) { return a + b; });
    const int64 first = query_row(p, batch_in_common(p) + item.request, item.token, item.head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (warp() != 0 || lane() >= 4 || item_row(i) >= kItemRows) continue;
      p.lse[first + item_row(i)] = (base[i] + ptx::log2_approx(total[i])) * kLn2;
    }
#pragma unroll
    for (auto& box : output) {
      float scaled[8];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float factor = total[i] == 0.0f ? 0.0f : ptx::reciprocal_approx(total[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = fragment::element(i / 2, half, i % 2);
          scaled[at] = box[at] * factor;
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; i += 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int row, column;
          const uint32 pair = transpose(scaled, i, half, row, column);
          column += (&box - output) * kBoxColumns;
          if (row >= kItemRows || column >= kValueDim) continue;
          uint16* out = static_cast<uint16*>(p.out) + (first + row) * kValueDim + column;
          *reinterpret_cast<uint32*>(out) = pair;
        }
      }
    }
  }
};

}  // namespace forward
