// FlashAttention forward for sm_90a: out = softmax(mask(score(scale * Q K^T))) V, and its lse.
//
// One producer warp feeds Q, K and V by TMA to kConsumers warpgroups of 64 query rows each; CTAs
// are persistent. cuda/README.md has the schedule as a diagram. Dao et al. 2022 (arXiv:2205.14135),
// Shah et al. 2024 (arXiv:2407.08608).
//
// Specialised by these constants, which the generated header defines in front of this text:
//   bool kBFloat16, kFloat32  element type of q, k, v, out: else float16
//   int kHeadDim, kValueDim   exact sizes, at most 256
//   bool kTmaLoads            TMA loads (8 divides both dims, or kEarly), else four producer warps
//                             do, see tile.cuh; then static units
//   bool kEarly               8 does not divide a dim, and boxes begin up to 14 bytes before a head
//   int kBlockKV               keys per step, a multiple of 16, 32 to 256
//   int kConsumers            consumer warpgroups, 2 or 3
//   int kStages               K and V buffers each
//   int kQueryStages          Q buffers; 2 loads the next unit's Q during this unit
//   bool kHoldsQueries        a unit's Q is in registers: the next unit's is loaded beside it
//   int kPackedHeads          query heads of one kv head that share a unit (a divisor of 64), or 1
//   bool kCarried, kRest      of a call that two programs share (element.cuh)
//   bool kHalves              float32 as two float16: sm90_float32/forward.cuh
//   int kParts                of an element, planes of a tile: 2 with kHalves, else 1
//   the terms: see terms.cuh
//   bool kPreScale            scale before the maximum (scale <= 0)
//   bool kBatchesTogether     units of a head follow each other through the batch rows
//   bool kDynamic             units from an atomic counter, else static
//   int kTeams                of a producer and its consumers, with units of their own
//   bool kSplits              units, of float8 those of the last wave, are in parts along their
//                             keys (forward_parts.cuh)
//   bool kFades               blocks that a falling line hides are left out (forward_fading.cuh)
//   int kCutDocuments         queries of a document from which on units begin where it does, with
//                             segments (forward_documents.cuh); 0: they do not
//   bool kCutsAligned         also where documents begin and end with a warpgroup's rows
//   bool kFromPages           keys in pages of kPageSize, a multiple of 8, and units of requests
//                             (forward_pages.cuh); kInCommon: and batch rows are parts of keys
//   int kTailRows             with kInCommon: rows of an item of forward_tails.cuh, where each
//                             token sees pages of its own too; 0: there are none
//   int kTailStages, kTailRegisters   their blocks of keys or values in flight; of a thread
//   bool kWholeRows           TMA loads a head's rows of a page at once (key_blocks.cuh)
//   bool kPingPong            warpgroups take turns at the tensor cores
//   bool kDrains              the registers of the weights are free before a softmax: the product
//                             with the values is waited for together with the scores
//   bool kDrainsToHide        the same before a softmax of a block whose elements need tests
//   bool kApart               the product with the values is done before the next scores begin
//   int kOutputs              parts that a block's output comes in, of float8; else 1
//   bool kSumsByProduct       a product with ones adds up the weights of rows, of float8
//   int kProducerRegisters, kConsumerRegisters
// and by flags: jax_flash/_gpu/sm90/forward_schedule.py says what each means, and why it is set.
// Dynamic shared memory: kParts times kQueryStages * kConsumers * 64 * 128 * ceil(kHeadDim / 64)
//   + kStages * kBlockKV * 128 * (ceil(kHeadDim / 64) + ceil(kValueDim / 64)) + 2048 bytes,
//   and with kBiasTiles kStages * kConsumers * 64 * kBlockKV elements of the bias.
#pragma once

#include "sm90/forward_operands.cuh"
// What multiplies them.
#include "sm90/forward_kernel.cuh"
