// Bulk copies from global to shared memory, and the barriers that say when they are complete.
//
// A copy needs one thread and no registers, so a block keeps tens of kilobytes in flight, and starts them before it may compute.
#pragma once

#include "common.cuh"

// -- mbarrier ---------------------------------------------------------------------------------------------------------

inline __device__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}
// After the initialisations, before anything else may use the barriers: the copy engine must see them too.
inline __device__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
inline __device__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
// Arrive, and let the phase also wait for this many bytes of bulk copies.
inline __device__ void barrier_arrive_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}
inline __device__ bool barrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}
// Until the phase of this parity has ended.
inline __device__ void barrier_wait(u64* barrier, u32 parity) {
    while (!barrier_try_wait(barrier, parity)) {
    }
}

// Barrier `id` (1..15) among `threads` threads of the block.
inline __device__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -- bulk copies ------------------------------------------------------------------------------------------------------

// What is read once must not push out of L2 what is read again.
inline __device__ u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// `bytes` and both addresses: multiples of 16.
inline __device__ void bulk_copy(void* smem, const void* global, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            smem_address(smem)),
        "l"(global), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
        : "memory");
}

// Asks for memory to come into L2; nothing waits for it.
inline __device__ void bulk_prefetch(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// -- tensor cores -----------------------------------------------------------------------------------------------------

// c[16, 8] += a[16, 16] · b[16, 8], bf16 with f32 accumulation. Lane l holds rows l/4 and l/4 + 8, columns 2(l%4) and the next.
inline __device__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
