// The rules of a tokenizer.json that apply to text before byte pairs are merged.
#pragma once

#include "data/tokenizer/pretokenizer.h"

// A token that is matched literally in text, before pre-tokenization.
struct AddedToken {
    int32_t id;
    std::string text;
    bool is_special = true;                          // its name is encoded like other text
    bool is_normalized = false;                      // matched in normalized text
    bool strips_left = false, strips_right = false;  // the match includes the white space on this side
};

enum class Normalization {
    none,
    nfc,    // Unicode normalization form C
    spaces  // SentencePiece: U+2581 represents a space, in the vocabulary and in text
};

// When a space is inserted before text, so that the first word has the same token as later words (the dummy prefix of
// SentencePiece).
enum class SpacePrefix { none, always, unless_space, first_unless_space };

struct TextRules {
    Normalization normalization = Normalization::none;
    SpacePrefix prefix = SpacePrefix::none;
    std::vector<SplitStep> steps = {SplitStep()};
    bool whole_words_first = false;    // a word that is a token is not built by merges ("ignore_merges")
    std::vector<int32_t> byte_tokens;  // (256), SentencePiece's <0x00> to <0xFF>: merging starts with characters, and a
                                       // character without a token becomes its bytes; empty: starts with bytes
    bool drops_bytes = false;          // bytes without a token are dropped; otherwise each byte must have a token
    std::vector<AddedToken> added;     // added tokens, in file order
    std::string document_start;        // name of the token before each document; empty: the end of text
    std::string document_end;          // name of the end of text; empty: the first of kEndNames
    std::string chosen_end;            // end of text set by the user or tokenizer_config.json; empty: document_end
    std::string file;                  // tokenizer.json as read; empty if Tokenizer::json() can generate it
    std::string identity;              // what the digest covers besides tokens and merges; empty for GPT-2's rules
};

// Returns where text for such a tokenizer may be cut.
inline SafeCut safe_cut_of(const TextRules& rules) {
    if (rules.normalization == Normalization::spaces) return SafeCut::by_spaces;
    return rules.identity.empty() ? SafeCut::by_gpt2 : SafeCut::by_all_rules;
}

// Returns the text with each U+2581 replaced by a space.
inline std::string with_spaces(std::string_view text) {
    constexpr std::string_view kSymbol = "\u2581";
    std::string out;
    for (size_t found; (found = text.find(kSymbol)) != std::string_view::npos;) {
        out.append(text.substr(0, found)).push_back(' ');
        text.remove_prefix(found + kSymbol.size());
    }
    return out.append(text);
}
