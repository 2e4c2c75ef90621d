// out = x / sqrt(mean(x²) + eps) · weight for rows of WIDTH values; x and out float32 or bf16, out may be x.
//
// Bound by the bytes moved. The trick: a row stays in the registers of GROUP threads between its two uses; short rows (heads) take one warp each.
#include "common.cuh"

constexpr int ROWS = THREADS / GROUP;  // of a block
constexpr int VECS = (WIDTH / 4 + GROUP - 1) / GROUP;
static_assert(WIDTH % 4 == 0 && THREADS % GROUP == 0 && (GROUP == WARP || ROWS == 1));

inline __device__ float4 load4(const void* p, i64 at) {
#if X_BF16
    const uint2 q = *reinterpret_cast<const uint2*>(static_cast<const u16*>(p) + at);
    return make_float4(bf16_lo(q.x), bf16_hi(q.x), bf16_lo(q.y), bf16_hi(q.y));
#else
    return *reinterpret_cast<const float4*>(static_cast<const float*>(p) + at);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const void* x, const float* weight, void* out, int rows, float eps) {
    __shared__ float scratch[THREADS / WARP];
    pdl_begin();
    pdl_launch();
    const int t = threadIdx.x % GROUP;
    const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / GROUP;
    float4 w[VECS], v[VECS];
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = 4 * (t + i * GROUP);
        w[i] = c < WIDTH ? *reinterpret_cast<const float4*>(weight + c) : make_float4(0, 0, 0, 0);
    }
    pdl_wait();
    float square = 0;
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = 4 * (t + i * GROUP);
        v[i] = row < rows && c < WIDTH ? load4(x, row * WIDTH + c) : make_float4(0, 0, 0, 0);
        square += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    float sum;
    if constexpr (GROUP == WARP)
        sum = warp_sum(square);
    else
        sum = block_sum<THREADS>(square, scratch);
    const float scale = rsqrtf(sum / WIDTH + eps);
    pdl_before_stores();
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
        const int c = 4 * (t + i * GROUP);
        if (c >= WIDTH) break;
        const float4 r = make_float4(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y, v[i].z * scale * w[i].z,
                                     v[i].w * scale * w[i].w);
#if OUT_BF16
        *reinterpret_cast<uint2*>(static_cast<u16*>(out) + row * WIDTH + c) =
            make_uint2(pack_bf16(r.x, r.y), pack_bf16(r.z, r.w));
#else
        *reinterpret_cast<float4*>(static_cast<float*>(out) + row * WIDTH + c) = r;
#endif
    }
}
