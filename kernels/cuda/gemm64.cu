// out[rows, n] = act[rows, K] · w[n, K]ᵀ for 3 to 64 rows, with what stands before and after it in a decoder layer.
//
// Bound by the bytes of w. The trick: a cluster shares a product by its columns, so that a block holds only its slice of the activations, and keeps
// it while rows of w stream past it. Copies begin before the predecessor kernel has ended.
//
// A unit is 16 or 32 rows of w. It belongs to one warp in each block of a cluster; these warps, and no others, meet: each sends the part of
// its sums that another has to finish there, through shared memory, and goes on with the next unit while they arrive. Nothing waits for a
// block. Sums are added in the order of the ranks, and within a rank in the order of the columns: the bits of a row depend neither on the
// number of rows nor on the units, stages and warps.
#if BULK
#include "gemm64_bulk.cuh"
#else
#include "gemm64_async.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemm64(const u16* w, const float* bias, const float* norm, const void* act, void* out, const int* picked, const int* positions,
           const int* row_slot, const int* block_table, const float* cosines, const float* sines, u16* cache, int rows, int n, int units,
           int max_blocks, int layer, int layers, int heads, int kv_heads, float eps) {
    const Args a = {w,     bias, norm,  act,  out,   picked,     positions, row_slot, block_table, cosines, sines,
                    cache, rows, n,     units, max_blocks, layer,     layers,   heads,       kv_heads, eps};
    run(a);
}
