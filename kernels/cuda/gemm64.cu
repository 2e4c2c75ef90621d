// out[rows, n] = act[rows, K] · w[n, K]ᵀ for 3 to 64 rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a cluster shares a product by its columns, so that a block holds only its slice of the activations, and keeps
// it while it streams rows of w past it. A warp of its own copies ahead, and starts before the predecessor kernel has ended.
//
// A unit is 16 or 32 rows of w. It belongs to one warp in each block of a cluster; these warps, and no others, meet: each sends the part of
// its sums that another has to finish there, through shared memory, and goes on with the next unit while they arrive. Nothing waits for a
// block. Sums are added in the order of the ranks, and within a rank in the order of the columns: the bits of a row depend neither on the
// number of rows nor on the units, stages and warps.
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

// -- before the product -----------------------------------------------------------------------------------------------

// x · norm as bf16, and the sums of squares to the blocks that finish the rows. The norm's scale is one number a row: it multiplies the sums.
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

// -- after the product ------------------------------------------------------------------------------------------------

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
                if constexpr (CHUNKS % CLUSTER == 0 && SLICE % STAGE_K == 0) {
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

extern "C" __global__ void __launch_bounds__((WARPS + 1) * WARP, MIN_BLOCKS)
    gemm64(const u16* w, const float* bias, const float* norm, const void* act, void* out, const int* picked, const int* positions,
           const int* row_slot, const int* block_table, const float* cosines, const float* sines, u16* cache, int rows, int n, int units,
           int max_blocks, int layer, int layers, int heads, int kv_heads, float eps) {
    const Args a = {w,     bias, norm,  act,  out,   picked,     positions, row_slot, block_table, cosines, sines,
                    cache, rows, n,     units, max_blocks, layer,     layers,   heads,       kv_heads, eps};
    char* smem = dynamic_smem();
    char* acts = smem + STAGES * STAGE_BYTES;
    char* sums = acts + ACT_SLOTS * ACT_BYTES;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    Shared& s = *reinterpret_cast<Shared*>(sums + WARPS * SUMS * 4);
    const Block b = {smem, acts, reinterpret_cast<float*>(sums), s, int(cluster_rank()), cluster, clusters,
                     (units - cluster + clusters - 1) / clusters};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    pdl_begin();
    constexpr int THREADS = CONSUMERS + WARP, ALL = sizeof(Barriers) / 8, OF_ONE = ALL - WARPS - ACT_SLOTS;
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
    if (NORM && threadIdx.x == 0) barrier_arrive_expect(&s.squared, max(0, min(COLS, rows - b.rank * COLS)) * CLUSTER * 4);
    cluster_arrive_initialised();
    if (warp == WARPS) {
        if (elect_one())
            produce(a, b);
        else
            pdl_wait();
        __syncwarp();
        if constexpr (CLUSTER > 1) cluster_wait();
    } else {
        if constexpr (CLUSTER > 1) cluster_wait();  // the others' barriers are there
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
