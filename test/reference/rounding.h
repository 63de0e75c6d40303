// Stochastic rounding as docs/numerics.md defines it.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/numeric.h"

namespace ref {

// Returns the 16 random bits of an element of a tensor, for an array of state or, with kMasterArray, for the masters.
inline constexpr int kMasterArray = 2;
inline uint32_t rounding_bits(uint64_t seed, uint64_t update, int tensor, uint64_t element, int array) {
    constexpr uint64_t kPurpose = uint64_t(6) << 32, kWords = uint64_t(1) << 32;
    const Philox of_update = philox(seed, kPurpose, update);
    const Philox of_tensor =
        philox(of_update.word[0] + kWords * of_update.word[1], kPurpose, static_cast<uint64_t>(tensor));
    const int first = array == kMasterArray ? 2 : 0;
    uint64_t x = (element + of_tensor.word[first]) % kWords;
    x = ((x ^ x / 65536) * 0x21f0aaad + of_tensor.word[first + 1]) % kWords;
    x = (x ^ x / 32768) * 0xd35a2d97 % kWords;
    x = x ^ x / 32768;
    return uint32_t(array == 1 ? x / 65536 : x % 65536);
}

// Returns floor(|x| / spacing + random / 2^16) spacing with the sign of x, where `spacing` is the distance of bf16's
// numbers next to x; at most bf16's largest number.
inline double rounded_to_bf16(double x, uint32_t random) {
    if (x == 0 || !std::isfinite(x)) return x;
    const double spacing = std::ldexp(1, std::max(std::ilogb(x), -126) - 7);
    return std::copysign(std::min(std::floor(std::abs(x) / spacing + random / 65536.0) * spacing, 0x1.fep127), x);
}

}  // namespace ref
