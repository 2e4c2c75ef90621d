// What a row that asks for log-probabilities gets: as kernels/sampling.py's score_token, of the raw logits.
//
// exp in float32 with a relative error of 2^-22, sums of four in float32 and all others in float64: a log-probability is right to 2^-20.
#pragma once

#include "mapped.cuh"
#include "sample_select.cuh"

struct TopList {
    u64 entry[WARP];  // order bits of the logit, then ~id: the greatest first
    u32 count;
    double normaliser;
};

// Of all threads of the cluster. Block 0 writes `out`, LOGPROB_WORDS words of host memory.
template <int Threads>
inline __device__ void score_token(const Row& r, int token, u32* out, Meeting<Threads>& meeting, Selection<Threads>& selection,
                                   TopList& top, u32& turn) {
    const float value = r.logits[token];
    u32 rank = 0;
    Best best = {0, NO_ID, 0};
    each_quad<Threads, 1>(r, false, [&](int q, const Quad& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rank += v.v[i] > value || (v.v[i] == value && 4 * q + i < token);
            best.key = max(best.key, order(v.v[i]));
        }
    });
    if (threadIdx.x == 0) top.count = 0;
    const float peak = unorder(cluster_best<Threads>(best, meeting, turn).key);
    double sum = 0;
    each_quad<Threads, 1>(r, false, [&](int q, const Quad& v) {
        sum += (weight(peak, v.v[0]) + weight(peak, v.v[1])) + (weight(peak, v.v[2]) + weight(peak, v.v[3]));
    });
    sum = cluster_sum<Threads>(sum, meeting, turn);
    const u32 before = u32(cluster_sum<Threads>(rank, meeting, turn));
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        top.normaliser = double(peak) + log(sum);
        out[0] = __float_as_uint(float(double(value) - top.normaliser)), out[1] = 1 + before;
    }

    const u32 count = min(MAX_LOGPROBS, r.vocab);
    Cut cut = {0, NO_BIN};
    u32 wanted = count, lowest = 0;
    float last = peak;  // where tied, the value of which only the lowest ids are in
    bool tied = false;
#pragma unroll 1
    for (int ids = 0; ids == 0 || (ids == 1 && tied); ++ids) {
        const Answer answer = select<Threads>(r, selection, {ids ? TIED_IDS : RAW, last, {0, NO_BIN}, wanted, 0});
        if (ids)
            lowest = answer.cut.key;
        else
            cut = answer.cut, tied = answer.tied, wanted = answer.needed, last = unorder(cut.key);
    }
    each_quad<Threads, 1>(r, false, [&](int q, const Quad& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 id = 4 * q + i;
            if (id >= r.vocab || !within(cut, peak, v.v[i]) || (tied && v.v[i] == last && ~id < lowest)) continue;
            const u32 at = remote_add(&top.count, 0, 1);
            if (at < WARP) remote_store(&top.entry[at], 0, u64(order(v.v[i])) << 32 | ~id);
        }
    });
    cluster_sync();
    if (cluster_rank() != 0) return;
    if (threadIdx.x < count) {
        const u64 mine = top.entry[threadIdx.x];
        u32 at = 0;
        for (u32 j = 0; j < count; ++j) at += top.entry[j] > mine;
        out[2 + at] = ~u32(mine);
        out[2 + MAX_LOGPROBS + at] = __float_as_uint(float(double(unorder(u32(mine >> 32))) - top.normaliser));
    }
    __threadfence_system();  // there before the step's number says so
}
