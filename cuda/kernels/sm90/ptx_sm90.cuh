// The PTX of sm_90a beyond ptx.cuh and ptx_barriers.cuh: registers per role, what mbarriers have
// there, TMA, wgmma, stmatrix, red.v4.
//
// With these two it owns every `asm` of the Hopper kernels, and no algorithm. Read tile.cuh next.
#pragma once

#include "element.cuh"
#include "ptx.cuh"
#include "ptx_barriers.cuh"

namespace ptx {

// ---- registers per thread -----------------------------------------------------------------------
// Each role is one branch of a single if/else, and the kernel has __launch_bounds__(threads, 1):
// otherwise ptxas drops the instruction (C7508).

template <int kRegisters>
__device__ __forceinline__ void register_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void register_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mbarriers ----------------------------------------------------------------------------------

// Makes initialised barriers visible to the async proxy.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Announces `bytes` that TMA will deliver in this phase.
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives and announces them.
__device__ __forceinline__ void barrier_arrive_expect(uint32 barrier, uint32 bytes) {
  if constexpr (kEveryLaneArrives) {
    barrier_expect(barrier, bytes);
    barrier_arrive(barrier);
  } else {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }
}
// The same for its warp, whose lanes are together and have written what is waited for, too: lane 0
// arrives, or all if kEveryLaneArrives.
__device__ __forceinline__ void warp_arrive_expect(uint32 barrier, uint32 bytes) {
  const bool is_first = threadIdx.x % 32 == 0;
  if constexpr (kEveryLaneArrives) {
    if (is_first) barrier_expect(barrier, bytes);
    __syncwarp();
    lane_arrive(barrier);
  } else {
    if (is_first) barrier_arrive_expect(barrier, bytes);
  }
}
// Waits until the phase of this parity has completed. A fresh barrier passes parity 1 at once.
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra waiting;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- proxies ------------------------------------------------------------------------------------

// Orders this thread's ordinary shared-memory accesses before later wgmma and TMA reads of them.
// Needed in each writing thread, before the barrier that hands the data over.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders what this thread knows to be written to global memory before later copies of it by TMA.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- TMA: rank-4 tensor maps over [B, T, N, H], coordinates (column h, head n, row t, batch b)
// ---

// L2 policies as `createpolicy` encodes them.
inline constexpr uint64 kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64 kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64 kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies one box into shared memory; its bytes count against `barrier`.
__device__ __forceinline__ void tma_load(uint32 destination, const void* map, uint32 barrier,
                                         uint64 policy, int column, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "l"(policy), "r"(column), "r"(head), "r"(row), "r"(batch)
      : "memory");
}
// Brings one box into L2.
__device__ __forceinline__ void tma_prefetch(const void* map, int column, int head, int row,
                                             int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(column), "r"(head), "r"(row), "r"(batch)
               : "memory");
}
// Writes one box from shared memory; rows and columns outside the array are dropped.
__device__ __forceinline__ void tma_store(const void* map, uint32 source, int column, int head,
                                          int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(column), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// ---- bulk copies of contiguous bytes (16-byte aligned, a multiple of 16) ------------------------

__device__ __forceinline__ void bulk_load(uint32 destination, const void* source, uint32 bytes,
                                          uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// From shared memory to that of another CTA of the cluster, which the barrier belongs to.
__device__ __forceinline__ void bulk_send(uint32 destination, uint32 source, uint32 bytes,
                                          uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* destination, uint32 source, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// At most kPending of this thread's bulk groups still read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// At most kPending of this thread's bulk groups are still incomplete in global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- wgmma --------------------------------------------------------------------------------------
// Accumulator of m64nN: thread t of the warpgroup holds, for j < N/8, row = 16*(t/32) + (t%32)/4
// (+8 for elements 4j+2, 4j+3) and column = 8j + 2*(t%4) (+1). Put wgmma_fence() before each group
// of products whose register operands were touched: otherwise ptxas adds its own, or serialises
// (C7510).

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of an operand in 128-byte-swizzled shared memory (tiles at 1024-byte alignment).
// K-major (rows of 64 elements): stride_bytes = 1024 between groups of 8 rows, leading ignored;
//   the next 16 elements of the contraction are +32 bytes of address.
// MN-major (transposed as stored): leading_bytes = distance of two 64-element column boxes,
//   stride_bytes = 1024; the next 16 elements of the contraction are +2048 bytes.
struct Descriptor {
  uint64 bits;
  // The descriptor `bytes` further on. Nothing carries, as shared memory ends below 2^18 bytes. But
  // a 64-bit sum stays in uniform registers, one instruction; two words would take one each.
  __device__ __forceinline__ uint64 at(uint32 bytes) const { return bits + bytes / 16; }
};
// Describes the operand `offset` bytes behind `address`. Constants join into one addition. kKnown:
// the compiler knows that all lanes have `address`.
template <bool kKnown = false>
__device__ __forceinline__ Descriptor descriptor(uint32 address, uint32 offset,
                                                 uint32 leading_bytes, uint32 stride_bytes) {
  uint32 low = address / 16 + (offset / 16 | leading_bytes / 16 << 16);
  if constexpr (!kKnown) low = uniform(low);
  Descriptor result;
  asm("mov.b64 %0, {%1, %2};" : "=l"(result.bits) : "r"(low), "r"(stride_bytes / 16 | 1u << 30));
  return result;
}

// Register lists: eight accumulators per group, as asm text (JF_Rk) and as constraints (JF_Ck).
#define JF_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define JF_R1 JF_R0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define JF_R2 JF_R1 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define JF_R3 JF_R2 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define JF_R4 JF_R3 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define JF_R5 JF_R4 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define JF_R6 JF_R5 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define JF_R7 JF_R6 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define JF_R8 JF_R7 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define JF_R9 JF_R8 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define JF_R10 JF_R9 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define JF_R11 JF_R10 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define JF_R12 JF_R11 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define JF_R13 JF_R12 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define JF_R14 JF_R13 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define JF_R15 JF_R14 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define JF_C(d, g)                                                                                \
  "+f"(d[8 * g]), "+f"(d[8 * g + 1]), "+f"(d[8 * g + 2]), "+f"(d[8 * g + 3]), "+f"(d[8 * g + 4]), \
      "+f"(d[8 * g + 5]), "+f"(d[8 * g + 6]), "+f"(d[8 * g + 7])
#define JF_C0(d) JF_C(d, 0)
#define JF_C1(d) JF_C0(d), JF_C(d, 1)
#define JF_C2(d) JF_C1(d), JF_C(d, 2)
#define JF_C3(d) JF_C2(d), JF_C(d, 3)
#define JF_C4(d) JF_C3(d), JF_C(d, 4)
#define JF_C5(d) JF_C4(d), JF_C(d, 5)
#define JF_C6(d) JF_C5(d), JF_C(d, 6)
#define JF_C7(d) JF_C6(d), JF_C(d, 7)
#define JF_C8(d) JF_C7(d), JF_C(d, 8)
#define JF_C9(d) JF_C8(d), JF_C(d, 9)
#define JF_C10(d) JF_C9(d), JF_C(d, 10)
#define JF_C11(d) JF_C10(d), JF_C(d, 11)
#define JF_C12(d) JF_C11(d), JF_C(d, 12)
#define JF_C13(d) JF_C12(d), JF_C(d, 13)
#define JF_C14(d) JF_C13(d), JF_C(d, 14)
#define JF_C15(d) JF_C14(d), JF_C(d, 15)

// N, index of the last register group, and the operand numbers N/2 .. N/2 + 7.
#define JF_FOR_EACH_WGMMA_N(M)                  \
  M(16, 0, 8, 9, 10, 11, 12, 13, 14)            \
  M(32, 1, 16, 17, 18, 19, 20, 21, 22)          \
  M(48, 2, 24, 25, 26, 27, 28, 29, 30)          \
  M(64, 3, 32, 33, 34, 35, 36, 37, 38)          \
  M(80, 4, 40, 41, 42, 43, 44, 45, 46)          \
  M(96, 5, 48, 49, 50, 51, 52, 53, 54)          \
  M(112, 6, 56, 57, 58, 59, 60, 61, 62)         \
  M(128, 7, 64, 65, 66, 67, 68, 69, 70)         \
  M(144, 8, 72, 73, 74, 75, 76, 77, 78)         \
  M(160, 9, 80, 81, 82, 83, 84, 85, 86)         \
  M(176, 10, 88, 89, 90, 91, 92, 93, 94)        \
  M(192, 11, 96, 97, 98, 99, 100, 101, 102)     \
  M(208, 12, 104, 105, 106, 107, 108, 109, 110) \
  M(224, 13, 112, 113, 114, 115, 116, 117, 118) \
  M(240, 14, 120, 121, 122, 123, 124, 125, 126) \
  M(256, 15, 128, 129, 130, 131, 132, 133, 134)

#define JF_SS_TEXT(N, TYPE, LAST, a, b, s, ta, tb)                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                         \
  ", 0;\n"                                                                        \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" JF_R##LAST \
      "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb ";\n}\n"
#define JF_RS_TEXT(N, TYPE, LAST, a0, a1, a2, a3, b, s, tb)                       \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                         \
  ", 0;\n"                                                                        \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" JF_R##LAST \
      "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, %" #tb ";\n}\n"

// Of 32 float8 (e4m3) of the contraction, which both operands have side by side in memory.
#define JF_SS8_TEXT(N, LAST, a, b, s)                                                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                                    \
  ", 0;\n"                                                                                   \
  "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" JF_R##LAST "}, %" #a ", %" #b \
                                                                          ", p, 1, 1;\n}\n"
#define JF_RS8_TEXT(N, LAST, a0, a1, a2, a3, b, s)                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                 \
  ", 0;\n"                                                                \
  "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" JF_R##LAST \
      "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1;\n}\n"

// d[64 x N] = a[64 x 16] b[16 x N] (+ d if accumulate), both operands in shared memory.
// kTransA, kTransB: the operand is stored MN-major.
template <class Element, int kTransA, int kTransB, int kHalfN>
__device__ __forceinline__ void wgmma_ss(float (&d)[kHalfN], uint64 a, uint64 b, int accumulate) {
#define JF_CASE(N, LAST, o0, o1, o2, o3, o4, o5, o6)                               \
  if constexpr (kHalfN * 2 == N) {                                                 \
    if constexpr (kSame<Element, BFloat16>) {                                      \
      asm volatile(JF_SS_TEXT(N, "bf16", LAST, o0, o1, o2, o3, o4)                 \
                   : JF_C##LAST(d)                                                 \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB)); \
    } else {                                                                       \
      asm volatile(JF_SS_TEXT(N, "f16", LAST, o0, o1, o2, o3, o4)                  \
                   : JF_C##LAST(d)                                                 \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB)); \
    }                                                                              \
  }
  JF_FOR_EACH_WGMMA_N(JF_CASE)
#undef JF_CASE
}

// The same with the A operand in registers (its four registers of one k16 step).
template <class Element, int kTransB, int kHalfN>
__device__ __forceinline__ void wgmma_rs(float (&d)[kHalfN], uint32 a0, uint32 a1, uint32 a2,
                                         uint32 a3, uint64 b, int accumulate) {
#define JF_CASE(N, LAST, o0, o1, o2, o3, o4, o5, o6)                                             \
  if constexpr (kHalfN * 2 == N) {                                                               \
    if constexpr (kSame<Element, BFloat16>) {                                                    \
      asm volatile(JF_RS_TEXT(N, "bf16", LAST, o0, o1, o2, o3, o4, o5, o6)                       \
                   : JF_C##LAST(d)                                                               \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB)); \
    } else {                                                                                     \
      asm volatile(JF_RS_TEXT(N, "f16", LAST, o0, o1, o2, o3, o4, o5, o6)                        \
                   : JF_C##LAST(d)                                                               \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB)); \
    }                                                                                            \
  }
  JF_FOR_EACH_WGMMA_N(JF_CASE)
#undef JF_CASE
}

// d[64 x N] = a[64 x 32] b[32 x N] (+ d if accumulate) of float8, both operands in shared memory.
template <int kHalfN>
__device__ __forceinline__ void wgmma_ss_float8(float (&d)[kHalfN], uint64 a, uint64 b,
                                                int accumulate) {
#define JF_CASE(N, LAST, o0, o1, o2, o3, o4, o5, o6) \
  if constexpr (kHalfN * 2 == N) {                   \
    asm volatile(JF_SS8_TEXT(N, LAST, o0, o1, o2)    \
                 : JF_C##LAST(d)                     \
                 : "l"(a), "l"(b), "r"(accumulate)); \
  }
  JF_FOR_EACH_WGMMA_N(JF_CASE)
#undef JF_CASE
}
// The same with the A operand in registers: lane 4r + c has of rows r and r + 8 the elements 4c to
// 4c + 3, then of both rows those 16 further on.
template <int kHalfN>
__device__ __forceinline__ void wgmma_rs_float8(float (&d)[kHalfN], uint32 a0, uint32 a1, uint32 a2,
                                                uint32 a3, uint64 b, int accumulate) {
#define JF_CASE(N, LAST, o0, o1, o2, o3, o4, o5, o6)                             \
  if constexpr (kHalfN * 2 == N) {                                               \
    asm volatile(JF_RS8_TEXT(N, LAST, o0, o1, o2, o3, o4, o5)                    \
                 : JF_C##LAST(d)                                                 \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate)); \
  }
  JF_FOR_EACH_WGMMA_N(JF_CASE)
#undef JF_CASE
}

// The same with eight columns more, whose sums are `last`.
#define JF_FOR_EACH_WGMMA_N_AND_8(M)                    \
  M(16, 24, 0, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)    \
  M(32, 40, 1, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25)  \
  M(48, 56, 2, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33)  \
  M(64, 72, 3, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41)  \
  M(80, 88, 4, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49)  \
  M(96, 104, 5, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57) \
  M(112, 120, 6, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65)

template <int kHalfN>
__device__ __forceinline__ void wgmma_rs_float8(float (&d)[kHalfN], float (&last)[4], uint32 a0,
                                                uint32 a1, uint32 a2, uint32 a3, uint64 b,
                                                int accumulate) {
#define JF_CASE(FEWER, N, LAST, l0, l1, l2, l3, o0, o1, o2, o3, o4, o5)                            \
  if constexpr (kHalfN * 2 == FEWER) {                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5                                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" JF_R##LAST           \
                 ", %" #l0 ", %" #l1 ", %" #l2 ", %" #l3 "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 \
                 "}, %" #o4 ", p, 1, 1;\n}\n"                                                      \
                 : JF_C##LAST(d), "+f"(last[0]), "+f"(last[1]), "+f"(last[2]), "+f"(last[3])       \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));                   \
  }
  JF_FOR_EACH_WGMMA_N_AND_8(JF_CASE)
#undef JF_CASE
}

// Four float8 (e4m3), the first in the lowest byte; beyond 448 they are 448.
__device__ __forceinline__ uint32 pack_float8(float a, float b, float c, float d) {
  uint32 packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// ---- 8x8 matrices from registers to shared memory (addresses 16-byte aligned) -------------------

__device__ __forceinline__ void store_matrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2,
                                                uint32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace ptx
