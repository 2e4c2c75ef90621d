// Kernels that touch each element once: embed, gather_rows, add, add_bias, silu_mul. A spec's option with the kernel's name picks one.
//
// Bound by the bytes moved. The trick: none; a thread moves VEC neighbours (16 bytes of float32), a block lies within one row, so no index is
// divided, and what a predecessor writes is not touched before it has ended.
#include "common.cuh"

constexpr int THREADS = 256;

// VEC neighbours in registers.
struct Vec {
    float v[VEC];
};

inline __device__ Vec load(const float* p) {
    Vec r;
    if constexpr (VEC == 4) {
        const float4 q = *reinterpret_cast<const float4*>(p);
        r.v[0] = q.x, r.v[1 % VEC] = q.y, r.v[2 % VEC] = q.z, r.v[3 % VEC] = q.w;
    } else {
        r.v[0] = *p;
    }
    return r;
}
inline __device__ Vec load(const u16* p) {
    Vec r;
    if constexpr (VEC == 4) {
        const uint2 q = *reinterpret_cast<const uint2*>(p);
        r.v[0] = bf16_lo(q.x), r.v[1 % VEC] = bf16_hi(q.x), r.v[2 % VEC] = bf16_lo(q.y), r.v[3 % VEC] = bf16_hi(q.y);
    } else {
        r.v[0] = bf16_to_f32(*p);
    }
    return r;
}
inline __device__ void store(float* p, const Vec& r) {
    if constexpr (VEC == 4)
        *reinterpret_cast<float4*>(p) = make_float4(r.v[0], r.v[1 % VEC], r.v[2 % VEC], r.v[3 % VEC]);
    else
        *p = r.v[0];
}
inline __device__ void store(u16* p, const Vec& r) {
    if constexpr (VEC == 4)
        *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(r.v[0], r.v[1 % VEC]), pack_bf16(r.v[2 % VEC], r.v[3 % VEC]));
    else
        *p = f32_to_bf16(r.v[0]);
}

// The thread's first column; the block's row is blockIdx.y.
inline __device__ int column() { return (blockIdx.x * THREADS + threadIdx.x) * VEC; }

inline __device__ void begin() {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
}

#ifdef EMBED
extern "C" __global__ void __launch_bounds__(THREADS) embed(const int* tokens, const u16* table, float* out, int width) {
    begin();
    const int c = column(), row = blockIdx.y;
    if (c < width) store(out + i64(row) * width + c, load(table + i64(tokens[row]) * width + c));
}
#endif

#ifdef GATHER_ROWS
extern "C" __global__ void __launch_bounds__(THREADS) gather_rows(const float* x, const int* rows, float* out, int width) {
    begin();
    const int c = column(), row = blockIdx.y;
    if (c >= width) return;
    const int from = rows[row];
    Vec r = {};
    if (from != PAD) r = load(x + i64(from) * width + c);
    store(out + i64(row) * width + c, r);
}
#endif

#ifdef ADD
extern "C" __global__ void __launch_bounds__(THREADS) add(const float* x, float* out, int width) {
    begin();
    const int c = column();
    if (c >= width) return;
    const i64 at = i64(blockIdx.y) * width + c;
    const Vec a = load(x + at);
    Vec b = load(out + at);
#pragma unroll
    for (int i = 0; i < VEC; ++i) b.v[i] += a.v[i];
    store(out + at, b);
}
#endif

#ifdef ADD_BIAS
extern "C" __global__ void __launch_bounds__(THREADS) add_bias(const float* bias, float* out, int width) {
    pdl_begin();
    pdl_launch();
    const int c = column();
    Vec a = {};
    if (c < width) a = load(bias + c);  // a weight
    pdl_wait();
    pdl_before_stores();
    if (c >= width) return;
    float* p = out + i64(blockIdx.y) * width + c;
    Vec b = load(p);
#pragma unroll
    for (int i = 0; i < VEC; ++i) b.v[i] += a.v[i];
    store(p, b);
}
#endif

#ifdef SILU_MUL
// width: of a row of `out`; one of gate_up is twice as wide, gate first. bias: of gate_up, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul(const float* gate_up, const float* bias, u16* out, int width) {
    begin();
    const int c = column(), row = blockIdx.y;
    if (c >= width) return;
    const float* p = gate_up + i64(row) * 2 * width + c;
    Vec g = load(p), u = load(p + width);
    if (bias != nullptr) {
        const Vec bg = load(bias + c), bu = load(bias + width + c);
#pragma unroll
        for (int i = 0; i < VEC; ++i) g.v[i] += bg.v[i], u.v[i] += bu.v[i];
    }
#pragma unroll
    for (int i = 0; i < VEC; ++i) u.v[i] *= silu(g.v[i]);
    store(out + i64(row) * width + c, u);
}
#endif
