// out[ROWS, n] = act[ROWS, k] · w[n, k]ᵀ for one or two rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a warp of its own streams w into a ring of shared memory by bulk copies and starts before the
// predecessor kernel has ended, so that memory never rests between kernels. Others only multiply, on tensor cores; one more adds up and finishes a unit while they
// are at the next.
//
// A unit is 4, 8 or 16 rows of w and as many values of each output row, chosen so that what an epilogue combines lies in one unit: gate rows
// with their up rows, rows of a head's first half with their partners in the second. Warps share a unit by its columns. Within 32 columns
// both operands take them in the same permuted order, which lets a lane load 16 contiguous bytes instead of shuffling fragments.
// Shared memory holds only so much of what is to come, so the first tiles beyond the ring are asked into L2 as well.
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

inline __device__ void prefetch_tiles(const Args& a, int first, int lane) {
    for (int q = first; q < first + PREFETCH; ++q) {
        const int u = blockIdx.x + q / TILES * gridDim.x, t = q % TILES;
        if (u < a.units && lane < UNIT)
            bulk_prefetch(row_start(a, u, lane) + t * STAGE_K, 2 * min(STAGE_K, K - t * STAGE_K));
    }
}

inline __device__ void produce(const Args& a, char* stages, Barriers& ring, int lane) {
    const u64 policy = evict_first_policy();
    const int mine = (a.units - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * TILES;
    for (int q = 0; q < mine; ++q) {
        if (q == STAGES) {
            pdl_launch();
            prefetch_tiles(a, STAGES, lane);
        }
        const int stage = q % STAGES, t = q % TILES;
        if (q >= STAGES) barrier_wait(&ring.empty[stage], (q / STAGES - 1) & 1);
        // More in flight than the memory system holds would only stand in the way of the activations.
        if (q >= WINDOW) barrier_wait(&ring.full[(q - WINDOW) % STAGES], (q - WINDOW) / STAGES & 1);
        const u32 bytes = 2 * min(STAGE_K, K - t * STAGE_K);
        if (lane == 0) barrier_arrive_expect(&ring.full[stage], UNIT * bytes);
        __syncwarp();
        if (lane < UNIT)
            bulk_copy(stages + stage * STAGE_BYTES + lane * PITCH,
                      row_start(a, blockIdx.x + q / TILES * gridDim.x, lane) + t * STAGE_K, bytes, &ring.full[stage], policy);
    }
    if (mine <= STAGES) pdl_launch();
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

// What the epilogue of a unit needs from memory, loaded a unit ahead so that nothing waits for it.
struct Before {
    float bias, old, cosine, sine;
};

struct Place {  // the row that an epilogue thread writes
    int position, slot;
    i64 block;
};

inline __device__ Before before(const Args& a, int u, int row, int col, const Place& place) {
    Before b = {0, 0, 0, 0};
    const i64 n = weight_row(a, u, col);
    if (a.bias != nullptr && n < a.n) b.bias = a.bias[n];
    if constexpr (MODE == RESIDUAL)
        if (n < a.n) b.old = static_cast<const float*>(a.out)[i64(row) * a.n + n];
    if constexpr (MODE == QKV) {
        constexpr int per_head = HEAD_DIM / UNIT;
        if (u / per_head < a.heads + a.kv_heads) {
            const i64 at = i64(place.position) * (HEAD_DIM / 2) + (u % per_head) * HALF + col % HALF;
            b.cosine = a.cosines[at], b.sine = a.sines[at];
        }
    }
    return b;
}

inline __device__ void finish(const Args& a, int u, int row, int col, float v, const Before& b, const Place& place, bool stores) {
    const i64 n = weight_row(a, u, col);
    v += b.bias;
    if constexpr (MODE == RESIDUAL) {
        if (stores && n < a.n) static_cast<float*>(a.out)[i64(row) * a.n + n] = b.old + v;
    } else if constexpr (MODE == HEAD || MODE == PLAIN) {
        if (stores && n < a.n) static_cast<float*>(a.out)[i64(row) * a.n + n] = v;
    } else {
        const float partner = __shfl_xor_sync(ALL_LANES, v, HALF);
        if constexpr (MODE == GATE_UP) {
            if (stores && col < HALF) static_cast<u16*>(a.out)[i64(row) * (a.n / 2) + n] = f32_to_bf16(silu(v) * partner);
        } else {
            constexpr int per_head = HEAD_DIM / UNIT;
            const int head = u / per_head, d = int(n - i64(head) * HEAD_DIM);
            if (head < a.heads + a.kv_heads) v = v * b.cosine + (col < HALF ? -partner : partner) * b.sine;
            if (!stores) return;
            if (head < a.heads) {
                static_cast<u16*>(a.out)[(i64(row) * a.heads + head) * HEAD_DIM + d] = f32_to_bf16(v);
            } else if (place.slot != PAD) {
                const int is_v = head >= a.heads + a.kv_heads, kv = head - a.heads - is_v * a.kv_heads;
                const i64 plane = ((place.block * a.layers + a.layer) * 2 + is_v) * a.kv_heads + kv;
                a.cache[(plane * BLOCK_TOKENS + place.position % BLOCK_TOKENS) * HEAD_DIM + d] = f32_to_bf16(v);
            }
        }
    }
}

// The finishing warp: adds up what the others have of a unit, in a fixed order, and writes it.
inline __device__ void finish_units(const Args& a, float (*partial)[WARPS][ROWS][UNIT], float (*squares)[ROWS], Barriers& ring, int lane) {
    const int output = lane % OUTPUTS, part = lane / OUTPUTS, row = output / UNIT, col = output % UNIT;
    pdl_wait();
    Place place = {0, PAD, 0};
    if constexpr (MODE == QKV) {
        place.position = a.positions[row], place.slot = a.row_slot[row];
        if (place.slot != PAD) place.block = a.block_table[i64(place.slot) * a.max_blocks + place.position / BLOCK_TOKENS];
    }
    Before next = {0, 0, 0, 0};
    if (blockIdx.x < a.units) next = before(a, blockIdx.x, row, col, place);
    float scale = 1;
    int i = 0;
    pdl_before_stores();
    for (int u = blockIdx.x; u < a.units; u += gridDim.x, ++i) {
        const Before b = next;  // loaded a unit ahead
        if (u + gridDim.x < a.units) next = before(a, u + gridDim.x, row, col, place);
        barrier_wait(&ring.summed[i & 1], i / 2 & 1);
        if (NORMED && i == 0) {
            float square = 0;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) square += squares[k][row];
            scale = rsqrtf(square / D + a.eps);
        }
        float v = 0;
#pragma unroll
        for (int k = part; k < WARPS; k += WARP / OUTPUTS) v += partial[i & 1][k][row][col];
#pragma unroll
        for (int offset = OUTPUTS; offset < WARP; offset *= 2) v += __shfl_xor_sync(ALL_LANES, v, offset);
        if (lane == 0) barrier_arrive(&ring.taken[i & 1]);
        finish(a, u, row, col, v * scale, b, place, part == 0);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 2 * WARP, MIN_BLOCKS)
    gemv(const u16* w, const float* bias, const float* norm, const void* act, void* out, const int* rows, const int* positions,
         const int* row_slot, const int* block_table, const float* cosines, const float* sines, u16* cache, int n, int units,
         int max_blocks, int layer, int layers, int heads, int kv_heads, float eps) {
    const Args a = {w,      bias,  norm,  act, out,   rows,       positions, row_slot, block_table, cosines,
                    sines,  cache, n,     units, max_blocks, layer,   layers,    heads,    kv_heads,    eps};
    extern __shared__ __align__(128) char smem[];
    __shared__ Barriers ring;
    __shared__ float partial[2][WARPS][ROWS][UNIT];
    __shared__ float squares[WARPS][ROWS];
    char* xs = smem + STAGES * STAGE_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    pdl_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&ring.full[s], 1), barrier_init(&ring.empty[s], WARPS);
        for (int s = 0; s < 2; ++s) barrier_init(&ring.summed[s], WARPS), barrier_init(&ring.taken[s], 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(a, smem, ring, lane);
        return;
    }
    if (warp == WARPS + 1) {
        finish_units(a, partial, squares, ring, lane);
        return;
    }
    load_rows(a, xs, squares, warp, lane);

    int stage = 0, i = 0;
    u32 parity = 0;
    // Lanes of rows that there are not multiply row 0 again; nobody reads what comes of it.
    const char* my_x = xs + (lane / 4 < ROWS ? lane / 4 : 0) * X_PITCH + (lane % 4) * 16 + warp * CHUNK * 2;
    const char* my_w = smem + (lane / 4 % N_ROWS) * PITCH + (lane % 4) * 16 + warp * CHUNK * 2;
    for (int u = blockIdx.x; u < units; u += gridDim.x, ++i) {
        float c[N_TILES][CHAINS][4] = {};
        for (int t = 0; t < TILES; ++t) {
            barrier_wait(&ring.full[stage], parity);
            const char* tile = my_w + stage * STAGE_BYTES;
            const char* x = my_x + t * STAGE_K * 2;
            if constexpr (K % STAGE_K == 0 && CHUNKS % WARPS == 0) {
#pragma unroll
                for (int j = 0; j < CHUNKS / WARPS; ++j)
                    multiply(c, j * 2 % CHAINS, tile + j * WARPS * CHUNK * 2, x + j * WARPS * CHUNK * 2);
            } else {
                const int chunks = min(STAGE_K, K - t * STAGE_K) / CHUNK - warp;
#pragma unroll 2
                for (int j = 0; j < chunks; j += WARPS) multiply(c, 0, tile + j * CHUNK * 2, x + j * CHUNK * 2);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&ring.empty[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        barrier_wait(&ring.taken[i & 1], i / 2 & 1 ^ 1);
        if (lane / 4 < ROWS && 2 * (lane % 4) < N_ROWS) {
#pragma unroll
            for (int k = 0; k < N_TILES; ++k) {
                float2 sum = make_float2(0, 0);
#pragma unroll
                for (int h = 0; h < CHAINS; ++h) sum.x += c[k][h][0], sum.y += c[k][h][1];
                *reinterpret_cast<float2*>(&partial[i & 1][warp][lane / 4][8 * k + 2 * (lane % 4)]) = sum;
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring.summed[i & 1]);
    }
}
