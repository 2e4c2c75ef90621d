// Reductions over the cluster of a row. Every block writes its result into every other's memory and meets them at one barrier; which of two sets
// of places it uses alternates, so that a block that is ahead disturbs nobody.
#pragma once

#include "sample_row.cuh"

constexpr u32 NO_ID = 0xffffffffu;

// The best value's order bits, the lowest id that has it, and the order bits of the best of all others. key 0: nothing.
struct Best {
    u32 key, id, second;
};

template <int Threads>
struct Meeting {
    Best warp[Threads / WARP];
    double sums[Threads / WARP];
    u32 key[2][CLUSTER], id[2][CLUSTER], second[2][CLUSTER];
    u64 value[2][CLUSTER];
};

inline __device__ Best warp_best(Best b) {
    const u32 key = __reduce_max_sync(ALL_LANES, b.key);
    const u32 id = __reduce_min_sync(ALL_LANES, b.key == key ? b.id : NO_ID);
    const bool mine = b.key == key && b.id == id;
    return {key, id, __reduce_max_sync(ALL_LANES, mine ? b.second : b.key)};
}

// The best of all threads of the row, in all of them. `turn` alternates from call to call.
template <int Threads>
inline __device__ Best cluster_best(Best b, Meeting<Threads>& m, u32& turn) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    b = warp_best(b);
    if (lane == 0) m.warp[warp] = b;
    __syncthreads();
    if (warp == 0) {
        b = warp_best(lane < Threads / WARP ? m.warp[lane] : Best{0, NO_ID, 0});
        if (lane < CLUSTER) {
            const u32 rank = cluster_rank();
            remote_store(&m.key[turn][rank], lane, b.key);
            remote_store(&m.id[turn][rank], lane, b.id);
            remote_store(&m.second[turn][rank], lane, b.second);
        }
    }
    cluster_sync();
    b = {m.key[turn][0], m.id[turn][0], m.second[turn][0]};
#pragma unroll
    for (int r = 1; r < CLUSTER; ++r) {
        const Best o = {m.key[turn][r], m.id[turn][r], m.second[turn][r]};
        if (o.key > b.key || (o.key == b.key && o.id < b.id))
            b = {o.key, o.id, max(b.key, o.second)};
        else
            b.second = max(b.second, o.key);
    }
    turn ^= 1;
    return b;
}

// The sum over all threads of the row, in all of them: lanes, warps and blocks in one fixed order.
template <int Threads>
inline __device__ double cluster_sum(double v, Meeting<Threads>& m, u32& turn) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(ALL_LANES, v, offset);
    if (lane == 0) m.sums[warp] = v;
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        double sum = 0;
#pragma unroll
        for (int w = 0; w < Threads / WARP; ++w) sum += m.sums[w];
        remote_store(&m.value[turn][cluster_rank()], threadIdx.x, u64(__double_as_longlong(sum)));
    }
    cluster_sync();
    double total = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) total += __longlong_as_double(i64(m.value[turn][r]));
    turn ^= 1;
    return total;
}
