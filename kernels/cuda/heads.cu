// What happens to heads between the projection and attention: qkv_finish does it all at once; rope, split_heads and kv_append are its parts.
//
// Bound by the bytes moved. The trick: LANES threads hold one head, each 4 values of the first half and their partners of the second, so a head
// is normalised by shuffles and rotated in registers, and everything stays float32 until it is stored once.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int HALF = HEAD_DIM / 2;
constexpr int USED = HALF / 4;  // lanes with values
constexpr int LANES = USED <= 1 ? 1 : USED <= 2 ? 2 : USED <= 4 ? 4 : USED <= 8 ? 8 : USED <= 16 ? 16 : 32;
static_assert(HEAD_DIM % 8 == 0 && USED <= 32);

// One head of a row as its lanes hold it: columns c .. c+3 in `lo`, HALF further on in `hi`.
struct Head {
    float4 lo, hi;
};

inline __device__ Head load(const float* head, int c) {
    return {*reinterpret_cast<const float4*>(head + c), *reinterpret_cast<const float4*>(head + HALF + c)};
}
inline __device__ void store(float* head, int c, const Head& h) {
    *reinterpret_cast<float4*>(head + c) = h.lo;
    *reinterpret_cast<float4*>(head + HALF + c) = h.hi;
}
inline __device__ void store(u16* head, int c, const Head& h) {
    *reinterpret_cast<uint2*>(head + c) = make_uint2(pack_bf16(h.lo.x, h.lo.y), pack_bf16(h.lo.z, h.lo.w));
    *reinterpret_cast<uint2*>(head + HALF + c) = make_uint2(pack_bf16(h.hi.x, h.hi.y), pack_bf16(h.hi.z, h.hi.w));
}
inline __device__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
inline __device__ float4 mul4(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
inline __device__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

inline __device__ void rotate(Head& h, const float* cosines, const float* sines, int position, int c) {
    const float4 cs = *reinterpret_cast<const float4*>(cosines + i64(position) * HALF + c);
    const float4 sn = *reinterpret_cast<const float4*>(sines + i64(position) * HALF + c);
    const float4 minus = make_float4(-sn.x, -sn.y, -sn.z, -sn.w), lo = h.lo;
    h.lo = add4(mul4(h.lo, cs), mul4(h.hi, minus));
    h.hi = add4(mul4(h.hi, cs), mul4(lo, sn));
}

// Where head `kv` of keys (plane 0) or values (plane 1) of this position lies in the cache [blocks, layers, 2, K, tokens, E].
inline __device__ u16* place(u16* cache, const int* block_table, int max_blocks, int slot, int position, int layer, int layers,
                             int kv_heads, int plane, int kv) {
    const i64 block = block_table[i64(slot) * max_blocks + position / BLOCK_TOKENS];
    return cache + ((((block * layers + layer) * 2 + plane) * kv_heads + kv) * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM;
}

// Which head of which row a thread holds, and where in it.
struct Task {
    int row, head, c;
    bool live;
};
inline __device__ Task task(int rows, int heads) {
    const int at = (blockIdx.x * THREADS + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
    Task t = {at / heads, at % heads, lane * 4, false};
    t.live = t.row < rows && lane < USED;
    return t;
}

#ifdef QKV_FINISH
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv_finish(const float* qkv, const float* bias, const float* q_norm, const float* k_norm, const float* cosines,
               const float* sines, const int* positions, const int* row_slot, const int* block_table, u16* q, u16* cache,
               int rows, int heads, int kv_heads, int max_blocks, int layer, int layers, float eps) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    const int all = heads + 2 * kv_heads;
    const Task t = task(rows, all);
    const bool is_q = t.head < heads, is_v = t.head >= heads + kv_heads;
    Head h = {};
    int position = 0, slot = PAD;
    if (t.live) {
        h = load(qkv + (i64(t.row) * all + t.head) * HEAD_DIM, t.c);
        position = positions[t.row], slot = row_slot[t.row];
        if (bias != nullptr) {
            const Head b = load(bias + t.head * HEAD_DIM, t.c);
            h.lo = add4(h.lo, b.lo), h.hi = add4(h.hi, b.hi);
        }
    }
    if (q_norm != nullptr) {
        float square = dot4(h.lo, h.lo) + dot4(h.hi, h.hi);
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) square += __shfl_xor_sync(ALL_LANES, square, offset);
        if (t.live && !is_v) {
            const float scale = rsqrtf(square / HEAD_DIM + eps);
            const Head w = load(is_q ? q_norm : k_norm, t.c);
            const float4 s = make_float4(scale, scale, scale, scale);
            h.lo = mul4(mul4(h.lo, s), w.lo), h.hi = mul4(mul4(h.hi, s), w.hi);
        }
    }
    pdl_before_stores();
    if (!t.live) return;
    if (!is_v) rotate(h, cosines, sines, position, t.c);
    if (is_q)
        store(q + (i64(t.row) * heads + t.head) * HEAD_DIM, t.c, h);
    else if (slot != PAD)
        store(place(cache, block_table, max_blocks, slot, position, layer, layers, kv_heads, is_v,
                    t.head - heads - is_v * kv_heads),
              t.c, h);
}
#endif

#ifdef ROPE
extern "C" __global__ void __launch_bounds__(THREADS)
    rope(float* x, const int* positions, const float* cosines, const float* sines, int rows, int heads) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
    const Task t = task(rows, heads);
    if (!t.live) return;
    float* head = x + (i64(t.row) * heads + t.head) * HEAD_DIM;
    Head h = load(head, t.c);
    rotate(h, cosines, sines, positions[t.row], t.c);
    store(head, t.c, h);
}
#endif

#ifdef SPLIT_HEADS
extern "C" __global__ void __launch_bounds__(THREADS)
    split_heads(const float* qkv, u16* q, float* k, float* v, int rows, int heads, int kv_heads) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
    const int all = heads + 2 * kv_heads;
    const Task t = task(rows, all);
    if (!t.live) return;
    const Head h = load(qkv + (i64(t.row) * all + t.head) * HEAD_DIM, t.c);
    if (t.head < heads)
        store(q + (i64(t.row) * heads + t.head) * HEAD_DIM, t.c, h);
    else if (t.head < heads + kv_heads)
        store(k + (i64(t.row) * kv_heads + t.head - heads) * HEAD_DIM, t.c, h);
    else
        store(v + (i64(t.row) * kv_heads + t.head - heads - kv_heads) * HEAD_DIM, t.c, h);
}
#endif

#ifdef KV_APPEND
extern "C" __global__ void __launch_bounds__(THREADS)
    kv_append(const float* k, const float* v, const int* positions, const int* row_slot, const int* block_table, u16* cache,
              int rows, int kv_heads, int max_blocks, int layer, int layers) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
    const Task t = task(rows, 2 * kv_heads);
    if (!t.live) return;
    const int slot = row_slot[t.row], plane = t.head / kv_heads, kv = t.head % kv_heads;
    if (slot == PAD) return;
    const Head h = load((plane ? v : k) + (i64(t.row) * kv_heads + kv) * HEAD_DIM, t.c);
    store(place(cache, block_table, max_blocks, slot, positions[t.row], layer, layers, kv_heads, plane, kv), t.c, h);
}
#endif
