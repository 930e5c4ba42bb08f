// PTX that every architecture from sm_80 on has, as functions: lanes, registers, named barriers,
// copies, shared and global memory, arithmetic, conversions.
//
// With sm90/ptx_sm90.cuh it owns every `asm`, and no algorithm. Compiled by NVRTC alone: no CUDA or
// C++ header is included. Shared-memory addresses are 32-bit (`shared_address`). Read element.cuh
// next.
#pragma once

#include "numbers.cuh"

namespace ptx {

// ---- addresses, lanes ---------------------------------------------------------------------------

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// The first lane's value, which the compiler then knows to be the same in all lanes: branches on
// values it takes for divergent make ptxas serialise the wgmma inside (C7518).
template <class Value>
__device__ __forceinline__ Value uniform(Value value) {
  return __shfl_sync(0xffffffffu, value, 0);
}
// What all lanes have, and the compiler then knows. In a loop that lanes walk together what follows
// from it stays in uniform registers.
__device__ __forceinline__ uint32 known(uint32 value) {
  return __reduce_max_sync(0xffffffffu, value);
}
// The same of a condition: behind any other one ptxas takes lanes for apart.
__device__ __forceinline__ bool together(bool condition) {
  return __any_sync(0xffffffffu, condition);
}
__device__ __forceinline__ int warp_index() { return uniform(static_cast<int>(threadIdx.x) / 32); }

// This thread's lane, read from the special register at each use.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The value as one that the compiler knows nothing of, anew at each use.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The value kept apart from a constant that is added to it, which stays an immediate of the
// instruction that uses the sum. Unlike an opaque one it may serve several uses.
__device__ __forceinline__ uint32 unfolded(uint32 value) {
  asm("" : "+r"(value));
  return value;
}

// Keeps the compiler from moving uses of these registers across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32 (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// ---- named barriers (ids 1..15; 0 is __syncthreads), counts in threads --------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies by ordinary threads -----------------------------------------------------------------

// Copies kBytes (4, 8 or 16) to shared memory, or zeroes them: visible to this thread after
// copy_async_wait.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32 destination, uint64 source, bool copies) {
  asm volatile(
      "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %3, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], %2, ignored;\n}\n" ::"r"(destination),
      "l"(source), "n"(kBytes), "r"(static_cast<uint32>(copies))
      : "memory");
}
// Copies the first `size` of kBytes and zeroes the others.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32 destination, uint64 source, int size) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source),
               "n"(kBytes), "r"(size)
               : "memory");
}
// Waits for all of this thread's copies.
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Ends a group of this thread's copies; there may be none in it.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all of this thread's groups but the last kCount.
template <int kCount>
__device__ __forceinline__ void copy_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

// ---- shared memory, plain -----------------------------------------------------------------------

__device__ __forceinline__ void store_shared(uint32 address, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2,
                                                uint32 r3) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}
__device__ __forceinline__ uint32 load_shared(uint32 address) {
  uint32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_shared_f2(uint32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ float4 load_shared_f4(uint32 address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// ---- global memory shared with other CTAs -------------------------------------------------------

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void add_relaxed(int* address, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(int* address, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void reduce_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
// Two consecutive floats (8-byte aligned), or four (16-byte aligned), of sm_90 and later.
__device__ __forceinline__ void reduce_add_x2(float* address, float a, float b) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(a), "f"(b)
               : "memory");
}
__device__ __forceinline__ void reduce_add_x4(float* address, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}
// Stores four elements, or adds them to those that are there, without a branch.
__device__ __forceinline__ void store_or_add_x4(bool stores, float* address, float a, float b,
                                                float c, float d) {
  asm volatile(
      "{\n.reg .pred stores;\nsetp.ne.u32 stores, %5, 0;\n"
      "@stores st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "@!stores red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(address),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<uint32>(stores))
      : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- one kernel after another, of sm_90 and later -----------------------------------------------
// A kernel that is launched so (cuda/runtime/launch.h) starts when every CTA of the one ahead has
// let it, and may read what that one wrote, and write what it reads, after its wait.

// ---- clusters (sm_90) ---------------------------------------------------------------------------

// The barrier of all threads of the cluster that have not ended. After the wait a thread sees what
// others wrote before they arrived only if a fence released it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
// The same place of shared memory in another CTA.
__device__ __forceinline__ uint32 address_in_cluster(uint32 address, int cta) {
  uint32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}
// The calling thread's arrival at an mbarrier there: who waits sees what it has read as read.
__device__ __forceinline__ void arrive_in_cluster(uint32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
// Sends values there; their bytes count against `barrier`, which is of the same CTA.
__device__ __forceinline__ void send(uint32 address, const float2& x, uint32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send(uint32 address, const float4& x, uint32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}
// To the place that another CTA has where this one has `place`, and its barrier likewise.
template <class Values>
__device__ __forceinline__ void send_to(const Values* place, const Values& values, int cta,
                                        const void* barrier) {
  send(address_in_cluster(shared_address(place), cta), values,
       address_in_cluster(shared_address(barrier), cta));
}

__device__ __forceinline__ void let_the_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_the_kernel_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Brings a cache line into L1.
__device__ __forceinline__ void prefetch(const void* address) {
  int unused;
  asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(address) : "memory");
}

// Brings a cache line into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^exponent, -126 <= exponent <= 127.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}
// The lowest `count` bits: none for 0 and less, all for 32 and more.
__device__ __forceinline__ uint32 low_bits(int count) {
  uint32 bits;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(max(count, 0)));
  return bits;
}

// ---- conversions: two elements in a register, the first in the low half; rounded to nearest
// ------

__device__ __forceinline__ uint32 pack_bfloat16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The same with zeros for what has a sign.
__device__ __forceinline__ uint32 pack_positive_bfloat16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32 pack_positive_float16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32 pack_float16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float unpack_float16(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
// Four e4m3, the first in the low byte, as float16, which holds them; of sm_89 and later.
__device__ __forceinline__ void unpack_e4m3(uint32 four, uint32& first, uint32& second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(four));
}
// Beyond 448 they are 448; NaN stays.
__device__ __forceinline__ uint16 pack_e4m3(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Bytes of a register by the nibbles of a selector, the first in the low one; 8 and more are a
// byte's sign, eight times.
template <uint32 kSelector>
__device__ __forceinline__ uint32 permute(uint32 four) {
  uint32 result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(four), "n"(kSelector));
  return result;
}
// a * b + c on both halves.
__device__ __forceinline__ uint32 fma_bfloat16(uint32 a, uint32 b, uint32 c) {
  uint32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ uint32 fma_float16(uint32 a, uint32 b, uint32 c) {
  uint32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// All bits of the halves of a pair whose number has a sign.
__device__ __forceinline__ uint32 sign_halves(float low, float high) {
  uint32 mask;
  asm("prmt.b32 %0, %1, %2, 0xffbb;" : "=r"(mask) : "f"(low), "f"(high));
  return mask;
}

// ---- pairs of float16, compared by magnitude; denormal numbers count ----------------------------

// |a| < |b| in each half, no NaN: as a mask, and as two results, the low half's first.
__device__ __forceinline__ uint32 below(uint32 a, uint32 b) {
  uint32 mask;
  asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\n"
      "set.lt.u32.f16x2 %0, x, y;\n}"
      : "=r"(mask)
      : "r"(a), "r"(b));
  return mask;
}
// |a| > |b| or a NaN.
__device__ __forceinline__ uint32 above(uint32 a, uint32 b) {
  uint32 mask;
  asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\n"
      "set.gtu.u32.f16x2 %0, x, y;\n}"
      : "=r"(mask)
      : "r"(a), "r"(b));
  return mask;
}

// ---- matrices -----------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16 bits from shared memory, one a register: lane 8 * m + r has the address
// of row r of matrix m, 16-byte aligned; lane 4 * r + c gets elements 2c and 2c + 1 of its row r.
__device__ __forceinline__ void load_matrix_x4(uint32 address, uint32 (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}
// Four such matrices, transposed.
__device__ __forceinline__ void load_transposed_x4(uint32 address, uint32 (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// Lane 4 * r + c holds elements 2c and 2c + 1 of row r of an 8 x 8 matrix of 16 bits: those of its
// transpose. Whole warps call.
__device__ __forceinline__ uint32 transpose_matrix(uint32 pair) {
  uint32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// d[16 x 8] += a[16 x 16] b[16 x 8] of a warp, d four numbers from `first` on, in the order of
// fragment.cuh. Of `a` matrices 0 and 1 are rows 0 and 8 on of columns 0 to 7, 2 and 3 those of
// columns 8 to 15; b0, b1: transposed, rows 0 and 8 on.
template <bool kOfBFloat16, int kCount>
__device__ __forceinline__ void multiply_add(float (&d)[kCount], int first, const uint32 (&a)[4],
                                             uint32 b0, uint32 b1) {
  if constexpr (kOfBFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
// d[16 x 8] += a[16 x 8] b[8 x 8] of bfloat16: matrices 0 and 1 of `a`, and the first of b.
template <int kCount>
__device__ __forceinline__ void multiply_add(float (&d)[kCount], int first, const uint32 (&a)[2],
                                             uint32 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace ptx
