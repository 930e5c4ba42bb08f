// What the roles of sm90_float32/backward.cuh have at the start of shared memory.
#pragma once

#include "sm90/backward_walk.cuh"

namespace backward {

template <int kPlanes>
struct OwnShared;
// What brings dS of a buffer back, by rows if it is negative, and of the warps that compute it the
// largest, of this step and the one before.
template <>
struct OwnShared<2> {
  float gradient_factor[kScoreStages];
  alignas(16) uint32 largest[2][4];
  alignas(16) float gradient_rows[kScoreStages][kQueries];
};
using RangeShared = OwnShared<2>;

}  // namespace backward
