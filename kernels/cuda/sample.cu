// Chooses the next token of each row: kernels/sampling.py in full, and log-probabilities for rows that ask for them.
//
// Bound by latency at small batches, by the logits' bytes (from L2) and the noise's arithmetic at large ones. The trick: a cluster of blocks
// shares a row and meets over distributed shared memory, a microsecond less than over global memory; noise is computed roughly with a
// bounded error, and the definition's float64 only decides between tokens that the bound does not separate, which is rare.
#include "commit.cuh"
#include "sample_load.cuh"
#include "sample_logprobs.cuh"
#include "sample_noise.cuh"

struct Shared {
    Row row;
    Meeting<THREADS> meeting;
    Selection<THREADS> selection;
    TopList top;
    Cut cut;  // what the filters keep
    float peak;
    float mine[THREADS];  // each thread's greatest logit
    u32 mine_id[THREADS];
    u32 floors[THREADS / WARP];
    u32 arrived;
};

// The greatest adjusted logit, the lowest id that has it; each thread's own stays in s.mine.
inline __device__ void own_greatest(const Row& r, Shared& s) {
    float best = -INF;
    u32 id = NO_ID;
    each_quad<THREADS, 8>(r, true, [&](int q, const Quad& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (v.v[i] > best) best = v.v[i], id = 4 * q + i;
    });
    s.mine[threadIdx.x] = best, s.mine_id[threadIdx.x] = id;
}
inline __device__ Best greatest(Shared& s, u32& turn) {
    const u32 id = s.mine_id[threadIdx.x];
    return cluster_best<THREADS>({id == NO_ID ? 0 : order(s.mine[threadIdx.x]), id, 0}, s.meeting, turn);
}

// Finds what the filters keep of logits / temperature: top_k, then min_p, then top_p of what is left.
inline __device__ void filter(const Row& r, Shared& s, float peak) {
    const int top_k = r.slot[SLOT_TOP_K];
    const float top_p = word_float(r, SLOT_TOP_P), min_p = word_float(r, SLOT_MIN_P);
    if (threadIdx.x == 0) s.cut = {0, NO_BIN}, s.peak = peak;
#pragma unroll 1
    for (int by_weight = 0; by_weight < 2; ++by_weight) {
        __syncthreads();
        Cut cut = s.cut;
        if (by_weight ? top_p < 1 : top_k > 0 && top_k < r.vocab)
            cut = select<THREADS>(r, s.selection, {SCALED, s.peak, cut, by_weight ? 0 : u32(top_k), top_p}).cut;
        if (by_weight == 0 && min_p > 0) cut.key = max(cut.key, order(float(double(s.peak) + log(double(min_p)))));
        cut.key = min(cut.key, order(s.peak));
        __syncthreads();
        if (threadIdx.x == 0) s.cut = cut;
    }
    __syncthreads();
}

// Two approximate noisy values further apart than this are in the order of the exact ones: twice the noise's error, and what rounding the
// sum to float32 does to values of this size, on both sides.
inline __device__ float separation(float best) { return 2 * NOISE_ERROR + (fabsf(best) + 32) * 0x1p-21f; }

inline __device__ Words words_of(const Row& r, u32 quad) {
    return philox(quad, r.position, r.slot[SLOT_SEED_LO], r.slot[SLOT_SEED_HI]);
}
template <typename T>
inline __device__ T pick(const T (&of)[4], u32 i) {
    return i == 0 ? of[0] : i == 1 ? of[1] : i == 2 ? of[2] : of[3];
}

// A noisy value that the block's best is not below: that of the best of its threads' own greatest logits.
inline __device__ float floor_of(const Row& r, Shared& s, bool filtered) {
    const u32 id = s.mine_id[threadIdx.x];
    float noisy = -INF;
    if (id != NO_ID) {
        const float z = scaled(r, s.mine[threadIdx.x]);
        if (!filtered || within(s.cut, s.peak, z)) noisy = z + approx_noise(pick(words_of(r, id / 4).w, id % 4));
    }
    const u32 key = __reduce_max_sync(ALL_LANES, order(noisy));
    if (threadIdx.x % WARP == 0) s.floors[threadIdx.x / WARP] = key;
    __syncthreads();
    return unorder(__reduce_max_sync(ALL_LANES, s.floors[threadIdx.x % (THREADS / WARP)]));
}

// The token whose noisy value is greatest among those that the filters keep. A token's noise exceeds y only if v < e^-y, which needs no logarithm:
// so nearly all are found not to reach the floor, and only the others' noise is computed, roughly. When that does not separate the best
// from the rest, a second pass takes the definition's for those that come near.
inline __device__ Best sampled(const Row& r, Shared& s, bool filtered, u32& turn) {
    constexpr float LOG2E = 1.44269502f;
    const float kept = filtered ? unscaled_below(r, unorder(s.cut.key)) : -INF;  // what lies below is dropped
    float floor = floor_of(r, s, filtered);
#pragma unroll 1
    for (bool exact = false;; exact = true) {
        floor -= 2 * separation(floor);
        float best = -INF, second = -INF;
        u32 id = NO_ID;
        each_quad<THREADS, 1>(r, true, [&](int q, const Quad& x) {
            if (greatest_of(x) < kept) return;
            const Words w = words_of(r, q);
            u32 near = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // 2^32 · e^(z - floor), a little more.
                const float reach = ex2_approx((x.v[i] * r.inverse - floor) * LOG2E + (32 + 0x1p-10f));
                near |= u32(!(float(w.w[i]) > reach)) << i;
            }
            for (; near != 0; near &= near - 1) {
                const u32 i = __ffs(near) - 1, word = pick(w.w, i);
                const float z = scaled(r, pick(x.v, i));
                if (filtered && !within(s.cut, s.peak, z)) continue;
                const float noisy = __fadd_rn(z, exact ? exact_noise(word) : approx_noise(word));
                second = fmaxf(second, fminf(best, noisy));
                if (noisy > best) best = noisy, id = 4 * q + i;
            }
        });
        const Best b = cluster_best<THREADS>({id == NO_ID ? 0 : order(best), id, order(second)}, s.meeting, turn);
        const float top = unorder(b.key);
        floor = top - separation(top);
        if (exact || b.id == NO_ID || unorder(b.second) < floor) return b;
    }
}

// The row's token, in all threads of its cluster.
inline __device__ int sample_row(const Row& r, Shared& s, u32& turn) {
    constexpr double MIN_TEMPERATURE = 1e-6;  // not a float32: the definition compares in float64
    const int top_k = r.slot[SLOT_TOP_K];
    const bool greedy = r.temperature < MIN_TEMPERATURE;
    const bool filtered = (top_k > 0 && top_k < r.vocab) || word_float(r, SLOT_TOP_P) < 1 ||
                          word_float(r, SLOT_MIN_P) > 0;
    Best best = {0, NO_ID, 0};
    own_greatest(r, s);
    if (greedy || filtered) best = greatest(s, turn);
    if (!greedy) {
        if (filtered) filter(r, s, best.id != NO_ID ? scaled(r, unorder(best.key)) : -INF);
        best = sampled(r, s, filtered, turn);
    }
    return best.id == NO_ID ? 0 : int(best.id);  // all are -inf: the lowest id
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const float* logits, const int* sample_rows, const int* row_slot, const int* positions, const int* targets,
           int* slots, int* output_counts, int* next_tokens, const int* bias_ids, const float* bias_values,
           const u32* prompt_seen, u32* control, u32* logprob_ring, u32* token_ring, u64* stamps, u32* arrived, int vocab, int rows,
           int samples, int seen_words, int ring_depth, int ring_samples, int token_words) {
    const Args a = {logits,      sample_rows,   row_slot,    positions, targets,      slots,  bias_ids, bias_values,
                    prompt_seen, output_counts, next_tokens, control,   logprob_ring, vocab,  rows,     samples,
                    seen_words,  ring_depth,    ring_samples};
    __shared__ Shared s;
    pdl_begin();
    pdl_launch();
    cluster_arrive();  // a block may not be written to before it runs
    const int sample = blockIdx.x / CLUSTER;
    pdl_wait();
    pdl_before_stores();
    Row& r = s.row;
    if (threadIdx.x < WARP) load_row(a, sample, r);
    cluster_wait();
    __syncthreads();
    if (r.row_slot != PAD) {
        u32 turn = 0;
        int token = r.target;
        if (token == PAD) {
            if (r.sparse) mark_sparse(a, r);
            token = sample_row(r, s, turn);
            if (cluster_rank() == 0 && threadIdx.x == 0) next_tokens[sample] = token;
        }
        if (r.slot[SLOT_NUM_LOGPROBS] >= 0) {
            const u32 entry = (control[CONTROL_STEP] + 1) % u32(ring_depth);
            score_token<THREADS>(r, token, logprob_ring + (i64(entry) * ring_samples + sample) * LOGPROB_WORDS, s.meeting,
                                 s.selection, s.top, turn);
        }
    }
#if COMMIT
    // The last row to get here ends the step.
    if (cluster_rank() != 0) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        s.arrived = atomicAdd(arrived, 1u);
        __threadfence();
    }
    __syncthreads();
    if (s.arrived != u32(samples) - 1) return;
    if (threadIdx.x == 0) *arrived = 0;
    static_assert(sizeof(TokenRow) * THREADS <= sizeof(s.selection));
    commit_all<THREADS>({sample_rows, row_slot, positions, targets, next_tokens, slots, output_counts, token_ring, control,
                         stamps, ring_depth, token_words, vocab, samples},
                        reinterpret_cast<TokenRow(&)[THREADS]>(s.selection));
#endif
}
