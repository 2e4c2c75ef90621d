// What ends a step: the sampled tokens go to their slots, to the counts of output and to the host, step number last.
//
// A step sees one sampled row of a slot at most, so rows do not meet.
#pragma once

#include "abi.cuh"
#include "mapped.cuh"

struct Commit {
    const int *sample_rows, *row_slot, *positions, *targets, *next_tokens;
    int *slots, *output_counts;
    u32 *token_ring, *control;
    u64* stamps;
    int depth, words, vocab, samples;
};

struct TokenRow {
    int slot, serial, token, flag;
};

// Row i of the token record, and what it changes in its slot.
inline __device__ TokenRow commit_row(const Commit& c, int i) {
    const int row = c.sample_rows[i];
    const int slot = row == PAD ? PAD : c.row_slot[row];
    if (slot == PAD) return {PAD, 0, 0, 0};
    int* s = c.slots + i64(slot) * SLOT_WORDS;
    const int serial = s[SLOT_SERIAL], target = c.targets[i];
    if (target != PAD) return {slot, serial, target, FLAG_GOES_ON};
    const int token = load_device(c.next_tokens + i), length = c.positions[row] + 2;  // with the new token
    int flag = length >= s[SLOT_MAX_LEN] ? FLAG_LENGTH : FLAG_GOES_ON;
    const int stops = s[SLOT_NUM_STOP_IDS];
#pragma unroll
    for (int j = 0; j < MAX_STOP_IDS; ++j)
        if (j < stops && s[SLOT_STOP_IDS + j] == token) flag = FLAG_STOP;
    s[SLOT_SEQ_LEN] = length - 1, s[SLOT_LAST_TOKEN] = token;
    if (flag != FLAG_GOES_ON) s[SLOT_STATE] = STATE_DONE;
    atomicAdd(c.output_counts + i64(slot) * c.vocab + token, 1);
    return {slot, serial, token, flag};
}

// By all Threads of one block. `stage`: shared memory, so that the words leave in whole lines.
template <int Threads>
inline __device__ void commit_all(const Commit& c, TokenRow (&stage)[Threads]) {
    const u32 step = c.control[CONTROL_STEP] + 1;
    u32* entry = c.token_ring + i64(step % u32(c.depth)) * c.words;
    for (int first = 0; first < c.samples; first += Threads) {
        const int count = min(Threads, c.samples - first);
        if (first > 0) __syncthreads();
        if (int(threadIdx.x) < count) stage[threadIdx.x] = commit_row(c, first + threadIdx.x);
        __syncthreads();
        const u32* words = reinterpret_cast<const u32*>(stage);
        u32* to = entry + RECORD_HEADER + first * TOKEN_WORDS;
        for (int w = threadIdx.x; w < count * TOKEN_WORDS; w += Threads) to[w] = words[w];
    }
    if (threadIdx.x == 0) entry[1] = c.samples;
    __syncthreads();  // every thread has read the step number and written its words
    if (threadIdx.x == 0) {
        c.control[CONTROL_STEP] = step;
        c.stamps[step % u32(c.depth) * 2 + 1] = global_ns();
        store_release_system(entry, step);
    }
}
