// What both kinds of gemm64.cu share: how the work is cut, and the arguments.
#pragma once

#include "gemm64.cuh"

#define RESIDUAL 0  // out float32 [rows, n] += act · wᵀ
#define QKV 1       // rotation; q to out, bf16, k and v to the cache
#define GATE_UP 2   // out = silu(gate) · up, bf16 [rows, n / 2]
#define PLAIN 3     // out float32 [rows, n]

constexpr int HALF = UNIT / 2;
constexpr int M_TILES = UNIT / 16, N_TILES = ROWS / 8;
constexpr int PARTS = (SLICE + STAGE_K - 1) / STAGE_K;  // stages of a unit
constexpr bool STREAMED = ACT_SLOTS < PARTS;            // the activations do not stay: they come again with every group of units
constexpr bool EVEN = CHUNKS % CLUSTER == 0 && SLICE % STAGE_K == 0;  // every stage is full
constexpr int STAGE_BYTES = UNIT * PITCH + STAGGER;
constexpr int ACT_BYTES = ROWS * PITCH + STAGGER;
constexpr int COLS = ROWS / CLUSTER;  // output rows that a block finishes
constexpr int SUMS = UNIT * ROWS;     // floats that a warp receives for a unit: [CLUSTER][UNIT][COLS]
constexpr int PER_LANE = (UNIT * COLS + WARP - 1) / WARP;
constexpr int BATCH = PER_LANE % 8 == 0 ? 8 : PER_LANE % 6 == 0 ? 6 : PER_LANE;  // of them at a time
constexpr int CONSUMERS = WARPS * WARP;  // threads that multiply
constexpr int UNROLL = M_TILES * N_TILES < 4 ? 4 : 2;  // chunks whose loads are in flight, as registers allow
static_assert(K % CHUNK == 0 && STAGE_K % CHUNK == 0 && D <= K && D % 8 == 0);
static_assert(ROWS % 8 == 0 && ROWS <= 64 && ROWS % CLUSTER == 0 && (UNIT == 16 || UNIT == 32) && WARPS <= 15);
static_assert(STAGES >= 2 && STAGES <= 32 && CLUSTER >= 2);
static_assert(!NORM || !STREAMED, "activations that are made here stay here");

struct Args {
    const u16* w;         // [n padded to 8, K]
    const float* bias;    // [n] or null
    const float* norm;    // [D], NORM
    const void* act;      // bf16 [rows, D]; NORM: x float32 [.., D]
    void* out;
    const int* picked;    // NORM: which rows of x, PAD for zeros; null for all in order
    const int* positions; // QKV, as all that follows
    const int* row_slot;
    const int* block_table;
    const float* cosines;
    const float* sines;
    u16* cache;           // [blocks, layers, 2, kv_heads, BLOCK_TOKENS, HEAD_DIM]
    int rows, n, units, max_blocks, layer, layers, heads, kv_heads;
    float eps;
};

struct Place {  // of an output row in the cache
    i64 first;  // of its first key head, -1 for a padding row
    int position;
};

inline __device__ i64 weight_row(const Args& a, int u, int i) {
    if constexpr (MODE == GATE_UP) return i64(u) * HALF + i % HALF + (i >= HALF ? a.n / 2 : 0);
    if constexpr (MODE == QKV) {
        constexpr int per_head = HEAD_DIM / UNIT;
        return i64(u / per_head) * HEAD_DIM + (u % per_head) * HALF + i % HALF + (i >= HALF ? HEAD_DIM / 2 : 0);
    }
    return i64(u) * UNIT + i;
}
