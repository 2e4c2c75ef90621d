// The cut of a filter: the smallest set of a row's greatest elements that has `target` members, or that much weight.
//
// Radix selection: a histogram of BINS bins over what is still undecided, the bin in which the running total reaches the target, and again
// within that bin, until it is decided. The first histogram is over the distance from the greatest value, where logits spread well; the
// others are over order bits, where they are exact. Totals are integers, weights too, so they do not depend on the order of additions.
#pragma once

#include "approx.cuh"
#include "sample_reduce.cuh"

constexpr int BIN_BITS = 10;
constexpr u32 BINS = 1u << BIN_BITS;
constexpr float BINS_PER_UNIT = 32;  // the first histogram spans 32 units; its last bin takes all that lies further
constexpr u32 NO_BIN = 0xffffffffu;
constexpr u32 LOWEST = 0x007fffffu;  // order(-inf)
constexpr float WEIGHT_ONE = 0x1p44f;  // of the greatest element; 2^18 of them fit into 64 bits

// Elements with key >= .key whose distance from the peak falls into a bin up to .bin.
struct Cut {
    u32 key, bin;
};

enum Elements { SCALED, RAW, TIED_IDS };  // adjusted logits / temperature; logits; of those equal to the peak argument, the lowest ids

// What a selection is about.
struct Question {
    Elements elements;
    float peak;  // the greatest value; of TIED_IDS the one that all share
    Cut inside;  // only these take part
    u32 members;   // wanted, at least 1; or where this is 0
    double share;  // of the weight of `inside`, below 1
};

// What is still undecided: members of the distance bin `bin` with a key in [lo, hi], split into bins of 2^shift keys; or everything.
struct Interval {
    bool everything;
    u32 bin, lo, hi, shift;
};

template <int Threads>
struct Selection {
    Question question;  // here, like all that threads have in common: registers are few
    Interval interval;
    u32 count[BINS], low[BINS], high[BINS];  // members; their weight in two words
    u64 warp[Threads / WARP];
    u64 totals[CLUSTER];
    u32 found_bin, found_members;
    u64 found_before;
};

inline __device__ u32 distance_bin(float peak, float x) {
    const float at = __fmul_rn(__fsub_rn(peak, x), BINS_PER_UNIT);
    return at < BINS - 1 ? u32(at) : BINS - 1;
}
inline __device__ bool within(Cut cut, float peak, float x) { return order(x) >= cut.key && distance_bin(peak, x) <= cut.bin; }

// e^(x - peak) as a share of WEIGHT_ONE: the difference is split so that the power's argument is exact to 2^-22 of the result.
inline __device__ float weight(float peak, float x) {
    constexpr float LOG2E = 1.44269502f, LOG2E_REST = 1.92596303e-8f, LN2 = 0.693147181f;
    const float d = fmaxf(__fsub_rn(x, peak), -128.0f), y = __fmul_rn(d, LOG2E);  // -inf: 0
    const float rest = __fmaf_rn(d, LOG2E_REST, __fmaf_rn(d, LOG2E, -y));
    const float p = ex2_approx(y);
    return __fmaf_rn(p, rest * LN2, p);
}

// Adds an element to its bin, if it takes part.
template <int Threads>
inline __device__ void add_element(const Row& r, Selection<Threads>& s, int id, float x) {
    const Question& ask = s.question;
    const Interval& in = s.interval;
    u32 key = order(x), place = 0;
    if (ask.elements == TIED_IDS) {
        if (x != ask.peak || id >= r.vocab) return;
        key = ~u32(id);
    } else {
        place = distance_bin(ask.peak, x);
        if (key <= LOWEST || key < ask.inside.key || place > ask.inside.bin) return;
        if (!in.everything && place != in.bin) return;
    }
    if (!in.everything) {
        if (key < in.lo || key > in.hi) return;
        place = (in.hi - key) >> in.shift;
    }
    if (ask.members == 0) {
        const float w = weight(ask.peak, x) * WEIGHT_ONE;
        u32 high = u32(w * 0x1p-32f);
        const u32 low = u32(w - float(high) * 0x1p32f);
        if (high == 0 && low == 0) return;
        if (atomicAdd(&s.low[place], low) + low < low) ++high;
        if (high != 0) atomicAdd(&s.high[place], high);
    }
    atomicAdd(&s.count[place], 1u);
}

// The block's histogram of its share of the row.
template <int Threads>
inline __device__ void fill_bins(const Row& r, Selection<Threads>& s) {
    for (u32 i = threadIdx.x; i < BINS; i += Threads) s.count[i] = s.low[i] = s.high[i] = 0;
    __syncthreads();
    const bool scale = s.question.elements == SCALED, everything = s.interval.everything;
    float least = -INF;  // what lies below takes no part: nearly all quads of all passes but the first
    if (s.question.elements != TIED_IDS) {
        if (!everything) least = unorder(s.interval.lo);
        if (everything && s.question.members == 0) least = s.question.peak - (BINS / BINS_PER_UNIT + 1);
        if (scale) least = unscaled_below(r, least);
    }
    each_quad<Threads, 1>(r, scale, [&](int q, const Quad& v) {
        if (greatest_of(v) < least) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) add_element(r, s, 4 * q + i, scale ? scaled(r, v.v[i]) : v.v[i]);
    });
}

// Finds the bin in which the running total over the cluster's histograms reaches `target`; the grand total. A block adds up its share of the bins;
// the one that holds the place tells the others. Without a target it is `share` of the grand total.
template <int Threads>
inline __device__ u64 find_bin(Selection<Threads>& s, u64& target) {
    constexpr u32 SLICE = BINS / CLUSTER, EACH = (SLICE + Threads - 1) / Threads;
    const u32 rank = cluster_rank(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool by_weight = s.question.members == 0;
    if (threadIdx.x == 0) s.found_bin = NO_BIN;
    cluster_sync();  // the histograms are complete
    u64 value[EACH], sum = 0;
    u32 members[EACH];
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) {
        const u32 i = threadIdx.x * EACH + e, bin = rank * SLICE + i;
        value[e] = 0, members[e] = 0;
        if (i >= SLICE) continue;
#pragma unroll 4
        for (u32 r = 0; r < CLUSTER; ++r) {
            members[e] += remote_load(&s.count[bin], r);
            if (by_weight) value[e] += remote_load(&s.low[bin], r) + (u64(remote_load(&s.high[bin], r)) << 32);
        }
        if (!by_weight) value[e] = members[e];
        sum += value[e];
    }
    u64 before = sum;  // inclusive over the warp, then exclusive over the block, then over the cluster
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const u64 o = __shfl_up_sync(ALL_LANES, before, offset);
        if (lane >= u32(offset)) before += o;
    }
    if (lane == WARP - 1) s.warp[warp] = before;
    __syncthreads();
    before -= sum;
    u64 mine = 0, total = 0;
#pragma unroll 4
    for (u32 w = 0; w < Threads / WARP; ++w) {
        if (w < warp) before += s.warp[w];
        mine += s.warp[w];
    }
    if (threadIdx.x < CLUSTER) remote_store(&s.totals[rank], threadIdx.x, mine);
    cluster_sync();
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
        if (r < rank) before += s.totals[r];
        total += s.totals[r];
    }
    if (target == 0) target = max(u64(ceil(double(total) * s.question.share)), u64(1));
#pragma unroll
    for (u32 e = 0; e < EACH; ++e) {
        if (before < target && target <= before + value[e])
#pragma unroll 1
            for (u32 r = 0; r < CLUSTER; ++r) {
                remote_store(&s.found_members, r, members[e]);
                remote_store(&s.found_before, r, before);
                remote_store(&s.found_bin, r, rank * SLICE + threadIdx.x * EACH + e);
            }
        before += value[e];
    }
    cluster_sync();
    return total;
}

struct Answer {
    Cut cut;
    u32 needed;  // of the elements with the cut's key, where there are more than are wanted
    bool tied;
};

// The cut. Where fewer elements than wanted lie above -inf, its key is that of -inf, which is then tied.
template <int Threads>
inline __device__ Answer select(const Row& r, Selection<Threads>& s, const Question& question) {
    u64 target = question.members;
    const Question& ask = s.question;
    __syncthreads();
    if (threadIdx.x == 0) {
        s.question = question;
        s.interval = {question.elements != TIED_IDS, 0, ~u32(MAX_VOCAB - 1), NO_ID, 18 - BIN_BITS};
    }
    __syncthreads();
    while (true) {
        fill_bins(r, s);
        const u64 total = find_bin(s, target);
        const u32 found = s.found_bin, members = s.found_members;
        if (found == NO_BIN) return {{max(LOWEST, ask.inside.key), ask.inside.bin}, u32(target - total), true};
        target -= s.found_before;
        const bool decided = members == 1 || (ask.members != 0 && target == members);
        Interval in = s.interval;
        if (in.everything) {
            if (decided) return {{ask.inside.key, found}, 0, false};
            // Order bits around the bin's edges, a little wider than it: its members are told by their distance.
            const float peak = ask.peak, slack = 0x1p-17f + fabsf(peak) * 0x1p-21f;
            in.everything = false, in.bin = found;
            in.hi = order(peak - found / BINS_PER_UNIT + slack);
            in.lo = found == BINS - 1 ? LOWEST : order(peak - (found + 1) / BINS_PER_UNIT - slack);
        } else {
            const u32 below = (1u << in.shift) - 1;
            in.hi -= found << in.shift;
            in.lo = in.hi - in.lo < below ? in.lo : in.hi - below;
            if (in.shift == 0 || decided) {
                const u32 bin = ask.elements == TIED_IDS ? NO_BIN : in.bin;
                return {{max(in.lo, ask.inside.key), bin}, u32(target), !decided};
            }
        }
        const int bits = WARP - __clz(in.hi - in.lo);
        in.shift = max(bits - BIN_BITS, 0);
        __syncthreads();
        if (threadIdx.x == 0) s.interval = in;
        __syncthreads();
    }
}
