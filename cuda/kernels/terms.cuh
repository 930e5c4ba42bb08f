// The terms of attention on a GPU, and their constants. The arithmetic of each is written once:
//
//   logit  what happens to a score between Q.K^T and the softmax, and its slope: logit.cuh (scale,
//          softcap), bias.cuh, score_functions.cuh (a user's function)
//   sees   which pairs of query and key there are: sees.cuh and sees_fragments.cuh (window,
//          lengths, segments, positions), mask.cuh
//   keep   which weights dropout keeps: dropout.cuh
//
// Three evaluators ask: the forward's fragments, whose rows are queries; the backward's fragments
// of S^T, whose rows are keys; and rows that are computed again element by element. A term that a
// call does not have is constexpr off. Blocks of pairs are the matter of walk.cuh.
//
// The constants of the generated header that say which terms there are, the same for both passes:
//   bool kWindowLeft, kWindowRight   that side of the window is bounded (causal: right, by 0)
//   bool kBottomRight         the last query is aligned with the last key
//   bool kHasPositions        these are read in place of the index; kReachLeft, kReachRight: the
//                             sides of the window then, where kWindowLeft and kWindowRight are off
//   bool kHasQueryLengths, kHasKeyValueLengths, kHasSegments, kHasSinks
//   bool kHasBias, kBiasFloat32, kBiasBFloat16   its type: float32, else bfloat16, else float16
//   bool kBiasTiles           TMA loads it, a family's choice
//   bool kAddsToScores        a bias, or what else with_bias adds: scores are scaled there
//   bool kHasMask             of either kind: a boolean one, kHasMaskBytes, or
//   int kMaskBlock            one of blocks of so many queries and keys; 0: there is none
//   bool kBiasQueries, kBiasKeys, kMaskQueries, kMaskKeys   they vary with the query, the key;
//                             kByteQueries, kByteKeys: the boolean mask alone does
//   int kBiasAlignment, kMaskAlignment   of their rows, bytes: 1 to 16
//   bool kHasDropout          kDropsMost: the threshold as a float16 is above the infinity
//   bool kDropsPart           queries and keys are a part of those that the pattern counts
//   bool kSoftcap             tanh softcap
//   bool kHighest             float32 as exact as float32 arithmetic
//   bool kFloat8              q, k and v are float8 with scales (sm90_float8/)
//   bool kHasScoreFunction    a user's function in its place, whose text follows the constants:
//                             score_value, in the backward pass score_value_and_slope
//   bool kScoreHasSlope       its derivative by the score is not 1
//   bool kScoreIsLine         it is score + slope * (key - query) + constant, by numbers of
//                             score_line_of_head, of keys that stand kScoreReach or more after the
//                             query, and by others of those as much before it; kScoreReach < 0:
//                             there is one line. kScoreIsLevel: it has none
//   bool kHasScoreIds         it is told the batch row and the head
//
// And where keys are:
//   bool kFromPages           in pages of kPageSize, of requests whose tokens are queries one
//                             behind the other
//   bool kInCommon            in pages that all tokens of a batch row see whole, in parts
#pragma once

#include "bias.cuh"
#include "dropout.cuh"
#include "logit.cuh"
#include "mask.cuh"
#include "score_functions.cuh"
#include "sees.cuh"
#include "sees_fragments.cuh"
