// What a warp computes of a tile of keys for its query rows: scores, what of them is hidden, the running softmax, weighted values.
#pragma once

#include "attention_rows.cuh"

// s[16 · MT, KEYS] = queries · keys, both in shared memory.
inline __device__ void scores(float (&s)[MT][KEYS / 8][4], const char* q, const char* keys) {
    const int lane = threadIdx.x % WARP;
    const char* query = q + lane % 16 * PITCH + lane / 16 * 16;
    const char* key = keys + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < E / 16; ++k) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix4(a[m], query + m * 16 * PITCH + k * 32);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            u32 b[4];
            ldmatrix4(b, key + n * 16 * PITCH + k * 32);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_bf16(s[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                mma_bf16(s[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
            }
        }
    }
}

// What a row does not see, of the tokens from `from` on: those after its own, and all for rows outside of the run.
inline __device__ void hide(float (&s)[MT][KEYS / 8][4], const TileRows& rows, const Run& run, int from) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = ((warp * MT + m) * 16 + h * 8 + lane / 4) / GROUP;
            const int last = token >= run.begin && token < run.end ? rows.position[token] : -1;
            const int left = last - from - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (8 * n + i > left) s[m][n][2 * h + i] = NEVER;
        }
}

inline __device__ float quad_sum(float v) {
    v += __shfl_xor_sync(ALL_LANES, v, 1);
    return v + __shfl_xor_sync(ALL_LANES, v, 2);
}

// The running softmax of a warp's rows: lane l has rows l/4 and l/4 + 8 of each tile of 16, of their columns two in eight.
struct Softmax {
    float top[MT][2], sum[MT][2];
    float o[MT][E / 8][4];

    inline __device__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            top[m][0] = top[m][1] = NEVER, sum[m][0] = sum[m][1] = 0;
#pragma unroll
            for (int n = 0; n < E / 8; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        }
    }
    // Scores to probabilities. scale: of scores, times log2 e, positive.
    inline __device__ void soften(float (&s)[MT][KEYS / 8][4], float scale) {
        float high[MT][2];
        bool higher = false;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float v = NEVER;
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) v = fmaxf(v, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
                v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
                high[m][h] = v;
                higher |= v > top[m][h];
            }
        if (__any_sync(ALL_LANES, higher)) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float old = top[m][h];
                    top[m][h] = fmaxf(old, high[m][h]);
                    const float less = old == NEVER ? 0.0f : exp2_fast((old - top[m][h]) * scale);
                    sum[m][h] *= less;
#pragma unroll
                    for (int n = 0; n < E / 8; ++n) o[m][n][2 * h] *= less, o[m][n][2 * h + 1] *= less;
                }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float zero = top[m][h] == NEVER ? 0.0f : top[m][h] * scale;  // a row that has seen nothing yet
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) {
                        s[m][n][i] = exp2_fast(__fmaf_rn(s[m][n][i], scale, -zero));
                        sum[m][h] += s[m][n][i];
                    }
            }
    }
    // o += probabilities · values.
    inline __device__ void add(const float (&p)[MT][KEYS / 8][4], const char* values) {
        const int lane = threadIdx.x % WARP;
        const char* value = values + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            u32 a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[m][i] = pack_bf16(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < E / 16; ++n) {
                u32 b[4];
                ldmatrix4_transposed(b, value + k * 16 * PITCH + n * 32);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma_bf16(o[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma_bf16(o[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    }
};
