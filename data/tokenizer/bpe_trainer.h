// Trains a byte pair encoding on GPT-2's pre-tokens (Sennrich, Haddow, Birch, "Neural machine translation of rare words
// with subword units", arXiv 1508.07909, algorithm 1).
#pragma once

#include "data/tokenizer/pretokenizer.h"
#include "data/tokenizer/tokenizer.h"

// Counts the words of a text. Not thread-safe.
class WordCounter {
public:
    void add(std::string_view text);  // requires text that begins and ends between pre-tokens
    uint64_t text_bytes() const { return text_bytes_; }
    const WordMap<int64_t>& counts() const { return counts_; }
    void clear() { counts_.clear(), text_bytes_ = 0; }

private:
    Pretokenizer pretokenizer_;
    WordMap<int64_t> counts_;
    uint64_t text_bytes_ = 0;
};

class BpeTrainer {
public:
    // Keeps at most `max_words` distinct words and drops the rarest ones first. This bounds memory for input of any
    // size and affects only rare words (Manku, Motwani, "Approximate frequency counts over data streams", VLDB 2002).
    // The result depends only on the texts and their order.
    explicit BpeTrainer(size_t max_words = size_t(1) << 21) : max_words_(max_words) {}

    void add(const WordMap<int64_t>& counts, uint64_t text_bytes);

    uint64_t text_bytes() const { return text_bytes_; }  // bytes of text counted so far

    // Returns a tokenizer of the single bytes in GPT-2's order, the merged tokens, and kEndOfText: `vocab_size` tokens
    // (at least 257), or fewer if no remaining pair occurs twice. The most frequent pair is merged first; ties go to
    // the smaller ids (left, then right).
    Tokenizer train(int vocab_size) const;

private:
    size_t max_words_;
    int64_t rare_below_ = 1;
    uint64_t text_bytes_ = 0;
    WordMap<int64_t> counts_;
};
