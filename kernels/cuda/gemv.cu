// out[ROWS, n] = act[ROWS, k] · w[n, k]ᵀ for one or two rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a warp of its own streams w into a ring of shared memory by bulk copies and starts before the
// predecessor kernel has ended, so that memory never rests between kernels. Others only multiply, on tensor cores; one more adds up and finishes a unit while they
// are at the next.
//
// A unit is 4, 8 or 16 rows of w and as many values of each output row, chosen so that what an epilogue combines lies in one unit: gate rows
// with their up rows, rows of a head's first half with their partners in the second. Warps share a unit by its columns. Within 32 columns
// both operands take them in the same permuted order, which lets a lane load 16 contiguous bytes instead of shuffling fragments.
#include "gemv.cuh"

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
inline __device__ void finish_units(const Args& a, float (*partial)[WARPS][ROWS][UNIT], float (*squares)[ROWS], Barriers& ring,
                                    const volatile int* queue, int lane) {
    const int output = lane % OUTPUTS, part = lane / OUTPUTS, row = output / UNIT, col = output % UNIT;
    pdl_wait();
    Place place = {0, PAD, 0};
    if constexpr (MODE == QKV) {
        place.position = a.positions[row], place.slot = a.row_slot[row];
        if (place.slot != PAD) place.block = a.block_table[i64(place.slot) * a.max_blocks + place.position / BLOCK_TOKENS];
    }
    Before b = {0, 0, 0, 0};
    float scale = 1;
    int u = next_unit(queue, 0), i = 0;
    if (u >= 0) b = before(a, u, row, col, place);
    pdl_before_stores();
    while (u >= 0) {
        const int peeked = peek_unit(queue, i + 1);
        Before next = {0, 0, 0, 0};
        if (peeked >= 0) next = before(a, peeked, row, col, place);  // a unit ahead, where it is known
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
        u = next_unit(queue, ++i);
        b = peeked < 0 && u >= 0 ? before(a, u, row, col, place) : next;
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 2 * WARP, MIN_BLOCKS)
    gemv(const u16* w, const float* bias, const float* norm, const void* act, void* out, const int* rows, const int* positions,
         const int* row_slot, const int* block_table, const float* cosines, const float* sines, u16* cache, u32* counter, int n,
         int units, int max_blocks, int layer, int layers, int heads, int kv_heads, int fixed, int tickets, float eps) {
    const Args a = {w,      bias,  norm,  act, out,   rows,       positions, row_slot, block_table, cosines,
                    sines,  cache, n,     units, max_blocks, layer,   layers,    heads,    kv_heads,    counter, fixed, tickets, eps};
    extern __shared__ __align__(128) char smem[];
    __shared__ Barriers ring;
    __shared__ float partial[2][WARPS][ROWS][UNIT];
    __shared__ float squares[WARPS][ROWS];
    __shared__ int queue[QUEUE];
    char* xs = smem + STAGES * STAGE_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    pdl_begin();
    if (threadIdx.x < QUEUE) queue[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&ring.full[s], 1), barrier_init(&ring.empty[s], WARPS);
        for (int s = 0; s < 2; ++s) barrier_init(&ring.summed[s], WARPS), barrier_init(&ring.taken[s], 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(a, smem, ring, queue, lane);
        return;
    }
    if (warp == WARPS + 1) {
        finish_units(a, partial, squares, ring, queue, lane);
        return;
    }
    load_rows(a, xs, squares, warp, lane);

    int stage = 0, i = 0;
    u32 parity = 0;
    // Lanes of rows that there are not multiply row 0 again; nobody reads what comes of it.
    const char* my_x = xs + (lane / 4 < ROWS ? lane / 4 : 0) * X_PITCH + (lane % 4) * 16 + warp * CHUNK * 2;
    const char* my_w = smem + (lane / 4 % N_ROWS) * PITCH + (lane % 4) * 16 + warp * CHUNK * 2;
    for (; next_unit(queue, i) >= 0; ++i) {
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
