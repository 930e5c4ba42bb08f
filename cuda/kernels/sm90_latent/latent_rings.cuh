// Latent decoding: packed rows, where a call has up to 32 query rows (kRings). Their place in
// shared memory is small, so each of the four warps that load has a ring of rows as they are. Rows
// come by cp.async, a lane 16 bytes beside its neighbour's: in another order they take several
// turns of shared memory. A warp writes bfloat16 to where the block lies.
#pragma once

#include "sm90_latent/latent_packed.cuh"

namespace decode {

template <class Shared>  // LatentShared, which has the rings with kRings alone
struct RingLoader {
  static constexpr int kRing = Incoming<true, true>::kRows;
  static constexpr int kWarpRows = kBlockKV / kLoaders;  // of a block
  static constexpr int kAtOnce = 2;                      // rows that come as a group
  static constexpr int kAhead = kRing - kAtOnce;         // rows that are asked for
  static_assert(kWarpRows % (2 * kAtOnce) == 0 && kAhead <= kWarpRows && kRing % kAtOnce == 0);

  const DecodeParams& p;
  Shared& shared;
  int warp;
  uint64 source;  // row 0, this lane's bytes

  const Unit* unit;
  Range needed;
  // Where this lane's row of the block lies, counted over all pages, or kNone, and of the next one;
  // its page and its place there in the block behind that. Row i of this warp is lane i's; from
  // kWarpRows on it is of the next block.
  int slots, next, page, row;
  uint32 filled, read;  // places of the ring, in bytes

  __device__ __forceinline__ RingLoader(const DecodeParams& p, Shared& shared, int warp)
      : p(p),
        shared(shared),
        warp(warp),
        source(reinterpret_cast<uint64>(p.key_data) + threadIdx.x % 32 * 16) {}

  // All blocks of a unit; `blocks` were loaded before.
  template <class LoadQueries>
  __device__ __forceinline__ void load(const Unit& of, const Range& range, uint32& blocks,
                                       LoadQueries load_queries) {
    unit = &of;
    needed = positions_of(p, of.length);
    int block = ptx::uniform(range.begin);
    const int end = ptx::uniform(range.end);
    filled = read = 0;
    find(block);
    next = slot();
    find(block + 1);
    move(block);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; i += kAtOnce) ask(i);
    load_queries();
#pragma unroll 1
    for (; block < end; ++block) {
      const uint32 stage = stage_of_block(blocks), parity = parity_of_block(blocks);
      const uint32 empty = ptx::shared_address(shared.empty[0]) + 16 * stage;
      ptx::barrier_wait(empty, parity ^ 1);
      ptx::barrier_wait(empty + 8, parity ^ 1);
      __syncwarp();
      const bool lacks = kPaged && __any_sync(0xffffffffu, slots == kNone);
      if (ptx::fresh_lane() == 0) {
        reinterpret_cast<unsigned char*>(&shared.spoiled[stage])[warp] = lacks;
      }
#pragma unroll 1
      for (int i = 0; i < kWarpRows; i += 2 * kAtOnce) {
        write(ask_and_take(i + kAhead), i, stage);
        write(ask_and_take(i + kAtOnce + kAhead), i + kAtOnce, stage);
      }
      tell(stage);
      ++blocks;
      move(block + 1);
    }
    ptx::copy_async_wait();
  }

 private:
  // As they are: a lane has 16 features of each row, and of one row 8 that are bfloat16. A lane
  // whose banks another one asks for has the second of its two pieces of a box's row first.
  struct Raw {
    float2 bits[kAtOnce][2];
    float scales[kAtOnce];
    float4 plain;
  };

  // The page of this lane's row of a block comes while others are loaded. In the place of a row
  // that is not needed there is one that is, by its side.
  __device__ __forceinline__ void find(int block) {
    const int at = block * kBlockKV + first_row() + threadIdx.x % kWarpRows;
    row = min(max(at, needed.begin), needed.end - 1);
    if constexpr (kPaged) {
      const int column = row / p.page_size;
      row -= column * p.page_size;
      page = p.page_table[static_cast<int64>(unit->batch) * p.columns + column];
    }
  }
  __device__ __forceinline__ int slot() const {
    if constexpr (!kPaged) return unit->batch * p.page_size + row;
    return page < 0 || page >= p.pages ? kNone : page * p.page_size + row;
  }
  __device__ __forceinline__ void move(int block) {
    slots = next;
    next = slot();
    find(block + 2);
  }
  __device__ __forceinline__ int first_row() const { return warp * kWarpRows; }
  __device__ __forceinline__ uint32 ring() const {
    return ptx::shared_address(shared.incoming) + warp * (kRing * kPackedBytes);
  }
  static __device__ __forceinline__ void move_on(uint32& place) {
    place += kAtOnce * kPackedBytes;
    if (place == kRing * kPackedBytes) place = 0;
  }

  // Asks for the rows from `first` on; zeros for one that lies nowhere.
  __device__ __forceinline__ void ask(int first) {
    const int lane = ptx::fresh_lane();
    const uint32 to = ring() + filled + lane * 16;
    const int of_lane = first < kWarpRows ? slots : next;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = __shfl_sync(0xffffffffu, of_lane, first % kWarpRows + i);
      const bool copies = !kPaged || slot >= 0;
      const uint64 from =
          source +
          static_cast<uint64>(static_cast<int64>(kPaged ? max(slot, 0) : slot) * kPackedBytes);
      ptx::copy_async_past_l1(to + i * kPackedBytes, from, copies);
      if (lane < (kPackedBytes - 512) / 16) {
        ptx::copy_async_past_l1(to + i * kPackedBytes + 512, from + 512, copies);
      }
    }
    ptx::copy_async_commit();
    move_on(filled);
  }
  // The same, once the rows are there that are to be read.
  __device__ __forceinline__ Raw ask_and_take(int first) {
    ptx::copy_async_wait_but<kAhead / kAtOnce - 1>();
    __syncwarp();
    ask(first);
    return take();
  }
  __device__ __forceinline__ Raw take() {
    const int lane = threadIdx.x % 32;
    const uint32 rows = ring() + read;
    const uint32 left = rows + lane * 16 + turns() * 8;
    const uint32 right = rows + (lane * 16 + turns() * 8 ^ 8);
    Raw raw;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      raw.bits[i][0] = ptx::load_shared_f2(left + i * kPackedBytes);
      raw.bits[i][1] = ptx::load_shared_f2(right + i * kPackedBytes);
      raw.scales[i] = __uint_as_float(
          ptx::load_shared(rows + i * kPackedBytes + kPackedScalesAt + lane / 8 * 4));
    }
    if (const int own = ptx::fresh_lane(); own / 8 < kAtOnce) {
      raw.plain =
          ptx::load_shared_f4(rows + own / 8 * kPackedBytes + kPackedPlainAt + own % 8 * 16);
    }
    move_on(read);
    return raw;
  }
  static __device__ __forceinline__ bool turns() { return (threadIdx.x / 4 + threadIdx.x / 8) % 2; }

  __device__ __forceinline__ void write(const Raw& raw, int first, uint32 stage) const {
    const int lane = threadIdx.x % 32, at = first_row() + first;  // in the block
    const uint32 keys = ptx::shared_address(shared.keys[0]) + stage * kKeyBytes;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32 to =
          chunk_address<kBlockKV>(keys + lane / 4 * kBoxBytes, at + i, lane % 4 * 2 + turns());
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint2 left = scaled_slowly(__float_as_uint(raw.bits[i][piece].x), raw.scales[i]),
                    right = scaled_slowly(__float_as_uint(raw.bits[i][piece].y), raw.scales[i]);
        ptx::store_shared_x4(to ^ piece * 16, left.x, left.y, right.x, right.y);
      }
    }
    if (const int own = ptx::fresh_lane(); own / 8 < kAtOnce) {
      ptx::store_shared_x4(chunk_address<kBlockKV>(keys + kWeightsAt, at + own / 8, own % 8),
                           __float_as_uint(raw.plain.x), __float_as_uint(raw.plain.y),
                           __float_as_uint(raw.plain.z), __float_as_uint(raw.plain.w));
    }
  }

  // This warp's rows of the block are there.
  __device__ __forceinline__ void tell(uint32 stage) const {
    const int lane = threadIdx.x % 32;
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane < kKeyBoxes) {
      ptx::barrier_arrive(ptx::shared_address(shared.full[stage]) + 8 * lane);
    }
  }
};

}  // namespace decode
