#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pretokenizer.h"

#include <pcre2.h>

#include "kernels/check.h"

// Unicode's White_Space. Spelled out because \s differs between libraries and versions.
static const std::string kWhiteSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

// The kind of a character is the number of the group that matches it.
static const std::string kKinds = "(\\p{L})|(\\p{N})|([" + kWhiteSpace + "])|(.)";

static pcre2_code* compile_pattern() {
    int error = 0;
    size_t offset = 0;
    pcre2_code* pattern = pcre2_compile(PCRE2_SPTR(kKinds.data()), kKinds.size(),
                                        PCRE2_UTF | PCRE2_ANCHORED | PCRE2_DOTALL, &error, &offset, nullptr);
    require(pattern != nullptr, "pre-tokenizer: PCRE2 error %d at character %zu of the pattern", error, offset);
    return pattern;
}

Pretokenizer::Pretokenizer()
    : pattern_(compile_pattern(), pcre2_code_free),
      match_(pcre2_match_data_create(5, nullptr), pcre2_match_data_free),
      beyond_ascii_(0x110000, unknown) {
    require(match_ != nullptr, "pre-tokenizer: PCRE2 has no memory for a match");
    for (size_t c = 0; c < ascii_.size(); c++) ascii_[c] = ask_pcre(std::string(1, char(c)));
}

Pretokenizer::Kind Pretokenizer::ask_pcre(std::string_view character) const {
    const int groups =
        pcre2_match(pattern_.get(), PCRE2_SPTR(character.data()), character.size(), 0, 0, match_.get(), nullptr);
    require(groups >= 2 && groups <= 5, "pre-tokenizer: PCRE2 error %d", groups);
    return Kind(groups - 1);  // the last group that has matched
}

size_t utf8_length(std::string_view text) {
    const uint8_t first = uint8_t(text[0]);
    if (first < 0x80) return 1;
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((uint8_t(text[i]) & 0xc0) != 0x80) return 0;
    const uint8_t second = uint8_t(text[1]);
    const bool is_overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool is_surrogate = first == 0xed && second >= 0xa0, is_too_large = first == 0xf4 && second >= 0x90;
    return is_overlong || is_surrogate || is_too_large ? 0 : length;
}

Pretokenizer::Character Pretokenizer::character_beyond_ascii(std::string_view text, size_t at) {
    const size_t length = utf8_length(text.substr(at));
    if (length == 0) return {invalid, 1};
    uint32_t code = uint8_t(text[at]) & (0xff >> (length + 1));
    for (size_t i = 1; i < length; i++) code = code << 6 | (uint8_t(text[at + i]) & 0x3f);
    Kind& kind = beyond_ascii_[code];
    if (kind == unknown) kind = ask_pcre(text.substr(at, length));
    return {kind, uint8_t(length)};
}

inline Pretokenizer::Character Pretokenizer::character(std::string_view text, size_t at) {
    const uint8_t byte = uint8_t(text[at]);
    return byte < 0x80 ? Character{ascii_[byte], 1} : character_beyond_ascii(text, at);
}

// The end of the run of characters of a kind that holds position `at`.
inline size_t Pretokenizer::run_end(std::string_view text, size_t at, Kind kind) {
    while (at < text.size()) {
        const Character next = character(text, at);
        if (next.kind != kind) break;
        at += next.length;
    }
    return at;
}

// White space is a piece but for its last character, if something else follows, which it may belong to. What is not
// UTF-8 counts as the end of the text.
size_t Pretokenizer::space_length(std::string_view text) {
    size_t end = 0, last = 0;
    for (; end < text.size(); end += character(text, last).length) {
        const Kind kind = character(text, end).kind;
        if (kind != space) return kind == invalid || last == 0 ? end : last;
        last = end;
    }
    return end;
}

size_t Pretokenizer::piece_length(std::string_view text) {
    Character first = character(text, 0);
    if (text[0] == '\'' && text.size() > 1) {
        const char next = text[1], after = text.size() > 2 ? text[2] : '\0';
        if (next == 's' || next == 't' || next == 'm' || next == 'd') return 2;
        if ((next == 'r' && after == 'e') || (next == 'v' && after == 'e') || (next == 'l' && after == 'l')) return 3;
    }
    size_t at = 0;
    if (text[0] == ' ' && text.size() > 1) {  // belongs to the word behind it
        const Character second = character(text, 1);
        if (second.kind != space && second.kind != invalid) first = second, at = 1;
    }
    if (first.kind == space) return space_length(text);
    return run_end(text, at, first.kind);
}

static bool is_ascii_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

// UTF-8 is self-synchronizing, so comparing the last bytes of the text is enough.
static bool ends_in_space(std::string_view text) {
    if (uint8_t(text.back()) < 0x80) return is_ascii_space(text.back());
    for (std::string_view space : {"\u0085", "\u00a0", "\u1680", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"})
        if (text.ends_with(space)) return true;
    bool is_general_punctuation = text.size() >= 3 && text.substr(text.size() - 3).starts_with("\xe2\x80");
    return is_general_punctuation && uint8_t(text.back()) <= 0x8a;  // U+2000 to U+200A
}

size_t last_safe_cut(std::string_view text) {
    for (size_t cut = text.size(); cut-- > 1;)
        if (is_ascii_space(text[cut]) && !ends_in_space(text.substr(0, cut))) return cut;
    return 0;
}
