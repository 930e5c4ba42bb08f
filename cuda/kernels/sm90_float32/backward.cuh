// The main backward kernel of float32 on tensor cores (precision "highest"): each number as two
// float16, three products for one. Without terms, head dims up to 128; the roles of
// sm90/backward_wide.cuh, constants as sm90/backward.cuh has them.
#pragma once

#include "sm90_float32/backward_shared.cuh"
// What lies behind it.
#include "sm90_float32/backward_steps.cuh"
// Who takes them.
#include "sm90/backward_wide_roles.cuh"
