// What every kernel shares: bf16 by bits, loads with a cache hint, reductions, and the two halves of programmatic dependent launch.
//
// No system header is included: NVRTC then needs nothing but itself, and compiles a kernel in a tenth of a second.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int PAD = -1;  // abi.PAD: the slot of a padding row

static_assert(sizeof(u64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2);

#ifndef PDL_STRESS
#define PDL_STRESS 0
#endif

// -- programmatic dependent launch ------------------------------------------------------------------------------------
// Every thread of every block calls pdl_wait() on every path, before any early return: a block that skips it lets the grid after next
// start while the predecessor still runs. What is read before it must be constant during a step (weights).

inline __device__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel be scheduled once every block has called this or ended. It orders no memory: the next kernel's wait does.
inline __device__ void pdl_launch() {
#if !PDL_STRESS
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Where a kernel begins: a stress build triggers here, as early as can be.
inline __device__ void pdl_begin() {
#if PDL_STRESS
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before a kernel's first store that another kernel reads: a stress build is late here, so that a missing wait shows.
inline __device__ void pdl_before_stores() {
#if PDL_STRESS
    __nanosleep(20000);
#endif
}

// -- bfloat16 ---------------------------------------------------------------------------------------------------------

// Two bf16 in a word, the lower half first in memory.
inline __device__ float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
inline __device__ float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline __device__ float bf16_to_f32(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// Round to nearest even.
inline __device__ u32 pack_bf16(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
inline __device__ u16 f32_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
inline __device__ float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }

// -- loads and stores -------------------------------------------------------------------------------------------------

// 16 bytes that are read once and never change during a step: they pass the L1 by.
inline __device__ uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

inline __device__ u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory without registers; `bytes` 0..16 are read, the rest is zeroed.
inline __device__ void cp_async16(void* smem, const void* global, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)), "l"(global), "r"(bytes)
                 : "memory");
}
inline __device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
inline __device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// -- reductions: one fixed order each, so that results repeat ---------------------------------------------------------

inline __device__ float warp_sum(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(ALL_LANES, v, offset);
    return v;
}
inline __device__ float warp_max(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, offset));
    return v;
}

// The sum over a block, in every thread. `scratch`: Threads / 32 floats of shared memory, free for reuse after the next barrier.
template <int Threads>
inline __device__ float block_sum(float v, float* scratch) {
    constexpr int warps = Threads / WARP;
    v = warp_sum(v);
    if constexpr (warps == 1) return v;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    float total = scratch[0];
#pragma unroll
    for (int w = 1; w < warps; ++w) total += scratch[w];
    return total;
}
template <int Threads>
inline __device__ float block_max(float v, float* scratch) {
    constexpr int warps = Threads / WARP;
    v = warp_max(v);
    if constexpr (warps == 1) return v;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    __syncthreads();
    float top = scratch[0];
#pragma unroll
    for (int w = 1; w < warps; ++w) top = fmaxf(top, scratch[w]);
    return top;
}

// -- small arithmetic -------------------------------------------------------------------------------------------------

template <typename T>
inline __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
// silu(x) = x / (1 + e^-x); e^-x overflows to infinity for a very negative x, and the quotient is then 0, as it should be.
inline __device__ float silu(float x) { return x / (1.0f + __expf(-x)); }
