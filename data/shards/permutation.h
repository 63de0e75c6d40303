// A keyed permutation of [0, n) without a table: each element is computed independently.
#pragma once

#include <utility>

#include "kernels/base/check.h"
#include "kernels/numeric.h"

// Returns the image of `index` in [0, n), 1 <= n <= 2^62. The permutation is a pure function of (seed, epoch).
//
// A balanced Feistel network (Luby, Rackoff, "How to construct pseudorandom permutations", SIAM J. Comput. 17, 1988)
// with Philox as its round function permutes [0, p), where p >= n is the smallest even power of two. Walking the cycle
// until a value below n appears gives a permutation of [0, n) (Black, Rogaway, "Ciphers with arbitrary finite domains",
// CT-RSA 2002, section 4). Since p < 4 n, this takes fewer than 4 steps on average.
inline uint64_t permuted(uint64_t index, uint64_t n, uint64_t seed, uint32_t epoch) {
    constexpr uint32_t kRounds = 8;  // four suffice for large halves; small ones mix more slowly
    require(n >= 1 && n <= uint64_t(1) << 62, "permutation: cannot permute %zu elements", n);
    int half_bits = 1;
    while ((uint64_t(1) << (2 * half_bits)) < n) half_bits++;
    const uint64_t mask = (uint64_t(1) << half_bits) - 1, purpose = uint64_t(RandomPurpose::permutation) << 32 | epoch;
    do {
        uint64_t left = index >> half_bits, right = index & mask;
        for (uint64_t round = 0; round < kRounds; round++) {
            const uint64_t mixed = left ^ (philox(seed, purpose, round << 32 | right).word[0] & mask);
            left = std::exchange(right, mixed);
        }
        index = left << half_bits | right;
    } while (index >= n);
    return index;
}
