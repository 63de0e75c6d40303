// Activation functions and their derivatives, in float.
//
// GELU, tanh form: 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x / (1 + e^(-2u)). The second
// form has no tanh and does not cancel if tanh(u) is near -1. SiLU: x / (1 + e^-x). relu2: max(x, 0)^2.
//
// Intrinsics: ptx::exp2_approx and __fdividef (2 units in the last place for divisors up to 2^126; beyond, its result
// is 0 and the exact one is below 1e-36 |x|). Multiply-adds are written as fmaf, so contraction changes nothing and a
// value has the same bits in every kernel that includes this file. Absolute errors: below 4e-7 max(1, |x|) for gelu and
// silu, below 5e-7 for their derivatives. relu2 is rounded once, its derivative from the stored output twice.
#pragma once

#include "kernels/base/choices.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"

inline constexpr float kGeluLinear = -2.302208198f;               // -2 sqrt(2/pi) log2(e)
inline constexpr float kGeluCubic = -0.1029432396f;               // kGeluLinear * 0.044715
inline constexpr float kGeluSlopeLinear = 1.5957691216f;          // d(2u)/dx = kGeluSlopeLinear + kGeluSlopeSquare x^2
inline constexpr float kGeluSlopeSquare = 3.0f * 0.07135481627f;  // 3 * 2 sqrt(2/pi) * 0.044715

__device__ inline float gelu(float x) {
    const float e = ptx::exp2_approx(x * fmaf(kGeluCubic, x * x, kGeluLinear));
    return __fdividef(x, 1.0f + e);
}

__device__ inline float silu(float x) { return __fdividef(x, 1.0f + ptx::exp2_approx(-kLog2E * x)); }

// d silu / dx = s (1 + x (1 - s)) with s = 1 / (1 + e^-x).
__device__ inline float silu_gradient(float x) {
    // Beyond 80 the result is within 1e-32 of 0 or 1. Clamping keeps e^-x from overflowing, and preserves NaN.
    x = x < -80.0f ? -80.0f : x;
    x = x > 80.0f ? 80.0f : x;
    const float e = ptx::exp2_approx(-kLog2E * x);
    const float s = __fdividef(1.0f, 1.0f + e);
    return s * fmaf(x, e * s, 1.0f);  // e s is 1 - s without cancellation
}

// Preserves NaN.
__device__ inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

template <ActivationFunction function> __device__ inline float activation(float x) {
    if constexpr (function == ActivationFunction::gelu_new) return gelu(x);
    if constexpr (function == ActivationFunction::silu) return silu(x);
    if constexpr (function == ActivationFunction::relu2) return relu(x) * relu(x);
}

// Value and derivative from one exponential.
struct ActivationPair {
    float value, gradient;
};

template <ActivationFunction function> __device__ inline ActivationPair activation_pair(float x) {
    if constexpr (function == ActivationFunction::relu2) {
        return {relu(x) * relu(x), 2.0f * relu(x)};
    } else {
        // GELU: d gelu / dx = s (1 + x (1 - s) d(2u)/dx) with s = 1 / (1 + e^(-2u)). Beyond 10 it is within 1e-34 of 0
        // or 1. Clamping avoids overflow of e^(-2u) and powers of x; keeps NaN. `value` uses x without the upper limit.
        constexpr bool kIsGelu = function == ActivationFunction::gelu_new;
        constexpr float kLimit = kIsGelu ? 10.0f : 80.0f;
        x = x < -kLimit ? -kLimit : x;
        const float clamped = x > kLimit ? kLimit : x, square = clamped * clamped;
        const float e = ptx::exp2_approx(kIsGelu ? clamped * fmaf(kGeluCubic, square, kGeluLinear) : -kLog2E * clamped);
        const float s = __fdividef(1.0f, 1.0f + e);
        const float slope = kIsGelu ? fmaf(kGeluSlopeSquare, square, kGeluSlopeLinear) : 1.0f;
        return {x * s, s * fmaf(clamped * (e * s), slope, 1.0f)};  // e s is 1 - s without cancellation
    }
}

// The derivative from the stored number: the input of the activation, or the output for relu2.
template <ActivationFunction function> __device__ inline float gradient_from_kept(float kept) {
    if constexpr (function == ActivationFunction::gelu_new) return activation_pair<function>(kept).gradient;
    if constexpr (function == ActivationFunction::silu) return silu_gradient(kept);
    if constexpr (function == ActivationFunction::relu2) return 2.0f * sqrtf(kept);
}
