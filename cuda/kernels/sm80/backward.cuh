// The backward pass of FlashAttention by mma.sync, for every GPU since Ampere: dq, dk and dv from
// q, k, v, out, lse and dout. Dao 2023 (arXiv:2307.08691).
//
// Kernels in the order of their launch, on one stream with the same Sm80BackwardParams; rows are
// the T queries padded to whole blocks of 64:
//   kernel                   grid                             block          dynamic shared memory
//   mask_plan                blocks of pairs, with a mask     128            0
//   split_float32            tiles, with kHalves alone        256            0
//   flash_backward_prepare   B * N * rows / 64, else          128            0
//   flash_backward_sm80      B * K * key blocks               32 * kWarps    sizeof(Shared)
//   flash_backward_finish    B * N * rows / 64 * ceil(H/64)   128            0
// and those of sm80/backward_bias.cuh. cuda/ampere.md has the schedule.
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16            element type of q, k, v, out and the gradients, else float16
//   bool kFloat32             it is float32, in kParts parts (split.cuh)
//   bool kHalves              which are two float16 (halves.cuh), else bfloat16
//   bool kCarried, kRest      of a call that two programs share (element.cuh)
//   int kHeadDim, kValueDim   exact sizes, at most 512
//   bool kEarly               false (early.cuh)
//   int kBlockQ               queries of a block: 64
//   int kStepQueries          of a step: 16, 32 or 64
//   int kMostQueries          that a warp takes at once: 16 or 32
//   int kBlockKV              keys of a CTA: 16, 32, 64 or 128
//   int kRowTiles             of 16 keys a warp has, 1 or 2
//   int kWarps                of a CTA: one for the keys of a warp, or two or four that share them
//   int kStages, kDoutStages  buffers of queries, of output gradients: 1 or 2
//   bool kDefersDq            dQ of a step comes in the next one
//   int kDqRowBytes           as in sm90/backward.cuh; bool kCompact, kDbiasByHeads, kDbiasCleared
//                             likewise; kRing, kStoresDq, kLastStores, kMarksRows, kPairs,
//                             kPartsApart, kDbiasByRows, kFromDiagonals, int kUnitHeads: off
//   bool kAddsFour            one instruction adds four elements of the sum of dq (sm_90 and later)
//   bool kDeterministic, kHasDlse, kHasDbias, kStoresDbias; int kTurnParts = 1, kPrepareParts = 1
//   bool kKeepsAddresses      from step to step; kKeepsGroup: so is the size of a group;
//                             kKeepsRows: so are a warp's rows of keys and values
//   bool kStepsInPieces       a thread copies a step's rows by 16 bytes, where 8 divides the dim
//   bool kListsBlocks         there may be gaps between the blocks of a walk
//   bool kSumsWholeTiles      shared memory holds whole rows where a bias's gradient is summed
//   flags of all families, of which jax_flash/_gpu/backward_schedule.py has the meaning
//   the terms: see terms.cuh
#pragma once

#include "sm80/backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(backward::kThreads, 1)
    flash_backward_sm80(const __grid_constant__ Sm80BackwardParams p) {
  using namespace backward;
  if (is_left_to_other(p)) return;
  extern __shared__ unsigned char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  int index = blockIdx.x;
  if constexpr (kDeterministic) {  // units wait for units that were taken before
    if (threadIdx.x == 0) shared.unit = atomicAdd(p.next_unit, 1);
    __syncthreads();
    index = shared.unit;
  }
  const Walk walk(p, index);
  Rows rows{p, walk, shared};
  rows.run();
}
