// The forward pass of float8 (e4m3) with scales; constants as sm90/forward.cuh
// has them, and its kernel but for the operands.
#pragma once

#include "sm90_float8/forward_operands.cuh"
// What multiplies them.
#include "sm90/forward_kernel.cuh"
