// GELU, tanh form: 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x / (1 + e^(-2u)). The second
// way of writing it has no tanh and does not cancel where tanh(u) is near -1.
//
// Intrinsics: exp2f (2 units in the last place by NVIDIA's table, subnormal results included) and __fdividef (2 units
// for divisors up to 2^126; beyond, its result is 0 where the exact one is below 1e-37 |x|). Products and sums are
// written as fmaf, so contraction changes nothing and a value has the same bits in every kernel that includes this.
// Absolute error of gelu below 4e-7 max(1, |x|), of gelu_gradient below 5e-7.
#pragma once

#include "kernels/cuda/launch.cuh"

inline constexpr float kGeluLinear = -2.302208198f;               // -2 sqrt(2/pi) log2(e)
inline constexpr float kGeluCubic = -0.1029432396f;               // kGeluLinear * 0.044715
inline constexpr float kGeluSlopeLinear = 1.5957691216f;          // d(2u)/dx = kGeluSlopeLinear + kGeluSlopeSquare x^2
inline constexpr float kGeluSlopeSquare = 3.0f * 0.07135481627f;  // 3 * 2 sqrt(2/pi) * 0.044715

__device__ inline float gelu(float x) {
    const float e = exp2f(x * fmaf(kGeluCubic, x * x, kGeluLinear));
    return __fdividef(x, 1.0f + e);
}

// d gelu / dx = s (1 + x (1 - s) d(2u)/dx) with s = 1 / (1 + e^(-2u)).
__device__ inline float gelu_gradient(float x) {
    // Beyond 10 the result is 0 or 1 to within 1e-34; clamped, neither e^(-2u) nor a power of x overflows. NaN stays.
    x = x < -10.0f ? -10.0f : x;
    x = x > 10.0f ? 10.0f : x;
    const float square = x * x;
    const float e = exp2f(x * fmaf(kGeluCubic, square, kGeluLinear));
    const float s = __fdividef(1.0f, 1.0f + e);
    const float slope = fmaf(kGeluSlopeSquare, square, kGeluSlopeLinear);
    return s * fmaf(x * (e * s), slope, 1.0f);  // e s is 1 - s without cancellation
}
