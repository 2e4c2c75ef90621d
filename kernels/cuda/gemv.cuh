// How gemv.cu cuts its work, and the two halves of its warps' loops that do not depend on what a unit ends as: the weights' way into shared
// memory, and the activations'.
#pragma once

#include "bulk.cuh"

#define RESIDUAL 0   // x[ROWS, n] += act · wᵀ
#define QKV 1        // norm, product, rotation; q to out, k and v to the cache
#define GATE_UP 2    // norm, product, out = silu(gate) · up
#define HEAD 3       // gather, norm, product: logits
#define PLAIN 4      // norm, product: float32 out

constexpr int CHUNK = 32;  // columns that a warp multiplies at a time
constexpr int HALF = UNIT / 2;
constexpr int N_TILES = UNIT > 8 ? UNIT / 8 : 1;  // products of 8 columns that share the activations
constexpr int N_ROWS = UNIT < 8 ? UNIT : 8;       // of such a product; of 4, each is there twice
constexpr int PITCH = STAGE_K * 2 + 64;  // bytes of a stage's row: neighbours start half the banks apart
constexpr int STAGE_BYTES = UNIT * PITCH;
constexpr int CHUNKS = STAGE_K / CHUNK;
constexpr int TILES = (K + STAGE_K - 1) / STAGE_K;  // stages of a unit
constexpr int X_PITCH = K * 2 + 64;
constexpr int CONSUMERS = WARPS * WARP;
constexpr bool NORMED = MODE != RESIDUAL;
constexpr int OUTPUTS = ROWS * UNIT;  // of a unit; the finishing warp has WARP / OUTPUTS lanes for each
constexpr int CHAINS = N_TILES == 1 ? 4 : 2;  // independent sums: a product waits for the one before it in its chain
static_assert(TILES == 1 || CHUNKS % WARPS == 0, "a warp's chunks are the same in every tile");
static_assert(WINDOW >= 1 && WINDOW <= STAGES, "a stage is waited for before it is filled again");
static_assert(K % CHUNK == 0 && STAGE_K % CHUNK == 0 && D <= K && D % 8 == 0 && ROWS >= 1 && ROWS <= 2 && (UNIT == 4 || UNIT == 8 || UNIT == 16));

struct Args {
    const u16* w;           // [n padded to 8, K]
    const float* bias;      // [n] or null
    const float* norm;      // [D]
    const void* act;        // RESIDUAL: bf16 [ROWS, D], else x float32 [rows, D]
    void* out;              // RESIDUAL: x float32; QKV: q bf16; GATE_UP: bf16 [ROWS, n / 2]; HEAD, PLAIN: float32 [ROWS, n]
    const int* rows;        // HEAD: which rows of x, PAD for none
    const int* positions;   // QKV, as all that follows
    const int* row_slot;
    const int* block_table;
    const float* cosines;
    const float* sines;
    u16* cache;             // [blocks, layers, 2, kv_heads, BLOCK_TOKENS, HEAD_DIM]
    int n, units, max_blocks, layer, layers, heads, kv_heads;
    u32* counter;  // zero between launches
    int fixed, tickets;
    float eps;
};

// Row `i` of unit `u`.
inline __device__ i64 weight_row(const Args& a, int u, int i) {
    if constexpr (MODE == GATE_UP) return i64(u) * HALF + i % HALF + (i >= HALF ? a.n / 2 : 0);
    if constexpr (MODE == QKV) {
        constexpr int per_head = HEAD_DIM / UNIT;
        return i64(u / per_head) * HEAD_DIM + (u % per_head) * HALF + i % HALF + (i >= HALF ? HEAD_DIM / 2 : 0);
    }
    return i64(u) * UNIT + i;
}

struct Barriers {
    u64 full[STAGES], empty[STAGES];  // of the ring's stages
    u64 summed[2], taken[2];          // of the two sets of partial sums
};

// A row that there is: a unit of 16 may end beyond the padded rows.
inline __device__ const u16* row_start(const Args& a, int u, int i) {
    const i64 last = (a.n + 7) / 8 * 8 - 1, row = weight_row(a, u, i);
    return a.w + (row < last ? row : last) * K;
}

// The units of this block, in order, for its other warps. The first `fixed` of each block are known; for what is left blocks draw tickets, so that
// two of them on one multiprocessor, or one with a slower way to memory, take less and all end together. Every block draws until it draws
// in vain, once: after `tickets` draws in all the counter is zero again, for the next launch.
constexpr int QUEUE = 16;  // more than the units between the one that is fetched and the one that is finished
static_assert(STAGES <= 8);

inline __device__ int queue_word(int i, int u) { return ((i & 0x7ff) + 1) << 20 | (u + 1); }

inline __device__ int peek_unit(const volatile int* queue, int i) {  // -1: no more, -2: not known yet
    const int word = queue[i % QUEUE];
    return word >> 20 == (i & 0x7ff) + 1 ? (word & 0xfffff) - 1 : -2;
}
inline __device__ int next_unit(const volatile int* queue, int i) {
    int u;
    while ((u = peek_unit(queue, i)) == -2) {
    }
    return u;
}

inline __device__ void produce(const Args& a, char* stages, Barriers& ring, volatile int* queue, int lane) {
    const u64 policy = evict_first_policy();
    int u = a.fixed > 0 ? int(blockIdx.x) : -2, q = 0, i = 0;
    u32 ticket = 0;
    if (u == -2) {
        if (lane == 0) ticket = atomicInc(a.counter, a.tickets - 1);
        u = int(__shfl_sync(ALL_LANES, ticket, 0));
    }
    while (u < a.units) {
        if (lane == 0) queue[i % QUEUE] = queue_word(i, u);
        ++i;
        if (lane == 0 && i >= a.fixed) ticket = atomicInc(a.counter, a.tickets - 1);  // used when this unit is on its way
        const u16* row = row_start(a, u, lane % UNIT);
        for (int t = 0; t < TILES; ++t, ++q) {
            if (q == STAGES) pdl_launch();
            const int stage = q % STAGES;
            if (q >= STAGES) barrier_wait(&ring.empty[stage], (q / STAGES - 1) & 1);
            // More in flight than the memory system holds would only stand in the way of the activations.
            if (WINDOW < STAGES && q >= WINDOW) barrier_wait(&ring.full[(q - WINDOW) % STAGES], (q - WINDOW) / STAGES & 1);
            const u32 bytes = 2 * min(STAGE_K, K - t * STAGE_K);
            if (lane == 0) barrier_arrive_expect(&ring.full[stage], UNIT * bytes);
            __syncwarp();
            if (lane < UNIT)
                bulk_copy(stages + stage * STAGE_BYTES + lane * PITCH, row + t * STAGE_K, bytes, &ring.full[stage], policy);
        }
        u = (i < a.fixed ? i * int(gridDim.x) + int(blockIdx.x) : a.fixed * int(gridDim.x) + int(__shfl_sync(ALL_LANES, ticket, 0)));
    }
    if (lane == 0) queue[i % QUEUE] = queue_word(i, -1);
    if (q <= STAGES) pdl_launch();
    pdl_wait();
}

// This warp's columns of the activations, in shared memory as bf16, zeros in the padding columns: nobody else reads them, so no warp waits
// for another. The norm's scale is one number a row; it multiplies the product, where the sum of squares has had time to arrive.
inline __device__ void load_rows(const Args& a, char* xs, float (*squares)[ROWS], int warp, int lane) {
    constexpr int GROUPS = (K / 8 + CONSUMERS - 1) / CONSUMERS;  // of 8 columns that a lane takes
    constexpr bool HELD = GROUPS <= 2;                           // the norm's weights wait in registers
    const auto column = [&](int v) {  // a warp's chunks are every WARPS-th
        const int g = lane + v * WARP;
        return ((g / 4) * WARPS + warp) * CHUNK + g % 4 * 8;
    };
    if constexpr (!NORMED) {
        pdl_wait();
        const u16* act = static_cast<const u16*>(a.act);
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int v = 0; v < GROUPS; ++v) {
                const int k = column(v);
                if (k >= K) continue;
                uint4 x = make_uint4(0, 0, 0, 0);
                if (k < D) x = *reinterpret_cast<const uint4*>(act + i64(r) * D + k);
                *reinterpret_cast<uint4*>(xs + r * X_PITCH + 2 * k) = x;
            }
        }
    } else {
        const auto load = [](const float* p, int k, bool real, float4& lo, float4& hi) {
            lo = hi = make_float4(0, 0, 0, 0);
            if (real && k < D) lo = *reinterpret_cast<const float4*>(p + k), hi = *reinterpret_cast<const float4*>(p + k + 4);
        };
        float4 glo[GROUPS], ghi[GROUPS];
        if constexpr (HELD) {
#pragma unroll
            for (int v = 0; v < GROUPS; ++v) load(a.norm, column(v), true, glo[v], ghi[v]);
        }
        pdl_wait();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int from = MODE == HEAD ? a.rows[r] : r;
            const float* x = static_cast<const float*>(a.act) + i64(from == PAD ? 0 : from) * D;
            float4 lo[GROUPS], hi[GROUPS];
#pragma unroll
            for (int v = 0; v < GROUPS; ++v) load(x, column(v), from != PAD, lo[v], hi[v]);
            float square = 0;
#pragma unroll
            for (int v = 0; v < GROUPS; ++v) {
                const int k = column(v);
                if constexpr (!HELD) load(a.norm, k, true, glo[v], ghi[v]);
                square += lo[v].x * lo[v].x + lo[v].y * lo[v].y + lo[v].z * lo[v].z + lo[v].w * lo[v].w;
                square += hi[v].x * hi[v].x + hi[v].y * hi[v].y + hi[v].z * hi[v].z + hi[v].w * hi[v].w;
                if (k < K)
                    *reinterpret_cast<uint4*>(xs + r * X_PITCH + 2 * k) =
                        make_uint4(pack_bf16(lo[v].x * glo[v].x, lo[v].y * glo[v].y), pack_bf16(lo[v].z * glo[v].z, lo[v].w * glo[v].w),
                                   pack_bf16(hi[v].x * ghi[v].x, hi[v].y * ghi[v].y), pack_bf16(hi[v].z * ghi[v].z, hi[v].w * ghi[v].w));
            }
            square = warp_sum(square);
            if (lane == 0) squares[warp][r] = square;
        }
    }
    __syncwarp();
}

// 32 columns of the unit's rows times those of the activations, into two of the chains.
inline __device__ void multiply(float (&c)[N_TILES][CHAINS][4], int chain, const char* w, const char* x) {
    const uint4 xv = *reinterpret_cast<const uint4*>(x);
#pragma unroll
    for (int k = 0; k < N_TILES; ++k) {
        const uint4 wv = *reinterpret_cast<const uint4*>(w + k * 8 * PITCH);
        mma_bf16(c[k][chain], xv.x, 0, xv.y, 0, wv.x, wv.y);
        mma_bf16(c[k][chain + 1], xv.z, 0, xv.w, 0, wv.z, wv.w);
    }
}
