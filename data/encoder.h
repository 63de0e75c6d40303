// Text to token ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/pretokenizer.h"
#include "data/tokenizer.h"

// Encodes with a tokenizer, which must outlive it. Remembers the words that it has met, in bounded memory. One object
// serves one thread. Any bytes can be encoded, and decode gives exactly them back; special tokens never come out, not
// even where the text spells one.
class Encoder {
public:
    explicit Encoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

    // BPE-dropout (Provilkov et al., arXiv 1910.13267): each merge of a word is left out with probability `dropout`, 0
    // to 1, and tried again after the next one that is made. So the same text gets other tokens each time; decode gives
    // it back all the same. The tokens are a function of the seed and of what this object has encoded before.
    Encoder(const Tokenizer& tokenizer, double dropout, uint64_t seed)
        : tokenizer_(tokenizer), dropout_(dropout), seed_(seed) {}

    void encode(std::string_view text, std::vector<int32_t>& ids);  // appends
    std::vector<int32_t> encode(std::string_view text);

private:
    struct TextHash {
        using is_transparent = void;
        size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };
    struct Span {
        uint32_t begin, count;
    };
    struct Candidate {
        int32_t rank, id;
        uint32_t left, right;  // symbols that would become one
        int32_t left_id, right_id;
    };
    struct Symbol {
        int32_t id;
        uint32_t previous, next;
    };

    void encode_word(std::string_view word, std::vector<int32_t>& ids);
    void merge_word(std::string_view word, std::vector<int32_t>& ids);
    void propose(uint32_t left, uint32_t right);
    void remember(std::string_view word, const int32_t* ids, size_t count);

    bool leaves_out();

    const Tokenizer& tokenizer_;
    const double dropout_ = 0;
    const uint64_t seed_ = 0;
    uint64_t drawn_ = 0;  // random numbers so far
    Pretokenizer pretokenizer_;
    std::unordered_map<std::string, Span, TextHash, std::equal_to<>> known_words_;
    std::vector<int32_t> known_ids_;
    std::vector<Symbol> symbols_;        // of the word being merged, a doubly linked list
    std::vector<Candidate> candidates_;  // heap, the next merge on top
    std::vector<Candidate> left_out_;    // until the next merge that is made
};
