// What a tokenizer does to text before byte pairs are merged, as a tokenizer.json says it.
#pragma once

#include "data/tokenizer/pretokenizer.h"

// A token that is found in text as it is written, before anything else is done to the text.
struct AddedToken {
    int32_t id;
    std::string text;
    bool is_special = true;                          // text is not searched for it unless the encoder is asked to
    bool is_normalized = false;                      // searched for in normalized text
    bool strips_left = false, strips_right = false;  // white space beside it belongs to it
};

enum class Normalization {
    none,
    nfc,    // Unicode's normalization form C
    spaces  // SentencePiece's: U+2581 stands for a space, in the vocabulary and in text
};

// Where a space is put before text, so that the first word is the same token as others (SentencePiece's dummy prefix).
enum class SpacePrefix { none, always, unless_space, first_unless_space };

struct TextRules {
    Normalization normalization = Normalization::none;
    SpacePrefix prefix = SpacePrefix::none;
    std::vector<SplitStep> steps = {SplitStep()};
    bool whole_words_first = false;    // a word that is a token needs no merges ("ignore_merges")
    std::vector<int32_t> byte_tokens;  // (256), SentencePiece's <0x00> to <0xFF>: merging begins with characters, and
                                       // one that is no token is its bytes; empty: it begins with bytes
    bool drops_bytes = false;          // bytes that no token stands for; otherwise each byte must have a token
    std::vector<AddedToken> added;     // without those that the model's other rules make superfluous
    std::string document_start;        // the name of the token before each document; empty: the end of text
    std::string document_end;          // the name of the end of text; empty: the first of kEndNames
    std::string chosen_end;            // the same, by a user or by tokenizer_config.json; empty: document_end
    std::string file;                  // tokenizer.json as it was read; empty for what Tokenizer::json() can write
    std::string identity;              // what the digest covers beside tokens and merges; empty for GPT-2's rules
};

// Where a text for such a tokenizer may be cut.
inline SafeCut safe_cut_of(const TextRules& rules) {
    if (rules.normalization == Normalization::spaces) return SafeCut::by_spaces;
    return rules.identity.empty() ? SafeCut::by_gpt2 : SafeCut::by_all_rules;
}

// The text with spaces instead of U+2581.
inline std::string with_spaces(std::string_view text) {
    constexpr std::string_view kSymbol = "\u2581";
    std::string out;
    for (size_t found; (found = text.find(kSymbol)) != std::string_view::npos;) {
        out.append(text.substr(0, found)).push_back(' ');
        text.remove_prefix(found + kSymbol.size());
    }
    return out.append(text);
}
