// A cluster of CLUSTER blocks along x (up to 8, which every card allows): its barrier, and each other's shared memory.
//
// With one block all of this is the block's own barrier and memory.
#pragma once

#include "common.cuh"

inline __device__ u32 cluster_rank() {
    if constexpr (CLUSTER == 1) return 0;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Everything written before, in whatever memory, is seen by the others after their wait.
inline __device__ void cluster_arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
inline __device__ void cluster_wait() {
    if constexpr (CLUSTER > 1)
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    else
        __syncthreads();
}
inline __device__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// A block's memory may be accessed from when it is known to run until it ends: there is a barrier before the first access and one after the last.
//
// The address of this block's `p` in the shared memory of another block, for the accesses below.
inline __device__ u32 remote(const void* p, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(p)), "r"(rank));
    return address;
}
inline __device__ u32 remote_load(const u32* p, u32 rank) {
    if constexpr (CLUSTER == 1) return *p;
    u32 v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote(p, rank)) : "memory");
    return v;
}
inline __device__ u64 remote_load(const u64* p, u32 rank) {
    if constexpr (CLUSTER == 1) return *p;
    u64 v;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(remote(p, rank)) : "memory");
    return v;
}
inline __device__ void remote_store(u32* p, u32 rank, u32 v) {
    if constexpr (CLUSTER == 1)
        *p = v;
    else
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote(p, rank)), "r"(v) : "memory");
}
inline __device__ void remote_store(u64* p, u32 rank, u64 v) {
    if constexpr (CLUSTER == 1)
        *p = v;
    else
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(p, rank)), "l"(v) : "memory");
}
inline __device__ u32 remote_add(u32* p, u32 rank, u32 v) {
    if constexpr (CLUSTER == 1) return atomicAdd(p, v);
    u32 old;
    asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(remote(p, rank)), "r"(v)
                 : "memory");
    return old;
}
