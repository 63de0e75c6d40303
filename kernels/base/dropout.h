// Dropout masks, the same in every backend. Whether an element is kept is a pure function of the run's seed, the
// sample's number in the run, the place in the model (the site) and the element's coordinates. It does not depend on
// threads, ranks, micro-batches or the order of work. Kept elements are divided by the probability of keeping them, to
// preserve the mean (Srivastava et al., "Dropout", JMLR 15, 2014, section 10).
//
// One call of philox() gives 8 decisions of 16 bits. So the probability is rounded to a multiple of 2^-16, and kept
// elements are divided by the rounded probability.
#pragma once

#include "kernels/numeric.h"

namespace ops {

inline constexpr double kMaxDropout = 0.9999;
inline constexpr uint32_t kDropoutRange = 1 << 16;
inline constexpr int kDropoutGroup = 8;  // decisions of one call

// The number of the 2^16 values of a decision that drop the element.
inline uint32_t dropout_threshold(double rate) { return uint32_t(std::lround(rate * kDropoutRange)); }

// The key of a sample's masks. Samples are counted over all ranks from the start of the run.
inline uint64_t dropout_key(uint64_t seed, uint64_t sample) {
    const Philox random = philox(seed, uint64_t(RandomPurpose::dropout) << 32, sample);
    return uint64_t(random.word[1]) << 32 | random.word[0];
}

// The mask of one site for a batch. By default there is no mask.
struct DropoutMask {
    const uint64_t* keys = nullptr;  // (batch), dropout_key() of each sample; null: no dropout
    uint32_t threshold = 0;          // below 2^16
    uint32_t place = 0;              // 2^16 times the site, plus the number of an attention op's head 0 in the model
    float factor = float(kDropoutRange) / float(kDropoutRange - threshold);  // multiplies kept elements

    HOST_DEVICE explicit operator bool() const { return keys != nullptr; }
    // Decision 0 (the low half) or 1 of a random word.
    HOST_DEVICE bool keeps(uint32_t word, int half) const { return (word >> (16 * half) & 0xffffu) >= threshold; }

    // Elementwise: element e of a sample has decision e % 8 of call e / 8, two of them in each word.
    HOST_DEVICE Philox words(uint64_t key, uint64_t call) const { return philox(key, counter_high(0), call); }
    HOST_DEVICE bool is_kept(uint64_t key, uint64_t element) const {
        const uint64_t call = element / kDropoutGroup;
        return keeps(word(words(key, call), int(element % kDropoutGroup / 2)), int(element % 2));
    }

    // Attention probabilities: one call covers queries r and r + 8 and keys c, c + 1, c + 8, c + 9 of a square of 16
    // queries and 16 keys (r in 0 .. 7, c in 0, 2, 4, 6), the part of a tensor core's accumulator in one lane. Word
    // 2 i + j covers query r + 8 i and keys c + 8 j and c + 8 j + 1.
    static HOST_DEVICE uint32_t query_call(int query) { return uint32_t(query / 16 * 8 + query % 8); }
    static HOST_DEVICE uint32_t key_call(int key) { return uint32_t(key / 16 * 4 + key % 8 / 2); }
    static HOST_DEVICE int word_of(int query, int key) { return 2 * (query / 8 % 2) + key / 8 % 2; }
    // `head` is the op's.
    HOST_DEVICE Philox words(uint64_t key, int head, uint32_t query_call, uint32_t key_call) const {
        return philox(key, counter_high(uint32_t(head)), uint64_t(key_call) << 32 | query_call);
    }
    HOST_DEVICE bool is_kept(uint64_t sample_key, int head, int query, int key) const {
        const Philox random = words(sample_key, head, query_call(query), key_call(key));
        return keeps(word(random, word_of(query, key)), key % 2);
    }

private:
    // A non-constant index would move the words from a GPU's registers to local memory.
    static HOST_DEVICE uint32_t word(const Philox& random, int i) {
        return i < 2 ? (i == 0 ? random.word[0] : random.word[1]) : (i == 2 ? random.word[2] : random.word[3]);
    }
    // head: below 2^16. With a sum in 32 bits, attention's backward kernel for sm_90a needs more registers than it has.
    HOST_DEVICE uint64_t counter_high(uint32_t head) const {
        return (uint64_t(RandomPurpose::dropout) << 32 | place) + head;
    }
};

}  // namespace ops
