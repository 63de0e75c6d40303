// Exact sums of squares of floats. Their bits depend neither on the order nor on the chunks and ranks that add them
// (Demmel, Nguyen, "Fast reproducible floating-point summation", ARITH 2013).
//
// Bin k of a sum counts multiples of its unit, 2^(235 - 22 k). A square is split into multiples of the units of three
// successive bins. No part exceeds 2^21 units, so a bin is exact for 2^32 elements. A chunk begins with the first bin
// in which its largest element counts. Before that bin the parts of all its elements are 0, so it does not matter where
// a chunk begins.
#pragma once

#include "kernels/numeric.h"  // IWYU pragma: export

namespace ops {

inline constexpr int kSquareBins = 28;
inline constexpr int kSquareEntries = kSquareBins + 1;  // of a sum: its bins, then the number of chunks not finite
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// The bits of |x|, which have the order of the numbers. NaN and infinity have at least kInfinityBits.
HOST_DEVICE inline uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// Three bins. Adding and subtracting 1.5 2^52 units rounds to multiples of a unit.
struct SquareBins {
    int first = 0;
    double high, middle, low;

    // The bins of squares of at most most^2. The first rounds most^2 up: ties are rounded to even, so to 0.
    HOST_DEVICE explicit SquareBins(float most) {
        const double square = double(most) * double(most);
        double unit = 0x1p235;
        for (; square <= unit / 2 && first + 3 < kSquareBins; first++) unit *= 0x1p-22;
        high = unit * 0x1.8p52, middle = high * 0x1p-22, low = middle * 0x1p-22;
    }
};

// The parts of a square. What is left is at most half a unit of the last bin.
struct SquareParts {
    double high, middle, low;
    HOST_DEVICE SquareParts(float value, const SquareBins& bins) {
        const double square = double(value) * double(value);
        high = square + bins.high - bins.high;
        const double rest = square - high;
        middle = rest + bins.middle - bins.middle;
        low = rest - middle + bins.low - bins.low;
    }
};

// Returns a sum of n squares: the first bin that is not 0 and the next two, which every chunk filled, so at most n
// 2^-44 of the sum is left out. Infinite if an element is not finite.
HOST_DEVICE inline double sum_of_bins(const double* sum) {
    if (sum[kSquareBins] > 0) return INFINITY;
    int first = 0;
    while (first + 3 < kSquareBins && sum[first] == 0) first++;
    return sum[first + 2] + sum[first + 1] + sum[first];
}

}  // namespace ops
