// The forward pass of float32 on tensor cores (precision "highest"): each number as two float16,
// three products for one. Without terms, head dims up to 128; constants as sm90/forward.cuh has
// them, and its kernel but for the operands.
#pragma once

#include "sm90_float32/forward_operands.cuh"
// What multiplies them.
#include "sm90/forward_kernel.cuh"
