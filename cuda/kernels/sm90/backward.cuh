// The backward pass of FlashAttention on Hopper: dq, dk and dv from q, k, v, out, lse and dout.
// Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608).
//
// This file is the program for head dims up to 128, backward_wide.cuh the one for wider heads and
// for few short units, sm90_float32/backward.cuh the one for float32.
// backward_entries.cuh, compiled at the same time, holds the kernels beside the main one. They are
// launched in this order on one stream with the same BackwardParams; rows are the T queries padded
// to whole query blocks:
//   kernel                   grid                             block  dynamic shared memory
//   split_float32            tiles, with kHalves alone        256    0
//   flash_backward_prepare   B * N * rows / 64 * parts, else  128    0
//   flash_backward           min(SMs, B * K * key blocks)     kThreads, sizeof(NarrowShared)
//   flash_backward_finish    B * N * rows / 64 * ceil(H/64)   128    0
// The last two may start while the kernel ahead ends, for which they wait. With kUnitHeads units
// are N / (K * kUnitHeads) times as many, and a block of flash_backward_finish comes for each 64
// keys. Sinks are in lse: they matter here where a row sees nothing else, see prepare.
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16, kFloat32  element type of q, k, v, out and the gradients, else float16
//   bool kCarried, kRest      of a call that two programs share (element.cuh)
//   bool kHalves              float32 as two float16: sm90_float32/backward.cuh
//   int kParts                of an element, planes of a tile: 2 with kHalves, else 1
//   int kHeadDim, kValueDim   exact sizes
//   bool kEarly               8 does not divide a dim, and boxes begin up to 14 bytes before a head
//   bool kTmaLoads            TMA moves tiles (8 divides both dims, or kEarly), else warps do, see
//                             tile.cuh
//   int kBlockQ                queries per step: 64, or 128 when both dims are at most 64 and
//                             there is no softcap
//   int kBlockKV               keys per block: 128, or 64 for backward_wide.cuh and where a row has
//                             no more: then one score warpgroup (kScoreWarpgroups, else 2) has
//                             them, and kResident CTAs run on a multiprocessor, else 1
//   int kStages, kDoutStages  Q and dO buffers
//   int kScoreStages          dS buffers
//   bool kPairs               two CTAs of a cluster share the columns of dq: backward_pairs.cuh
//   int kDqRowBytes           from one row of dq to the next, if half of the float32 sum of dq lies
//                             there until the end: kBlockQ divides T, 64 the head dim; else 0
//   bool kStoresDq            a unit has all keys of its queries: the main kernel stores dq, and
//                             there is no sum (backward_dq.cuh); not with kDeterministic
//   bool kLastStores          the unit that adds last makes dq of its sum; kMarksRows: with it or
//                             kStoresDq 64 rows in memory that are not all finite are marked
//   bool kCompact             scratch arrays have the rows and columns that there are, no padding
//   bool kRing                sums of some heads at a time, of which the main kernel makes dq:
//                             backward_ring.cuh
//   int kUnitHeads            query heads of a unit, where a key/value head has more: units add to
//                             float32 sums of dk and dv; else 0
//   int kPrepareParts         CTAs of flash_backward_prepare for 64 rows of a head
//   int kOutputs              buffers by which a warpgroup's dV and dK leave, 1 or 2
//   bool kReadsAhead          a step finds what it needs in registers, -delta as what dP starts at
//   bool kHoldsDraws          what dropout draws takes of keys alone is found once a unit, of one
//                             query head
//   bool kDeterministic       units add in turns
//   int kTurnParts            parts of a query block's sum with turns of their own: what one of the
//                             two score warpgroups adds, with kPairs what one of the two CTAs does,
//                             or all that the wide kernel's query role does
//   bool kAddsFour            one instruction adds four elements of the sum of dq
//   bool kHasDlse             lse has a gradient; kHasDbias: the bias has one
//   bool kStoresDbias         such a gradient is dS: the main kernel stores it, heads up to 128;
//                             kDbiasByHeads: of some heads at a time, before the next kernel adds
//                             the batch rows; kDbiasByRows: a CTA adds them, one after the other;
//                             kDbiasCleared: it is zeroed ahead
//   int kSumStages            pairs of blocks in flight where another one is summed
//   the terms: see terms.cuh
//   int kLoadRegisters, kQueryRegisters, kScoreRegisters   of a thread of these roles
// and by flags: jax_flash/_gpu/sm90/backward_schedule.py says what each means, and why it is set;
// jax_flash/_gpu/backward_schedule.py those of all families.
#pragma once

#include "sm90/backward_narrow.cuh"

extern "C" __global__ void __launch_bounds__(backward::kThreads, kResident)
    flash_backward(const __grid_constant__ BackwardParams p) {
  if (is_left_to_other(p)) return;
  backward::main_kernel(p);
}
