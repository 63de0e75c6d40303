#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pretokenizer.h"

#include <pcre2.h>

#include "kernels/check.h"

// Unicode's White_Space. Spelled out because \s differs between libraries and versions.
static const std::string kWhiteSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

static const std::string kGpt2Pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" + kWhiteSpace +
                                        "\\p{L}\\p{N}]+|[" + kWhiteSpace + "]+(?![^" + kWhiteSpace + "])|[" +
                                        kWhiteSpace + "]+";

static pcre2_code* compile_pattern() {
    int error = 0;
    size_t offset = 0;
    pcre2_code* pattern = pcre2_compile(PCRE2_SPTR(kGpt2Pattern.data()), kGpt2Pattern.size(),
                                        PCRE2_UTF | PCRE2_ANCHORED, &error, &offset, nullptr);
    require(pattern != nullptr, "pre-tokenizer: PCRE2 error %d at character %zu of the pattern", error, offset);
    pcre2_jit_compile(pattern, PCRE2_JIT_COMPLETE);  // if the system forbids it, the pattern is interpreted
    return pattern;
}

Pretokenizer::Pretokenizer()
    : pattern_(compile_pattern(), pcre2_code_free), match_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free) {
    require(match_ != nullptr, "pre-tokenizer: PCRE2 has no memory for a match");
}

// Matches the pattern at the beginning of the text.
int Pretokenizer::match(std::string_view text, uint32_t options) const {
    return pcre2_match(pattern_.get(), PCRE2_SPTR(text.data()), text.size(), 0, options, match_.get(), nullptr);
}

// Bytes of valid UTF-8 at the beginning of the text: PCRE2 checks all of it before it matches.
size_t Pretokenizer::valid_length(std::string_view text) const {
    const int result = match(text, 0);
    const bool is_invalid = result <= PCRE2_ERROR_UTF8_ERR1 && result >= PCRE2_ERROR_UTF8_ERR21;
    return is_invalid ? pcre2_get_startchar(match_.get()) : text.size();
}

void Pretokenizer::split(std::string_view text, const std::function<void(std::string_view piece)>& visit) const {
    while (!text.empty()) {
        for (size_t valid = valid_length(text), length; valid > 0; valid -= length, text.remove_prefix(length)) {
            const int matched = match(text.substr(0, valid), PCRE2_NO_UTF_CHECK);
            length = matched > 0 ? pcre2_get_ovector_pointer(match_.get())[1] : 0;
            require(length > 0, "pre-tokenizer: PCRE2 error %d", matched);  // some alternative matches at any character
            visit(text.substr(0, length));
        }
        size_t invalid = 0;
        while (invalid < text.size() && valid_length(text.substr(invalid)) == 0) invalid++;
        if (invalid > 0) visit(text.substr(0, invalid));
        text.remove_prefix(invalid);
    }
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
