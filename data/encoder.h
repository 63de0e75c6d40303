// Encoding: text to token ids.
#pragma once

#include <queue>

#include "data/pretokenizer.h"
#include "data/tokenizer.h"

// Encodes with a tokenizer, which must outlive it. Caches the ids of words in bounded memory. Not for several threads
// at once. Any bytes can be encoded, and Tokenizer::decode() restores them exactly; the ids are never those of special
// tokens, even if the text contains their names.
class Encoder {
public:
    // BPE-dropout (Provilkov et al., arXiv 1910.13267): each merge is skipped with probability `dropout`, 0 to 1, and
    // reconsidered after the next one that is made. So the same text gets different tokens each time, which decode to
    // the same text. The tokens are a function of the seed and of what this object has encoded before.
    explicit Encoder(const Tokenizer& tokenizer, double dropout = 0, uint64_t seed = 0)
        : tokenizer_(tokenizer), dropout_(dropout), seed_(seed) {}

    std::vector<int32_t> encode(std::string_view text);

private:
    struct Candidate {  // in the order of merging: lowest rank first, then leftmost
        int32_t rank;
        uint32_t left, right;  // symbols that would become one
        int32_t id, left_id, right_id;
        auto operator<=>(const Candidate&) const = default;
    };
    struct Symbol {
        int32_t id;
        uint32_t previous, next;
    };

    void merge_word(std::string_view word, std::vector<int32_t>& ids);
    void find_candidate(uint32_t left, uint32_t right);
    bool drops_merge();

    const Tokenizer& tokenizer_;
    const double dropout_;
    const uint64_t seed_;
    uint64_t drawn_ = 0;  // count of random numbers
    Pretokenizer pretokenizer_;
    WordMap<std::vector<int32_t>> known_words_;
    std::vector<Symbol> symbols_;  // of the word being merged, a doubly linked list
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
    std::vector<Candidate> dropped_;  // until the next merge that is made
};
