// The random bits of stochastic rounding, the same in every backend. They are a pure function of the run's seed, the
// number of the update, the tensor, the element's place in it and the array of state. So they do not depend on threads,
// ranks, ZeRO stages or the order of work, and a resumed run has the same ones.
#pragma once

#include "kernels/numeric.h"

namespace ops {

// The key of all random bits of one update. number: of the update, from 1.
inline uint64_t rounding_key(uint64_t seed, uint64_t number) {
    const Philox random = philox(seed, uint64_t(RandomPurpose::rounding) << 32, number);
    return uint64_t(random.word[1]) << 32 | random.word[0];
}

// The random bits of a tensor's elements in one update, for the optimizer's state or for the master weights. Philox has
// 20 multiplications per 4 words, so it only keys a hash with 2 per word: two rounds of multiply and shift with the
// constants of Wellons' search for functions whose output bits all depend on all input bits
// (https://github.com/skeeto/hash-prospector, 2018: 16 21f0aaad 15 d35a2d97 15).
struct RoundingBits {
    uint32_t before, between;  // added before the hash, and between its rounds

    HOST_DEVICE RoundingBits(uint64_t key, int tensor, bool of_master = false) {
        const Philox random = philox(key, uint64_t(RandomPurpose::rounding) << 32, uint64_t(tensor));
        before = random.word[of_master ? 2 : 0], between = random.word[of_master ? 3 : 1];
    }
    // The bits of an element: 16 for each array of state, the first in the low half; masters use the low half. element:
    // in the tensor, modulo 2^32, so elements at that distance share bits.
    HOST_DEVICE uint32_t of(uint32_t element) const {
        uint32_t x = element + before;
        x = (x ^ x >> 16) * 0x21f0aaadu + between;
        x = (x ^ x >> 15) * 0xd35a2d97u;
        return x ^ x >> 15;
    }
};

}  // namespace ops
