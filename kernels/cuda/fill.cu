// out[i] = mean + std · bell(seed, i): weights for a model that exists only to be timed.
//
// Bound by the bytes written. The trick: a hash of the index, split into four 16-bit uniforms whose sum is nearly normal, so that the host
// can compute the same value bit by bit, for any element, without the others.
#include "common.cuh"

// Finaliser of MurmurHash3 over 64 bits (public domain, Austin Appleby).
inline __device__ u64 mix(u64 h) {
    h ^= h >> 33, h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33, h *= 0xc4ceb9fe1a85ec53ull;
    return h ^ (h >> 33);
}

extern "C" __global__ void __launch_bounds__(256) fill_bell(void* out, u64 n, u64 seed, float mean, float std) {
    pdl_begin();
    pdl_launch();
    pdl_wait();
    pdl_before_stores();
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) {
        const u64 h = mix(i + seed * 0x9e3779b97f4a7c15ull);
        const int sum = int(h & 0xffff) + int(h >> 16 & 0xffff) + int(h >> 32 & 0xffff) + int(h >> 48);
        // Four uniforms on 0..65535 sum to mean 131070 with a standard deviation of 37837.2.
        const float v = __fadd_rn(mean, __fmul_rn(std, __fmul_rn(float(sum - 131070), 1.0f / 37837.2f)));
#if BITS == 16
        static_cast<u16*>(out)[i] = f32_to_bf16(v);
#else
        static_cast<float*>(out)[i] = v;
#endif
    }
}
