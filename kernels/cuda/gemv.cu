// out[ROWS, n] = act[ROWS, k] · w[n, k]ᵀ for one or two rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a warp of its own streams w into a ring of shared memory by bulk copies and starts before the
// predecessor kernel has ended, so that memory never rests between kernels; the other warps only wait, multiply on tensor cores and reduce.
//
// A unit is 8 rows of w and 8 values of each output row, chosen so that what an epilogue combines lies in one unit: 4 gate rows with
// their 4 up rows, 4 rows of a head's first half with their partners in the second. Warps share a unit by its columns. Within 32 columns
// both operands take them in the same permuted order, which lets a lane load 16 contiguous bytes instead of shuffling fragments.
#include "bulk.cuh"

#define RESIDUAL 0   // x[ROWS, n] += act · wᵀ
#define QKV 1        // norm, product, rotation; q to out, k and v to the cache
#define GATE_UP 2    // norm, product, out = silu(gate) · up
#define HEAD 3       // gather, norm, product: logits
#define PLAIN 4      // norm, product: float32 out

constexpr int CHUNK = 32;  // columns that a warp multiplies at a time
constexpr int UNIT = 8;
constexpr int PITCH = STAGE_K * 2 + 64;  // bytes of a stage's row: neighbours start half the banks apart
constexpr int STAGE_BYTES = UNIT * PITCH;
constexpr int TILES = (K + STAGE_K - 1) / STAGE_K;  // stages of a unit
constexpr int X_PITCH = K * 2 + 64;
constexpr int CONSUMERS = WARPS * WARP;
constexpr bool NORMED = MODE != RESIDUAL;
static_assert(K % CHUNK == 0 && STAGE_K % CHUNK == 0 && D <= K && D % 4 == 0 && ROWS >= 1 && ROWS <= 2);

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
    if constexpr (MODE == GATE_UP) return i64(u) * 4 + (i & 3) + (i >= 4 ? a.n / 2 : 0);
    if constexpr (MODE == QKV) {
        constexpr int per_head = HEAD_DIM / UNIT;
        return i64(u / per_head) * HEAD_DIM + (u % per_head) * 4 + (i & 3) + (i >= 4 ? HEAD_DIM / 2 : 0);
    }
    return i64(u) * UNIT + i;
}

struct Ring {
    u64 full[STAGES];
    u64 empty[STAGES];
};

inline __device__ void produce(const Args& a, char* stages, Ring& ring, int lane) {
    const u64 policy = evict_first_policy();
    int stage = 0;
    u32 parity = 1;  // the first round finds every stage empty
    bool launched = false;
    int filled = 0;
    for (int u = blockIdx.x; u < a.units; u += gridDim.x) {
        const u16* row = lane < UNIT ? a.w + weight_row(a, u, lane) * K : nullptr;
        for (int t = 0; t < TILES; ++t) {
            barrier_wait(&ring.empty[stage], parity);
            const u32 bytes = 2 * min(STAGE_K, K - t * STAGE_K);
            if (lane == 0) barrier_arrive_expect(&ring.full[stage], UNIT * bytes);
            __syncwarp();
            if (lane < UNIT)
                bulk_copy(stages + stage * STAGE_BYTES + lane * PITCH, row + t * STAGE_K, bytes, &ring.full[stage], policy);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (++filled == STAGES && !launched) pdl_launch(), launched = true;
        }
    }
    if (!launched) pdl_launch();
    pdl_wait();
}

// The sum over the consumer warps, in each of their threads; `which`: the row.
inline __device__ float consumer_sum(float v, float* scratch) {
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
    named_barrier(1, CONSUMERS);
    float total = scratch[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) total += scratch[w];
    return total;
}

// The activations in shared memory as bf16 rows, zeros in the padding columns.
inline __device__ void load_rows(const Args& a, char* xs, float* scratch) {
    constexpr int VECS = (K / 4 + CONSUMERS - 1) / CONSUMERS;
    const int t = threadIdx.x;
    if constexpr (!NORMED) {
        pdl_wait();
        const u16* act = static_cast<const u16*>(a.act);
        for (int r = 0; r < ROWS; ++r)
#pragma unroll 4
            for (int i = t; i < K / 4; i += CONSUMERS) {
                uint2 v = make_uint2(0, 0);
                if (4 * i < D) v = *reinterpret_cast<const uint2*>(act + i64(r) * D + 4 * i);
                *reinterpret_cast<uint2*>(xs + r * X_PITCH + 8 * i) = v;
            }
    } else {
        static_assert(!NORMED || VECS <= 8, "the row is held in registers");
        float4 g[VECS];
#pragma unroll
        for (int v = 0; v < VECS; ++v) {
            const int i = t + v * CONSUMERS;
            g[v] = 4 * i < D ? reinterpret_cast<const float4*>(a.norm)[i] : make_float4(0, 0, 0, 0);
        }
        pdl_wait();
        const float* x = static_cast<const float*>(a.act);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int from = MODE == HEAD ? a.rows[r] : r;
            float4 p[VECS];
            float square = 0;
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
                const int i = t + v * CONSUMERS;
                p[v] = 4 * i < D && from != PAD ? reinterpret_cast<const float4*>(x + i64(from) * D)[i]
                                                : make_float4(0, 0, 0, 0);
                square += p[v].x * p[v].x + p[v].y * p[v].y + p[v].z * p[v].z + p[v].w * p[v].w;
            }
            const float scale = rsqrtf(consumer_sum(square, scratch + r * WARPS) / D + a.eps);
#pragma unroll
            for (int v = 0; v < VECS; ++v) {
                const int i = t + v * CONSUMERS;
                if (4 * i < K)
                    *reinterpret_cast<uint2*>(xs + r * X_PITCH + 8 * i) =
                        make_uint2(pack_bf16(p[v].x * scale * g[v].x, p[v].y * scale * g[v].y),
                                   pack_bf16(p[v].z * scale * g[v].z, p[v].w * scale * g[v].w));
            }
        }
    }
    named_barrier(1, CONSUMERS);
}

// What the epilogue of a unit needs from memory, loaded before the unit's product so that nothing waits for it.
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
            const i64 at = i64(place.position) * (HEAD_DIM / 2) + (u % per_head) * 4 + (col & 3);
            b.cosine = a.cosines[at], b.sine = a.sines[at];
        }
    }
    return b;
}

inline __device__ void finish(const Args& a, int u, int row, int col, float v, const Before& b, const Place& place) {
    const i64 n = weight_row(a, u, col);
    v += b.bias;
    if constexpr (MODE == RESIDUAL) {
        if (n < a.n) static_cast<float*>(a.out)[i64(row) * a.n + n] = b.old + v;
    } else if constexpr (MODE == HEAD || MODE == PLAIN) {
        if (n < a.n) static_cast<float*>(a.out)[i64(row) * a.n + n] = v;
    } else {
        const float partner = __shfl_xor_sync(ROWS == 1 ? 0xffu : 0xffffu, v, 4);
        if constexpr (MODE == GATE_UP) {
            if (col < 4) static_cast<u16*>(a.out)[i64(row) * (a.n / 2) + n] = f32_to_bf16(silu(v) * partner);
        } else {
            constexpr int per_head = HEAD_DIM / UNIT;
            const int head = u / per_head, d = int(n - i64(head) * HEAD_DIM);
            if (head < a.heads + a.kv_heads) v = v * b.cosine + (col < 4 ? -partner : partner) * b.sine;
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

extern "C" __global__ void __launch_bounds__(CONSUMERS + WARP, MIN_BLOCKS)
    gemv(const u16* w, const float* bias, const float* norm, const void* act, void* out, const int* rows, const int* positions,
         const int* row_slot, const int* block_table, const float* cosines, const float* sines, u16* cache, int n, int units,
         int max_blocks, int layer, int layers, int heads, int kv_heads, float eps) {
    const Args a = {w,      bias,  norm,  act, out,   rows,       positions, row_slot, block_table, cosines,
                    sines,  cache, n,     units, max_blocks, layer,   layers,    heads,    kv_heads,    eps};
    extern __shared__ __align__(128) char smem[];
    __shared__ Ring ring;
    __shared__ float partial[2][WARPS][ROWS][UNIT];
    __shared__ float scratch[ROWS * WARPS];
    char* xs = smem + STAGES * STAGE_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    pdl_begin();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&ring.full[s], 1), barrier_init(&ring.empty[s], WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(a, smem, ring, lane);
        return;
    }
    load_rows(a, xs, scratch);

    const int row = threadIdx.x / UNIT, col = threadIdx.x % UNIT;
    const bool ends = threadIdx.x < ROWS * UNIT;
    Place place = {0, PAD, 0};
    if constexpr (MODE == QKV) {
        if (ends) {
            place.position = positions[row], place.slot = row_slot[row];
            if (place.slot != PAD) place.block = block_table[i64(place.slot) * max_blocks + place.position / BLOCK_TOKENS];
        }
    }
    int stage = 0, buffer = 0;
    u32 parity = 0;
    const char* my_x = xs + (lane / 4 < ROWS ? lane / 4 : 0) * X_PITCH + (lane % 4) * 16;
    pdl_before_stores();
    for (int u = blockIdx.x; u < units; u += gridDim.x, buffer ^= 1) {
        Before b = {0, 0, 0, 0};
        if (ends) b = before(a, u, row, col, place);
        float c[4] = {0, 0, 0, 0};
        for (int t = 0; t < TILES; ++t) {
            barrier_wait(&ring.full[stage], parity);
            const char* tile = smem + stage * STAGE_BYTES + (lane / 4) * PITCH + (lane % 4) * 16;
            const int chunks = (TILES * STAGE_K == K ? STAGE_K : min(STAGE_K, K - t * STAGE_K)) / CHUNK;
#pragma unroll 4
            for (int i = warp; i < chunks; i += WARPS) {
                const uint4 wv = *reinterpret_cast<const uint4*>(tile + i * (CHUNK * 2));
                uint4 xv = make_uint4(0, 0, 0, 0);
                if (lane / 4 < ROWS) xv = *reinterpret_cast<const uint4*>(my_x + (t * STAGE_K + i * CHUNK) * 2);
                mma_bf16(c, xv.x, 0, xv.y, 0, wv.x, wv.y);
                mma_bf16(c, xv.z, 0, xv.w, 0, wv.z, wv.w);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&ring.empty[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (lane / 4 < ROWS) {
            partial[buffer][warp][lane / 4][2 * (lane % 4)] = c[0];
            partial[buffer][warp][lane / 4][2 * (lane % 4) + 1] = c[1];
        }
        named_barrier(1, CONSUMERS);
        if (ends) {
            float v = 0;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) v += partial[buffer][k][row][col];
            finish(a, u, row, col, v, b, place);
        }
    }
}
