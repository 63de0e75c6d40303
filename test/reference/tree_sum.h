// The sum of reduce_scatter_sum() as kernels/comm.h defines it, and numbers to add.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/numeric.h"

namespace ref {

// Returns x rounded to nearest even to the numbers of `type`. Requires that it is not beyond the largest.
inline double rounded(double x, Dtype type) {
    if (x == 0 || type == Dtype::fp64) return x;
    const int fraction_bits = type == Dtype::fp32 ? 23 : type == Dtype::bf16 ? 7 : 10;
    const int lowest_exponent = type == Dtype::fp16 ? -14 : -126;
    const double spacing = std::ldexp(1, std::max(std::ilogb(x), lowest_exponent) - fraction_bits);
    return std::nearbyint(x / spacing) * spacing;
}

// Returns the sum of the first 2^k terms plus the sum of the rest, each rounded to fp32.
inline double tree_sum(std::span<const double> terms) {
    if (terms.size() == 1) return terms[0];
    size_t first = 1;
    while (2 * first < terms.size()) first *= 2;
    return rounded(tree_sum(terms.first(first)) + tree_sum(terms.subspan(first)), Dtype::fp32);
}

// Returns element i of a part: a number of `type`. The magnitudes are from 2^-13 to 2^10, so that fp32 rounds sums of
// every type, and the sums depend on the order of addition.
inline double tree_term(int part, size_t i, Dtype type) {
    const Philox random = philox(uint64_t(part), 7, i);
    const double magnitude = std::ldexp(1 + random.word[0] * 0x1p-32, int(random.word[1] % 23) - 13);
    return rounded(random.word[2] % 2 ? -magnitude : magnitude, type);
}

}  // namespace ref
