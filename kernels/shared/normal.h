// Normal random numbers with the same bits on every device.
//
// log, sin and cos of different libraries differ in the last place. After rounding to float, about one number in 10^8
// differs, so every large model would. These implementations use only operations that IEEE 754 defines to the bit
// (+ - * / sqrt and fma; no product feeds a sum except in an fma, so contraction has no effect).
#pragma once

#include "kernels/numeric.h"

// log(x) for a positive normal x, within 2 units in the last place: x = m 2^e with m in [1/sqrt(2), sqrt(2)), then
// log(m) = 2 atanh(s) with s = (m - 1) / (m + 1) and the series of atanh, |s| < 0.172.
HOST_DEVICE inline double log_exact_order(double x) {
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    const uint64_t kRootHalf = 0x3fe6a09e667f3bcdu;  // 1/sqrt(2)
    const int64_t e = int64_t(bits - kRootHalf) >> 52;
    const double m = std::bit_cast<double>(bits - (uint64_t(e) << 52));
    const double s = (m - 1.0) / (m + 1.0), square = s * s;
    double series = 1.0 / 23;
    for (int k = 21; k >= 3; k -= 2) series = std::fma(series, square, 1.0 / k);
    const double log_m = std::fma(2.0 * s * square, series, 2.0 * s);
    constexpr double kLn2High = 0x1.62e42fefa38p-1, kLn2Low = 0x1.ef35793c7673p-45;
    return std::fma(double(e), kLn2High, std::fma(double(e), kLn2Low, log_m));
}

struct CosSin {
    double cos, sin;
};

// cos and sin of 2 pi turns, for turns in [0, 1]: the nearest quarter turn, and a Taylor series of the remainder.
HOST_DEVICE inline CosSin cos_sin_of_turns(double turns) {
    const int quarter = int(std::fma(4.0, turns, 0.5));
    const double x = std::fma(4.0, turns, -double(quarter)) * 1.5707963267948966, square = x * x;
    double sin_series = 1.0, cos_series = 1.0;
    for (int k = 18; k >= 2; k -= 2) {
        sin_series = std::fma(sin_series * (-1.0 / (k * (k + 1))), square, 1.0);
        cos_series = std::fma(cos_series * (-1.0 / (k * (k - 1))), square, 1.0);
    }
    const double sin = x * sin_series, cos = cos_series;
    switch (quarter % 4) {
        case 0: return {cos, sin};
        case 1: return {-sin, cos};
        case 2: return {-cos, -sin};
        default: return {sin, -cos};
    }
}

// Box-Muller on four random words: words 0 and 1 give numbers 0 (cosine) and 1 (sine), words 2 and 3 the other two
// (Box, Muller, "A note on the generation of random normal deviates", Annals of Mathematical Statistics 29, 1958).
struct NormalQuad {
    double value[4];
};

HOST_DEVICE inline NormalQuad normal_quad(const Philox& random) {
    NormalQuad quad;
    for (int pair = 0; pair < 4; pair += 2) {
        const double radius = std::sqrt(-2.0 * log_exact_order(double(uniform_from_bits(random.word[pair]))));
        const CosSin direction = cos_sin_of_turns(double(uniform_from_bits(random.word[pair + 1])));
        quad.value[pair] = radius * direction.cos;
        quad.value[pair + 1] = radius * direction.sin;
    }
    return quad;
}
