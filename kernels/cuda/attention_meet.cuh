// Where the warps of a worker meet at the end of a split: every warp sends what it has to the blocks that own the columns.
//
// In a cluster the stores themselves tell the owner's barrier that they have arrived, so nobody waits for a fence.
#pragma once

#include "attention.cuh"
#include "attention_work.cuh"
#include "bulk.cuh"
#include "cluster.cuh"

constexpr int OUT = GROUP * E;                                      // columns of all query rows of a head
constexpr int SLICE = (OUT + 8 * CLUSTER - 1) / (8 * CLUSTER) * 8;  // that a block of the worker owns
constexpr int PITCH = SLICE + 4;

struct Meeting {
    float (*columns)[PITCH];  // [TEAM] of this block's slice
    float2 (*stats)[GROUP];   // [TEAM] maximum and sum of each row
    u64* full;                // all of it is here
    u32 parity;

    // Before this block's predecessor may have ended.
    inline __device__ void init() {
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0) {
                barrier_init(full, 1);
                barrier_init_fence();
            }
            arrive();
        }
        parity = 0;
    }
    // Nobody reads a block's slice any more, or, the first time, it is ready.
    inline __device__ void arrive() {
        if constexpr (CLUSTER > 1) {
            __syncwarp();
            cluster_arrive_relaxed();
        }
    }
    inline __device__ void wait() {
        if constexpr (CLUSTER > 1) {
            __syncwarp();
            cluster_wait_aligned();
        } else {
            __syncthreads();
        }
    }
    // All blocks have begun.
    inline __device__ void ready() {
        if constexpr (CLUSTER > 1) wait();
    }
    // Bytes that a block is sent.
    static inline __device__ u32 bytes(u32 rank) {
        return TEAM * (max(min(OUT - int(rank) * SLICE, SLICE), 0) + 2 * GROUP) * 4;
    }
    // Until all has arrived that was sent for one split.
    inline __device__ void gather(u32 rank) {
        if constexpr (CLUSTER > 1) {
            if (threadIdx.x == 0) barrier_arrive_expect(full, bytes(rank));
            barrier_wait(full, parity);
            parity ^= 1;
        } else {
            __syncthreads();
        }
    }
    // Columns `at` .. of the output, to the block that owns them.
    template <int Count>
    inline __device__ void send(int member, int at, const float (&v)[Count]) {
        const u32 owner = CLUSTER == 1 ? 0 : at / SLICE;
        float* to = columns[member] + at - owner * SLICE;
        if constexpr (Count == 2) {
            put(to, owner, v[0], v[1]);
        } else {
#pragma unroll
            for (int i = 0; i < Count; i += 4) put(to + i, owner, v[i], v[i + 1], v[i + 2], v[i + 3]);
        }
    }
    inline __device__ void send_stat(u32 rank, int member, int row, float top, float sum) {
        put(&stats[member][row].x, rank, top, sum);
    }

   private:
    inline __device__ void put(float* to, u32 rank, float x, float y, float z, float w) {
        if constexpr (CLUSTER > 1)
            store_async(to, full, rank, x, y, z, w);
        else
            *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
    }
    inline __device__ void put(float* to, u32 rank, float x, float y) {
        if constexpr (CLUSTER > 1)
            store_async(to, full, rank, x, y);
        else
            *reinterpret_cast<float2*>(to) = make_float2(x, y);
    }
};
