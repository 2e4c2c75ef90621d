// Pulls the step's delta record from host memory, applies its patches, and fills the rows: the first kernel of every step.
//
// Bound by latency: one round trip to the host (two for a record longer than FIRST words). The trick: block 0 asks for the words behind the
// header together with it. Word i of a field is always written by the same thread, so patches apply in their order without a barrier in between.
// The other blocks of the cluster exist for what is rare and large: clearing the output counts of new requests.
#define CLUSTER 8
#include "abi.cuh"
#include "cluster.cuh"
#include "mapped.cuh"

constexpr u32 THREADS = 256;
constexpr u32 FIRST = 4 * THREADS, WINDOW = 16 * THREADS;  // words

enum Kind { DECODE, PREFILL, SCORE };

struct Step {
    const u32* delta;
    u32* control;
    int *slots, *decode_rows, *prefill_tokens, *prefill_positions, *prefill_slots, *prefill_samples, *score_targets;
    int *output_counts, *tokens, *positions, *row_slot, *sample_rows, *targets;
    int depth, words, num_slots, vocab, rows, samples, kind;
};

// Words [from, from + count) of the record, all asked for before the first arrives.
template <u32 Loads>
inline __device__ void load_window(u32* window, const u32* from, u32 count) {
    u32 v[Loads];
#pragma unroll
    for (u32 j = 0; j < Loads; ++j) {
        const u32 i = threadIdx.x + j * THREADS;
        v[j] = i < count ? load_system(from + i) : 0;
    }
#pragma unroll
    for (u32 j = 0; j < Loads; ++j) window[threadIdx.x + j * THREADS] = v[j];
}

// Every thread walks through the patches and writes the words that are its own.
inline __device__ bool apply_record(const Step& s, u32* const* fields, u32* window) {
    const u32 step = s.control[CONTROL_STEP] + 1, words = s.words;
    const u32* entry = s.delta + i64(step % u32(s.depth)) * words;
    u32 base = 0, have = min(FIRST, words);
    load_window<FIRST / THREADS>(window, entry, have);
    __syncthreads();
    if (window[0] != step) {
        if (threadIdx.x == 0) s.control[CONTROL_ERROR] = 1, s.control[CONTROL_FOUND] = window[0];
        return false;
    }
    const u32 end = RECORD_HEADER + min(window[1], words - RECORD_HEADER);
    u32 at = RECORD_HEADER, offset = 0, left = 0;
    u32* target = nullptr;
    while (at < end) {
        if (left == 0 && end - at < PATCH_HEADER) break;
        if (at + (left == 0 ? PATCH_HEADER : 1) > base + have) {
            __syncthreads();
            base = at, have = min(WINDOW, end - at);
            load_window<WINDOW / THREADS>(window, entry + base, have);
            __syncthreads();
        }
        const u32* w = window + (at - base);
        if (left == 0) {
            target = w[0] < FIELDS ? fields[w[0]] : nullptr;
            offset = w[1], left = w[2];
            at += PATCH_HEADER, w += PATCH_HEADER;
        }
        const u32 n = min(left, base + have - at);
        if (target != nullptr)
            for (u32 i = (threadIdx.x - offset) % THREADS; i < n; i += THREADS) target[offset + i] = w[i];
        at += n, offset += n, left -= n;
    }
    return true;
}

// The rows, from the slots or from what a patch wrote; all of them padding when there is no record.
inline __device__ void fill_rows(const Step& s, bool ok) {
    for (int r = threadIdx.x; r < s.rows; r += THREADS) {
        int token = 0, position = 0, slot = PAD;
        if (ok && s.kind == DECODE) {
            const int wanted = s.decode_rows[r];
            if (wanted != PAD) {
                const int4 head = *reinterpret_cast<const int4*>(s.slots + i64(wanted) * SLOT_WORDS);
                if (head.w == STATE_RUNNING) position = head.x, token = head.y, slot = wanted;
            }
        } else if (ok) {
            token = s.prefill_tokens[r], position = s.prefill_positions[r], slot = s.prefill_slots[r];
        }
        s.tokens[r] = token, s.positions[r] = position, s.row_slot[r] = slot;
        if (s.kind == DECODE) s.sample_rows[r] = slot == PAD ? PAD : r, s.targets[r] = PAD;
    }
    if (s.kind == DECODE) return;
    for (int i = threadIdx.x; i < s.samples; i += THREADS) {
        s.sample_rows[i] = ok ? s.prefill_samples[i] : PAD;
        s.targets[i] = ok && s.kind == SCORE ? s.score_targets[i] : PAD;
    }
}

// This block's share of a slot's counts.
inline __device__ void clear_counts(int* counts, int vocab, u32 rank) {
    const int thread = rank * THREADS + threadIdx.x;
    const int before = min(int(-(reinterpret_cast<u64>(counts) / 4) & 3), vocab);  // words in front of 16-byte alignment
    int4* whole = reinterpret_cast<int4*>(counts + before);
    const int quads = (vocab - before) / 4, behind = before + quads * 4;
    for (int i = thread; i < quads; i += CLUSTER * THREADS) whole[i] = make_int4(0, 0, 0, 0);
    if (thread < before) counts[thread] = 0;
    if (thread < vocab - behind) counts[behind + thread] = 0;
}

// Clears what the predecessors of new requests left behind; every block sees the same flags.
inline __device__ void clear_fresh(const Step& s, u32* masks, u32 rank) {
    bool any = false;
    for (int first = 0; first < s.num_slots; first += THREADS) {
        const int slot = first + threadIdx.x;
        const bool fresh = slot < s.num_slots && load_device(s.slots + i64(slot) * SLOT_WORDS + SLOT_FRESH) != 0;
        if (!__syncthreads_or(fresh)) continue;
        any = true;
        const u32 mask = __ballot_sync(ALL_LANES, fresh);
        if (threadIdx.x % WARP == 0) masks[threadIdx.x / WARP] = mask;
        __syncthreads();
        for (u32 w = 0; w < THREADS / WARP; ++w)
            for (u32 m = masks[w]; m != 0; m &= m - 1)
                clear_counts(s.output_counts + i64(first + w * WARP + __ffs(m) - 1) * s.vocab, s.vocab, rank);
        __syncthreads();
    }
    if (!any) return;
    cluster_sync();  // counts are clear, and nobody reads the flags any more
    if (rank == 0)
        for (int slot = threadIdx.x; slot < s.num_slots; slot += THREADS) s.slots[i64(slot) * SLOT_WORDS + SLOT_FRESH] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    begin_step(const u32* delta, u32* control, int* slots, int* block_table, int* decode_rows, int* prefill_tokens,
               int* prefill_positions, int* prefill_slots, int* prefill_samples, int* score_targets, int* bias_ids,
               float* bias_values, u32* prompt_seen, u64* stamps, int* output_counts, int* tokens, int* positions, int* row_slot,
               int* sample_rows, int* targets, int depth, int words, int num_slots, int vocab, int rows, int samples, int kind) {
    const Step s = {delta,         control,       slots,         decode_rows, prefill_tokens, prefill_positions, prefill_slots,
                    prefill_samples, score_targets, output_counts, tokens,      positions,      row_slot,          sample_rows,
                    targets,       depth,         words,         num_slots,   vocab,          rows,              samples,
                    kind};
    __shared__ u32 window[WINDOW];
    __shared__ u32 masks[THREADS / WARP];
    __shared__ u32* fields[FIELDS];
    const u32 rank = cluster_rank();
    pdl_begin();
    pdl_launch();
    if (rank == 0 && threadIdx.x == 0) {  // in the order of abi.Field
        void* const all[FIELDS] = {slots,           block_table,   decode_rows, prefill_tokens, prefill_positions, prefill_slots,
                                   prefill_samples, score_targets, bias_ids,    bias_values,    prompt_seen};
#pragma unroll
        for (int f = 0; f < FIELDS; ++f) fields[f] = static_cast<u32*>(all[f]);
    }
    pdl_wait();
    if (rank == 0 && threadIdx.x == 0) stamps[(control[CONTROL_STEP] + 1) % u32(depth) * 2] = global_ns();
    pdl_before_stores();
    if (rank == 0) {
        const bool ok = apply_record(s, fields, window);
        __syncthreads();
        cluster_arrive();  // the flags are there
        fill_rows(s, ok);
    } else {
        cluster_arrive();
    }
    cluster_wait();
    clear_fresh(s, masks, rank);
    if (rank != 0 || kind == DECODE) return;
    // Output that is computed again, after a preemption, counts as output again.
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const int slot = row_slot[r];
        if (slot != PAD && positions[r] >= slots[i64(slot) * SLOT_WORDS + SLOT_PROMPT_LEN])
            atomicAdd(output_counts + i64(slot) * vocab + tokens[r], 1);
    }
}
