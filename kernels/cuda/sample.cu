// Chooses the next token of each row: kernels/sampling.py in full, and log-probabilities for rows that ask for them.
//
// Bound by latency at small batches, by the logits' bytes (from L2) and the noise's arithmetic at large ones. The trick: a cluster of blocks
// shares a row and meets over distributed shared memory, a microsecond less than over global memory; noise is computed roughly with a
// bounded error, and the definition's float64 only decides between tokens that the bound does not separate, which is rare.
#include "commit.cuh"
#include "sample_logprobs.cuh"
#include "sample_noise.cuh"

struct Args {
    const float* logits;
    const int *sample_rows, *row_slot, *positions, *targets, *slots, *bias_ids;
    const float* bias_values;
    const u32* prompt_seen;
    int* output_counts;
    int* next_tokens;
    const u32* control;
    u32* logprob_ring;
    int vocab, rows, samples, seen_words, ring_depth, ring_samples;
};

struct Shared {
    Row row;
    Meeting<THREADS> meeting;
    Selection<THREADS> selection;
    TopList top;
    u32 listed;
};

inline __device__ float word_float(const Row& r, int word) { return __int_as_float(r.slot[word]); }

// Warp 0 follows the row to its slot. In decode steps sample i is row i, so that what belongs to the row is asked for at once.
inline __device__ void load_row(const Args& a, int sample, Row& r) {
    const int lane = threadIdx.x;
    const int row = a.sample_rows[sample], target = a.targets[sample];
    int slot = PAD, position = 0;
    if (sample < a.rows) slot = a.row_slot[sample], position = a.positions[sample];
    if (row == PAD)
        slot = PAD;
    else if (row != sample)
        slot = a.row_slot[row], position = a.positions[row];
    if (slot != PAD) r.slot[lane] = a.slots[i64(slot) * SLOT_WORDS + lane];
    __syncwarp();
    if (lane != 0) return;
    r.row_slot = slot, r.position = position + 1, r.target = target;
    if (slot == PAD) return;
    const int quads = (a.vocab + 3) / 4, each = (quads + CLUSTER - 1) / CLUSTER;
    r.logits = a.logits + i64(sample) * a.vocab;
    r.counts = a.output_counts + i64(slot) * a.vocab;
    r.seen = a.prompt_seen + i64(slot) * a.seen_words;
    r.vocab = a.vocab;
    r.first = min(int(cluster_rank()) * each, quads), r.end = min(r.first + each, quads);
    r.aligned = a.vocab % 4 == 0;
    r.num_bias = min(r.slot[SLOT_NUM_BIAS], MAX_BIAS);
    r.num_banned = r.position < r.slot[SLOT_MIN_LEN] ? min(r.slot[SLOT_NUM_STOP_IDS], MAX_STOP_IDS) : 0;
    r.sparse = r.num_bias > 0 || r.num_banned > 0;
    r.repetition = word_float(r, SLOT_REPETITION_PENALTY);
    r.presence = word_float(r, SLOT_PRESENCE_PENALTY);
    r.frequency = word_float(r, SLOT_FREQUENCY_PENALTY);
    r.penalised = r.repetition != 1 || r.presence != 0 || r.frequency != 0;
    r.temperature = word_float(r, SLOT_TEMPERATURE);
    r.inverse = 1.0f / r.temperature;
}

// Finds out which of the block's quads hold a biased or banned token.
inline __device__ void mark_sparse(const Args& a, Row& r) {
    for (int w = threadIdx.x; w < (r.end - r.first + 31) / 32; w += THREADS) r.marked[w] = 0;
    for (int j = threadIdx.x; j < r.num_bias; j += THREADS) {
        r.bias_ids[j] = a.bias_ids[i64(r.row_slot) * MAX_BIAS + j];
        r.bias[j] = a.bias_values[i64(r.row_slot) * MAX_BIAS + j];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.num_bias + r.num_banned; j += THREADS) {
        const int id = j < r.num_bias ? r.bias_ids[j] : r.slot[SLOT_STOP_IDS + j - r.num_bias], local = id / 4 - r.first;
        if (id >= 0 && id / 4 >= r.first && id / 4 < r.end) atomicOr(&r.marked[local / 32], 1u << (local % 32));
    }
    __syncthreads();
}

// The greatest adjusted logit, the lowest id that has it.
inline __device__ Best greatest(const Row& r, Shared& s, u32& turn) {
    float best = -INF;
    u32 id = NO_ID;
    each_quad<THREADS, 4>(r, true, [&](int q, const Quad& v) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (v.v[i] > best) best = v.v[i], id = 4 * q + i;
    });
    return cluster_best<THREADS>({id == NO_ID ? 0 : order(best), id, 0}, s.meeting, turn);
}

// What the filters keep of logits / temperature: top_k, then min_p, then top_p of what is left.
inline __device__ Cut filter(const Row& r, Shared& s, float peak) {
    Cut cut = {0, NO_BIN};
    const int top_k = r.slot[SLOT_TOP_K];
    const float top_p = word_float(r, SLOT_TOP_P), min_p = word_float(r, SLOT_MIN_P);
#pragma unroll 1
    for (int by_weight = 0; by_weight < 2; ++by_weight) {
        if (by_weight ? top_p < 1 : top_k > 0 && top_k < r.vocab) {
            cut = select<THREADS>(r, s.selection, {SCALED, peak, cut, by_weight ? 0 : u32(top_k), top_p}).cut;
        }
        if (by_weight == 0 && min_p > 0) cut.key = max(cut.key, order(float(double(peak) + log(double(min_p)))));
    }
    cut.key = min(cut.key, order(peak));
    return cut;
}

// Two approximate noisy values further apart than this are in the order of the exact ones: twice the noise's error, and what rounding the
// sum to float32 does to values of this size, on both sides.
inline __device__ float separation(float best) { return 2 * NOISE_ERROR + (fabsf(best) + 32) * 0x1p-21f; }

// The token whose noisy value is greatest among those that the filters keep. The first pass takes approximate noise; a second one, when that
// does not separate the best from the rest, takes the definition's for the few that come near.
inline __device__ Best sampled(const Row& r, Shared& s, Cut cut, bool filtered, float peak, u32& turn) {
    const float kept = filtered ? unscaled_below(r, unorder(cut.key)) : -INF;  // what lies below is dropped: nearly everything
    float least = 0;
#pragma unroll 1
    for (bool exact = false;; exact = true) {
        float best = -INF, second = -INF;
        u32 id = NO_ID;
        each_quad<THREADS, 1>(r, true, [&](int q, const Quad& x) {
            if (greatest_of(x) < kept) return;
            Quad z;
            bool any = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                z.v[i] = scaled(r, x.v[i]);
                if (filtered && !within(cut, peak, z.v[i])) z.v[i] = -INF;
                any |= z.v[i] > -INF;
            }
            if (!any) return;
            const Words w = philox(q, r.position, r.slot[SLOT_SEED_LO], r.slot[SLOT_SEED_HI]);
            u32 near = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float noisy = z.v[i] + approx_noise(w.w[i]);
                if (exact) {
                    near |= u32(!(noisy < least) && noisy > -INF) << i;
                } else {
                    second = fmaxf(second, fminf(best, noisy));
                    if (noisy > best) best = noisy, id = 4 * q + i;
                }
            }
            for (; near != 0; near &= near - 1) {
                const int i = __ffs(near) - 1;
                const float at = i == 0 ? z.v[0] : i == 1 ? z.v[1] : i == 2 ? z.v[2] : z.v[3];
                const u32 word = i == 0 ? w.w[0] : i == 1 ? w.w[1] : i == 2 ? w.w[2] : w.w[3];
                const float noisy = __fadd_rn(at, exact_noise(word));
                if (noisy > best) best = noisy, id = 4 * q + i;
            }
        });
        const Best b = cluster_best<THREADS>({id == NO_ID ? 0 : order(best), id, order(second)}, s.meeting, turn);
        const float top = unorder(b.key);
        least = top - separation(top);
        if (exact || b.id == NO_ID || unorder(b.second) < least) return b;
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
    if (greedy || filtered) best = greatest(r, s, turn);
    if (!greedy) {
        const float peak = filtered && best.id != NO_ID ? scaled(r, unorder(best.key)) : -INF;
        Cut cut = {0, NO_BIN};
        if (filtered) cut = filter(r, s, peak);
        best = sampled(r, s, cut, filtered, peak, turn);
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
    const int sample = blockIdx.x / CLUSTER;
    pdl_wait();
    pdl_before_stores();
    Row& r = s.row;
    if (threadIdx.x < WARP) load_row(a, sample, r);
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
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) s.listed = atomicAdd(arrived, 1u);
    __syncthreads();
    if (s.listed != u32(samples) - 1) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    static_assert(sizeof(TokenRow) * THREADS <= sizeof(s.selection));
    commit_all<THREADS>({sample_rows, row_slot, positions, targets, next_tokens, slots, output_counts, token_ring, control,
                         stamps, ring_depth, token_words, vocab, samples},
                        reinterpret_cast<TokenRow(&)[THREADS]>(s.selection));
#endif
}
