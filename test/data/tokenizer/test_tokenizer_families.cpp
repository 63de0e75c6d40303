// The model families' tokenizers compared with Hugging Face's tokenizers on the same texts, as recorded by
// test/recorded/tokenizers/make_tokenizer_families.py.
#include <nlohmann/json.hpp>

#include "data/tokenizer/encoder.h"
#include "data/tokenizer/nfc.h"
#include "runtime/io/files.h"
#include "runtime/io/utf8.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/temporary_directory.h"

using Json = nlohmann::ordered_json;

namespace {

const Json& recorded() {
    static const Json json = Json::parse(read_file("test/recorded/tokenizers/tokenizer_families.json"));
    return json;
}
const Json& family(const std::string& name) { return recorded()["families"][name]; }

Tokenizer load(const Json& json) {
    TemporaryDirectory directory;
    write_bytes(directory / "tokenizer.json", json.dump());
    return Tokenizer::load(directory / "tokenizer.json");
}
Tokenizer load_family(const std::string& name) { return load(family(name)["tokenizer"]); }

using Ids = std::vector<int32_t>;

}  // namespace

TEST_CASE("tokenizer families: Hugging Face's ids and texts") {
    const std::vector<std::string> texts = recorded()["texts"];
    REQUIRE(texts.size() > 30);
    for (const auto& [name, reference] : recorded()["families"].items()) {
        const Tokenizer tokenizer = load(reference["tokenizer"]);
        Encoder encoder(tokenizer);
        for (size_t i = 0; i < texts.size(); i++) {
            INFO(name << ": " << texts[i]);
            const Ids ids = encoder.encode(texts[i]);
            CHECK(ids == reference["ids"][i].get<Ids>());
            const Json& decoded = reference["decoded"][i];
            // If some bytes of a character are dropped, Hugging Face replaces the others.
            if (!tokenizer.warning().empty() && decoded.is_string() &&
                decoded.get<std::string>().find("\ufffd") != std::string::npos)
                continue;
            CHECK(tokenizer.decode(ids, true) == (decoded.is_null() ? texts[i] : decoded.get<std::string>()));
        }
        INFO(name);
    }
}

TEST_CASE("tokenizer families: Hugging Face's pieces") {
    const std::vector<std::string> texts = recorded()["texts"];
    int compared = 0;
    for (const auto& [name, reference] : recorded()["families"].items()) {
        Pretokenizer pretokenizer(load(reference["tokenizer"]).rules().steps);
        for (size_t i = 0; i < texts.size(); i++) {
            const Json& expected = reference["pieces"][i];
            if (expected.is_null()) continue;
            std::vector<size_t> lengths;
            pretokenizer.split(texts[i], [&](std::string_view piece) { lengths.push_back(piece.size()); });
            INFO(name << ": " << texts[i]);
            CHECK(lengths == expected.get<std::vector<size_t>>());
            compared++;
        }
    }
    CHECK(compared > 200);
}

TEST_CASE("tokenizer families: the scanners split like their patterns") {
    const std::vector<std::pair<SplitRule, std::string_view>> rules = {
        {SplitRule::gpt2, kGpt2Pattern},   {SplitRule::llama3, kLlama3Pattern},  {SplitRule::qwen2, kQwen2Pattern},
        {SplitRule::o200k, kO200kPattern}, {SplitRule::digit_runs, R"(\p{N}+)"}, {SplitRule::digits, R"(\p{N})"}};
    const std::vector<std::string> parts = {
        " ",       "  ",     "\n",     "\r\n",   "\t",     "\u3000", "\u0085",   "'s",          "'S",
        "'\u017f", "'ll",    "'LL",    "'re",    "'v",     "a",      "aB",       "AB",          "Ab",
        "\u01c5",  "\u02b0", "\u00aa", "\u0301", "\u4e2d", "1",      "234",      "\u0663",      "\u00bd",
        ".",       "!?",     "/",      "//",     "_",      "-",      "'",        "\u200b",      "\U0001f600",
        "\u00e9",  "\u0130", "\u00df", "\x01",   "\x7f",   "\xff",   "\xe2\x80", "\xed\xa0\x80"};
    for (const auto& [rule, pattern] : rules) {
        Pretokenizer scanner({{rule}}), matcher({{SplitRule::pattern, std::string(pattern)}});
        auto pieces = [](Pretokenizer& pretokenizer, std::string_view text) {
            std::vector<std::string> result;
            pretokenizer.split(text, [&](std::string_view piece) { result.emplace_back(piece); });
            return result;
        };
        for (uint64_t seed = 0; seed < 6000; seed++) {
            std::string text;
            for (int i : random_integers(1 + seed % 9, seed, int(parts.size()))) text += parts[size_t(i)];
            if (pieces(scanner, text) != pieces(matcher, text))
                FAIL_CHECK("rule " << int(rule) << ": " << quoted(text, 200));
        }
    }
}

TEST_CASE("tokenizer families: text may be split where last_safe_cut says, for every rule") {
    const std::vector<std::string> parts = {" ",      "  ",     "\n", "\n\n", "\r\n", "\t", "\u3000", "'s", "a", "Bc",
                                            "\u0301", "\u4e2d", "12", ".",    "!",    "/",  "\u3002", "-",  "'"};
    for (const auto& [name, reference] : recorded()["families"].items()) {
        const Tokenizer tokenizer = load(reference["tokenizer"]);
        Encoder encoder(tokenizer);
        if (tokenizer.rules().byte_tokens.empty()) CHECK(keeps_safe_cuts(tokenizer.rules().steps));
        int cuts = 0;
        for (uint64_t seed = 0; seed < 1500; seed++) {
            std::string text;
            for (int i : random_integers(2 + seed % 9, seed, int(parts.size()))) text += parts[size_t(i)];
            const size_t cut = last_safe_cut(text);
            if (cut == 0) continue;
            cuts++;
            Ids in_parts;
            encoder.append(std::string_view(text).substr(0, cut), in_parts);
            encoder.append(std::string_view(text).substr(cut), in_parts, 0, false);
            if (in_parts != encoder.encode(text)) FAIL_CHECK(name << ": cut at " << cut << " of " << quoted(text, 200));
        }
        CHECK(cuts > 500);
    }
    CHECK(last_safe_cut("\u3002\nxyz") == 4);
    CHECK(last_safe_cut("\u3002\n\u3000\u3000xyz") == 0);
    CHECK(last_safe_cut(".\n/xyz") == 0);
    CHECK(last_safe_cut(".\n\nxyz") == 0);
    CHECK(last_safe_cut(". \nxyz") == 1);
    CHECK(!keeps_safe_cuts({{SplitRule::pattern, R"(\p{L}+ \p{L}+)"}}));
}

TEST_CASE("tokenizer families: with ignore_merges a word that is a token needs no merges") {
    Json json = family("llama3")["tokenizer"];
    json["model"]["vocab"]["zqx"] = 422;  // no merge produces it
    const Tokenizer whole = load(json);
    CHECK(Encoder(whole).encode("zqx") == Ids{422});
    CHECK(Encoder(whole).encode("zqxz").size() > 1);
    json["model"]["ignore_merges"] = false;
    const Tokenizer merging = load(json);
    CHECK(Encoder(merging).encode("zqx").size() > 1);
}

TEST_CASE("tokenizer families: bytes without a token are dropped and reported") {
    Json json = family("smollm2_missing_bytes")["tokenizer"];
    const Tokenizer tokenizer = load(json);
    int missing = 0;
    for (int byte = 0; byte < 256; byte++) missing += tokenizer.byte_id(uint8_t(byte)) < 0;
    CHECK(missing > 100);
    CHECK(tokenizer.warning() == format("%d of 256 bytes have no token: encoding drops them", missing));
    CHECK(load_family("smollm2").warning().empty());

    Encoder encoder(tokenizer);
    const std::string text =
        "\x04In \x04\x05 the\x01 beginning\xff of words of \x04 any length" + std::string(70, '\x01');
    std::string rest = text;
    std::erase_if(rest, [&](char byte) { return tokenizer.byte_id(uint8_t(byte)) < 0; });
    for (int pass = 1; pass <= 2; pass++)  // the second pass finds the words in the cache
        CHECK(tokenizer.decode(encoder.encode(text)) == rest);
    CHECK(encoder.encode("\x04").empty());
    CHECK(Encoder(tokenizer, 0.5, 1).encode("\x04\x05").empty());
    // Merges skip them.
    CHECK(encoder.encode(" thße") == encoder.encode(" the"));
    CHECK(encoder.encode(" the").size() == 1);

    json["model"]["unk_token"] = kEndOfText;  // represents bytes that would be dropped
    expect_error(Exit::data, {"the byte 0x00 has no token"}, [&] { load(json); });
}

TEST_CASE("tokenizer families: decoding the ids of any bytes gives the bytes") {
    for (const auto& [name, reference] : recorded()["families"].items()) {
        const Tokenizer tokenizer = load(reference["tokenizer"]);
        if (!tokenizer.warning().empty()) continue;  // drops bytes
        Encoder encoder(tokenizer);
        const bool is_nfc = tokenizer.rules().normalization == Normalization::nfc;
        // Metaspace adds no space to a text that begins with one, and its decoder removes that space.
        const bool keeps_space = tokenizer.rules().prefix != SpacePrefix::first_unless_space;
        for (uint64_t seed = 0; seed < 300; seed++) {
            std::string text;
            for (int byte : random_integers(seed % 40, seed, 256)) text += char(byte % 7 == 0 ? ' ' : byte);
            INFO(name << ": " << quoted(text, 200));
            if (!keeps_space && text.starts_with(' ')) continue;
            CHECK(tokenizer.decode(encoder.encode(text), true) == (is_nfc ? to_nfc(text) : text));
        }
    }
}

TEST_CASE("tokenizer families: the tokens at a document's beginning and end") {
    auto check = [](const char* name, std::string start, std::string end) {
        const Tokenizer tokenizer = load_family(name);
        CHECK(tokenizer.token(tokenizer.document_start()) == start);
        CHECK(tokenizer.token(tokenizer.eot()) == end);
        const std::span<const int32_t> prefix = tokenizer.document_prefix();
        CHECK(prefix.front() == tokenizer.eot());
        CHECK(prefix.back() == tokenizer.document_start());
        CHECK(prefix.size() == (start == end ? 1 : 2));
    };
    check("gpt2", kEndOfText, kEndOfText);
    check("qwen2", kEndOfText, kEndOfText);
    check("cl100k", kEndOfText, kEndOfText);  // after an unused id
    check("llama3", "<|begin_of_text|>", "<|end_of_text|>");
    check("llama2", "<s>", "</s>");
}

TEST_CASE("tokenizer families: the end-of-text token is set by name or by tokenizer_config.json") {
    TemporaryDirectory directory;
    const std::string path = directory / "tokenizer.json", config = directory / "tokenizer_config.json";
    const std::string deepseek = "<\uff5cend\u2581of\u2581sentence\uff5c>";
    Json json = family("deepseek")["tokenizer"];
    json["added_tokens"][0]["content"] = deepseek;
    write_bytes(path, json.dump());
    expect_error(Exit::data, {"no special token", kEndOfText, "--end-of-text", "tokenizer_config.json"},
                 [&] { Tokenizer::load(path); });
    const Tokenizer chosen = Tokenizer::load(path, deepseek);
    CHECK(chosen.token(chosen.eot()) == deepseek);
    CHECK(chosen.document_prefix().size() == 1);
    expect_error(Exit::data, {"--end-of-text", "<|end|>"}, [&] { Tokenizer::load(path, "<|end|>"); });
    for (const Json& name : {Json(deepseek), Json{{"content", deepseek}, {"lstrip", false}}}) {
        write_bytes(config, Json{{"eos_token", name}}.dump());
        const Tokenizer configured = Tokenizer::load(path);
        CHECK(configured.eot() == chosen.eot());
        CHECK(configured.digest() == chosen.digest());
    }
    for (const Json& wrong : {Json(5), Json{{"name", deepseek}}}) {
        write_bytes(config, Json{{"eos_token", wrong}}.dump());
        wrong.is_number()
            ? expect_error(Exit::data, {"tokenizer_config.json", "eos_token is 5"}, [&] { Tokenizer::load(path); })
            : expect_error(Exit::data, {"no special token"}, [&] { Tokenizer::load(path); });
    }

    // eos_token takes precedence over the usual names if it is a special token, and is saved.
    write_bytes(path, family("qwen2")["tokenizer"].dump());
    write_bytes(config, R"({"eos_token": "<tool_call>"})");
    const Tokenizer usual = Tokenizer::load(path);
    CHECK(usual.token(usual.eot()) == kEndOfText);
    CHECK(usual.digest() == load_family("qwen2").digest());
    write_bytes(config, R"({"eos_token": "<|im_end|>"})");
    const Tokenizer other = Tokenizer::load(path);
    CHECK(other.token(other.eot()) == "<|im_end|>");
    CHECK(other.digest() != usual.digest());
    CHECK(Tokenizer::load(path, kEndOfText).digest() == usual.digest());
    TemporaryDirectory copy;
    other.save(copy / "");
    CHECK(Tokenizer::load(copy / "tokenizer.json").digest() == other.digest());
    CHECK(read_file(copy / "tokenizer.json") == read_file(path));
    expect_error(Exit::data, {"--end-of-text", "tokenizer.json"},
                 [&] { Tokenizer::load("data/gpt2/vocab.json", "<|im_end|>"); });
}

TEST_CASE("tokenizer families: files are saved unchanged, and rules affect the digest") {
    TemporaryDirectory directory;
    const std::string path = directory / "tokenizer.json";
    std::vector<std::string> digests;
    for (const auto& [name, reference] : recorded()["families"].items()) {
        write_bytes(path, reference["tokenizer"].dump());
        const Tokenizer tokenizer = Tokenizer::load(path);
        if (name != "gpt2") CHECK(tokenizer.json() == reference["tokenizer"].dump());
        write_bytes(path, tokenizer.json());
        CHECK(Tokenizer::load(path).digest() == tokenizer.digest());
        digests.push_back(tokenizer.digest());
    }
    Json changed = family("llama3")["tokenizer"];
    changed["model"]["ignore_merges"] = false;
    digests.push_back(load(changed).digest());
    std::ranges::sort(digests);
    CHECK(std::ranges::adjacent_find(digests) == digests.end());
}

TEST_CASE("tokenizer families: unsupported features are rejected by name") {
    auto expect_refusal = [](Json json, const char* pointer, Json value, std::initializer_list<std::string> words) {
        json[Json::json_pointer(pointer)] = std::move(value);
        expect_error(Exit::data, words, [&] { load(json); });
    };
    const Json llama3 = family("llama3")["tokenizer"], llama2 = family("llama2")["tokenizer"];
    const Json metaspace = family("llama2_metaspace")["tokenizer"], qwen2 = family("qwen2")["tokenizer"];
    expect_refusal(qwen2, "/normalizer/type", "NFKC", {"/normalizer", "NFKC", "NFC"});
    expect_refusal(llama3, "/pre_tokenizer/pretokenizers/0/type", "Whitespace",
                   {"/pre_tokenizer/pretokenizers/0/type", "Whitespace"});
    const char* pattern = "/pre_tokenizer/pretokenizers/0/pattern/Regex";
    expect_refusal(llama3, pattern, "(a", {"/pre_tokenizer", "(a"});
    expect_refusal(llama3, pattern, "(?<=a)b", {"look-behind"});
    expect_refusal(llama3, pattern, R"(\bb)", {R"(\b)"});
    expect_refusal(llama3, pattern, R"(\p{L}+ \p{L}+)", {"joins a space"});
    expect_refusal(llama3, "/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext", {"behavior", "MergedWithNext"});
    // The known pattern's matches, all text, would be removed.
    expect_refusal(llama3, "/pre_tokenizer/pretokenizers/0/behavior", "Removed", {"behavior", "Removed"});
    expect_refusal(llama3, "/pre_tokenizer/pretokenizers/1/add_prefix_space", true, {"add_prefix_space"});
    expect_refusal(llama3, "/post_processor/processors/0/type", "BertProcessing",
                   {"/post_processor", "BertProcessing"});
    expect_refusal(llama3, "/added_tokens/0/single_word", true, {"single_word"});
    expect_refusal(llama3, "/decoder/type", "WordPiece", {"/decoder/type", "WordPiece"});
    expect_refusal(qwen2, "/added_tokens/3/rstrip", true, {"/added_tokens/3", "rstrip"});
    expect_refusal(llama2, "/normalizer/normalizers/0/type", "NFKC", {"/normalizer/normalizers/0", "NFKC"});
    expect_refusal(llama2, "/decoder/decoders/0/type", "BPEDecoder", {"/decoder/decoders/0/type", "BPEDecoder"});
    expect_refusal(metaspace, "/pre_tokenizer/split", true, {"/pre_tokenizer/split", "true"});
    expect_refusal(metaspace, "/pre_tokenizer/prepend_scheme", "last", {"prepend_scheme"});
    Json json = llama2;
    json["model"]["vocab"]["<0x1F>x"] = json["model"]["vocab"]["<0x1F>"];
    json["model"]["vocab"].erase("<0x1F>");
    expect_error(Exit::data, {"<0x1F>"}, [&] { load(json); });
    json = llama2;
    const size_t next = json["model"]["vocab"].size();
    json["model"]["vocab"]["a\u2581"] = next;
    json["model"]["merges"].push_back({"a", "\u2581"});
    expect_error(Exit::data, {"\"a \"", "not supported"}, [&] { load(json); });
    json = llama3;
    json["added_tokens"][1]["content"] = "<|finis|>";
    expect_error(Exit::data, {"no special token"}, [&] { load(json); });
}

TEST_CASE("tokenizer families: streaming decodes whole characters") {
    for (const char* name : {"qwen2", "llama2"}) {
        const Tokenizer tokenizer = load_family(name);
        Encoder encoder(tokenizer);
        for (const std::string text : {"a 日本語 😀👩‍👩‍👧 é.", "\xff\xe2\x82 \xf0\x9f\x98",
                                       "\xe2\x82\xe2\x82\xac\xc2", "\xed\xa0\x80\xf4\x90x"}) {
            StreamDecoder decoder(tokenizer, true);
            std::string joined;
            bool is_valid = text[0] == 'a';
            for (const int32_t id : encoder.encode(text)) {
                const std::string piece = decoder.add(id);
                for (size_t at = 0, length; is_valid && at < piece.size(); at += length) {
                    length = utf8_length(std::string_view(piece).substr(at));
                    REQUIRE(length > 0);
                }
                joined += piece;
            }
            if (is_valid) CHECK(joined == text);
            CHECK(joined + decoder.finish() == text);
        }
    }
}

TEST_CASE("tokenizer families: NFC") {
    CHECK(to_nfc("e\u0301") == "\u00e9");
    CHECK(to_nfc("\u00ea\u0323") == "\u1ec7");
    CHECK(to_nfc("a\u0302\u0323") == "\u1ead");
    CHECK(to_nfc("\u1112\u1161\u11ab\u1100\u1161") == "\ud55c\uac00");
    CHECK(to_nfc("\uac00\u11a8\u11a7") == "\uac01\u11a7");
    CHECK(to_nfc("\u212b\u2126\u0958") == "\u00c5\u03a9\u0915\u093c");
    CHECK(to_nfc("q\u0307\u0323") == "q\u0323\u0307");
    CHECK(to_nfc("\uac00\u11a7") == "\uac00\u11a7");
    CHECK(to_nfc("\uac00\u11c2") == "\uac1b");
    CHECK(to_nfc("a\u0363\u0301") == "a\u0363\u0301");  // blocked by a mark of the same class
    CHECK(to_nfc("e\xff\u0301\u0301") == "e\xff\u0301\u0301");
    CHECK(is_certainly_nfc("\u00e9 \u65e5\u672c \ud55c"));
    CHECK(!is_certainly_nfc("e\u0301"));
    CHECK(!is_certainly_nfc("\u09c7\u09be"));
    CHECK(!is_certainly_nfc("\u1100\u1161"));  // Hangul: neither is a mark, and each is in NFC by itself
    CHECK(!is_certainly_nfc("\uac00\u11a8"));
    CHECK(!is_certainly_nfc("\u212b"));  // alone
    CHECK(to_nfc("\u09c7\u09be") == "\u09cb");
    for (std::string text : recorded()["texts"]) {
        CHECK(to_nfc(to_nfc(text)) == to_nfc(text));
        if (is_certainly_nfc(text)) CHECK(to_nfc(text) == text);
    }
}
