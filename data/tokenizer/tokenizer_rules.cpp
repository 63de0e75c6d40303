#include "data/tokenizer/tokenizer_rules.h"

#include <algorithm>

#include "data/tokenizer/pretokenizer.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

using Json = nlohmann::ordered_json;

const Json& find(const Json& json, const std::string& pointer) {
    static const Json null;
    const Json::json_pointer where(pointer);
    return json.contains(where) ? json[where] : null;
}

namespace {

constexpr const char* kSpaceSymbol = "\u2581";

class RulesReader {
public:
    RulesReader(const Json& json, const std::string& path) : json_(json), path_(path) {}

    TextRules read() {
        check("/model/type", {"BPE"});
        for (const char* key : {"/model/dropout", "/model/continuing_subword_prefix", "/model/end_of_word_suffix"})
            check(key, {nullptr, "", false});
        check("/model/ignore_merges", {nullptr, "", false, true});
        check("/model/byte_fallback", {nullptr, "", false, true});
        rules_.whole_words_first = find(json_, "/model/ignore_merges") == true;
        find(json_, "/model/byte_fallback") == true ? read_sentencepiece() : read_byte_level();
        read_post_processor("/post_processor");
        read_added_tokens();
        return std::move(rules_);
    }

private:
    [[noreturn]] void refuse(const std::string& pointer, const std::string& expected) const {
        reject_file(path_, "%s is %s, but must be %s", pointer, printed(find(json_, pointer)), expected);
    }
    void check(const std::string& pointer, const std::vector<Json>& accepted) const {
        if (std::ranges::count(accepted, find(json_, pointer)) == 0) refuse(pointer, printed(accepted[0]));
    }
    std::string type_at(const std::string& pointer) const {
        const Json& type = find(json_, pointer + "/type");
        return type.is_string() ? type.get<std::string>() : "";
    }
    // Returns the pointers to all parts of a Sequence, recursively; `list` is the key of its parts. For any other part,
    // returns its own pointer.
    std::vector<std::string> parts_of(const std::string& pointer, const std::string& list) const {
        if (find(json_, pointer).is_null()) return {};
        if (type_at(pointer) != "Sequence") return {pointer};
        std::vector<std::string> parts;
        for (size_t i = 0; i < find(json_, pointer + "/" + list).size(); i++)
            for (std::string& part : parts_of(pointer + "/" + list + "/" + std::to_string(i), list))
                parts.push_back(std::move(part));
        return parts;
    }

    void read_byte_level() {
        for (const std::string& part : parts_of("/normalizer", "normalizers")) {
            if (type_at(part) != "NFC") refuse(part, "absent, or of type NFC");
            rules_.normalization = Normalization::nfc;
        }
        rules_.steps.clear();
        const std::vector<std::string> parts = parts_of("/pre_tokenizer", "pretokenizers");
        if (parts.empty()) refuse("/pre_tokenizer/type", "\"ByteLevel\"");
        for (size_t i = 0; i < parts.size(); i++) {
            const std::string type = type_at(parts[i]);
            if (i + 1 == parts.size()) {
                check(parts[i] + "/type", {"ByteLevel"});
                check(parts[i] + "/add_prefix_space", {false});
                if (rules_.steps.empty()) check(parts[i] + "/use_regex", {true, nullptr});
                if (find(json_, parts[i] + "/use_regex") != false) rules_.steps.push_back({SplitRule::gpt2});
            } else if (type == "Split") {
                rules_.steps.push_back(split_step(parts[i]));
            } else if (type == "Digits") {
                const bool each = find(json_, parts[i] + "/individual_digits") == true;
                rules_.steps.push_back({each ? SplitRule::digits : SplitRule::digit_runs});
            } else {
                refuse(parts[i] + "/type", "\"Split\" or \"Digits\"");
            }
        }
        check("/decoder/type", {"ByteLevel", nullptr});
        rules_.drops_bytes = find(json_, "/model/unk_token").is_null();
        if (std::ranges::count(rules_.steps, SplitRule::pattern, &SplitStep::rule) > 0) check_patterns();
    }

    // Long documents are encoded in parts, so the patterns must keep the safe cuts.
    void check_patterns() const {
        bool keeps_cuts = false;
        try {
            keeps_cuts = keeps_safe_cuts(rules_.steps);
        } catch (const Error& error) {
            reject_file(path_, "/pre_tokenizer: %s", error.what());
        }
        if (!keeps_cuts)
            reject_file(path_,
                        "/pre_tokenizer has a pattern that joins a space to the text before it, which is not "
                        "supported");
    }

    SplitStep split_step(const std::string& part) const {
        const Json& pattern = find(json_, part + "/pattern/Regex");
        if (!pattern.is_string()) refuse(part + "/pattern", "a \"Regex\"");
        const std::string regex = pattern;
        const auto known = [&]() -> SplitStep {
            if (regex == kGpt2Pattern) return {SplitRule::gpt2};
            if (regex == kLlama3Pattern) return {SplitRule::llama3};
            if (regex == kQwen2Pattern) return {SplitRule::qwen2};
            if (regex == kO200kPattern) return {SplitRule::o200k};
            return {SplitRule::pattern, regex};
        }();
        // For a pattern that covers all text, "Removed" with "invert" is equivalent to "Isolated".
        const bool removes_rest = find(json_, part + "/behavior") == "Removed" && find(json_, part + "/invert") == true;
        if (removes_rest && known.rule != SplitRule::pattern) return known;
        check(part + "/behavior", {"Isolated"});
        check(part + "/invert", {false, nullptr});
        return known;
    }

    void read_sentencepiece() {
        rules_.normalization = Normalization::spaces;
        rules_.steps = {{SplitRule::spaces}};
        bool replaces = false;
        for (const std::string& part : parts_of("/normalizer", "normalizers")) {
            if (type_at(part) == "Prepend") {
                check(part + "/prepend", {kSpaceSymbol});
                rules_.prefix = SpacePrefix::always;
            } else if (type_at(part) == "Replace") {
                check(part + "/pattern/String", {" "});
                check(part + "/content", {kSpaceSymbol});
                replaces = true;
            } else {
                refuse(part, "of type Prepend or Replace");
            }
        }
        if (!replaces || !find(json_, "/pre_tokenizer").is_null()) {
            if (replaces || rules_.prefix != SpacePrefix::none) refuse("/pre_tokenizer", "null with a normalizer");
            check("/pre_tokenizer/type", {"Metaspace"});
            check("/pre_tokenizer/replacement", {kSpaceSymbol});
            check("/pre_tokenizer/split", {false});
            check("/pre_tokenizer/prepend_scheme", {"first", "always", "never"});
            const Json& scheme = find(json_, "/pre_tokenizer/prepend_scheme");
            rules_.prefix = scheme == "first"    ? SpacePrefix::first_unless_space
                            : scheme == "always" ? SpacePrefix::unless_space
                                                 : SpacePrefix::none;
        }
        for (const std::string& part : parts_of("/decoder", "decoders")) check_decoder(part);
    }

    void check_decoder(const std::string& part) const {
        const std::string type = type_at(part);
        if (type == "ByteFallback" || type == "Fuse") return;
        if (type == "Metaspace") return check(part + "/replacement", {kSpaceSymbol});
        if (type == "Replace") {
            check(part + "/pattern/String", {kSpaceSymbol});
            return check(part + "/content", {" "});
        }
        check(part + "/type", {"Strip"});
        check(part + "/content", {" "});
        check(part + "/start", {1, 0});
        check(part + "/stop", {0});
    }

    // Reads the tokens that a template puts before and after a text.
    void read_post_processor(const std::string& pointer) {
        for (const std::string& part : parts_of(pointer, "processors")) {
            if (type_at(part) == "ByteLevel") continue;
            check(part + "/type", {"TemplateProcessing"});
            bool is_behind = false;
            const Json& pieces = find(json_, part + "/single");
            if (!pieces.is_array()) refuse(part + "/single", "an array");
            for (const Json& piece : pieces) {
                const Json& id = find(piece, "/SpecialToken/id");
                if (!id.is_string()) {
                    is_behind = true;
                    continue;
                }
                std::string& name = is_behind ? rules_.document_end : rules_.document_start;
                if (!name.empty()) refuse(part + "/single", "at most one token on each side of the text");
                name = id;
            }
        }
    }

    void read_added_tokens() {
        const Json& added = find(json_, "/added_tokens");
        if (!added.is_array() && !added.is_null()) refuse("/added_tokens", "an array");
        for (size_t i = 0; i < added.size(); i++) {
            const Json& token = added[i];
            const Json& content = find(token, "/content");
            if (!content.is_string() || content == "") reject_file(path_, "an added token has no \"content\"");
            const std::string at = "/added_tokens/" + std::to_string(i);
            check(at + "/single_word", {false, nullptr});
            auto is = [&](const char* name) { return find(token, name) == true; };
            const AddedToken one{-1, content, is("/special"), is("/normalized"), is("/lstrip"), is("/rstrip")};
            // Long documents are encoded in parts, which begin with white space or after a line end.
            if (!one.is_special && one.strips_right) refuse(at, "special, or without \"rstrip\"");
            const size_t word = std::min(one.text.find_first_not_of(" \t\r\n"), one.text.size());
            if (!one.is_special && one.text.find_first_of(" \t\r\n", word) != std::string::npos)
                refuse(at, "special, or without white space after other characters");
            rules_.added.push_back(one);
        }
    }

    const Json& json_;
    const std::string& path_;
    TextRules rules_;
};

bool is_plain(const AddedToken& token) {
    return token.is_special && !token.is_normalized && !token.strips_left && !token.strips_right;
}

}  // namespace

TextRules read_text_rules(const Json& json, std::string_view file, const std::string& path) {
    TextRules rules = RulesReader(json, path).read();
    const bool is_gpt2 = rules.normalization == Normalization::none && rules.steps.size() == 1 &&
                         rules.steps[0].rule == SplitRule::gpt2 && !rules.whole_words_first &&
                         rules.document_start.empty() && rules.document_end.empty() &&
                         std::ranges::all_of(rules.added, is_plain);
    if (is_gpt2) return rules;
    rules.file = file;
    Json parts;
    for (const char* part : {"added_tokens", "normalizer", "pre_tokenizer", "post_processor"})
        parts[part] = find(json, std::string("/") + part);
    parts["ignore_merges"] = rules.whole_words_first;
    parts["byte_fallback"] = find(json, "/model/byte_fallback");
    rules.identity = parts.dump();
    return rules;
}
