// Ends a step: see commit.cuh.
//
// Bound by latency: two dependent loads, and the way to the host. The trick: none; one small block.
#include "commit.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    commit_step(const int* sample_rows, const int* row_slot, const int* positions, const int* targets, const int* next_tokens,
                int* slots, int* output_counts, u32* token_ring, u32* control, u64* stamps, int depth, int words, int vocab, int samples) {
    __shared__ TokenRow stage[THREADS];
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
    commit_all<THREADS>({sample_rows, row_slot, positions, targets, next_tokens, slots, output_counts, token_ring, control, stamps,
                         depth, words, vocab, samples},
                        stage);
}
