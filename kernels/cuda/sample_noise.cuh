// Gumbel noise of a token: -log(-log1p(-v)), v = min((word + 1/2)·2^-32, 1 - 2^-24), word from Philox4x32-10 of (seed, position, token).
//
// Twice: as the definition has it, in float64, and in a dozen float32 instructions with a bounded error, which finds the few tokens that
// the first has to be computed for.
#pragma once

#include "approx.cuh"

struct Words {
    u32 w[4];
};

// Philox4x32-10 (Salmon et al., SC 2011) with counter (c0, c1, 0, 0).
inline __device__ Words philox(u32 c0, u32 c1, u32 k0, u32 k1) {
    u32 c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        asm volatile("" : "+r"(k0), "+r"(k1));  // else all rounds' keys live in registers
        const u64 p0 = u64(c0) * 0xD2511F53u, p1 = u64(c2) * 0xCD9E8D57u;
        c0 = u32(p1 >> 32) ^ c1 ^ k0, c2 = u32(p0 >> 32) ^ c3 ^ k1;
        c1 = u32(p1), c3 = u32(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

inline __device__ float exact_noise(u32 word) {
    const double v = fmin((double(word) + 0.5) * 0x1p-32, 1 - 0x1p-24);
    return float(-log(-log1p(-v)));
}

// |approx_noise - exact_noise| <= NOISE_ERROR. With u = -log1p(-v): for v < 1/16 the series' truncation is below 2^-22 of u; else lg2's error of
// 2^-22 is at most 2^-18.6 of u >= 0.0645, and 1 - v is rounded by 2^-24, 2^-20 of u. So u is right to 2^-18, which is the absolute
// error of its logarithm; that logarithm's own is 2^-22 of at most 23. Together below 2^-16.5.
constexpr float NOISE_ERROR = 0x1p-15f;

inline __device__ float approx_noise(u32 word) {
    constexpr float LN2 = 0.693147181f;
    const bool small = word < (1u << 28);
    const float x = __fadd_rn(float(small ? word : ~word), 0.5f) * 0x1p-32f;  // v, or 1 - v: each where it is the smaller one's exact
    const float series = x * (1 + x * (0.5f + x * (0x1.555556p-2f + x * (0.25f + x * 0.2f))));
    const float u = small ? series : -LN2 * lg2_approx(fmaxf(x, 0x1p-24f));
    return -LN2 * lg2_approx(u);
}
