// What gemm64.cu is made of: how its work is cut, its arguments, its shared memory, and the warp that copies.
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
constexpr int STAGE_BYTES = UNIT * PITCH + STAGGER;
constexpr int ACT_BYTES = ROWS * PITCH + STAGGER;
constexpr int COLS = ROWS / CLUSTER;  // output rows that a block finishes
constexpr int SUMS = UNIT * ROWS;     // floats that a warp receives for a unit: [CLUSTER][UNIT][COLS]
constexpr int PER_LANE = (UNIT * COLS + WARP - 1) / WARP;
constexpr int BATCH = PER_LANE % 8 == 0 ? 8 : PER_LANE % 6 == 0 ? 6 : PER_LANE;  // of them at a time
constexpr int CONSUMERS = WARPS * WARP;
constexpr int UNROLL = M_TILES * N_TILES < 4 ? 4 : 2;  // chunks whose loads are in flight, as registers allow
static_assert(K % CHUNK == 0 && STAGE_K % CHUNK == 0 && D <= K && D % 8 == 0);
static_assert(ROWS % 8 == 0 && ROWS <= 64 && ROWS % CLUSTER == 0 && (UNIT == 16 || UNIT == 32) && WARPS <= 15);
static_assert(STAGES <= 32);
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

struct Barriers {
    u64 full[STAGES], empty[STAGES];  // stages of w
    u64 act_full[ACT_SLOTS];
    u64 sent[WARPS];  // sums of a unit have come from all ranks
    u64 squared;
    u64 taken[WARPS];  // all ranks have read theirs
    u64 act_empty[ACT_SLOTS];
};

struct Shared : Barriers {
    int holds[STAGES];  // which stage of the stream: a warp that did not see those between cannot tell by the parity
    Place places[COLS];
    float squares[CLUSTER][COLS];
    float scale[WARPS][COLS];
};
static_assert(sizeof(Barriers) % 8 == 0 && sizeof(Shared) <= 20 * STAGES + 16 * (ACT_SLOTS + WARPS + COLS + 2) + 4 * (ROWS + WARPS * COLS), "as gemm64_tuning.py has it");

struct Block {
    char* stages;
    char* acts;
    float* sums;
    Shared& s;
    int rank, cluster, clusters, mine;  // mine: units of this cluster

    // Of a part, up to column `end` of a row.
    __device__ int columns(int part, int end) const { return max(0, min(STAGE_K, end - slice_start(rank) - part * STAGE_K)); }
};

inline __device__ i64 weight_row(const Args& a, int u, int i) {
    if constexpr (MODE == GATE_UP) return i64(u) * HALF + i % HALF + (i >= HALF ? a.n / 2 : 0);
    if constexpr (MODE == QKV) {
        constexpr int per_head = HEAD_DIM / UNIT;
        return i64(u / per_head) * HEAD_DIM + (u % per_head) * HALF + i % HALF + (i >= HALF ? HEAD_DIM / 2 : 0);
    }
    return i64(u) * UNIT + i;
}

// -- the copying warp -------------------------------------------------------------------------------------------------
// One of its lanes does it all. What it computes is the same in every lane, so addresses lie in uniform registers and a copy is a handful of
// instructions; a lane for each row would take turns in a loop, which is slower than memory.

struct Stage {
    int index, unit, part, columns;
};

// Units come in groups of one for each warp; a group's stages go round the warps, part by part.
inline __device__ Stage stage_at(const Block& b, int q) {
    const int g = q / (WARPS * PARTS), rest = q % (WARPS * PARTS), active = b.mine - g * WARPS;
    const int warp = active < WARPS ? rest % active : rest % WARPS, part = active < WARPS ? rest / active : rest / WARPS;
    return {q, b.cluster + (g * WARPS + warp) * b.clusters, part, b.columns(part, slice_start(b.rank + 1))};
}

// Calls f(row of the unit, where its columns begin) and returns the number of rows: a unit may end beyond the last that there is.
template <typename F>
inline __device__ int for_rows(const Args& a, const Block& b, const Stage& at, F f) {
    const u16* w = a.w + slice_start(b.rank) + at.part * STAGE_K;
    int count = 0;
#pragma unroll
    for (int half = 0; half < UNIT; half += HALF) {
        const i64 first = weight_row(a, at.unit, half), there = (a.n + 7) / 8 * 8 - first;
        const int rows = there < 0 ? 0 : there < HALF ? int(there) : HALF;
        for (int i = 0; i < rows; ++i) f(half + i, w + (first + i) * K);
        count += rows;
    }
    return count;
}

inline __device__ void copy_stage(const Args& a, const Block& b, const Stage& at, u64 policy) {
    const int slot = at.index % STAGES;
    u64* full = &b.s.full[slot];
    const u32 bytes = 2 * at.columns;
    char* to = b.stages + slot * STAGE_BYTES;
    const int rows = at.columns == 0 ? 0 : for_rows(a, b, at, [&](int i, const u16* from) {
        bulk_copy(to + row_offset<UNIT>(i), from, bytes, full, policy);
    });
    barrier_arrive_expect(full, rows * bytes);
    store_release(&b.s.holds[slot], at.index);
}

inline __device__ void produce(const Args& a, const Block& b) {
    const u64 policy = evict_first_policy();
    const int stages = b.mine * PARTS;
    const int uses = NORM ? 0 : STREAMED ? (b.mine + WARPS - 1) / WARPS * PARTS : PARTS;
    int used = 0;
    const auto fetch_activations = [&](int until) {
        for (; used < min(until, uses); ++used) {
            const int slot = used % ACT_SLOTS, part = used % PARTS, bytes = 2 * b.columns(part, min(slice_start(b.rank + 1), D));
            const u16* from = static_cast<const u16*>(a.act) + slice_start(b.rank) + part * STAGE_K;
            u64* full = &b.s.act_full[slot];
            if (used >= ACT_SLOTS) barrier_wait(&b.s.act_empty[slot], (used / ACT_SLOTS - 1) & 1);
            barrier_arrive_expect(full, a.rows * bytes);
            if (bytes == 0) continue;
            for (int r = 0; r < a.rows; ++r)
                bulk_copy_shared(b.acts + slot * ACT_BYTES + row_offset<ROWS>(r), from + i64(r) * D, bytes, full);
        }
    };
    int q = 0;
    for (; q < min(STAGES, stages); ++q) copy_stage(a, b, stage_at(b, q), policy);
    pdl_launch();
    for (int p = q; p < min(q + PREFETCH, stages); ++p) {
        const Stage at = stage_at(b, p);
        if (at.columns > 0) for_rows(a, b, at, [&](int, const u16* from) { bulk_prefetch(from, 2 * at.columns); });
    }
    pdl_wait();
    fetch_activations(ACT_SLOTS);
    for (; q < stages; ++q) {
        const Stage at = stage_at(b, q);
        fetch_activations(q / (WARPS * PARTS) * PARTS + at.part + 1);  // whoever is to empty a stage may need these first
        barrier_wait(&b.s.empty[q % STAGES], (q / STAGES - 1) & 1);
        copy_stage(a, b, at, policy);
    }
    fetch_activations(uses);
}
