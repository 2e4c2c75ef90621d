// out[rows, n] = act[rows, K] · w[n, K]ᵀ for 3 to 64 rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a cluster shares a product by its columns, so that a block holds only its slice of the activations, and keeps
// it while it streams rows of w past it. A warp of its own copies ahead, and starts before the predecessor kernel has ended.
//
// A unit is 16 or 32 rows of w. It belongs to one warp in each block of a cluster; these warps, and no others, meet: each sends the part of
// its sums that another has to finish there, through shared memory, and goes on with the next unit while they arrive. Nothing waits for a
// block. Sums are added in the order of the ranks, and within a rank in the order of the columns: the bits of a row depend neither on the
// number of rows nor on the units, stages and warps.
#include "gemm64_finish.cuh"

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
