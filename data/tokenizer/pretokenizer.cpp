#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/tokenizer/pretokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <atomic>

#include "data/tokenizer/white_space.h"
#include "kernels/base/check.h"
#include "runtime/io/utf8.h"

// Unicode's White_Space, spelled out because \s differs between libraries and versions.
static const std::string kWhiteSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

// The number of the matching group is the kind of the character.
static const std::string kKinds =
    "([\\p{Lu}\\p{Lt}])|(\\p{Ll})|([\\p{Lm}\\p{Lo}])|(\\p{M})|(\\p{N})|([" + kWhiteSpace + "])|(.)";
static constexpr int kKindGroups = 7;

static std::shared_ptr<pcre2_code> compile(const std::string& pattern, uint32_t options) {
    int error = 0;
    size_t offset = 0;
    pcre2_code* code = pcre2_compile(PCRE2_SPTR(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP | options,
                                     &error, &offset, nullptr);
    if (!code) {
        PCRE2_UCHAR message[120] = {};
        pcre2_get_error_message(error, message, sizeof(message));
        fail(Exit::data, "invalid pattern %s: %s at offset %zu", pattern, reinterpret_cast<const char*>(message),
             offset);
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    return {code, pcre2_code_free};
}

// Returns the pattern with \s and \S spelled out. Fails with Exit::data if a match may depend on the text before it,
// because matching restarts after each piece.
static std::string spelled_out(std::string_view pattern) {
    std::string out;
    bool in_class = false;
    auto refuse = [&](std::string_view part) {
        fail(Exit::data, "the pattern %s uses %s, which is not supported", std::string(pattern), std::string(part));
    };
    for (size_t i = 0; i < pattern.size(); i++) {
        const std::string_view two = pattern.substr(i, 2);
        if (two.size() == 2 && two[0] == '\\') {
            if (two[1] == 's')
                out += in_class ? kWhiteSpace : "[" + kWhiteSpace + "]";
            else if (two[1] == 'S' && !in_class)
                out += "[^" + kWhiteSpace + "]";
            else if (std::string_view("SbBAGzZK").find(two[1]) != std::string_view::npos)
                refuse(two);
            else
                out += two;
            i++;
            continue;
        }
        const bool is_behind = pattern.substr(i).starts_with("(?<=") || pattern.substr(i).starts_with("(?<!");
        if (!in_class && is_behind) refuse("a look-behind");
        if (!in_class && pattern[i] == '^') refuse("^");
        if (!in_class && pattern[i] == '[') {
            in_class = true;
        } else if (in_class && pattern[i] == ']') {
            in_class = false;
        } else if (in_class && (pattern[i] == '[' || two == "&&")) {
            refuse("a class within a class");
        }
        out += pattern[i];
        if (in_class && two == "[^") out += pattern[++i];
    }
    return out;
}

Pretokenizer::Pretokenizer(std::vector<SplitStep> steps)
    : steps_(std::move(steps)), match_(pcre2_match_data_create(kKindGroups + 1, nullptr), pcre2_match_data_free) {
    require(match_ != nullptr, "pre-tokenizer: PCRE2 cannot allocate match data");
    for (uint32_t code = 0; code < ascii_.size(); code++) {
        const char character = char(code);
        ascii_[code] = kind_of(code, {&character, 1});
    }
    for (const SplitStep& step : steps_)
        patterns_.push_back(step.rule == SplitRule::pattern ? compile(spelled_out(step.pattern), 0) : nullptr);
}

// Several threads may look up a character at the same time; they all store the same kind.
Pretokenizer::Kind Pretokenizer::kind_of(uint32_t code, std::string_view character) const {
    static std::array<std::atomic<Kind>, 0x110000> known;  // filled on first use of a character
    if (const Kind kind = known[code].load(std::memory_order_relaxed); kind != unknown) return kind;
    static const std::shared_ptr<pcre2_code> kinds = compile(kKinds, PCRE2_ANCHORED | PCRE2_DOTALL);
    const int groups =
        pcre2_match(kinds.get(), PCRE2_SPTR(character.data()), character.size(), 0, 0, match_.get(), nullptr);
    require(groups >= 2 && groups <= kKindGroups + 1, "pre-tokenizer: PCRE2 error %d", groups);
    const bool is_newline = code == '\r' || code == '\n';
    const Kind kind = is_newline ? newline : Kind(1 << (groups - 2));  // groups - 1 is the matching group
    known[code].store(kind, std::memory_order_relaxed);
    return kind;
}

Pretokenizer::Character Pretokenizer::character_beyond_ascii(std::string_view text, size_t at) {
    const size_t length = utf8_length(text.substr(at));
    if (length == 0) return {invalid, 1};
    uint32_t code = uint8_t(text[at]) & (0xff >> (length + 1));
    for (size_t i = 1; i < length; i++) code = code << 6 | (uint8_t(text[at + i]) & 0x3f);
    return {kind_of(code, text.substr(at, length)), uint8_t(length)};
}

inline Pretokenizer::Character Pretokenizer::character(std::string_view text, size_t at) {
    const uint8_t byte = uint8_t(text[at]);
    return byte < 0x80 ? Character{ascii_[byte], 1} : character_beyond_ascii(text, at);
}

// Returns the end of the run of characters of these kinds that begins at `at`.
inline size_t Pretokenizer::run_end(std::string_view text, size_t at, int kinds) {
    while (at < text.size()) {
        const uint8_t byte = uint8_t(text[at]);
        if (byte < 0x80) {
            if (!(ascii_[byte] & kinds)) break;
            at++;
            continue;
        }
        const Character next = character_beyond_ascii(text, at);
        if (!next.is(kinds)) break;
        at += next.length;
    }
    return at;
}

// Returns the length of a piece of white space. If other text follows, the piece excludes the last white-space
// character, which may belong to that text. With ends_lines (\s*[\r\n]+), the piece ends after its last line end, if
// any. Invalid UTF-8 counts as the end of the text.
size_t Pretokenizer::space_length(std::string_view text, bool ends_lines) {
    size_t end = 0, last = 0, lines = 0;
    while (end < text.size()) {
        const Character next = character(text, end);
        if (!next.is(space)) break;
        last = end;
        end += next.length;
        if (next.kind == newline) lines = end;
    }
    if (ends_lines && lines > 0) return lines;
    const bool ends_text = end == text.size() || character(text, end).kind == invalid;
    return ends_text || last == 0 ? end : last;
}

// Returns the length of 's, 't, 're, 've, 'm, 'll or 'd at `at`; 0 if none is there.
static size_t contraction_length(std::string_view text, size_t at, bool any_case) {
    if (at + 1 >= text.size() || text[at] != '\'') return 0;
    auto folded = [&](size_t i) {
        const char c = i < text.size() ? text[i] : '\0';
        return any_case && c >= 'A' && c <= 'Z' ? char(c + ('a' - 'A')) : c;
    };
    const char first = folded(at + 1), second = folded(at + 2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if ((first == 'r' || first == 'v') && second == 'e') return 3;
    if (first == 'l' && second == 'l') return 3;
    return any_case && text.substr(at + 1).starts_with("\u017f") ? 3 : 0;  // a long s folds to s
}

size_t Pretokenizer::gpt2_length(std::string_view text) {
    if (const size_t length = contraction_length(text, 0, false)) return length;
    Character first = character(text, 0);
    size_t at = 0;
    if (text[0] == ' ' && text.size() > 1) {  // belongs to the next word
        const Character second = character(text, 1);
        if (!second.is(space) && second.kind != invalid) first = second, at = 1;
    }
    if (first.kind == invalid) return rest_length(text, "");
    if (first.is(letter)) return run_end(text, at, letter);
    if (first.is(number)) return run_end(text, at, number);
    if (first.is(space)) return space_length(text, false);
    return run_end(text, at, other | mark);
}

// Returns the length of one of: ?[^\s\p{L}\p{N}]+ with a tail of characters in `tail`, white space, or invalid UTF-8.
size_t Pretokenizer::rest_length(std::string_view text, std::string_view tail) {
    const Character first = character(text, 0);
    size_t at = text[0] == ' ' && text.size() > 1 && character(text, 1).is(other | mark) ? 1 : 0;
    if (at == 1 || first.is(other | mark)) {
        at = run_end(text, at, other | mark);
        while (at < text.size() && tail.find(text[at]) != std::string_view::npos) at++;
        return at;
    }
    if (first.is(space)) return space_length(text, true);
    while (at < text.size() && character(text, at).kind == invalid) at++;
    return at;
}

size_t Pretokenizer::digits_end(std::string_view text, int most) {
    size_t at = 0;
    for (int i = 0; i < most && at < text.size(); i++) {
        const Character next = character(text, at);
        if (!next.is(number)) break;
        at += next.length;
    }
    return at;
}

size_t Pretokenizer::llama3_length(std::string_view text, int most_digits) {
    if (const size_t length = contraction_length(text, 0, true)) return length;
    const Character first = character(text, 0);
    if (first.is(letter)) return run_end(text, first.length, letter);
    if (first.is(number)) return digits_end(text, most_digits);
    if (first.kind != newline && first.kind != invalid) {
        const size_t end = run_end(text, first.length, letter);
        if (end > first.length) return end;
    }
    return rest_length(text, "\r\n");
}

// Returns the end of a match at `begin` of [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+, or, without
// needs_lower, of the same pattern with + and * swapped; 0 if there is no match.
size_t Pretokenizer::cased_word_end(std::string_view text, size_t begin, bool needs_lower) {
    size_t at = begin, behind_caseless = 0;
    while (at < text.size()) {
        const Character next = character(text, at);
        if (!next.is(upper | caseless | mark)) break;
        at += next.length;
        if (!next.is(upper)) behind_caseless = at;
    }
    if (at < text.size() && character(text, at).is(lower)) {
        if (needs_lower || at > begin) return run_end(text, at, lower | caseless | mark);
        return 0;
    }
    if (needs_lower) return behind_caseless;
    return at > begin ? at : 0;
}

size_t Pretokenizer::o200k_length(std::string_view text) {
    const Character first = character(text, 0);
    if (first.is(number)) return digits_end(text, 3);
    if (first.kind == invalid) return rest_length(text, "");
    const bool may_lead = first.kind != newline && !first.is(letter);
    for (bool needs_lower : {true, false})
        for (bool leads : {true, false}) {
            if (leads && !may_lead) continue;
            const size_t end = cased_word_end(text, leads ? first.length : 0, needs_lower);
            if (end > 0) return end + contraction_length(text, end, true);
        }
    return rest_length(text, "\r\n/");
}

size_t Pretokenizer::piece_length(SplitRule rule, std::string_view text) {
    switch (rule) {
        case SplitRule::gpt2: return gpt2_length(text);
        case SplitRule::llama3: return llama3_length(text, 3);
        case SplitRule::qwen2: return llama3_length(text, 1);
        case SplitRule::o200k: return o200k_length(text);
        case SplitRule::digits:
        case SplitRule::digit_runs: {
            const Character first = character(text, 0);
            if (first.is(number)) return rule == SplitRule::digits ? first.length : run_end(text, 0, number);
            const int kind_of_rest = letter | mark | space | other;
            if (first.kind != invalid) return run_end(text, 0, kind_of_rest);
            return rest_length(text, "");
        }
        case SplitRule::spaces: {
            const size_t word = std::min(text.find_first_not_of(' '), text.size());
            return std::min(text.find(' ', word), text.size());
        }
        case SplitRule::pattern: break;
    }
    fail(Exit::internal, "pre-tokenizer: piece_length() does not support SplitRule::pattern");
}

void Pretokenizer::split_from(size_t step, std::string_view text, const Visit& visit) {
    if (step == steps_.size()) return visit(text);
    if (patterns_[step]) return split_by_pattern(step, text, visit);
    for (size_t length; !text.empty(); text.remove_prefix(length)) {
        length = piece_length(steps_[step].rule, text);
        split_from(step + 1, text.substr(0, length), visit);
    }
}

void Pretokenizer::split_by_pattern(size_t step, std::string_view text, const Visit& visit) {
    while (!text.empty()) {
        size_t valid = 0;
        for (size_t length; valid < text.size() && (length = utf8_length(text.substr(valid))) > 0;) valid += length;
        const std::string_view run = text.substr(0, valid);
        for (size_t at = 0; at < run.size();) {
            const int found = pcre2_match(patterns_[step].get(), PCRE2_SPTR(run.data()), run.size(), at,
                                          PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match_.get(), nullptr);
            require(found >= 0 || found == PCRE2_ERROR_NOMATCH, "pre-tokenizer: PCRE2 error %d", found);
            const size_t* ends = pcre2_get_ovector_pointer(match_.get());
            const size_t begin = found < 0 ? run.size() : ends[0], end = found < 0 ? run.size() : ends[1];
            if (begin > at) split_from(step + 1, run.substr(at, begin - at), visit);
            if (end > begin) split_from(step + 1, run.substr(begin, end - begin), visit);
            at = end;
        }
        size_t rest = valid;
        while (rest < text.size() && utf8_length(text.substr(rest)) == 0) rest++;
        if (rest > valid) visit(text.substr(valid, rest - valid));
        text.remove_prefix(rest);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static bool is_ascii_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }
static bool is_ascii_alphanumeric(char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// UTF-8 is self-synchronizing, so it is enough to compare the last bytes of the text.
static bool ends_in_space(std::string_view text) {
    if (uint8_t(text.back()) < 0x80) return is_ascii_space(text.back());
    for (std::string_view space : {"\u0085", "\u00a0", "\u1680", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"})
        if (text.ends_with(space)) return true;
    bool is_general_punctuation = text.size() >= 3 && text.substr(text.size() - 3).starts_with("\xe2\x80");
    return is_general_punctuation && uint8_t(text.back()) <= 0x8a;  // U+2000 to U+200A
}

// There are two kinds of safe cuts:
// 1. Before ASCII white space that follows another character. Exception: in Llama 3's pattern, line ends belong to the
//    punctuation before them.
// 2. After a single line end between characters that are not white space. Exception: a / in o200k's pattern.
// by_gpt2 treats line ends like other white space and does not use the second kind, so that BPE-dropout draws the same
// random numbers as in earlier versions. With by_spaces, only spaces start a word; U+2581 counts as a space.
size_t last_safe_cut(std::string_view text, SafeCut rule) {
    constexpr size_t kLongestCharacter = 4;
    for (size_t cut = text.size(); cut-- > 1;) {
        const char before = text[cut - 1], at = text[cut];
        if (rule == SafeCut::by_spaces) {
            if (at == ' ' && before != ' ' && !text.substr(0, cut).ends_with("\u2581")) return cut;
        } else if (is_ascii_space(at)) {
            const bool may_be_a_tail =
                rule == SafeCut::by_all_rules && (at == '\r' || at == '\n') && !is_ascii_alphanumeric(before);
            if (!may_be_a_tail && !ends_in_space(text.substr(0, cut))) return cut;
        } else if (rule == SafeCut::by_all_rules && before == '\n' && cut > 1 && at != '/' &&
                   !ends_in_space(text.substr(0, cut - 1))) {
            const bool is_whole = uint8_t(at) < 0x80 || text.size() - cut >= kLongestCharacter;
            if (is_whole && white_space_length(text.substr(cut)) == 0) return cut;
        }
    }
    return 0;
}

bool keeps_safe_cuts(const std::vector<SplitStep>& steps) {
    static constexpr std::array kCharacters = {"a",      "A",      "'",      ".",          "-",      "_",
                                               "/",      "(",      "1",      "\u00e9",     "\u4e2d", "\u0301",
                                               "\u0663", "\u00bd", "\u3002", "\U0001f600", "$"};
    static constexpr std::array kSpaces = {" ", "  ", "\t", "\n", "\r\n", "\n ", " \n", "\n\n"};
    Pretokenizer pretokenizer(steps);
    std::vector<size_t> whole, parts;  // ends of the pieces
    auto add_ends = [&](std::string_view text, size_t offset, std::vector<size_t>& ends) {
        pretokenizer.split(text, [&](std::string_view piece) { ends.push_back(offset += piece.size()); });
    };
    for (std::string first : kCharacters)
        for (std::string_view space : kSpaces)
            for (std::string_view last : kCharacters)
                for (int times : {1, 2}) {
                    std::string text = times == 2 ? first + first : first;
                    text.append(space).append(last).append(last).append("xyz");
                    const size_t cut = last_safe_cut(text);
                    if (cut == 0) continue;
                    whole.clear();
                    parts.clear();
                    add_ends(text, 0, whole);
                    add_ends(std::string_view(text).substr(0, cut), 0, parts);
                    add_ends(std::string_view(text).substr(cut), cut, parts);
                    if (whole != parts) return false;
                }
    return true;
}
