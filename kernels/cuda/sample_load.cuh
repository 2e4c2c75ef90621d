// From a sample's number to its row: the slot's parameters, and which quads hold tokens with a bias or a ban.
#pragma once

#include "sample_row.cuh"

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
