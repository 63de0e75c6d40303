// Pre-tokenization splits text into words, numbers, punctuation and white space. Byte pairs are merged only within
// these pieces (Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2).
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

// How a step splits text. A pattern is named after the tokenizer that uses it:
//   gpt2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   llama3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
//           |\s+(?!\S)|\s+                                                              also used by cl100k
//   qwen2   like llama3, but \p{N} instead of \p{N}{1,3}
//   o200k   splits words between lower and upper case; a word may end in a contraction: kO200kPattern
enum class SplitRule {
    gpt2,
    llama3,
    qwen2,
    o200k,
    digits,      // each character of \p{N} is a piece
    digit_runs,  // each run of \p{N} is a piece
    spaces,      // splits before each run of spaces: the word boundaries of a SentencePiece vocabulary
    pattern      // another regular expression: its matches and the text between them are pieces
};
struct SplitStep {
    SplitRule rule = SplitRule::gpt2;
    std::string pattern = {};  // for SplitRule::pattern
};

// The regular expressions as written in tokenizer.json files.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";
inline constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+)"
    R"(|\s+(?!\S)|\s+)";
inline constexpr std::string_view kO200kPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Splits text in steps; each step splits the pieces of the previous step. Each run of bytes that are not UTF-8 is a
// separate piece, except with SplitRule::spaces. For any input, the concatenation of the pieces is the text. Not
// thread-safe. PCRE2 determines the category of each character, once per process.
class Pretokenizer {
public:
    // Fails with Exit::data, naming the reason, if a pattern is invalid or has a construct that PCRE2 would match
    // differently.
    explicit Pretokenizer(std::vector<SplitStep> steps = {SplitStep()});

    // Calls visit(piece) for each piece, in order.
    template <class Visit> void split(std::string_view text, const Visit& visit) {
        if (steps_.size() != 1 || steps_[0].rule == SplitRule::pattern) return split_from(0, text, visit);
        const SplitRule rule = steps_[0].rule;
        for (size_t length; !text.empty(); text.remove_prefix(length)) {
            length = piece_length(rule, text);
            visit(text.substr(0, length));
        }
    }

private:
    enum Kind : uint8_t {  // flags
        unknown = 0,
        upper = 1,     // Lu, Lt
        lower = 2,     // Ll
        caseless = 4,  // Lm, Lo
        mark = 8,      // M
        number = 16,
        space = 32,
        other = 64,
        invalid = 128,
        newline = space | invalid,  // \r, \n; test for it before its component flags
        letter = upper | lower | caseless,
    };
    struct Character {
        Kind kind;
        uint8_t length;  // bytes
        bool is(int kinds) const { return kind != invalid && (kind & kinds) != 0; }
    };
    using Visit = std::function<void(std::string_view)>;

    void split_from(size_t step, std::string_view text, const Visit& visit);
    void split_by_pattern(size_t step, std::string_view text, const Visit& visit);
    size_t piece_length(SplitRule rule, std::string_view text);  // length of the first piece; requires nonempty text
    Character character(std::string_view text, size_t at);
    Character character_beyond_ascii(std::string_view text, size_t at);
    Kind kind_of(uint32_t code, std::string_view character) const;
    size_t run_end(std::string_view text, size_t at, int kinds);
    size_t space_length(std::string_view text, bool ends_lines);
    size_t gpt2_length(std::string_view text);
    size_t llama3_length(std::string_view text, int most_digits);
    size_t o200k_length(std::string_view text);
    size_t cased_word_end(std::string_view text, size_t begin, bool needs_lower);
    size_t digits_end(std::string_view text, int most);
    size_t rest_length(std::string_view text, std::string_view tail);

    const std::vector<SplitStep> steps_;
    std::unique_ptr<pcre2_real_match_data_8, void (*)(pcre2_real_match_data_8*)> match_;
    std::vector<std::shared_ptr<pcre2_real_code_8>> patterns_;  // (steps), null except for SplitRule::pattern
    std::array<Kind, 128> ascii_;
};

// Returns the last position in `text`, after its first byte, where a cut does not change the pieces, for any text that
// follows; 0 if there is none. by_all_rules finds the cuts that are safe for all patterns. by_gpt2 finds more cuts, for
// GPT-2's pattern only; by_spaces is for SplitRule::spaces.
enum class SafeCut { by_gpt2, by_all_rules, by_spaces };
size_t last_safe_cut(std::string_view text, SafeCut cut = SafeCut::by_all_rules);

// Returns whether cuts by last_safe_cut() keep the pieces of these steps. Tests texts of all kinds of characters.
bool keeps_safe_cuts(const std::vector<SplitStep>& steps);

// A hash map with words as keys and lookup by string_view without a copy.
struct WordHash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
template <class Value> using WordMap = std::unordered_map<std::string, Value, WordHash, std::equal_to<>>;
