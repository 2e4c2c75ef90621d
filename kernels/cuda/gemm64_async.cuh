// Stages come by copies of 16 bytes a lane: each warp makes those of its own units, as far ahead as its stages reach.
//
// A row of a stage may be short, 256 bytes, since a lane's copies cost it an instruction each and nothing else. And a warp that waits for nobody's copies
// but its own needs no barrier.
#pragma once

#include "gemm64_finish.cuh"
#include "gemm64_product.cuh"

constexpr int THREADS = CONSUMERS;
constexpr int PIECES = STAGE_K / 8;  // of 16 bytes, of a row of a stage
static_assert(!STREAMED || ACT_SLOTS >= 2);

struct Barriers {
    u64 sent[WARPS];  // sums of a unit have come from all ranks
    u64 squared;
    u64 taken[WARPS];  // all ranks have read theirs
};

struct Shared : Barriers {
    Place places[COLS];
    float squares[CLUSTER][COLS];
    float scale[WARPS][COLS];
};
static_assert(sizeof(Shared) <= 16 * (WARPS + COLS + 2) + 4 * (ROWS + WARPS * COLS), "as gemm64_tuning.py has it");

struct Block {
    char* stages;  // of this warp
    char* acts;
    float* sums;  // of this warp
    Shared& s;
    int warp, lane, rank, cluster, clusters;
    int all, mine;  // units of this cluster, and of this warp

    // Of a part; of the last ones maybe none.
    __device__ int columns(int part) const {
        return max(0, min(STAGE_K, slice_start(rank + 1) - slice_start(rank) - part * STAGE_K));
    }
};

// The unit that a warp takes as its g-th.
inline __device__ int unit_at(const Block& b, int g) { return b.cluster + (g * WARPS + b.warp) * b.clusters; }

// Calls f(row of the unit, where a piece of 8 columns lies in it, which piece) for this lane's share of a stage; lanes side by side take pieces
// side by side.
template <typename F>
inline __device__ void for_pieces(const Args& a, const Block& b, int u, int part, F f) {
    const u16* half[2];
    int rows[2];  // that there are: a unit may end beyond the last
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int first = int(weight_row(a, u, h * HALF));
        half[h] = a.w + i64(first) * K + slice_start(b.rank) + part * STAGE_K;
        rows[h] = max(0, min((a.n + 7) / 8 * 8 - first, HALF));
    }
    if (EVEN && rows[0] + rows[1] == UNIT) {  // addresses are constants beyond two registers
        if constexpr (PIECES % WARP == 0) {
            constexpr int of_row = PIECES / WARP;
#pragma unroll
            for (int i = 0; i < UNIT * of_row; ++i) {
                const int row = i / of_row, piece = i % of_row * WARP;
                f(row, half[row / HALF] + 8 * b.lane + row % HALF * K + 8 * piece, piece + b.lane);
            }
            return;
        } else if constexpr (WARP % PIECES == 0) {
            constexpr int at_once = WARP / PIECES;
            const int mine = b.lane / PIECES, piece = b.lane % PIECES;
#pragma unroll
            for (int i = 0; i < UNIT / at_once; ++i) {
                const int row = i * at_once;
                f(row + mine, half[row / HALF] + mine * K + 8 * piece + row % HALF * K, piece);
            }
            return;
        }
    }
    const int pieces = EVEN ? PIECES : b.columns(part) / 8;
#pragma unroll 2
    for (int i = b.lane; i < UNIT * pieces; i += WARP) {
        const int row = i / pieces, piece = i % pieces;
        const u16* first = row < HALF ? half[0] : half[1];
        if (row % HALF < (row < HALF ? rows[0] : rows[1])) f(row, first + row % HALF * K + 8 * piece, piece);
    }
}

// The t-th stage of this warp, if there is one: a group of copies in any case.
inline __device__ void copy_stage(const Args& a, const Block& b, int t, u64 policy) {
    if (t < b.mine * PARTS) {
        char* to = b.stages + t % STAGES * STAGE_BYTES;
        for_pieces(a, b, unit_at(b, t / PARTS), t % PARTS, [&](int row, const u16* from, int piece) {
            if constexpr (EVICT_FIRST)
                cp_async16(to + row_offset<UNIT>(row) + piece * 16, from, policy);
            else
                cp_async16(to + row_offset<UNIT>(row) + piece * 16, from);
        });
    }
    cp_async_commit();
}

inline __device__ void prefetch_stage(const Args& a, const Block& b, int t) {
    if (t >= b.mine * PARTS) return;
    for_pieces(a, b, unit_at(b, t / PARTS), t % PARTS, [&](int, const u16* from, int piece) {
        if (piece % 8 == 0) prefetch_l2(from);  // a line
    });
}

// This thread's share of a part of the activations: a group of copies.
inline __device__ void copy_activations(const Args& a, const Block& b, int part, int slot) {
    const int pieces = EVEN ? PIECES : b.columns(part) / 8, first = slice_start(b.rank) + part * STAGE_K;
#pragma unroll 2
    for (int i = threadIdx.x; i < a.rows * pieces; i += THREADS) {
        const int r = i / pieces, piece = i % pieces, k = first + piece * 8;
        const bool real = k < D;  // what is beyond is zero, there as here: what is not a number times zero is none
        cp_async16(b.acts + slot * ACT_BYTES + row_offset<ROWS>(r) + piece * 16,
                   static_cast<const u16*>(a.act) + i64(r) * D + (real ? k : 0), real ? 16 : 0);
    }
    cp_async_commit();
}

// All units of this warp. Without STREAMED no warp waits for another of its block.
inline __device__ void multiply_units(const Args& a, const Block& b, u64 policy) {
    const char* my_w = b.stages + lane_offset<UNIT>(b.lane);
    const char* my_x = b.acts + lane_offset<ROWS>(b.lane);
    // Groups of copies that may still be under way when a stage is needed: the stages ahead, and the activations between them.
    constexpr int AHEAD = !STREAMED ? STAGES - 1 : STAGES < ACT_SLOTS ? 2 * STAGES - 2 : 2 * ACT_SLOTS - 3;
    const int groups = STREAMED ? (b.all + WARPS - 1) / WARPS : b.mine;
    int pending = -1, count = 0;  // the unit that was sent and not finished; units finished
    const auto finish_pending = [&] {
        if (pending >= 0) finish_unit(a, b, b.sums, pending, count++, false, b.warp, b.lane);
        pending = -1;
    };
    for (int g = 0, t = 0; g < groups; ++g) {
        const bool busy = g < b.mine;
        float c[M_TILES][N_TILES][4] = {};
        for (int p = 0; p < PARTS; ++p, ++t) {
            const int slot = STREAMED ? t % ACT_SLOTS : p;
            if (STREAMED && t == 0)
                cp_async_wait<0>();
            else
                cp_async_wait<AHEAD>();
            if constexpr (STREAMED) {
                __syncthreads();  // everybody's copies are there, and nobody reads the slot before this one any more
                if (const int next = t + ACT_SLOTS - 1; next < groups * PARTS)
                    copy_activations(a, b, next % PARTS, next % ACT_SLOTS);
                else
                    cp_async_commit();
            } else {
                __syncwarp();
            }
            if (PARTS == 1) finish_pending();  // then the others have read their sums by the time that new ones are there
            if (busy) {
                const char* w = my_w + t % STAGES * STAGE_BYTES;
                const char* x = my_x + slot * ACT_BYTES;
                if constexpr (EVEN) {
#pragma unroll UNROLL
                    for (int j = 0; j < STAGE_K / CHUNK; ++j) multiply(c, w + j * CHUNK * 2, x + j * CHUNK * 2);
                } else {
                    const int chunks = b.columns(p) / CHUNK;
#pragma unroll 2
                    for (int j = 0; j < chunks; ++j) multiply(c, w + j * CHUNK * 2, x + j * CHUNK * 2);
                }
            }
            __syncwarp();
            copy_stage(a, b, t + STAGES, policy);
            if (p == 0) finish_pending();
        }
        if (busy) {
            if (count > 0) barrier_wait_cluster(&b.s.taken[b.warp], (count - 1) & 1);
            send_sums(c, b, b.sums, &b.s.sent[b.warp], b.lane);
            pending = unit_at(b, g);
        }
    }
    if (pending >= 0) finish_unit(a, b, b.sums, pending, count, true, b.warp, b.lane);
}

inline __device__ void run(const Args& a) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    char* smem = dynamic_smem();
    char* acts = smem + WARPS * STAGES * STAGE_BYTES;
    char* sums = acts + ACT_SLOTS * ACT_BYTES;
    Shared& s = *reinterpret_cast<Shared*>(sums + WARPS * SUMS * 4);
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, all = (a.units - cluster + clusters - 1) / clusters;
    const Block b = {smem + warp * STAGES * STAGE_BYTES, acts, reinterpret_cast<float*>(sums) + warp * SUMS, s, warp, lane,
                     int(cluster_rank()), cluster, clusters, all, max(0, (all - warp + WARPS - 1) / WARPS)};

    pdl_begin();
    const u64 policy = EVICT_FIRST ? evict_first_policy() : 0;
    for (int t = 0; t < STAGES; ++t) copy_stage(a, b, t, policy);
    if (threadIdx.x == 0) {
        for (int i = 0; i < WARPS; ++i) barrier_init(&s.sent[i], 1), barrier_init(&s.taken[i], CLUSTER);
        barrier_init(&s.squared, 1);
        barrier_init_fence();
    }
    pdl_launch();
    __syncthreads();
    if (NORM && threadIdx.x == 0) barrier_arrive_expect(&s.squared, max(0, min(COLS, a.rows - b.rank * COLS)) * CLUSTER * 4);
    __syncwarp();
    cluster_arrive_initialised();
    for (int t = STAGES; t < STAGES + PREFETCH; ++t) prefetch_stage(a, b, t);
    __syncwarp();
    cluster_wait();  // the others' barriers are there
    if constexpr (NORM) {
        fill_activations(a, b, warp, lane);
    } else {
        pdl_wait();
        constexpr int first = STREAMED ? ACT_SLOTS - 1 : PARTS;  // one slot less: it is filled when the first is being multiplied
        for (int p = 0; p < first; ++p) copy_activations(a, b, p, p);
        if constexpr (!STREAMED) cp_async_wait<0>();
    }
    if constexpr (MODE == QKV) find_places(a, b);
    if constexpr (!STREAMED) __syncthreads();
    pdl_before_stores();
    multiply_units(a, b, policy);
    // A block leaves without asking the others: whatever they send here has been waited for.
}
