// Reads and writes tokenizer files.
#include <algorithm>
#include <charconv>
#include <map>
#include <queue>
#include <sstream>

#include "data/tokenizer/text_rules.h"
#include "data/tokenizer/tokenizer.h"
#include "data/tokenizer/tokenizer_rules.h"
#include "runtime/io/files.h"
#include "runtime/io/header_word.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxFileBytes = size_t(256) << 20;
constexpr int kMaxTokens = 1 << 24;
constexpr const char* kConfigName = "/tokenizer_config.json";

// ---------------------------------------------------------------------------------------------------------------------
// GPT-2's files write each byte as one printable character: a printable byte as itself, and byte i of the others (in
// gpt2_byte_order()) as U+0100 + i.

struct PrintableBytes {
    std::array<std::string, 256> utf8;
    std::unordered_map<std::string, char> bytes;  // the inverse

    PrintableBytes() {
        constexpr size_t kPrinting = 188;
        const std::array<uint8_t, 256> order = gpt2_byte_order();
        for (size_t i = 0; i < 256; i++) {
            const size_t c = i < kPrinting ? order[i] : 0x100 + i - kPrinting;
            std::string& text = utf8[order[i]];
            if (c >= 0x80) text += char(0xc0 | c >> 6);
            text += char(c < 0x80 ? c : 0x80 | (c & 0x3f));
            bytes[text] = char(order[i]);
        }
    }
};

const PrintableBytes& printable_bytes() {
    static const PrintableBytes table;  // created on first use
    return table;
}

std::string to_printable(std::string_view bytes) {
    std::string text;
    for (char byte : bytes) text += printable_bytes().utf8[uint8_t(byte)];
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON files

// Collects the tokens and merges of a file, in the file's printable form, and builds a Tokenizer.
class TokenizerBuilder {
public:
    explicit TokenizerBuilder(const std::string& path, TextRules rules = {}) : path_(path), rules_(std::move(rules)) {}

    const TextRules& rules() const { return rules_; }

    void add_token(const std::string& token, const Json& id, bool is_special = false) {
        if (!id.is_number_integer() || id < 0 || id >= kMaxTokens)
            reject_file(path_, "the id of the token \"%s\" is %s, but must be an integer from 0 to %d", token,
                        printed(id), kMaxTokens - 1);
        auto [known, is_new] = ids_.emplace(token, id.get<int32_t>());
        if (known->second != id)
            reject_file(path_, "the token \"%s\" has two ids, %d and %s", token, known->second, printed(id));
        auto [same_id, is_first] = tokens_.emplace(known->second, &known->first);
        if (*same_id->second != token)
            reject_file(path_, "the tokens \"%s\" and \"%s\" both have the id %d", *same_id->second, token,
                        known->second);
        if (is_special) special_.push_back(known->second);
    }

    void add_added_token(size_t index, const Json& id) {
        AddedToken& token = rules_.added[index];
        add_token(token.text, id, token.is_special);
        token.id = id;
        added_.insert(token.id);
    }

    // Adds a merge: "LEFT RIGHT" or ["LEFT", "RIGHT"]. `where` names it in errors.
    void add_merge(const Json& merge, const std::string& where) {
        std::string text;
        if (merge.is_string()) text = merge;
        if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
            text = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
        const size_t space = text.find(' ');
        if (space == std::string::npos)
            fail(Exit::data, "%s is %s, but must be two tokens separated by a space", where, printed(merge));
        const std::string left = text.substr(0, space), right = text.substr(space + 1);
        for (const std::string& token : {left, right})
            if (!ids_.contains(token))
                fail(Exit::data, "%s joins \"%s\" and \"%s\", but \"%s\" is not a token", where, left, right, token);
        merges_.push_back({ids_.at(left), ids_.at(right)});
    }

    Tokenizer build() {
        constexpr int32_t kMaxUnused = 1 << 16;
        int32_t vocabulary = 0;  // number of ids up to the last token that is not an added token
        for (const auto& [id, text] : tokens_)
            if (!added_.contains(id)) vocabulary = id + 1;
        std::vector<std::string> tokens;
        const std::set<int32_t> special(special_.begin(), special_.end());
        for (const auto& [id, text] : tokens_) {
            const std::string& token = *text;
            // Published vocabularies have unused ids between added tokens. No text is encoded to them.
            const bool may_skip = id >= vocabulary && int32_t(tokens.size()) >= vocabulary;
            for (; may_skip && int32_t(tokens.size()) < std::min(id, vocabulary + kMaxUnused); tokens.emplace_back())
                special_.push_back(int32_t(tokens.size()));
            if (size_t(id) != tokens.size())
                reject_file(path_, "the ids of the %zu tokens must be 0 to %zu, but \"%s\" has %d", tokens_.size(),
                            tokens_.size() - 1, *tokens_.rbegin()->second, tokens_.rbegin()->first);
            const bool is_written_out = special.contains(id) || added_.contains(id);
            tokens.push_back(is_written_out                                  ? token
                             : rules_.normalization == Normalization::spaces ? from_spaced(token, id)
                                                                             : from_printable(token, id));
        }
        if (rules_.normalization == Normalization::spaces)
            for (int value = 0; value < 256; value++)
                if (value >= int(rules_.byte_tokens.size()) || rules_.byte_tokens[size_t(value)] < 0)
                    reject_file(path_, "byte_fallback requires a token called <0x%02X>", unsigned(value));
        return Tokenizer(std::move(tokens), merges_, special_, path_, rules_);
    }

private:
    // The inverse of to_printable().
    std::string from_printable(const std::string& token, int32_t id) const {
        std::string bytes;
        for (size_t i = 0, length; i < token.size(); i += length) {
            length = uint8_t(token[i]) < 0x80 ? 1 : 2;
            auto byte = printable_bytes().bytes.find(token.substr(i, length));
            if (byte == printable_bytes().bytes.end())
                reject_file(path_, "the token \"%s\" (%d) has a character that does not represent a byte", token, id);
            bytes += byte->second;
        }
        return bytes;
    }

    // Converts SentencePiece's notation: U+2581 represents a space, <0x0A> a byte.
    std::string from_spaced(const std::string& token, int32_t id) {
        if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return with_spaces(token);
        uint8_t value = 0;
        const char* const end = &token[5];
        if (std::from_chars(&token[3], end, value, 16).ptr != end) return with_spaces(token);
        rules_.byte_tokens.resize(256, -1);
        rules_.byte_tokens[value] = id;
        return std::string(1, char(value));
    }

    const std::string path_;
    TextRules rules_;
    std::unordered_map<std::string, int32_t> ids_;
    std::map<int32_t, const std::string*> tokens_;  // the inverse
    std::set<int32_t> added_;
    std::vector<int32_t> special_;
    std::vector<Merge> merges_;
};

// Returns the name of eos_token in the tokenizer_config.json next to a tokenizer.json; "" if there is none.
std::string configured_end(const std::string& tokenizer_path) {
    const std::string path = directory_of(tokenizer_path) + kConfigName;
    if (!file_exists(path)) return "";
    const Json config = parse_json(read_file(path, kMaxFileBytes), path, Exit::data);
    const Json& token = ::find(config, "/eos_token");
    const Json& name = token.is_object() ? ::find(token, "/content") : token;
    if (!name.is_string() && !name.is_null())
        reject_file(path, "eos_token is %s, but must be text or have a \"content\"", printed(token));
    return name.is_null() ? "" : name;
}

Tokenizer from_tokenizer_json(Json file, std::string_view text, const std::string& path, const std::string& end) {
    TextRules rules = read_text_rules(file, text, path);
    rules.chosen_end = end.empty() ? configured_end(path) : end;
    const bool is_special = std::ranges::any_of(
        rules.added, [&](const AddedToken& token) { return token.is_special && token.text == rules.chosen_end; });
    if (!is_special && !end.empty()) reject_file(path, "--end-of-text: no special token is called %s", end);
    if (!is_special) rules.chosen_end.clear();
    if (!find(file, "/model/vocab").is_object()) reject_file(path, "/model/vocab must be an object");
    if (!find(file, "/model/merges").is_array()) reject_file(path, "/model/merges must be an array");
    TokenizerBuilder builder(path, std::move(rules));
    {  // freed after reading, like the merges: JSON values take many times the bytes of their text
        const Json vocabulary = std::move(file["model"]["vocab"]);
        for (const auto& [token, id] : vocabulary.items()) builder.add_token(token, id);
    }
    for (size_t i = 0; i < builder.rules().added.size(); i++)
        builder.add_added_token(i, find(file["added_tokens"][i], "/id"));
    {
        const Json merges = std::move(file["model"]["merges"]);
        for (size_t i = 0; i < merges.size(); i++)
            builder.add_merge(merges[i], format("%s: merge %zu", path.c_str(), i));
    }
    return builder.build();
}

Tokenizer from_vocabulary_and_merges(const Json& vocabulary, const std::string& path) {
    constexpr std::string_view kVocabName = "vocab.json";
    if (!path.ends_with(kVocabName))
        reject_file(path, "a vocabulary without merges; name it ...vocab.json and put ...merges.txt next to it");
    TokenizerBuilder builder(path);
    for (const auto& [token, id] : vocabulary.items()) builder.add_token(token, id, token == kEndOfText);

    const std::string merges_path = path.substr(0, path.size() - kVocabName.size()) + "merges.txt";
    std::istringstream text(read_file(merges_path, kMaxFileBytes));
    std::string line;
    for (size_t number = 1; std::getline(text, line); number++) {
        if (line.ends_with('\r')) line.pop_back();
        const bool is_heading = number == 1 && line.starts_with("#version");
        if (!line.empty() && !is_heading) builder.add_merge(line, format("%s: line %zu", merges_path.c_str(), number));
    }
    return builder.build();
}

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's gpt2_tokenizer.bin has no merges, but its ids are in training order. So the merge that produced a token is
// the pair that remains of its bytes after all earlier merges.

constexpr int32_t kLlmcTokenizerMagic = 20240328, kLlmcTokenizerVersion = 2;
constexpr size_t kLlmcHeaderBytes = 1024;

std::vector<std::string> read_llmc_tokens(std::string_view bytes, const std::string& path) {
    const uint32_t count = uint32_t(header_word(bytes, 2));
    std::vector<std::string> tokens;
    std::string_view rest = bytes.substr(kLlmcHeaderBytes);
    while (tokens.size() < count) {
        const size_t length = rest.empty() ? 0 : uint8_t(rest[0]);
        if (rest.size() < 1 + length)
            reject_file(path, "cut short: ends at byte %zu within token %zu of %u", bytes.size(), tokens.size(), count);
        if (length == 0) reject_file(path, "token %zu is empty", tokens.size());
        tokens.emplace_back(rest.substr(1, length));
        rest.remove_prefix(1 + length);
    }
    if (!rest.empty())
        reject_file(path, "%u tokens end at byte %zu, but the file has %zu bytes", count, bytes.size() - rest.size(),
                    bytes.size());
    return tokens;
}

// Returns the two tokens that were merged into a token: the parts that remain of its bytes after all merges into
// earlier tokens, lowest id first, then leftmost.
Merge recover_merge(const std::unordered_map<std::string_view, int32_t>& ids, std::string_view token, int32_t id,
                    const std::string& path) {
    struct Pair {  // of adjacent parts, the bytes [begin, middle) and [middle, end)
        int32_t id;
        size_t begin, middle, end;
        auto operator<=>(const Pair&) const = default;
    };
    std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
    const auto add = [&](size_t begin, size_t middle, size_t end) {
        const auto known = ids.find(token.substr(begin, end - begin));
        if (known != ids.end() && known->second < id) pairs.push({known->second, begin, middle, end});
    };
    // For the part that begins at a byte: its end (0: no part begins here) and the beginning of the previous part.
    std::vector<size_t> end_of(token.size()), before(token.size());
    for (size_t i = 0; i < token.size(); i++) {
        end_of[i] = i + 1;
        before[i] = i - 1;
        if (i + 1 < token.size()) add(i, i + 1, i + 2);
    }
    size_t parts = token.size();
    while (!pairs.empty()) {
        const auto [merged, begin, middle, end] = pairs.top();
        pairs.pop();
        if (end_of[begin] != middle || end_of[middle] != end) continue;  // outdated: a part was merged
        parts--;
        end_of[begin] = end;
        end_of[middle] = 0;
        if (begin > 0) add(before[begin], begin, end);
        if (end == token.size()) continue;
        before[end] = begin;
        add(begin, end, end_of[end]);
    }
    const auto left = ids.find(token.substr(0, end_of[0])), right = ids.find(token.substr(end_of[0]));
    if (parts != 2 || left == ids.end() || right == ids.end())
        reject_file(path, "token %d is not a merge of two earlier tokens, so the ids are not in training order", id);
    return {left->second, right->second};
}

Tokenizer from_llmc(std::string_view bytes, const std::string& path) {
    if (bytes.size() < kLlmcHeaderBytes || header_word(bytes, 1) != kLlmcTokenizerVersion)
        reject_file(path, "llm.c tokenizer of version %d with %zu bytes; only version %d is supported",
                    header_word(bytes, 1), bytes.size(), kLlmcTokenizerVersion);
    std::vector<std::string> tokens = read_llmc_tokens(bytes, path);
    const int32_t count = int32_t(tokens.size()), eot = header_word(bytes, 3);
    if (eot < 0 || eot >= count || tokens[size_t(eot)] != kEndOfText)
        reject_file(path, "the header names token %d as the end of text, but its text is not %s", eot, kEndOfText);

    std::unordered_map<std::string_view, int32_t> ids;
    for (int32_t id = 0; id < count; id++)
        if (id != eot) ids.emplace(tokens[size_t(id)], id);
    std::vector<Merge> merges;
    for (int32_t id = 0; id < count; id++)
        if (id != eot && tokens[size_t(id)].size() > 1)
            merges.push_back(recover_merge(ids, tokens[size_t(id)], id, path));
    return Tokenizer(std::move(tokens), std::move(merges), {eot}, path);
}

bool begins_json_object(std::string_view bytes) {
    return bytes.substr(std::min(bytes.find_first_not_of(" \t\r\n"), bytes.size())).starts_with('{');
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

std::string Tokenizer::json() const {
    if (!rules_.file.empty()) return rules_.file;
    Json file = Json::parse(R"({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {}, "merges": []}
    })");
    Json added = Json::parse(R"({"id": 0, "content": "", "single_word": false, "lstrip": false, "rstrip": false,
                                 "normalized": false, "special": true})");
    auto& vocab = file["model"]["vocab"].get_ref<Json::object_t&>();
    for (int32_t id = 0; id < vocab_size(); id++) {
        const std::string written = is_special(id) ? token(id) : to_printable(token(id));
        vocab.Json::object_t::Container::emplace_back(written, id);  // avoids the linear search for an equal key
        if (!is_special(id)) continue;
        added["id"] = id;
        added["content"] = written;
        file["added_tokens"].push_back(added);
    }
    Json& merges = file["model"]["merges"];
    for (auto [left, right] : merges_) merges.push_back(to_printable(token(left)) + " " + to_printable(token(right)));
    return file.dump(2) + "\n";
}

bool is_tokenizer_file(std::string_view bytes) {
    return header_word(bytes, 0) == kLlmcTokenizerMagic ||
           (begins_json_object(bytes) && bytes.find("\"added_tokens\"") != std::string_view::npos);
}

Tokenizer Tokenizer::characters(const std::set<std::string, std::less<>>& characters) {
    Json file = Json::parse(bytes().json());
    file["pre_tokenizer"] = Json::parse(R"({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "[\\r\\n]|[^\\r\\n]"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})");
    file["model"]["ignore_merges"] = true;  // there are no merges: each character is a word
    Json& vocab = file["model"]["vocab"] = Json::object();
    for (const std::string& character : characters) vocab[to_printable(character)] = vocab.size();
    file["added_tokens"][0]["id"] = vocab.size();
    const std::string text = file.dump(2) + "\n";
    return from_tokenizer_json(std::move(file), text, "the characters", "");
}

void Tokenizer::save(const std::string& directory) const {
    write_file_atomically(directory + "/tokenizer.json", json());
    write_file_atomically(directory + kConfigName, Json{{"eos_token", token(eot())}}.dump(2) + "\n");
}

Tokenizer Tokenizer::load(const std::string& path, const std::string& end_of_text) {
    MappedFile file(path);
    if (file.size() > kMaxFileBytes)
        reject_file(path, "too large for a tokenizer: it has %zu bytes; the limit is %zu", file.size(), kMaxFileBytes);
    auto refuse_end = [&] {
        if (!end_of_text.empty()) reject_file(path, "--end-of-text requires tokenizer.json; here it is %s", kEndOfText);
    };
    if (header_word(file.text(), 0) == kLlmcTokenizerMagic) {
        refuse_end();
        return from_llmc(file.text(), path);
    }
    if (!begins_json_object(file.text()))
        reject_file(path, "not a tokenizer: it has %zu bytes and looks like %s", file.size(),
                    describe_content(file.text().substr(0, 1024), file.size()));
    Json json = parse_json(file.text(), path, Exit::data);
    if (::find(json, "/model").is_object()) return from_tokenizer_json(std::move(json), file.text(), path, end_of_text);
    refuse_end();
    return from_vocabulary_and_merges(json, path);
}
