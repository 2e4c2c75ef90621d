// Reads n 16-byte words and adds them up: the rate at which a decode step can read at best.
//
// Bound by the bytes read. The trick: none; eight loads in flight a thread, a grid that just fills the card.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(512, 2) read_all(const uint4* data, u64 n, u32* out) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    u32 sum = 0;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = load_stream(data + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += stride) {
        const uint4 v = load_stream(data + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    sum = __reduce_add_sync(ALL_LANES, sum);
    pdl_before_stores();
    if (threadIdx.x % WARP == 0) atomicAdd(out, sum);
}
