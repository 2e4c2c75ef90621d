// What a warp computes of a chunk of 16 tokens: scores, the running softmax, weighted values, all as fragments of the tensor cores.
//
// A product may take its inner index in any order, if both sides take the same. So 16 contiguous bytes of a key are four words of fragments,
// and 16 bytes of four neighbouring values are eight, after a byte permutation each.
#pragma once

#include "attention_ring.cuh"

constexpr int NT = (GROUP + 7) / 8;  // tiles of 8 query rows

// The running softmax of a warp over its chunks: for query rows lane/4 (+ 8) the maximum and this lane's part of the sum; for rows 2(lane%4)
// and the next (+ 8) the weighted values.
struct Softmax {
    float top[NT], sum[NT];
    float o[NT][E / 16][4];

    inline __device__ void clear() {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            top[t] = NEVER, sum[t] = 0;
#pragma unroll
            for (int m = 0; m < E / 16; ++m) o[t][m][0] = o[t][m][1] = o[t][m][2] = o[t][m][3] = 0;
        }
    }
};

// The query rows of a group, as fragments. A fragment has room for 16 rows; up to 8 rows fill it with two parts of their columns instead, and
// the product with one half of a key is then in its upper half, with the other in its lower half.
struct Query {
    u32 words[NT][E / 8];

    inline __device__ void load(const u16* group) {
        const int lane = threadIdx.x % WARP, c = lane % 4;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const int row = lane / 4 + 8 * t;
            const u16* from = group + row * E;
#pragma unroll
            for (int s = 0; s < K16; ++s) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (row < GROUP) v = *reinterpret_cast<const uint4*>(from + s * 32 + c * 8);
                words[t][4 * s] = v.x, words[t][4 * s + 1] = v.y, words[t][4 * s + 2] = v.z, words[t][4 * s + 3] = v.w;
            }
            if constexpr (K8 > 0) {
                uint2 v = make_uint2(0, 0);
                if (row < GROUP) v = *reinterpret_cast<const uint2*>(from + K16 * 32 + c * 4);
                words[t][4 * K16] = v.x, words[t][4 * K16 + 1] = v.y;
            }
        }
    }
};

// s[row, token]: products of the query rows with the chunk's keys; the second index is a fragment's, for 8 tokens.
inline __device__ void scores(float (&s)[2][4], const Query& q, const char* slot) {
    const int lane = threadIdx.x % WARP;
    const u32(&a)[E / 8] = q.words[0];
    const u32(&b)[E / 8] = q.words[NT - 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float other[4] = {0, 0, 0, 0};
        s[h][0] = s[h][1] = s[h][2] = s[h][3] = 0;
#pragma unroll
        for (int p = 0; p < K16; ++p) {
            const uint4 k = *reinterpret_cast<const uint4*>(slot + (h * K16 + p) * 512 + lane * 16);
            const int w = 4 * p;
            if constexpr (NT == 1) {
                mma_bf16(s[h], a[w], a[w + 2], a[w + 1], a[w + 3], k.x, k.y);
                mma_bf16(other, a[w], a[w + 2], a[w + 1], a[w + 3], k.z, k.w);
            } else {
                mma_bf16(s[h], a[w], b[w], a[w + 1], b[w + 1], k.x, k.y);
                mma_bf16(other, a[w + 2], b[w + 2], a[w + 3], b[w + 3], k.z, k.w);
            }
        }
        if constexpr (K8 > 0) {
            const uint2 k = *reinterpret_cast<const uint2*>(slot + 2 * K16 * 512 + h * 256 + lane * 8);
            mma_bf16(s[h], a[4 * K16], NT == 1 ? 0 : b[4 * K16], a[4 * K16 + 1], NT == 1 ? 0 : b[4 * K16 + 1], k.x, k.y);
        }
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) s[h][i] += other[NT == 1 ? i + 2 : i];
    }
}

// Scores to probabilities, as fragments of the product with the values. left: tokens of the chunk that exist.
inline __device__ void soften(Softmax& f, float (&s)[2][4], float scale, int left, u32 (&p)[NT][2]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) s[h][i] *= scale;
    if (left < CHUNK) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2 * NT; ++i)
                if (8 * h + lane % 4 * 2 + i % 2 >= left) s[h][i] = NEVER;
    }
    float top[NT];
    bool higher = false;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
        top[t] = fmaxf(fmaxf(s[0][2 * t], s[0][2 * t + 1]), fmaxf(s[1][2 * t], s[1][2 * t + 1]));
        top[t] = fmaxf(top[t], __shfl_xor_sync(ALL_LANES, top[t], 1));
        top[t] = fmaxf(top[t], __shfl_xor_sync(ALL_LANES, top[t], 2));
        higher |= top[t] > f.top[t];
    }
    if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const float old = f.top[t];
            f.top[t] = fmaxf(old, top[t]);
            const float less = exp2_fast(old - f.top[t]);  // 0 at the first chunk
            f.sum[t] *= less;
            const float less0 = __shfl_sync(ALL_LANES, less, lane % 4 * 8), less1 = __shfl_sync(ALL_LANES, less, lane % 4 * 8 + 4);
#pragma unroll
            for (int m = 0; m < E / 16; ++m)
                f.o[t][m][0] *= less0, f.o[t][m][1] *= less1, f.o[t][m][2] *= less0, f.o[t][m][3] *= less1;
        }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float p0 = exp2_fast(s[h][2 * t] - f.top[t]), p1 = exp2_fast(s[h][2 * t + 1] - f.top[t]);
            f.sum[t] += p0 + p1;
            p[t][h] = pack_bf16(p0, p1);
        }
}

// o += values · probabilities for the two columns that word `v` of each of four tokens holds.
inline __device__ void add_columns(Softmax& f, int m, const u32 (&p)[NT][2], u32 v0, u32 v1, u32 v2, u32 v3) {
    const u32 a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
    const u32 a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
#pragma unroll
    for (int t = 0; t < NT; ++t) mma_bf16(f.o[t][m], a0, a1, a2, a3, p[t][0], p[t][1]);
}
inline __device__ void add_values(Softmax& f, const u32 (&p)[NT][2], const char* slot) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < V16; ++s) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint4*>(slot + (i * V16 + s) * 512 + lane * 16);
        add_columns(f, 4 * s, p, v[0].x, v[1].x, v[2].x, v[3].x);
        add_columns(f, 4 * s + 1, p, v[0].y, v[1].y, v[2].y, v[3].y);
        add_columns(f, 4 * s + 2, p, v[0].z, v[1].z, v[2].z, v[3].z);
        add_columns(f, 4 * s + 3, p, v[0].w, v[1].w, v[2].w, v[3].w);
    }
    if constexpr (V8 > 0) {
        uint2 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = *reinterpret_cast<const uint2*>(slot + 4 * V16 * 512 + i * 256 + lane * 8);
        add_columns(f, 4 * V16, p, v[0].x, v[1].x, v[2].x, v[3].x);
        add_columns(f, 4 * V16 + 1, p, v[0].y, v[1].y, v[2].y, v[3].y);
    }
    if constexpr (V4 > 0) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = *reinterpret_cast<const u32*>(slot + 4 * V16 * 512 + 4 * V8 * 256 + i * 128 + lane * 4);
        add_columns(f, E / 16 - 1, p, v[0], v[1], v[2], v[3]);
    }
}
