// Encoding: text to token ids.
#pragma once

#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

#include "data/pretokenizer.h"
#include "data/tokenizer.h"

// Encodes with a tokenizer, which must outlive it. Caches the ids of words in bounded memory. Not for several threads
// at once. Any bytes can be encoded, and Tokenizer::decode() restores them exactly; the ids are never those of special
// tokens, even if the text contains their names.
class Encoder {
public:
    explicit Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

    // BPE-dropout (Provilkov et al., arXiv 1910.13267): each merge is skipped with probability `dropout`, 0 to 1, and
    // reconsidered after the next one that is made. So the same text gets different tokens each time, which decode to
    // the same text. The tokens are a function of the seed and of what this object has encoded before.
    Encoder(const Tokenizer& tokenizer, double dropout, uint64_t seed)
        : tokenizer_(tokenizer), dropout_(dropout), seed_(seed) {}

    void encode(std::string_view text, std::vector<int32_t>& ids);  // appends
    std::vector<int32_t> encode(std::string_view text);

private:
    struct Candidate {
        int32_t rank, id;
        uint32_t left, right;  // symbols that would become one
        int32_t left_id, right_id;
        bool operator<(const Candidate& other) const {  // lowest rank first, then leftmost
            return rank != other.rank ? rank > other.rank : left > other.left;
        }
    };
    struct Symbol {
        int32_t id;
        uint32_t previous, next;
    };

    void encode_word(std::string_view word, std::vector<int32_t>& ids);
    void merge_word(std::string_view word, std::vector<int32_t>& ids);
    void find_candidate(uint32_t left, uint32_t right);
    bool drops_merge();

    const Tokenizer& tokenizer_;
    const double dropout_ = 0;
    const uint64_t seed_ = 0;
    uint64_t drawn_ = 0;  // count of random numbers
    Pretokenizer pretokenizer_;
    WordMap<std::vector<int32_t>> known_words_;
    std::vector<Symbol> symbols_;  // of the word being merged, a doubly linked list
    std::priority_queue<Candidate> candidates_;
    std::vector<Candidate> dropped_;  // until the next merge that is made
};
