// The special function unit's base-2 logarithm and power. Subnormal arguments count as zero.
#pragma once

#include "common.cuh"

// Relative error at most 2^-22, and within (1/2, 2) an absolute one of at most 2^-22 (PTX ISA).
inline __device__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Relative error at most 2^-22 (PTX ISA).
inline __device__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
