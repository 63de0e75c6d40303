// GPT-2's pre-tokenization: text is split into words, numbers, punctuation and white space, and byte pairs are merged
// within these pieces only (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

struct pcre2_real_code_8;  // PCRE2's
struct pcre2_real_match_data_8;

// Splits text by GPT-2's pattern. A run of bytes that are not UTF-8 is a piece of its own, so the concatenation of the
// pieces is the text for any input. Not for several threads at once.
class Pretokenizer {
public:
    Pretokenizer();

    // Calls visit() for each piece, in order.
    void split(std::string_view text, const std::function<void(std::string_view piece)>& visit) const;

private:
    int match(std::string_view text, uint32_t options) const;
    size_t valid_length(std::string_view text) const;

    std::shared_ptr<pcre2_real_code_8> pattern_;
    std::unique_ptr<pcre2_real_match_data_8, void (*)(pcre2_real_match_data_8*)> match_;
};

// The last position in `text`, beyond its first byte, where splitting the text in two leaves its pieces the same,
// whatever follows: between a character that is not white space and ASCII white space. 0 if there is none.
size_t last_safe_cut(std::string_view text);

// A hash map from words, searched by string_view without a copy.
struct WordHash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
template <class Value> using WordMap = std::unordered_map<std::string, Value, WordHash, std::equal_to<>>;
