// One row of logits as the sampler sees it: raw, with bias, bans and penalties, and divided by the temperature.
//
// Ids go in quads, since a quad shares 16 bytes of logits and one call of Philox. A block owns the quads [first, end) of its row.
#pragma once

#include "abi.cuh"
#include "cluster.cuh"

constexpr int MAX_VOCAB = 262144;
constexpr int QUADS = (MAX_VOCAB / 4 + CLUSTER - 1) / CLUSTER;  // of a block, at most
#define INF __int_as_float(0x7f800000)

// All that the threads of a block have in common about their row, in shared memory.
struct Row {
    const float* logits;
    const int* counts;  // [vocab], read when there are penalties
    const u32* seen;
    int vocab, first, end;
    int row_slot, position, target;
    int num_bias, num_banned;
    float repetition, presence, frequency;
    float temperature, inverse;
    bool aligned;             // every quad is whole and lies on 16 bytes
    bool sparse, penalised;   // what there is to adjust
    int slot[SLOT_WORDS];
    int bias_ids[MAX_BIAS];
    float bias[MAX_BIAS];
    u32 marked[(QUADS + 31) / 32];  // quads with a biased or banned token
};

// Four values of a quad; the loops over them unroll.
struct Quad {
    float v[4];
};

// Past the vocabulary all is -inf, which no sampler takes.
inline __device__ Quad raw_quad(const Row& r, int q) {
    __builtin_assume(__isGlobal(r.logits));
    if (r.aligned) {
        const float4 v = *reinterpret_cast<const float4*>(r.logits + 4 * q);
        return {{v.x, v.y, v.z, v.w}};
    }
    Quad v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.v[i] = 4 * q + i < r.vocab ? r.logits[4 * q + i] : -INF;
    return v;
}

// As kernels/sampling.py's adjust_logits: bias, bans, repetition, presence and frequency, each rounded to float32.
inline __device__ Quad adjust(const Row& r, int q, Quad v) {
    const int local = q - r.first;
    if (r.sparse && (r.marked[local / 32] >> (local % 32) & 1)) {
#pragma unroll 1
        for (int j = 0; j < r.num_bias; ++j) {
            const int id = r.bias_ids[j] - 4 * q;
            const float bias = r.bias[j];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (id == i) v.v[i] = __fadd_rn(v.v[i], bias);
        }
#pragma unroll 1
        for (int j = 0; j < r.num_banned; ++j) {
            const int id = r.slot[SLOT_STOP_IDS + j] - 4 * q;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (id == i) v.v[i] = -INF;
        }
    }
    if (!r.penalised) return v;
    const u32 seen = r.seen[q / 8] >> (q % 8 * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int count = 4 * q + i < r.vocab ? r.counts[4 * q + i] : 0;
        if (r.repetition != 1 && (count > 0 || (seen >> i & 1)))
            v.v[i] = v.v[i] > 0 ? __fdiv_rn(v.v[i], r.repetition) : __fmul_rn(v.v[i], r.repetition);
        if (count != 0) v.v[i] = __fsub_rn(v.v[i], __fadd_rn(__fmul_rn(r.frequency, float(count)), r.presence));
    }
    return v;
}

// f(quad, values) for each of the thread's quads, ids ascending; where nothing needs adjusting, `Unroll` of them are asked for at once, and f may
// be called for quads past the end, which are -inf.
template <int Threads, int Unroll, typename F>
inline __device__ void each_quad(const Row& r, bool adjusted, F f) {
    const bool plain = !(adjusted && (r.sparse || r.penalised));
    int q = r.first + threadIdx.x;
    if constexpr (Unroll > 1)
        if (plain) {
            for (; q < r.end; q += Unroll * Threads) {
                Quad v[Unroll];
#pragma unroll
                for (int j = 0; j < Unroll; ++j)
                    v[j] = q + j * Threads < r.end ? raw_quad(r, q + j * Threads) : Quad{{-INF, -INF, -INF, -INF}};
#pragma unroll
                for (int j = 0; j < Unroll; ++j) f(q + j * Threads, v[j]);
            }
            return;
        }
    if (q >= r.end) return;
    Quad next = raw_quad(r, q);
#pragma unroll 1
    for (; q < r.end; q += Threads) {
        Quad v = next;
        if (q + Threads < r.end) next = raw_quad(r, q + Threads);
        if (!plain) v = adjust(r, q, v);
        f(q, v);
    }
}

// x / temperature, rounded as the division is: one Newton step from the product with the reciprocal. Never decreasing in x.
inline __device__ float scaled(const Row& r, float x) {
    const float q = __fmul_rn(x, r.inverse);
    const float better = __fmaf_rn(__fmaf_rn(-q, r.temperature, x), r.inverse, q);
    return fabsf(q) < 3e38f ? better : q;
}

// An adjusted logit below this is below z when scaled.
inline __device__ float unscaled_below(const Row& r, float z) {
    const float x = z * r.temperature;
    return x - fabsf(x) * 0x1p-20f - 0x1p-120f;
}

inline __device__ float greatest_of(const Quad& v) { return fmaxf(fmaxf(v.v[0], v.v[1]), fmaxf(v.v[2], v.v[3])); }

// Order-preserving bits of a float; both zeros are one.
inline __device__ u32 order(float x) {
    const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
inline __device__ float unorder(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
