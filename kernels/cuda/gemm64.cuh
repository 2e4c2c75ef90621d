// How a block of a cluster holds its share of the columns, and how the blocks of a cluster signal each other.
//
// The trick: rows lie in shared memory without padding, the odd ones behind the even ones and STAGGER bytes further on. Two neighbours are
// then half the banks apart, which is all that a load of 16 bytes a lane needs, and a copy of a row is one contiguous piece.
#pragma once

#include "bulk.cuh"
#include "cluster.cuh"

constexpr int CHUNK = 32;  // columns of one load of 16 bytes by the 4 lanes of a row: two steps of a tensor core
constexpr int CHUNKS = K / CHUNK;
constexpr int SLICE = (CHUNKS + CLUSTER - 1) / CLUSTER * CHUNK;  // columns of a block, at most
constexpr int PITCH = STAGE_K * 2;                               // bytes of a row
constexpr int TILE = 4 * PITCH;                                  // from a row to the one 8 further on
constexpr int STAGGER = 64;

// Where a block's columns begin: those of the block before it end there.
inline __device__ int slice_start(int rank) { return rank * CHUNKS / CLUSTER * CHUNK; }

template <int Rows>
inline __device__ int row_offset(int i) {
    return ((i & 1) * (Rows / 2) + i / 2) * PITCH + (i & 1) * STAGGER;
}
// The 16 bytes that a lane loads of the first chunk of the first 8 rows.
template <int Rows>
inline __device__ int lane_offset(int lane) {
    return row_offset<Rows>(lane / 4) + lane % 4 * 16;
}

// True in one lane of a whole warp.
inline __device__ bool elect_one() {
    u32 elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected != 0;
}

// What is written before the store is seen by whoever loads its value.
inline __device__ void store_release(int* p, int v) {
    asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(smem_address(p)), "r"(v) : "memory");
}
inline __device__ int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(v) : "r"(smem_address(p)) : "memory");
    return v;
}

// 16 bytes and more that are read again soon, by other blocks: no hint.
inline __device__ void bulk_copy_shared(void* smem, const void* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(smem)),
                 "l"(global), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// As cp_async16, with a hint of what L2 may do with it.
inline __device__ void cp_async16(void* smem, const void* global, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(smem_address(smem)), "l"(global), "l"(policy)
                 : "memory");
}
inline __device__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

// -- across the cluster -----------------------------------------------------------------------------------------------

// The barriers' initialisation, which has a fence of its own, is all that is to be seen: no other memory waits.
inline __device__ void cluster_arrive_initialised() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
// Values to another block; its barrier there counts their bytes, and who waits at it sees them. No fence: a release across the cluster would
// wait for all of a thread's stores to memory.
inline __device__ void send(float* p, u64* barrier, u32 rank, float v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote(p, rank)), "f"(v),
                 "r"(remote(barrier, rank))
                 : "memory");
}
inline __device__ void send(float* p, u64* barrier, u32 rank, float v, float next) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote(p, rank)),
                 "f"(v), "f"(next), "r"(remote(barrier, rank))
                 : "memory");
}
// After this block's loads of what others may now overwrite. It orders no stores.
inline __device__ void barrier_arrive_at(u64* barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote(barrier, rank)) : "memory");
}
inline __device__ void barrier_wait_cluster(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(smem_address(barrier)), "r"(parity)
            : "memory");
    } while (done == 0);
}
// Its end lets generic stores before it be followed by bulk copies to the same place.
inline __device__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

inline __device__ char* dynamic_smem() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
