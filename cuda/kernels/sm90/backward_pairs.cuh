// With kPairs: two CTAs of a cluster have neighbouring blocks of keys and walk the same query
// blocks. Each makes half of the columns of dq for the keys of both, so that the sum of dq in
// memory is added to half as often.
//
// L2 adds what CTAs of 64 keys send it at 0.9 of a sector a clock and slice, which limits the wide
// kernel without pairs. Each CTA copies its dS to the other one, and loads, beside its own keys,
// half of the columns of the other one's.
#pragma once

#include "sm90/backward_wide_shared.cuh"

namespace backward {

// The query role: dq of the columns of this CTA, 32 or 64 at a time. Some are added to the sum
// beside the products of the next ones.
struct PairedQuery {
  static_assert(!kPairs || kHeadBoxes == 3 || (kHeadBoxes == 4 && !kAddsBoxes));
  static constexpr int kPieces = kHeadBoxes;  // of 32 columns, of this CTA

  const BackwardParams& p;

  static __device__ __forceinline__ int first_piece() { return pair_rank() * kPieces; }

  // dq = dS K of columns from a piece on: of this CTA's 64 keys, then of the other one's, whose
  // boxes lie behind.
  template <int kCount>
  static __device__ __forceinline__ void issue(float (&dq)[kCount], uint32 iteration, int piece,
                                               bool first) {
    const uint32 buffer = stage_of<kScoreStages>(iteration);
    const int box = piece / 2, of_other = kHeadBoxes + box - first_piece() / 2;
    const uint32 keys = at(&Shared::key) + piece % 2 * (kBoxRowBytes / 2);
    ptx::wgmma_fence();
    issue(dq, at(&Shared::gradient) + buffer * kGradientBytes, keys + box * kBoxK, false);
    if (first) {
      ptx::barrier_wait(at(&Shared::other_full, buffer), parity_of<kScoreStages>(iteration));
    }
    issue(dq, gradient_of_other(buffer), keys + of_other * kBoxK, true);
    ptx::wgmma_commit();
  }
  template <int kCount>
  static __device__ __forceinline__ void issue(float (&dq)[kCount], uint32 gradient, uint32 keys,
                                               bool accumulate) {
    const ptx::Descriptor a = descriptor(gradient, kGradientBytes), b = descriptor(keys, kBoxK);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::wgmma_ss<Element, 1, 1>(dq, a.at(i * 2048), b.at(i * 2048), accumulate || i > 0);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add(float (&dq)[kCount], const volatile UnitRecord& u,
                                      int sum_index, int piece, Turn turn) const {
    ptx::pin(dq);
    if constexpr (kStoresDq) return store_dq(p, u, sum_index, piece / 2, piece % 2 * 4, dq);
    add_fragments(SumTile(p, sum_index, piece / 2), piece % 2 * 4, dq, turn);
  }

  // The other CTA's dS has been read, and so has what it was copied from.
  static __device__ __forceinline__ void release_gradient(uint32 iteration) {
    const uint32 empty = at(&Shared::gradient_empty, stage_of<kScoreStages>(iteration));
    release(empty);
    if (ptx::kEveryLaneArrives || threadIdx.x % 32 == 0) ptx::arrive_in_cluster(in_other(empty));
  }

  // Half of the middle box and a whole one, where there are three.
  __device__ __forceinline__ void add_boxes(const volatile UnitRecord& u, uint32 iteration,
                                            int sum_index, bool first) {
    const int middle = 2 + pair_rank(), whole = pair_rank() * 4;
    float low[16], high[32];
    issue(low, iteration, middle, true);
    issue(high, iteration, whole, false);
    if constexpr (kDeterministic) {  // dS is given back before the turn comes
      ptx::wgmma_wait<0>();
      release_gradient(iteration);
      ptx::pin(high);
      const Turn turn = take_turn(iteration, 0, first);
      add(low, u, sum_index, middle, turn);
      add(high, u, sum_index, whole, turn);
      end_turn(iteration, 0);
      return;
    }
    ptx::wgmma_wait<1>();
    add(low, u, sum_index, middle, Turn::later());
    ptx::wgmma_wait<0>();
    release_gradient(iteration);
    add(high, u, sum_index, whole, Turn::later());
  }
  // 32 columns at a time.
  __device__ __forceinline__ void add_pieces(const volatile UnitRecord& u, uint32 iteration,
                                             int sum_index, bool first) {
    Turn turn = Turn::later();
    float dq[2][16];
    issue(dq[0], iteration, first_piece(), true);
#pragma unroll
    for (int i = 1; i < kPieces; ++i) {
      issue(dq[i % 2], iteration, first_piece() + i, false);
      ptx::wgmma_wait<1>();
      if (i == 1) turn = take_turn(iteration, 0, first);
      add(dq[1 - i % 2], u, sum_index, first_piece() + i - 1, turn);
    }
    ptx::wgmma_wait<0>();
    release_gradient(iteration);
    add(dq[1 - kPieces % 2], u, sum_index, first_piece() + kPieces - 1, turn);
    end_turn(iteration, 0);
  }

  __device__ __forceinline__ void run() {
    uint32 received = 0, iteration = 0;
    while (true) {
      const volatile UnitRecord& u = receive_unit(received);
      if (u.step == 0) break;
      ptx::barrier_wait(at(&Shared::key_full), parity_of<1>(received));
      for (Walk walk(p, u); walk.left > 0; walk.next(p, u)) {
        const uint32 buffer = stage_of<kScoreStages>(iteration);
        if (threadIdx.x % 128 == 0) {
          ptx::barrier_arrive_expect(at(&Shared::other_full, buffer), kGradientBytes);
        }
        ptx::barrier_wait(at(&Shared::gradient_full, buffer), parity_of<kScoreStages>(iteration));
        __syncwarp();
        const bool first = adds_first(p, u, walk.m0);
        if constexpr (kAddsBoxes) {
          add_boxes(u, iteration, walk.sum(), first);
        } else {
          add_pieces(u, iteration, walk.sum(), first);
        }
        ++iteration;
      }
      release(at(&Shared::key_empty));
      return_unit(received);
      ++received;
    }
    // A CTA's shared memory stays until the other one has arrived there for the last time.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
};

}  // namespace backward
