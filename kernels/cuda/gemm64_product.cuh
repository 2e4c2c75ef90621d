// What the warps do that multiply: the activations made ready, chunks, sums on their way to the ranks that finish them.
#pragma once

#include "gemm64_parts.cuh"

// -- before the product -----------------------------------------------------------------------------------------------

// x · norm as bf16, and the sums of squares to the blocks that finish the rows. The norm's scale is one number a row: it multiplies the sums.
template <typename Block>
inline __device__ void fill_activations(const Args& a, const Block& b, int warp, int lane) {
    constexpr int VECS = (SLICE / 4 + WARP - 1) / WARP;
    constexpr int HELD = WARPS > 4 ? 8 : 16;  // loads in flight, as registers allow
    constexpr int AT_ONCE = VECS >= HELD ? 1 : HELD / VECS;
    const int from = slice_start(b.rank), to = slice_start(b.rank + 1);
    const auto load = [&](const float* row, int v, bool real) {
        const int k = from + 4 * (lane + v * WARP);
        return real && k < min(to, D) ? *reinterpret_cast<const float4*>(row + k) : make_float4(0, 0, 0, 0);
    };
    float4 g[VECS];
#pragma unroll
    for (int v = 0; v < VECS; ++v) g[v] = load(a.norm, v, true);
    pdl_wait();
    for (int first = warp; first < a.rows; first += WARPS * AT_ONCE) {
        float4 x[AT_ONCE][VECS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int r = first + i * WARPS;
            const int source = r >= a.rows ? PAD : a.picked == nullptr ? r : a.picked[r];
#pragma unroll
            for (int v = 0; v < VECS; ++v)
                x[i][v] = load(static_cast<const float*>(a.act) + i64(source == PAD ? 0 : source) * D, v, source != PAD);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int r = first + i * WARPS;
            float square = 0;
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
                const int k = 4 * (lane + v * WARP);
                const float4 p = x[i][v];
                square = fmaf(p.x, p.x, fmaf(p.y, p.y, fmaf(p.z, p.z, fmaf(p.w, p.w, square))));
                if (r < a.rows && from + k < to)
                    *reinterpret_cast<uint2*>(b.acts + k / STAGE_K * ACT_BYTES + row_offset<ROWS>(r) + k % STAGE_K * 2) =
                        make_uint2(pack_bf16(p.x * g[v].x, p.y * g[v].y), pack_bf16(p.z * g[v].z, p.w * g[v].w));
            }
            square = warp_sum(square);
            if (lane == 0 && r < a.rows) send(&b.s.squares[b.rank][r % COLS], &b.s.squared, r / COLS, square);
        }
    }
}

template <typename Block>
inline __device__ void find_places(const Args& a, const Block& b) {
    const int r = b.rank * COLS + int(threadIdx.x);
    if (threadIdx.x >= COLS || r >= a.rows) return;
    Place& place = b.s.places[threadIdx.x];
    const int slot = a.row_slot[r], position = a.positions[r];
    place.position = position, place.first = -1;
    if (slot == PAD) return;
    const i64 block = a.block_table[i64(slot) * a.max_blocks + position / BLOCK_TOKENS];
    place.first = ((block * a.layers + a.layer) * 2 * a.kv_heads * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM;
}

// -- the product ------------------------------------------------------------------------------------------------------

// A chunk. Both operands take its columns in the same permuted order, so that 16 contiguous bytes are the fragments of two steps.
inline __device__ void multiply(float (&c)[M_TILES][N_TILES][4], const char* w, const char* x) {
    uint4 lo[M_TILES], hi[M_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        lo[m] = *reinterpret_cast<const uint4*>(w + 2 * m * TILE);
        hi[m] = *reinterpret_cast<const uint4*>(w + (2 * m + 1) * TILE);
    }
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + j * TILE);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) mma_bf16(c[m][j], lo[m].x, hi[m].x, lo[m].y, hi[m].y, v.x, v.y);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) mma_bf16(c[m][j], lo[m].z, hi[m].z, lo[m].w, hi[m].w, v.z, v.w);
    }
}

// To each rank the sums of the output rows that it finishes.
template <typename Block>
inline __device__ void send_sums(const float (&c)[M_TILES][N_TILES][4], const Block& b, float* sums, u64* sent, int lane) {
    if (lane == 0) barrier_arrive_expect(sent, SUMS * 4);  // from all ranks, this one too
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const int r = 8 * j + 2 * (lane % 4);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* to = sums + (b.rank * UNIT + 16 * m + 8 * h + lane / 4) * COLS;
                if constexpr (COLS % 2 == 0) {
                    send(to + r % COLS, sent, r / COLS, c[m][j][2 * h], c[m][j][2 * h + 1]);
                } else {
                    send(to + r % COLS, sent, r / COLS, c[m][j][2 * h]);
                    send(to + (r + 1) % COLS, sent, (r + 1) / COLS, c[m][j][2 * h + 1]);
                }
            }
    }
}
