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

    const Tokenizer& tokenizer_;
    Pretokenizer pretokenizer_;
    std::unordered_map<std::string, Span, TextHash, std::equal_to<>> known_words_;
    std::vector<int32_t> known_ids_;
    std::vector<Symbol> symbols_;        // of the word being merged, a doubly linked list
    std::vector<Candidate> candidates_;  // heap, the next merge on top
};
