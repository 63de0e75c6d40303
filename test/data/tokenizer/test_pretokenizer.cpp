// The splitter compared with PCRE2's matches of GPT-2's pattern.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "data/tokenizer/pretokenizer.h"
#include "test/support/catch.h"
#include "test/support/random_values.h"

namespace {

// PCRE2's definition of white space differs from Unicode's in one character.
constexpr const char* kPattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\h\\v\\p{L}\\p{N}]+|[\\h\\v]+(?![^\\h\\v])|[\\h\\v]+";

using Pieces = std::vector<std::string>;

// The pieces of valid UTF-8 without U+180E, which is in \h but not White_Space.
Pieces split_by_pattern(std::string_view text) {
    static const auto pattern = [] {
        int error;
        size_t offset;
        return pcre2_compile(PCRE2_SPTR(kPattern), PCRE2_ZERO_TERMINATED, PCRE2_UTF, &error, &offset, nullptr);
    }();
    REQUIRE(pattern != nullptr);
    const auto match = pcre2_match_data_create(1, nullptr);
    Pieces pieces;
    for (size_t at = 0; at < text.size();) {
        REQUIRE(pcre2_match(pattern, PCRE2_SPTR(text.data()), text.size(), at, 0, match, nullptr) > 0);
        const size_t* ends = pcre2_get_ovector_pointer(match);
        REQUIRE(ends[0] == at);
        pieces.emplace_back(text.substr(at, ends[1] - at));
        at = ends[1];
    }
    pcre2_match_data_free(match);
    return pieces;
}

Pieces split(std::string_view text) {
    static Pretokenizer pretokenizer;
    Pieces pieces;
    pretokenizer.split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
    return pieces;
}

std::string utf8(uint32_t c) {
    if (c < 0x80) return {char(c)};
    if (c < 0x800) return {char(0xc0 | c >> 6), char(0x80 | (c & 0x3f))};
    if (c < 0x10000) return {char(0xe0 | c >> 12), char(0x80 | (c >> 6 & 0x3f)), char(0x80 | (c & 0x3f))};
    return {char(0xf0 | c >> 18), char(0x80 | (c >> 12 & 0x3f)), char(0x80 | (c >> 6 & 0x3f)), char(0x80 | (c & 0x3f))};
}

}  // namespace

TEST_CASE("pretokenizer: every character is split like the pattern") {
    for (uint32_t c = 0; c < 0x110000; c += c < 0x3100 ? 1 : 61) {
        if ((c >= 0xd800 && c < 0xe000) || c == 0x180e) continue;
        const std::string text = "a" + utf8(c) + "1 " + utf8(c) + utf8(c) + "'s";
        if (split(text) != split_by_pattern(text)) FAIL_CHECK("U+" << std::hex << c);
    }
}

TEST_CASE("pretokenizer: random and difficult texts are split like the pattern") {
    const Pieces parts = {" ",      "  ",     "\n",     "\t",         "\r\n",   "'",      "'s",     "'S",      "'ll",
                          "'l",     "'ve",    "'re",    "'r",         "a",      "Word",   "1",      "42",      ".",
                          "!?",     "-",      "_",      "\u00a0",     "\u3000", "\u2028", "\u00e9", "e\u0301", "\u4e2d",
                          "\u0663", "\u2164", "\u00bd", "\U0001f600", "\u200b", "\ufeff", "\x01",   "\x7f"};
    for (uint64_t seed = 0; seed < 4000; seed++) {
        std::string text;
        for (int i : random_integers(1 + seed % 12, seed, int(parts.size()))) text += parts[size_t(i)];
        if (split(text) != split_by_pattern(text)) FAIL_CHECK(text);
    }
}

TEST_CASE("pretokenizer: bytes that are not UTF-8 are separate pieces") {
    using P = Pieces;
    CHECK(split("a\xff\xfe b") == P{"a", "\xff\xfe", " b"});
    CHECK(split("a  \xff") == P{"a", "  ", "\xff"});  // as at the end of a text
    CHECK(split("a  b") == P{"a", " ", " b"});
    CHECK(split(" \xff") == P{" ", "\xff"});
    CHECK(split("\xe2\x82") == P{"\xe2\x82"});                // truncated
    CHECK(split("\xed\xa0\x80z") == P{"\xed\xa0\x80", "z"});  // a surrogate
    CHECK(split("\xc0\x80'") == P{"\xc0\x80", "'"});          // overlong
    CHECK(split("\xf4\x90\x80\x80") == P{"\xf4\x90\x80\x80"});
    for (uint64_t seed = 0; seed < 2000; seed++) {
        std::string text, joined;
        for (int byte : random_integers(20, seed, 256)) text += char(byte % 5 ? byte : ' ');
        for (const std::string& piece : split(text)) joined += piece;
        CHECK(joined == text);
    }
}
