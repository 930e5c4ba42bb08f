// The main backward kernel for head or value dims above 128, and for few short units: dk, dv and
// the float32 sum of dq, or with kStoresDq dq itself. sm90_float32/backward.cuh has the same roles
// for float32.
//
// A persistent CTA takes blocks of 64 keys. One warpgroup cannot hold both dK and dV, so the work
// is a pipeline of roles, one warpgroup each:
//   load         one warp fetches units, K, V, and per query block Q, -lse, dO, -delta by TMA
//   probability  S^T = K Q^T, P;            dV += P^T dO, P in registers
//   gradient     dP^T = V dO^T, dS;         dK += dS^T Q, dS in registers
//   query        dQ = dS K from shared memory, added to the float32 sum by red.v4
// P goes to the gradient role in float32 and in fragment order, dS^T to the query role in a ring of
// buffers. Each product of a role is issued beside the first product of its next query block.
#pragma once

#include "sm90/backward_wide_steps.cuh"
// Who takes them.
#include "sm90/backward_wide_roles.cuh"
