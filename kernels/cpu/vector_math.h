// exp, tanh, activation functions and conversions for vectorized loops: inline, without branches, tables or calls.
//
// The bits of a result depend only on the argument, not on whether the element is in the vectorized body of a loop or
// in its remainder: each product feeds one sum, so there is only one way to contract it to a fused multiply-add.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/choices.h"
#include "kernels/numeric.h"

// e^x with a relative error below 1.5 units in the last place, including subnormal results. Overflows to infinity, is 0
// for -104 and below, and preserves NaN.
inline float exp_approx(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;

    // x = n ln 2 + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    constexpr float kRound = 0x1.8p23f;
    float shifted = x * 1.44269504f + kRound;
    float n = shifted - kRound;
    float r = x - n * 0.693359375f;  // ln 2 in two parts, the first short enough for an exact product
    r = r + n * 2.12194440e-4f;

    // Taylor polynomial of degree 7; the first omitted term is below 2^-27.
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 1.0f / 2;
    p = p * r * r + r;
    p = p + 1.0f;

    // 2^n as two factors, because one factor would overflow, or lose bits of a subnormal result.
    int exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
    int half = exponent >> 1;
    float first = std::bit_cast<float>(uint32_t(half + 127) << 23);
    float second = std::bit_cast<float>(uint32_t(exponent - half + 127) << 23);
    return p * first * second;
}

// tanh with a relative error below 4 units in the last place. Up to 0.75: Lambert's continued fraction to x^8. Beyond:
// (1 - e) / (1 + e) with e = e^(-2 |x|), because 1 - e no longer cancels. One division serves both.
inline float tanh_approx(float x) {
    float size = x < 0 ? -x : x;
    float square = x * x;
    float e = exp_approx(-2.0f * size);
    bool is_small = size < 0.75f;
    float over = is_small ? size * ((square + 105.0f) * square + 945.0f) : 1.0f - e;
    float under = is_small ? (15.0f * square + 420.0f) * square + 945.0f : 1.0f + e;
    float result = over / under;
    return x < 0 ? -result : result;
}

// GELU, tanh form: 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x / (1 + e^(-2u)). The second
// form does not cancel if tanh(u) is near -1. Absolute error below 4e-7 max(1, |x|).
inline constexpr float kGeluLinear = -1.5957691216f;  // -2 sqrt(2/pi)
inline constexpr float kGeluCubic = kGeluLinear * 0.044715f;

inline float gelu(float x) { return x / (1.0f + exp_approx(x * (kGeluCubic * (x * x) + kGeluLinear))); }

// x / (1 + e^-x). Absolute error below 4e-7 max(1, |x|).
inline float silu(float x) { return x / (1.0f + exp_approx(-x)); }

// max(x, 0)^2; preserves NaN.
inline float relu2(float x) {
    x = x < 0.0f ? 0.0f : x;
    return x * x;
}

template <ActivationFunction function> float activation(float x) {
    if constexpr (function == ActivationFunction::gelu_new) return gelu(x);
    if constexpr (function == ActivationFunction::silu) return silu(x);
    if constexpr (function == ActivationFunction::relu2) return relu2(x);
}

// out (count) = inp, rounded to out's type. The arrays are the same or do not overlap.
template <class Out, class In> void convert(Out* out, const In* inp, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) out[i] = from_float<Out>(to_float(inp[i]));
}

// out (count) = f(inp), of stored numbers. Never inlined: two inlined copies could contract multiply-adds differently,
// but recomputation must give the same bits as the original computation.
template <ActivationFunction function, class T>
[[gnu::noinline]] void activation_block(T* out, const T* inp, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) out[i] = from_float<T>(activation<function>(to_float(inp[i])));
}

// Value and derivative of an activation.
struct ActivationPair {
    float value, gradient;
};

// GELU and SiLU are x s with s = 1 / (1 + e^-u), from one exponential: u = 2 sqrt(2/pi) (x + 0.044715 x^3) in GELU and
// x in SiLU. The derivative is s (1 + x (1 - s) du/dx). Its absolute error is below 5e-7.
template <ActivationFunction function> inline ActivationPair activation_pair(float x) {
    if constexpr (function == ActivationFunction::relu2) {
        return {relu2(x), 2.0f * (x < 0.0f ? 0.0f : x)};
    } else {
        // Beyond the limit the derivative is within 1e-32 of 0 or 1. Clamping keeps e^-u and powers of x from
        // overflowing. The value of a large x still uses x itself.
        constexpr bool is_gelu = function == ActivationFunction::gelu_new;
        constexpr float kLimit = is_gelu ? 10.0f : 80.0f;
        x = x < -kLimit ? -kLimit : x;
        const float clamped = x > kLimit ? kLimit : x, square = clamped * clamped;
        const float e = exp_approx(is_gelu ? clamped * (kGeluCubic * square + kGeluLinear) : -clamped);
        const float s = 1.0f / (1.0f + e);
        const float slope = is_gelu ? -3.0f * kGeluCubic * square - kGeluLinear : 1.0f;
        return {x * s, s * (clamped * (e * s) * slope + 1.0f)};  // e s is 1 - s without cancellation
    }
}

// The derivative from the stored number: the input of the activation, or the output for relu2.
template <ActivationFunction function> float gradient_from_kept(float kept) {
    if constexpr (function == ActivationFunction::relu2)
        return 2.0f * __builtin_sqrtf(kept);
    else
        return activation_pair<function>(kept).gradient;
}
