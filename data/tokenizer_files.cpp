// The files that a tokenizer is read from and written to.
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/tokenizer.h"
#include "kernels/check.h"
#include "runtime/io/io.h"

using Json = nlohmann::ordered_json;

static constexpr size_t kMaxFileBytes = size_t(256) << 20;
static constexpr int kMaxTokens = 1 << 24;

// ---------------------------------------------------------------------------------------------------------------------
// Bytes as printable characters: byte number i of GPT-2's order that does not print is written as U+0100 + its place
// among those, the others as themselves.

static std::array<char32_t, 256> byte_characters() {
    std::array<char32_t, 256> characters;
    constexpr size_t kPrinting = 188;
    std::array<uint8_t, 256> order = gpt2_byte_order();
    for (size_t i = 0; i < 256; i++) characters[order[i]] = i < kPrinting ? order[i] : char32_t(0x100 + i - kPrinting);
    return characters;
}

static std::string to_characters(std::string_view bytes) {
    static const std::array<char32_t, 256> characters = byte_characters();
    std::string text;
    for (char byte : bytes) {
        char32_t c = characters[uint8_t(byte)];
        if (c >= 0x80) text += char(0xc0 | c >> 6);
        text += char(c < 0x80 ? c : 0x80 | (c & 0x3f));
    }
    return text;
}

// Nothing if a character stands for no byte.
static std::optional<std::string> from_characters(std::string_view text) {
    static const std::unordered_map<std::string, char> bytes = [] {
        std::unordered_map<std::string, char> map;
        for (int byte = 0; byte < 256; byte++) map[to_characters(std::string(1, char(byte)))] = char(byte);
        return map;
    }();
    std::string result;
    for (size_t i = 0; i < text.size();) {
        size_t length = uint8_t(text[i]) < 0x80 ? 1 : 2;
        auto byte = bytes.find(std::string(text.substr(i, length)));
        if (byte == bytes.end()) return std::nullopt;
        result += byte->second;
        i += length;
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Looking into JSON whose shape is not known.

static const Json kNull;

static const Json& member(const Json& object, const char* key) {
    if (!object.is_object()) return kNull;
    auto found = object.find(key);
    return found == object.end() ? kNull : *found;
}

static bool is_unset(const Json& value) { return value.is_null() || value == "" || value == false; }

static std::string string_member(const Json& object, const char* key) {
    const Json& value = member(object, key);
    return value.is_string() ? value.get<std::string>() : std::string();
}

// The vocabulary as the files write it: characters, not bytes.
struct Vocabulary {
    std::vector<std::string> written;
    std::unordered_map<std::string, int32_t> ids;
    std::vector<int32_t> special;
};

static int32_t checked_id(const Json& value, const std::string& token, const std::string& path) {
    if (!value.is_number_integer() || value < 0 || value >= kMaxTokens)
        fail(Exit::data, "%s: the id of the token \"%s\" is %s, but must be a whole number from 0 to %d", path.c_str(),
             token.c_str(), value.dump().c_str(), kMaxTokens - 1);
    return value.get<int32_t>();
}

static void add_token(Vocabulary& vocabulary, const std::string& token, int32_t id, const std::string& path) {
    auto [known, is_new] = vocabulary.ids.emplace(token, id);
    if (!is_new && known->second != id)
        fail(Exit::data, "%s: the token \"%s\" has two ids, %d and %d", path.c_str(), token.c_str(), known->second, id);
}

static void list_tokens(Vocabulary& vocabulary, const std::string& path) {
    std::vector<const std::string*> by_id(vocabulary.ids.size());
    for (const auto& [token, id] : vocabulary.ids) {
        if (size_t(id) >= by_id.size())
            fail(Exit::data, "%s: the ids of %zu tokens must be 0 to %zu, but \"%s\" has %d", path.c_str(),
                 by_id.size(), by_id.size() - 1, token.c_str(), id);
        if (by_id[size_t(id)])
            fail(Exit::data, "%s: the tokens \"%s\" and \"%s\" both have the id %d", path.c_str(),
                 by_id[size_t(id)]->c_str(), token.c_str(), id);
        by_id[size_t(id)] = &token;
    }
    for (const std::string* token : by_id) vocabulary.written.push_back(*token);
}

static void add_vocabulary(Vocabulary& vocabulary, const Json& object, const std::string& path) {
    for (const auto& [token, id] : object.items()) add_token(vocabulary, token, checked_id(id, token, path), path);
}

static Merge find_merge(const Vocabulary& vocabulary, const std::string& left, const std::string& right,
                        const std::string& where) {
    auto found_left = vocabulary.ids.find(left), found_right = vocabulary.ids.find(right);
    if (found_left == vocabulary.ids.end() || found_right == vocabulary.ids.end())
        fail(Exit::data, "%s joins \"%s\" and \"%s\", but \"%s\" is no token", where.c_str(), left.c_str(),
             right.c_str(), (found_left == vocabulary.ids.end() ? left : right).c_str());
    return {found_left->second, found_right->second};
}

static Merge parse_merge(const Vocabulary& vocabulary, const std::string& line, const std::string& where) {
    size_t space = line.find(' ');
    if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos)
        fail(Exit::data, "%s is \"%s\", but must be two tokens and a space between them", where.c_str(), line.c_str());
    return find_merge(vocabulary, line.substr(0, space), line.substr(space + 1), where);
}

static Tokenizer build(const Vocabulary& vocabulary, std::vector<Merge> merges, const std::string& path) {
    std::vector<bool> is_special(vocabulary.written.size());
    for (int32_t id : vocabulary.special) is_special[size_t(id)] = true;
    std::vector<std::string> tokens;
    for (size_t id = 0; id < vocabulary.written.size(); id++) {
        const std::string& written = vocabulary.written[id];
        std::optional<std::string> bytes = is_special[id] ? written : from_characters(written);
        if (!bytes)
            fail(Exit::data, "%s: the token \"%s\" (%zu) has characters that stand for no byte", path.c_str(),
                 written.c_str(), id);
        tokens.push_back(std::move(*bytes));
    }
    return Tokenizer(std::move(tokens), std::move(merges), vocabulary.special, path);
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.json

// Refuses what would give other ids than plain GPT-2 tokenisation.
static void check_settings(const Json& file, const std::string& path) {
    const Json &model = member(file, "model"), &pre_tokenizer = member(file, "pre_tokenizer");
    auto refuse = [&](const char* key, const Json& value, const char* known) {
        fail(Exit::data, "%s: \"%s\" is %s, but only %s is known", path.c_str(), key,
             value.dump(-1, ' ', true).substr(0, 100).c_str(), known);
    };
    auto demand = [&](const char* name, const Json& object, const char* key, const char* value) {
        if (string_member(object, key) != value) refuse(name, member(object, key), value);
    };
    demand("model.type", model, "type", "BPE");
    demand("pre_tokenizer.type", pre_tokenizer, "type", "ByteLevel");
    if (const Json& value = member(pre_tokenizer, "add_prefix_space"); value != false)
        refuse("pre_tokenizer.add_prefix_space", value, "false");
    if (const Json& value = member(pre_tokenizer, "use_regex"); !value.is_null() && value != true)
        refuse("pre_tokenizer.use_regex", value, "true");
    if (const Json& value = member(file, "normalizer"); !value.is_null()) refuse("normalizer", value, "null");
    if (const Json& value = member(file, "decoder"); !value.is_null())
        demand("decoder.type", value, "type", "ByteLevel");
    for (const char* key :
         {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"})
        if (const Json& value = member(model, key); !is_unset(value)) refuse(key, value, "null");
    if (!member(model, "vocab").is_object()) refuse("model.vocab", member(model, "vocab"), "an object");
    if (!member(model, "merges").is_array()) refuse("model.merges", member(model, "merges"), "an array");
}

static void add_special_tokens(Vocabulary& vocabulary, const Json& added, const std::string& path) {
    if (added.is_null()) return;
    if (!added.is_array()) fail(Exit::data, "%s: \"added_tokens\" must be an array", path.c_str());
    for (const Json& token : added) {
        std::string content = string_member(token, "content");
        if (content.empty()) fail(Exit::data, "%s: an added token has no \"content\"", path.c_str());
        int32_t id = checked_id(member(token, "id"), content, path);
        add_token(vocabulary, content, id, path);
        vocabulary.special.push_back(id);
    }
}

static Tokenizer from_tokenizer_json(const Json& file, const std::string& path) {
    check_settings(file, path);
    const Json& model = member(file, "model");
    Vocabulary vocabulary;
    add_vocabulary(vocabulary, member(model, "vocab"), path);
    add_special_tokens(vocabulary, member(file, "added_tokens"), path);
    list_tokens(vocabulary, path);

    std::vector<Merge> merges;
    for (const Json& merge : member(model, "merges")) {
        std::string where = format("%s: merge %zu", path.c_str(), merges.size());
        bool is_pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
        if (is_pair)
            merges.push_back(find_merge(vocabulary, merge[0].get<std::string>(), merge[1].get<std::string>(), where));
        else if (merge.is_string())
            merges.push_back(parse_merge(vocabulary, merge.get<std::string>(), where));
        else
            fail(Exit::data, "%s must be a string or two strings", where.c_str());
    }
    return build(vocabulary, std::move(merges), path);
}

std::string Tokenizer::json() const {
    Json added = Json::array(), merges = Json::array();
    Json vocab = Json::object();
    auto& members = vocab.get_ref<Json::object_t&>();
    for (int32_t id = 0; id < vocab_size(); id++) {
        std::string written = is_special(id) ? token(id) : to_characters(token(id));
        members.Json::object_t::Container::emplace_back(written, id);  // no search for an equal key: there is none
        if (is_special(id))
            added.push_back({{"id", id},
                             {"content", written},
                             {"single_word", false},
                             {"lstrip", false},
                             {"rstrip", false},
                             {"normalized", false},
                             {"special", true}});
    }
    for (auto [left, right] : merges_) merges.push_back(to_characters(token(left)) + " " + to_characters(token(right)));
    Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
    Json file = {{"version", "1.0"},
                 {"truncation", nullptr},
                 {"padding", nullptr},
                 {"added_tokens", std::move(added)},
                 {"normalizer", nullptr},
                 {"pre_tokenizer", byte_level},
                 {"post_processor", nullptr},
                 {"decoder", byte_level},
                 {"model",
                  {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", false},
                   {"vocab", std::move(vocab)},
                   {"merges", std::move(merges)}}}};
    return file.dump(2) + "\n";
}

void Tokenizer::save(const std::string& path) const { write_file_atomically(path, json()); }

// ---------------------------------------------------------------------------------------------------------------------
// vocab.json with merges.txt

static Tokenizer from_vocabulary_and_merges(const Json& file, const std::string& path) {
    constexpr std::string_view kVocabName = "vocab.json";
    if (!path.ends_with(kVocabName))
        fail(Exit::data, "%s: a vocabulary alone; call it ...vocab.json and put ...merges.txt beside it", path.c_str());
    Vocabulary vocabulary;
    add_vocabulary(vocabulary, file, path);
    list_tokens(vocabulary, path);
    if (auto eot = vocabulary.ids.find(kEndOfText); eot != vocabulary.ids.end())
        vocabulary.special.push_back(eot->second);

    std::string merges_path = path.substr(0, path.size() - kVocabName.size()) + "merges.txt";
    std::string text = read_file(merges_path, kMaxFileBytes);
    std::vector<Merge> merges;
    size_t line_number = 0;
    for (size_t begin = 0; begin < text.size();) {
        size_t end = std::min(text.find('\n', begin), text.size());
        std::string line = text.substr(begin, end - begin);
        if (line.ends_with('\r')) line.pop_back();
        line_number++;
        begin = end + 1;
        bool is_heading = line_number == 1 && line.starts_with("#version");
        if (line.empty() || is_heading) continue;
        merges.push_back(parse_merge(vocabulary, line, format("%s: line %zu", merges_path.c_str(), line_number)));
    }
    return build(vocabulary, std::move(merges), path);
}

// ---------------------------------------------------------------------------------------------------------------------
// llm.c's gpt2_tokenizer.bin has no merges, but ids stand in the order in which they were learned. So the merge that
// made a token is what is left of its bytes once all earlier merges have been applied.

static constexpr uint32_t kLlmcTokenizerMagic = 20240328;
static constexpr size_t kLlmcHeaderBytes = 1024;

static uint32_t word_at(std::string_view bytes, size_t index) {
    uint32_t word = 0;
    if (bytes.size() >= 4 * (index + 1)) std::memcpy(&word, bytes.data() + 4 * index, 4);
    return word;
}

static std::vector<std::string> read_llmc_tokens(std::string_view bytes, const std::string& path) {
    uint32_t count = word_at(bytes, 2);
    std::vector<std::string> tokens;
    size_t at = kLlmcHeaderBytes;
    while (tokens.size() < count) {
        size_t length = at < bytes.size() ? uint8_t(bytes[at]) : 0;
        if (at >= bytes.size() || length > bytes.size() - at - 1)
            fail(Exit::data, "%s: cut short: it ends at byte %zu within token %zu of %u", path.c_str(), bytes.size(),
                 tokens.size(), count);
        if (length == 0) fail(Exit::data, "%s: token %zu is empty", path.c_str(), tokens.size());
        tokens.emplace_back(bytes.substr(at + 1, length));
        at += 1 + length;
    }
    if (at != bytes.size())
        fail(Exit::data, "%s: %u tokens end at byte %zu, but the file has %zu bytes", path.c_str(), count, at,
             bytes.size());
    return tokens;
}

static Merge recover_merge(const std::unordered_map<std::string, int32_t>& ids, const std::string& token, int32_t id,
                           const std::string& path) {
    std::vector<std::string> parts;
    for (char byte : token) parts.emplace_back(1, byte);
    for (;;) {
        size_t best = parts.size();
        int32_t best_id = id;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            auto known = ids.find(parts[i] + parts[i + 1]);
            if (known != ids.end() && known->second < best_id) best = i, best_id = known->second;
        }
        if (best == parts.size()) break;
        parts[best] += parts[best + 1];
        parts.erase(parts.begin() + std::ptrdiff_t(best) + 1);
    }
    auto left = ids.find(parts.front()), right = ids.find(parts.back());
    if (parts.size() != 2 || left == ids.end() || right == ids.end())
        fail(Exit::data, "%s: token %d is not made of two earlier ones, so the ids are not in the order of merges",
             path.c_str(), id);
    return {left->second, right->second};
}

static Tokenizer from_llmc(std::string_view bytes, const std::string& path) {
    if (bytes.size() < kLlmcHeaderBytes || word_at(bytes, 1) != 2)
        fail(Exit::data, "%s: an llm.c tokenizer of version %u with %zu bytes; only version 2 is known", path.c_str(),
             word_at(bytes, 1), bytes.size());
    std::vector<std::string> tokens = read_llmc_tokens(bytes, path);
    int32_t eot = int32_t(word_at(bytes, 3));
    if (eot < 0 || size_t(eot) >= tokens.size() || tokens[size_t(eot)] != kEndOfText)
        fail(Exit::data, "%s: the header calls token %d the end of text, which is not %s", path.c_str(), eot,
             kEndOfText);

    std::unordered_map<std::string, int32_t> ids;
    for (size_t id = 0; id < tokens.size(); id++)
        if (int32_t(id) != eot) ids.emplace(tokens[id], int32_t(id));
    std::vector<Merge> merges;
    for (size_t id = 0; id < tokens.size(); id++)
        if (int32_t(id) != eot && tokens[id].size() > 1)
            merges.push_back(recover_merge(ids, tokens[id], int32_t(id), path));
    return Tokenizer(std::move(tokens), std::move(merges), {eot}, path);
}

// ---------------------------------------------------------------------------------------------------------------------

static bool begins_json_object(std::string_view bytes) {
    size_t first = bytes.find_first_not_of(" \t\r\n");
    return first != std::string_view::npos && bytes[first] == '{';
}

bool is_tokenizer_file(std::string_view bytes) {
    return word_at(bytes, 0) == kLlmcTokenizerMagic ||
           (begins_json_object(bytes) && bytes.find("\"added_tokens\"") != std::string_view::npos);
}

Tokenizer Tokenizer::load(const std::string& path) {
    MappedFile file(path);
    if (file.size() > kMaxFileBytes)
        fail(Exit::data, "%s: %zu bytes are too many for a tokenizer; at most %zu are read", path.c_str(), file.size(),
             kMaxFileBytes);
    if (word_at(file.text(), 0) == kLlmcTokenizerMagic) return from_llmc(file.text(), path);
    if (!begins_json_object(file.text()))
        fail(Exit::data, "%s: not a tokenizer: it has %zu bytes and looks like %s", path.c_str(), file.size(),
             describe_content(file.text().substr(0, 1024), file.size()).c_str());
    Json json = parse_json(file.text(), path, Exit::data);
    return json.contains("model") && json["model"].is_object() ? from_tokenizer_json(json, path)
                                                               : from_vocabulary_and_merges(json, path);
}
