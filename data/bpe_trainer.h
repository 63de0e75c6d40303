// Learns the merges of a byte pair encoding from text (Sennrich, Haddow, Birch, "Neural machine translation of rare
// words with subword units", arXiv 1508.07909, algorithm 1), on GPT-2's pre-tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "data/pretokenizer.h"
#include "data/tokenizer.h"

class BpeTrainer {
public:
    // Keeps at most `max_words` distinct words: where the text has more, those met least so far are dropped, which
    // bounds memory on input of any size and loses nothing that matters (Manku, Motwani, "Approximate frequency counts
    // over data streams", VLDB 2002).
    explicit BpeTrainer(size_t max_words = size_t(1) << 21) : max_words_(max_words) {}

    // Counts the words of a piece of text that was cut where pre-tokens end.
    void add(std::string_view text);

    // Single bytes in GPT-2's order, then merged tokens, then kEndOfText: `vocab_size` in all (at least 257), fewer if
    // no pair is left that occurs twice. The most frequent pair is merged first, of equals the one with the smaller ids
    // (left, then right).
    Tokenizer train(int vocab_size) const;

private:
    struct TextHash {
        using is_transparent = void;
        size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };

    void drop_rare_words();

    size_t max_words_;
    int64_t rare_below_ = 1;
    Pretokenizer pretokenizer_;
    std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>> counts_;
};
