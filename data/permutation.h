// A keyed permutation of [0, n) without a table: any element is computed on its own.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/check.h"
#include "kernels/numeric.h"

// A balanced Feistel network (Luby, Rackoff, "How to construct pseudorandom permutations", SIAM J. Comput. 17, 1988)
// with Philox as its round function permutes the next even power of two >= n; following its cycle until a value
// below n appears makes that a permutation of [0, n) (Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
// 2002, section 4). The power of two is less than 4 n, so that takes less than 4 steps on average.
class Permutation {
public:
    // Of [0, n), 1 <= n <= 2^62, a pure function of (seed, epoch).
    Permutation(uint64_t n, uint64_t seed, uint32_t epoch) : n_(n), seed_(seed), epoch_(epoch) {
        require(n >= 1 && n <= uint64_t(1) << 62, "permutation: cannot permute %llu elements", (unsigned long long)n);
        while ((uint64_t(1) << (2 * half_bits_)) < n) half_bits_++;
    }

    uint64_t size() const { return n_; }

    // The image of `index` in [0, n).
    uint64_t operator()(uint64_t index) const {
        do index = feistel(index);
        while (index >= n_);
        return index;
    }

private:
    // Four rounds suffice for large halves; small ones mix more slowly.
    static constexpr uint32_t kRounds = 8;

    uint64_t feistel(uint64_t value) const {
        uint64_t mask = (uint64_t(1) << half_bits_) - 1;
        uint64_t left = value >> half_bits_, right = value & mask;
        for (uint32_t round = 0; round < kRounds; round++) {
            uint64_t mixed = left ^ (round_function(round, right) & mask);
            left = right, right = mixed;
        }
        return left << half_bits_ | right;
    }

    uint32_t round_function(uint32_t round, uint64_t half) const {
        uint64_t purpose = uint64_t(RandomPurpose::permutation) << 32 | epoch_;
        return philox(seed_, purpose, uint64_t(round) << 32 | half).word[0];
    }

    uint64_t n_, seed_;
    uint32_t epoch_;
    int half_bits_ = 1;
};
