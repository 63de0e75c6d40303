// Encoding: text to token ids.
#pragma once

#include <queue>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/tokenizer.h"

enum class SpecialTokens {
    are_text,   // their names in text are encoded as other text is
    are_found,  // the name of a special token becomes its id
};

// Encodes with a tokenizer, which must outlive it. Caches the ids of words in bounded memory. Not for several threads
// at once. Any bytes can be encoded, and Tokenizer::decode() restores them exactly, but for what the tokenizer's rules
// change (NFC, or U+2581) and bytes that have no token, which are dropped as Hugging Face's tokenizers do. Time is n
// log n; a word of more than kMaxWordBytes is encoded in parts.
class Encoder {
public:
    static constexpr size_t kMaxWordBytes = size_t(1) << 16;

    // BPE-dropout (Provilkov et al., arXiv 1910.13267): each merge is skipped with probability `dropout`, 0 to 1, and
    // reconsidered after the next one that is made. So the same text gets different tokens each time, which decode to
    // the same text. The tokens are a function of seed, stream and text, and not of what was encoded before.
    explicit Encoder(const Tokenizer& tokenizer, double dropout = 0, uint64_t seed = 0,
                     SpecialTokens special = SpecialTokens::are_text);

    // `stream` selects the random numbers of dropout.
    std::vector<int32_t> encode(std::string_view text, uint64_t stream = 0);

    // The same, behind what `ids` has. A text may be encoded in parts that last_safe_cut() makes; `begins_text` says
    // whether this is the first.
    void append(std::string_view text, std::vector<int32_t>& ids, uint64_t stream = 0, bool begins_text = true);

    uint64_t dropped_bytes() const { return dropped_bytes_; }  // by all calls

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
    // A slot of the cache of short words, which holds the last one of those that fall into it.
    struct ShortWord {
        static constexpr size_t kMaxBytes = 15, kMaxIds = 3;
        uint64_t low = 0, high = 0;  // bytes of the word, padded with zeros, and its length in the last one
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
    uint64_t stream_ = 0, drawn_ = 0;  // of random numbers
    Pretokenizer pretokenizer_;
    const AddedTokenFinder added_, added_normalized_;
    const bool is_plain_;  // text is split into words and nothing else is done to it
    std::vector<ShortWord> short_words_;
    std::vector<KnownWord> known_words_;  // a power of two, at most half of them used
    size_t n_known_words_ = 0;
    uint64_t dropped_bytes_ = 0;  // words that have such bytes are not cached
    std::string known_bytes_;
    std::vector<int32_t> known_ids_;
    std::vector<Symbol> symbols_;  // of the word being merged, a doubly linked list
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
    std::vector<Candidate> dropped_;  // until the next merge that is made
};
