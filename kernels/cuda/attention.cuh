// What both attention kernels share: small asynchronous copies, exponentials in base 2, and where a token lies in the paged cache.
#pragma once

#include "common.cuh"

constexpr int E = HEAD_DIM;
static_assert(E % 16 == 0 && E >= 16 && E <= 128);
static_assert(GROUP >= 1 && GROUP <= 16);
static_assert(BLOCK_TOKENS % 16 == 0);

constexpr float NEVER = __builtin_bit_cast(float, 0xff800000u);  // minus infinity: the score of what a row does not see

// 2^x; 0 for minus infinity.
inline __device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 4, 8 or 16 bytes to shared memory without registers; zeros, and no read, where `live` is false.
template <int Bytes>
inline __device__ void copy_async(void* smem, const void* global, bool live) {
    const int size = live ? Bytes : 0;
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_address(smem)), "l"(global), "r"(size)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem_address(smem)), "l"(global), "n"(Bytes), "r"(size)
                     : "memory");
}

// Four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8, and gets of each row l / 4 the columns 2(l % 4) and the
// next; of the transposed ones, the same of column l / 4.
inline __device__ void ldmatrix4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
}
inline __device__ void ldmatrix4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
}

// Reads that no cache of this multiprocessor answers, and that are done where they stand: what another block, or an earlier kernel, has just
// written.
inline __device__ u32 load_fresh(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
inline __device__ int load_fresh(const int* p) { return int(load_fresh(reinterpret_cast<const u32*>(p))); }
inline __device__ float load_fresh(const float* p) { return __uint_as_float(load_fresh(reinterpret_cast<const u32*>(p))); }
inline __device__ float2 load_fresh(const float2* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}
inline __device__ float4 load_fresh(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// -- clusters ---------------------------------------------------------------------------------------------------------

// The two halves of the cluster's barrier. The first orders no stores: what is sent carries its own barrier.
inline __device__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
inline __device__ void cluster_wait_aligned() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores to the shared memory of block `rank` of the cluster, which count their bytes at that block's `barrier`.
inline __device__ u32 address_in(const void* p, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(p)), "r"(rank));
    return address;
}
inline __device__ void store_async(void* p, u64* barrier, u32 rank, float x, float y) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address_in(p, rank)),
                 "f"(x), "f"(y), "r"(address_in(barrier, rank))
                 : "memory");
}
inline __device__ void store_async(void* p, u64* barrier, u32 rank, float x, float y, float z, float w) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_in(p, rank)),
                 "f"(x), "f"(y), "f"(z), "f"(w), "r"(address_in(barrier, rank))
                 : "memory");
}

// Counts an arrival of this block, whose threads' stores are seen by whoever arrives later. True for the last of `count`, which sets the
// counter back to zero and sees the stores of all. For one thread, after a barrier of the block.
inline __device__ bool arrive_last(u32* counter, u32 count) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(count - 1) : "memory");
    return old == count - 1;
}

// One layer of the cache [blocks, layers, 2, kv_heads, BLOCK_TOKENS, E].
struct Pages {
    const char* layer;  // keys of head 0 in block 0
    i64 block, values;  // bytes from one block to the next, and from a key to its value

    // The key of a head's token: token `inside` of block `entry`.
    inline __device__ const char* key(int entry, int head, int inside) const {
        return layer + i64(entry) * block + (head * BLOCK_TOKENS + inside) * (E * 2);
    }
};
