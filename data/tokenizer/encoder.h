// Encodes text as token ids.
#pragma once

#include <queue>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/pretokenizer.h"
#include "data/tokenizer/tokenizer.h"

// Encodes text with a tokenizer, which must outlive the encoder. Caches the ids of words in bounded memory. Not
// thread-safe. Accepts any bytes. Tokenizer::decode() restores them exactly, except for changes by the tokenizer's
// rules (NFC or U+2581) and bytes without a token, which are dropped as in Hugging Face's tokenizers. Takes
// O(n log n). Words longer than kMaxWordBytes are encoded in parts.
class Encoder {
public:
    static constexpr size_t kMaxWordBytes = size_t(1) << 16;

    // BPE-dropout (Provilkov et al., arXiv 1910.13267): each merge is skipped with probability `dropout`, 0 to 1, and
    // reconsidered after the next applied merge. Different streams give different tokens that decode to the same text.
    // The tokens depend only on seed, stream and text, not on earlier calls.
    explicit Encoder(const Tokenizer& tokenizer, double dropout = 0, uint64_t seed = 0);

    // `stream` selects the random numbers of dropout.
    std::vector<int32_t> encode(std::string_view text, uint64_t stream = 0);

    // Like encode(), but appends to `ids`. A text may be encoded in parts cut by last_safe_cut(); `begins_text` is true
    // for the first part.
    void append(std::string_view text, std::vector<int32_t>& ids, uint64_t stream = 0, bool begins_text = true);

private:
    struct Candidate {  // ordered by merging: lowest rank first, then leftmost
        int32_t rank;
        uint32_t left, right;  // symbols to merge
        int32_t id, left_id, right_id;
        auto operator<=>(const Candidate&) const = default;
    };
    struct Symbol {
        int32_t id;
        uint32_t previous, next;
    };
    // A slot of the short-word cache. A slot keeps the last word that hashed to it.
    struct ShortWord {
        static constexpr size_t kMaxBytes = 15, kMaxIds = 3;
        uint64_t low = 0, high = 0;  // bytes of the word, zero-padded; the last byte is its length
        int32_t ids[kMaxIds] = {};
        int32_t count = 0;
    };

    void append_stretch(std::string_view text, bool is_first, bool begins_text, std::vector<int32_t>& ids);
    void append_words(std::string_view text, std::vector<int32_t>& ids);
    struct KnownWord {  // a slot of a hash map with linear probing; empty if it has no bytes
        uint64_t hash = 0;
        size_t bytes_begin = 0, ids_begin = 0;  // in known_bytes_ and known_ids_
        uint32_t n_bytes = 0, n_ids = 0;
    };
    void make_room_for_word();
    KnownWord& slot_of(std::string_view word, uint64_t hash);
    void append_short_word(std::string_view word, std::vector<int32_t>& ids);
    void append_long_word(std::string_view word, std::vector<int32_t>& ids);
    void merge_word(std::string_view word, std::vector<int32_t>& ids);
    void find_candidate(uint32_t left, uint32_t right);
    bool drops_merge();
    void start_symbols(std::string_view word);
    void merge_few(std::vector<int32_t>& ids);
    void merge_many(std::vector<int32_t>& ids);

    const Tokenizer& tokenizer_;
    const double dropout_;
    const uint64_t seed_;
    uint64_t stream_ = 0, drawn_ = 0;  // random stream, and the number of values drawn from it
    Pretokenizer pretokenizer_;
    const AddedTokenFinder added_, added_normalized_;
    const bool is_plain_;  // no normalization and no added tokens: text is only split into words
    std::vector<ShortWord> short_words_;
    std::vector<KnownWord> known_words_;  // size is a power of two; at most half full
    size_t n_known_words_ = 0;
    std::string known_bytes_;
    std::vector<int32_t> known_ids_;
    std::vector<Symbol> symbols_;  // doubly linked list of the word being merged
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
    std::vector<Candidate> dropped_;  // skipped until the next applied merge
};
