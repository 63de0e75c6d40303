// GPT-2's pre-tokenization: text is split into words, numbers, punctuation and white space, and byte pairs are merged
// within these pieces only (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

struct pcre2_real_code_8;  // PCRE2's
struct pcre2_real_match_data_8;

// Splits text by GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// A run of bytes that are not UTF-8 is a piece of its own, so the concatenation of the pieces is the text for any
// input. Not for several threads at once. Which characters are letters and numbers is what PCRE2 says; each is asked
// for once.
class Pretokenizer {
public:
    Pretokenizer();

    // Bytes of the piece that `text`, which is not empty, begins with.
    size_t piece_length(std::string_view text);

    // Calls visit(piece) for each piece, in order.
    template <class Visit> void split(std::string_view text, const Visit& visit) {
        for (size_t length; !text.empty(); text.remove_prefix(length)) {
            length = piece_length(text);
            visit(text.substr(0, length));
        }
    }

private:
    enum Kind : uint8_t { unknown, letter, number, space, other, invalid };
    struct Character {
        Kind kind;
        uint8_t length;  // bytes
    };
    Character character(std::string_view text, size_t at);
    Character character_beyond_ascii(std::string_view text, size_t at);
    Kind ask_pcre(std::string_view character) const;
    size_t run_end(std::string_view text, size_t at, Kind kind);
    size_t space_length(std::string_view text);

    std::shared_ptr<pcre2_real_code_8> pattern_;
    std::unique_ptr<pcre2_real_match_data_8, void (*)(pcre2_real_match_data_8*)> match_;
    std::array<Kind, 128> ascii_;
    std::vector<Kind> beyond_ascii_;  // by code point; unknown until it is asked for
};

// Bytes of the valid UTF-8 character that `text`, which is not empty, begins with; 0 if it is not one.
size_t utf8_length(std::string_view text);

// The last position in `text`, beyond its first byte, where splitting the text in two leaves its pieces the same,
// whatever follows: between a character that is not white space and ASCII white space. 0 if there is none.
size_t last_safe_cut(std::string_view text);

// A hash map from words, searched by string_view without a copy.
struct WordHash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
template <class Value> using WordMap = std::unordered_map<std::string, Value, WordHash, std::equal_to<>>;
