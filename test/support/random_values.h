// Numbers for tests: the same on every machine and in every run.
#pragma once

#include <vector>

#include "kernels/numeric.h"

// `count` uniform numbers in (center - width, center + width).
inline std::vector<double> random_values(size_t count, uint64_t seed, double width = 1, double centre = 0) {
    std::vector<double> values(count);
    for (size_t i = 0; i < count; i++)
        values[i] = centre + width * (2 * double(uniform_from_bits(philox(seed, 0, i).word[0])) - 1);
    return values;
}

// `count` integers in [0, limit).
inline std::vector<int> random_integers(size_t count, uint64_t seed, int limit) {
    std::vector<int> values(count);
    for (size_t i = 0; i < count; i++) values[i] = int(philox(seed, 1, i).word[0] % uint32_t(limit));
    return values;
}
