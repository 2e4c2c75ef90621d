// Stages come by bulk copies: a warp of its own keeps a ring full that all others take from, each the stages of its units.
//
// A bulk copy takes no registers and few instructions, but its engine takes long over each: rows must be of 2 KB to keep up with memory.
#pragma once

#include "gemm64_finish.cuh"
#include "gemm64_product.cuh"

constexpr int THREADS = CONSUMERS + WARP;

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

// -- the warps that multiply ------------------------------------------------------------------------------------------

inline __device__ void consume(const Args& a, const Block& b, int warp, int lane) {
    const int from = slice_start(b.rank), to = slice_start(b.rank + 1);
    const char* my_w = b.stages + lane_offset<UNIT>(lane);
    const char* my_x = b.acts + lane_offset<ROWS>(lane);
    float* sums = b.sums + warp * SUMS;
    int pending = -1, count = 0;  // the unit that was sent and not finished; units finished
    for (int g = 0; g * WARPS < b.mine; ++g) {
        const int active = min(WARPS, b.mine - g * WARPS);
        const bool busy = warp < active;
        if (!STREAMED && !busy) break;
        float c[M_TILES][N_TILES][4] = {};
        for (int p = 0; p < PARTS; ++p) {
            const int use = STREAMED ? g * PARTS + p : p, slot = use % ACT_SLOTS;
            if (!NORM && (STREAMED || g == 0)) barrier_wait(&b.s.act_full[slot], use / ACT_SLOTS & 1);
            const auto finish_pending = [&] {
                if (pending >= 0) finish_unit(a, b, sums, pending, count++, false, warp, lane);
                pending = -1;
            };
            if (busy) {
                const int q = g * WARPS * PARTS + p * active + warp, stage = q % STAGES;
                while (load_acquire(&b.s.holds[stage]) != q) {
                }
                barrier_wait(&b.s.full[stage], q / STAGES & 1);
                if (PARTS == 1) finish_pending();  // then the others have read their sums by the time that new ones are there
                const char* w = my_w + stage * STAGE_BYTES;
                const char* x = my_x + slot * ACT_BYTES;
                if constexpr (EVEN) {
#pragma unroll UNROLL
                    for (int j = 0; j < STAGE_K / CHUNK; ++j) multiply(c, w + j * CHUNK * 2, x + j * CHUNK * 2);
                } else {
                    const int chunks = min(STAGE_K, to - from - p * STAGE_K) / CHUNK;
#pragma unroll 2
                    for (int j = 0; j < chunks; ++j) multiply(c, w + j * CHUNK * 2, x + j * CHUNK * 2);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&b.s.empty[stage]);
            }
            if (STREAMED) {
                __syncwarp();
                if (lane == 0) barrier_arrive(&b.s.act_empty[slot]);
            }
            if (p == 0) finish_pending();
        }
        if (busy) {
            if (count > 0) barrier_wait_cluster(&b.s.taken[warp], (count - 1) & 1);
            send_sums(c, b, sums, &b.s.sent[warp], lane);
            pending = b.cluster + (g * WARPS + warp) * b.clusters;
        }
    }
    if (pending >= 0) finish_unit(a, b, sums, pending, count, true, warp, lane);
}

inline __device__ void run(const Args& a) {
    char* smem = dynamic_smem();
    char* acts = smem + STAGES * STAGE_BYTES;
    char* sums = acts + ACT_SLOTS * ACT_BYTES;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    Shared& s = *reinterpret_cast<Shared*>(sums + WARPS * SUMS * 4);
    const Block b = {smem, acts, reinterpret_cast<float*>(sums), s, int(cluster_rank()), cluster, clusters,
                     (a.units - cluster + clusters - 1) / clusters};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    pdl_begin();
    constexpr int ALL = sizeof(Barriers) / 8, OF_ONE = ALL - WARPS - ACT_SLOTS;
    if (elect_one()) {
        for (int i = warp; i < ALL; i += WARPS + 1)
            barrier_init(&s.full[0] + i, i < OF_ONE ? 1 : i < OF_ONE + WARPS ? CLUSTER : WARPS);
        barrier_init_fence();
    }
    if (threadIdx.x < STAGES) s.holds[threadIdx.x] = -1;
    if constexpr (K != D && !NORM) {  // copies leave the padding columns as they are, and what is not a number times zero is none
        for (int i = threadIdx.x; i < ACT_SLOTS * ACT_BYTES / 16; i += THREADS)
            reinterpret_cast<uint4*>(acts)[i] = make_uint4(0, 0, 0, 0);
        async_proxy_fence();
    }
    __syncthreads();
    if (NORM && threadIdx.x == 0) barrier_arrive_expect(&s.squared, max(0, min(COLS, a.rows - b.rank * COLS)) * CLUSTER * 4);
    cluster_arrive_initialised();
    if (warp == WARPS) {
        if (elect_one())
            produce(a, b);
        else
            pdl_wait();
        __syncwarp();
        cluster_wait();
    } else {
        cluster_wait();  // the others' barriers are there
        if constexpr (NORM)
            fill_activations(a, b, warp, lane);
        else
            pdl_wait();
        if constexpr (MODE == QKV) find_places(a, b);
        if constexpr (NORM || MODE == QKV) named_barrier(1, CONSUMERS);
        pdl_before_stores();
        consume(a, b, warp, lane);
    }
    // A block leaves without asking the others: whatever they send here has been waited for.
}
