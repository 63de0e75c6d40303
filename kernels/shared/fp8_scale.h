// The scale of an array of 8 bits, the same on host and device.
#pragma once

#include "kernels/numeric.h"

// Returns the smallest power of two s with amax / s at most the largest number of T, a type of 8 bits: 1 if amax is 0,
// NaN if it is not finite, and not below 2^-126. A power of two changes no digit of a number, so a result does not
// depend on where scales are applied (as in DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
template <class T> HOST_DEVICE inline float fp8_scale(float amax) {
    static_assert(is_fp8(dtype_of<T>));
    constexpr uint32_t kInfinity = 0x7f800000u, kFraction = 0x007fffffu;
    const uint32_t bits = std::bit_cast<uint32_t>(amax), limit = std::bit_cast<uint32_t>(largest_of<T>);
    if (bits >= kInfinity) return std::bit_cast<float>(0x7fc00000u);
    if (bits == 0) return 1;
    const int exponent = int(bits >> 23) - int(limit >> 23) + ((bits & kFraction) > (limit & kFraction));
    return std::bit_cast<float>(uint32_t((exponent < -126 ? -126 : exponent) + 127) << 23);
}

// Returns 1 / scale for a result of fp8_scale().
HOST_DEVICE inline float inverse_of_scale(float scale) {
    const uint32_t bits = std::bit_cast<uint32_t>(scale);
    return bits > 0x7f800000u ? scale : std::bit_cast<float>((254u << 23) - bits);
}
