// What becomes of the sums of a unit: from all ranks, in their order, to the place that the mode has for them.
#pragma once

#include "gemm64_parts.cuh"

// `v`: row `i` of unit `u` for output row `r`. x, y: what `before` loaded. All lanes come here; those that are not live store nothing.
inline __device__ void finish(const Args& a, int u, int i, i64 n, int r, float v, float x, float y, const Place& place, bool live) {
    if constexpr (MODE == RESIDUAL) {
        if (live) static_cast<float*>(a.out)[i64(r) * a.n + n] = x + v;
    } else if constexpr (MODE == PLAIN) {
        if (live) static_cast<float*>(a.out)[i64(r) * a.n + n] = v;
    } else {
        const float partner = __shfl_xor_sync(ALL_LANES, v, HALF);
        if constexpr (MODE == GATE_UP) {
            if (live && i < HALF) static_cast<u16*>(a.out)[i64(r) * (a.n / 2) + n] = f32_to_bf16(silu(v) * partner);
        } else {
            constexpr int per_head = HEAD_DIM / UNIT;
            const int head = u / per_head, d = int(n - i64(head) * HEAD_DIM);
            if (head < a.heads + a.kv_heads) v = v * x + (i < HALF ? -partner : partner) * y;
            if (!live) return;
            if (head < a.heads)
                static_cast<u16*>(a.out)[(i64(r) * a.heads + head) * HEAD_DIM + d] = f32_to_bf16(v);
            else if (place.first >= 0)  // value heads follow the key heads, here and in the cache
                a.cache[place.first + i64(head - a.heads) * BLOCK_TOKENS * HEAD_DIM + d] = f32_to_bf16(v);
        }
    }
}

// N sums of one rank.
template <int N>
inline __device__ void add_sums(float (&v)[N], const float* from) {
    if constexpr (N % 4 == 0 && COLS % 4 == 0) {
#pragma unroll
        for (int c = 0; c < N; c += 4) {
            const float4 p = *reinterpret_cast<const float4*>(from + c);
            v[c] += p.x, v[c + 1] += p.y, v[c + 2] += p.z, v[c + 3] += p.w;
        }
    } else if constexpr (N % 2 == 0 && COLS % 2 == 0) {
#pragma unroll
        for (int c = 0; c < N; c += 2) {
            const float2 p = *reinterpret_cast<const float2*>(from + c);
            v[c] += p.x, v[c + 1] += p.y;
        }
    } else {
#pragma unroll
        for (int c = 0; c < N; ++c) v[c] += from[c];
    }
}

// This block's output rows of the unit that this warp sent as its `count`-th.
template <typename Block>
inline __device__ void finish_unit(const Args& a, const Block& b, const float* sums, int u, int count, bool last, int warp, int lane) {
    const int i = lane % UNIT, column = lane / UNIT * PER_LANE;
    const i64 n = weight_row(a, u, i);
    const bool real = MODE == GATE_UP ? n - (i < HALF ? 0 : a.n / 2) < a.n / 2 : n < a.n;
    const float bias = a.bias != nullptr && real ? a.bias[n] : 0;
    const bool rotated = MODE == QKV && u / (HEAD_DIM / UNIT) < a.heads + a.kv_heads;
    if (NORM && count == 0) {
        barrier_wait_cluster(&b.s.squared, 0);
        for (int c = lane; c < COLS; c += WARP) {
            float square = 0;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) square += b.s.squares[rank][c];
            b.s.scale[warp][c] = rsqrtf(square / D + a.eps);
        }
        __syncwarp();
    }
#pragma unroll
    for (int at = 0; at < PER_LANE; at += BATCH) {
        float v[BATCH] = {}, x[BATCH] = {}, y[BATCH] = {};
        bool live[BATCH];
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
            const int col = column + at + c, r = b.rank * COLS + col;
            live[c] = real && col < COLS && r < a.rows;
            if (!live[c]) continue;
            if constexpr (MODE == RESIDUAL) x[c] = static_cast<const float*>(a.out)[i64(r) * a.n + n];
            if (rotated) {
                const i64 angle = i64(b.s.places[col].position) * (HEAD_DIM / 2) + u % (HEAD_DIM / UNIT) * HALF + i % HALF;
                x[c] = a.cosines[angle], y[c] = a.sines[angle];
            }
        }
        if (at == 0) barrier_wait_cluster(&b.s.sent[warp], count & 1);
        if (column + at < COLS) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) add_sums(v, sums + (rank * UNIT + i) * COLS + column + at);
        }
        if (at + BATCH >= PER_LANE && !last) {  // nobody waits for the last one, and whoever is done may leave
            __syncwarp();
            if (lane < CLUSTER) barrier_arrive_at(&b.s.taken[warp], lane);
        }
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
            const int col = min(column + at + c, COLS - 1);
            const float scaled = NORM ? v[c] * b.s.scale[warp][col] : v[c];
            finish(a, u, i, n, b.rank * COLS + col, scaled + bias, x[c], y[c], b.s.places[col], live[c]);
        }
    }
}
