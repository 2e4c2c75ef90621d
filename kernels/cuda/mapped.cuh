// Host memory that kernels read and write: what the other side wrote last says that all before it is there.
#pragma once

#include "common.cuh"

// The device's clock, in nanoseconds.
inline __device__ u64 global_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// A word that the host wrote before the launch. Never from a cache.
inline __device__ u32 load_system(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// A word that another block of this grid wrote, and this one has waited for since. Never from this multiprocessor's own cache.
inline __device__ int load_device(const int* p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Whoever on the host sees this word sees all that this thread, or threads that it met at a barrier, wrote before.
inline __device__ void store_release_system(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
