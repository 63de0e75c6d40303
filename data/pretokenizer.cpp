#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pretokenizer.h"

#include <pcre2.h>

#include <cstdint>
#include <string>

#include "kernels/check.h"

// Unicode's White_Space. Spelled out because \s means different characters in different libraries and versions.
static const std::string kWhiteSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

static const std::string kGpt2Pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" + kWhiteSpace +
                                        "\\p{L}\\p{N}]+|[" + kWhiteSpace + "]+(?![^" + kWhiteSpace + "])|[" +
                                        kWhiteSpace + "]+";

struct Pretokenizer::Pattern {
    pcre2_code* code = nullptr;
    pcre2_match_data* match = nullptr;

    Pattern() {
        int error = 0;
        size_t where = 0;
        code = pcre2_compile(PCRE2_SPTR(kGpt2Pattern.data()), kGpt2Pattern.size(), PCRE2_UTF | PCRE2_ANCHORED, &error,
                             &where, nullptr);
        require(code != nullptr, "pre-tokenizer: PCRE2 error %d at character %zu of the pattern", error, where);
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where the system forbids it the pattern is interpreted
        match = pcre2_match_data_create(1, nullptr);
        require(match != nullptr, "pre-tokenizer: no memory for PCRE2");
    }
    ~Pattern() {
        pcre2_match_data_free(match);
        pcre2_code_free(code);
    }
    Pattern(const Pattern&) = delete;
    Pattern& operator=(const Pattern&) = delete;
};

Pretokenizer::Pretokenizer() : pattern_(std::make_unique<Pattern>()) {}
Pretokenizer::~Pretokenizer() = default;
Pretokenizer::Pretokenizer(Pretokenizer&&) noexcept = default;
Pretokenizer& Pretokenizer::operator=(Pretokenizer&&) noexcept = default;

// Length of the UTF-8 character at the beginning of `text`, or 0 if there is none: table 3-7 of the Unicode Standard.
static size_t character_length(std::string_view text) {
    auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : uint8_t(0); };
    auto continues = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
    uint8_t first = byte(0), second = byte(1);
    if (first < 0x80) return text.empty() ? 0 : 1;
    if (first < 0xc2 || first > 0xf4 || !continues(1)) return 0;
    if (first < 0xe0) return 2;
    if (first < 0xf0) {
        bool is_overlong = first == 0xe0 && second < 0xa0, is_surrogate = first == 0xed && second > 0x9f;
        return continues(2) && !is_overlong && !is_surrogate ? 3 : 0;
    }
    bool is_overlong = first == 0xf0 && second < 0x90, is_too_large = first == 0xf4 && second > 0x8f;
    return continues(2) && continues(3) && !is_overlong && !is_too_large ? 4 : 0;
}

static size_t end_of_valid(std::string_view text, size_t begin) {
    while (size_t length = character_length(text.substr(begin))) begin += length;
    return begin;
}

static size_t end_of_invalid(std::string_view text, size_t begin) {
    while (begin < text.size() && character_length(text.substr(begin)) == 0) begin++;
    return begin;
}

size_t Pretokenizer::piece_end(std::string_view text, size_t begin) {
    if (begin >= valid_end_) valid_end_ = end_of_valid(text, begin);
    if (begin == valid_end_) return end_of_invalid(text, begin);
    int matched = pcre2_match(pattern_->code, PCRE2_SPTR(text.data() + begin), valid_end_ - begin, 0,
                              PCRE2_NO_UTF_CHECK, pattern_->match, nullptr);
    size_t length = matched > 0 ? pcre2_get_ovector_pointer(pattern_->match)[1] : 0;
    require(length > 0, "pre-tokenizer: PCRE2 error %d", matched);  // some alternative matches at any character
    return begin + length;
}

static bool is_ascii_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

// The bytes of UTF-8 tell where a character begins, so comparing the end of the text is enough.
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
