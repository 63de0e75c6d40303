#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "test/support/add_text.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/temporary_directory.h"

using Json = nlohmann::ordered_json;

static Tokenizer small_tokenizer() {
    BpeTrainer trainer;
    add_text(trainer, read_file("test/recorded/tokenizers/tokenizer_corpus.txt"));
    return trainer.train(275);
}

static std::string llmc_bytes(const Tokenizer& tokenizer) {
    std::string bytes(1024, '\0');
    int32_t words[4] = {20240328, 2, tokenizer.vocab_size(), tokenizer.eot()};
    std::memcpy(bytes.data(), words, sizeof(words));
    for (int32_t id = 0; id < tokenizer.vocab_size(); id++) {
        bytes += char(tokenizer.token(id).size());
        bytes += tokenizer.token(id);
    }
    return bytes;
}

TEST_CASE("tokenizer files: saved files can be loaded") {
    TemporaryDirectory directory;
    std::string path = directory / "tokenizer.json";
    for (const Tokenizer& tokenizer : {Tokenizer::bytes(), small_tokenizer(),
                                       Tokenizer::load("test/recorded/tokenizers/tokenizer_huggingface.json")}) {
        write_bytes(path, tokenizer.json());
        Tokenizer loaded = Tokenizer::load(path);
        CHECK(loaded.digest() == tokenizer.digest());
        CHECK(loaded.eot() == tokenizer.eot());
        CHECK(loaded.json() == tokenizer.json());
        CHECK(is_tokenizer_file(tokenizer.json()));
    }
}

TEST_CASE("tokenizer files: tokenizer.json, vocab.json with merges.txt, and llm.c's file are equivalent") {
    TemporaryDirectory directory;
    Tokenizer tokenizer = small_tokenizer();
    REQUIRE(tokenizer.merges().size() == 18);
    Json json = Json::parse(tokenizer.json());
    write_bytes(directory / "my_vocab.json", json["model"]["vocab"].dump());
    std::string merges = "#version: 0.2\n";
    for (const Json& merge : json["model"]["merges"]) merges += merge.get<std::string>() + "\n";
    write_bytes(directory / "my_merges.txt", merges);
    CHECK(Tokenizer::load(directory / "my_vocab.json").digest() == tokenizer.digest());

    write_bytes(directory / "tokenizer.bin", llmc_bytes(tokenizer));
    CHECK(Tokenizer::load(directory / "tokenizer.bin").digest() == tokenizer.digest());
    CHECK(is_tokenizer_file(llmc_bytes(tokenizer)));

    for (Json& merge : json["model"]["merges"]) {
        std::string line = merge.get<std::string>();
        merge = {line.substr(0, line.find(' ')), line.substr(line.find(' ') + 1)};
    }
    write_bytes(directory / "pairs.json", json.dump());
    CHECK(Tokenizer::load(directory / "pairs.json").digest() == tokenizer.digest());
}

// Requires that the tokenizer.json with one change is rejected with these words.
static void expect_refusal(const std::string& json, std::initializer_list<std::string> words) {
    TemporaryDirectory directory;
    std::string path = directory / "tokenizer.json";
    write_bytes(path, json);
    std::string sentence = expect_error(Exit::data, words, [&] { Tokenizer::load(path); });
    CHECK_THAT(sentence, ContainsSubstring("tokenizer.json"));
}

TEST_CASE("tokenizer files: a tokenizer.json that would give other ids is rejected") {
    const Json good = Json::parse(small_tokenizer().json());
    auto changed = [&](const char* pointer, Json value) {
        Json json = good;
        json[Json::json_pointer(pointer)] = std::move(value);
        return json.dump();
    };
    expect_refusal(changed("/model/type", "Unigram"), {"/model/type", "Unigram", "BPE"});
    expect_refusal(changed("/pre_tokenizer/type", "Whitespace"), {"/pre_tokenizer/type", "Whitespace"});
    expect_refusal(changed("/pre_tokenizer", nullptr), {"/pre_tokenizer/type", "null"});
    expect_refusal(changed("/pre_tokenizer/add_prefix_space", true), {"add_prefix_space", "true"});
    expect_refusal(changed("/pre_tokenizer/use_regex", false), {"use_regex", "false"});
    expect_refusal(changed("/normalizer", {{"type", "NFKC"}}), {"normalizer", "NFKC"});
    expect_refusal(changed("/decoder/type", "Metaspace"), {"/decoder/type", "Metaspace"});
    expect_refusal(changed("/model/dropout", 0.1), {"dropout", "0.1"});
    expect_refusal(changed("/model/continuing_subword_prefix", "##"), {"continuing_subword_prefix", "##"});
    expect_refusal(changed("/model/end_of_word_suffix", "</w>"), {"end_of_word_suffix", "</w>"});
    expect_refusal(changed("/model/byte_fallback", true), {"/pre_tokenizer/type", "ByteLevel", "Metaspace"});
    expect_refusal(changed("/model/ignore_merges", 1), {"ignore_merges"});
}

TEST_CASE("tokenizer files: a damaged tokenizer.json is rejected with the reason") {
    const Json good = Json::parse(small_tokenizer().json());
    auto changed = [&](auto change) {
        Json json = good;
        change(json);
        return json.dump();
    };
    expect_refusal("", {"empty"});
    expect_refusal("<html></html>", {"not a tokenizer", "HTML"});
    expect_refusal("{\"model\": {", {"line 1"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"] = 3; }), {"/model/vocab", "object"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"] = 3; }), {"/model/merges", "array"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["a"] = "b"; }), {"the token \"a\"", "must be an integer"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["a"] = -1; }), {"the token \"a\"", "-1"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["a"] = 1e300; }), {"the token \"a\"", "1e+300"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["a"] = 9'000'000'000; }),
                   {"the token \"a\"", "9000000000"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["a"] = 5; }), {"both have the id 5"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["zq"] = 280; }), {"must be 0 to 275", "\"zq\" has 280"});
    expect_refusal(changed([](Json& j) { j["model"]["vocab"]["日"] = 275; }), {"(275)", "does not represent a byte"});
    expect_refusal(changed([](Json& j) {
                       j["model"]["vocab"].erase("~"), j["model"]["vocab"]["zq"] = 93;
                       j["model"]["unk_token"] = "zq";
                   }),
                   {"byte 0x7e"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = "zq x"; }), {"merge 2 joins \"zq\"", "not a token"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = "z q"; }), {"merge 2 gives \"zq\"", "not a token"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = "a b c"; }),
                   {"merge 2 joins \"a\" and \"b c\"", "not a token"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = 7; }), {"merge 2 is 7,", "two tokens"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = {"a"}; }), {"merge 2 is [\"a\"],", "two tokens"});
    expect_refusal(changed([](Json& j) { j["model"]["merges"][2] = "< <|endoftext|>"; }), {"merge 2", "special"});
    expect_refusal(changed([](Json& j) { j["added_tokens"] = Json::array(); }), {"no special token", kEndOfText});
    expect_refusal(changed([](Json& j) { j["added_tokens"] = 3; }), {"added_tokens"});
    expect_refusal(changed([](Json& j) { j["added_tokens"][0].erase("content"); }), {"added token", "content"});
    expect_refusal(changed([](Json& j) { j["added_tokens"][0]["id"] = 3; }), {"two ids, 274 and 3"});
    expect_refusal(changed([](Json& j) { j["added_tokens"][0]["id"] = 3e9; }), {"must be an integer"});
}

TEST_CASE("tokenizer files: a lone vocabulary, a missing or damaged merges.txt") {
    TemporaryDirectory directory;
    std::string vocab = Json::parse(small_tokenizer().json())["model"]["vocab"].dump();
    write_bytes(directory / "words.json", vocab);
    expect_error(Exit::data, {"words.json", "merges.txt"}, [&] { Tokenizer::load(directory / "words.json"); });
    write_bytes(directory / "vocab.json", vocab);
    expect_error(Exit::no_input, {directory / "merges.txt"}, [&] { Tokenizer::load(directory / "vocab.json"); });
    write_bytes(directory / "merges.txt", "#version\nt h\r\n\nth\n");
    expect_error(Exit::data, {"merges.txt: line 4", "\"th\""}, [&] { Tokenizer::load(directory / "vocab.json"); });
    write_bytes(directory / "merges.txt", "t h\r\n");
    CHECK(Tokenizer::load(directory / "vocab.json").merges().size() == 1);
}

TEST_CASE("tokenizer files: llm.c's file, truncated or damaged") {
    TemporaryDirectory directory;
    std::string path = directory / "tokenizer.bin", whole = llmc_bytes(small_tokenizer());
    auto expect = [&](const std::string& bytes, std::initializer_list<std::string> words) {
        write_bytes(path, bytes);
        expect_error(Exit::data, words, [&] { Tokenizer::load(path); });
    };
    auto with_word = [&](size_t index, int32_t value) {
        std::string bytes = whole;
        std::memcpy(bytes.data() + 4 * index, &value, 4);
        return bytes;
    };
    for (size_t length = 0; length < whole.size(); length += length < 20 || length > 1500 ? 1 : 97)
        expect(whole.substr(0, length), {path});
    expect(whole + "x", {"token", "bytes"});
    expect(with_word(1, 1), {"version 1"});
    expect(with_word(2, -1), {"cut short"});
    expect(with_word(2, 0), {"0 tokens"});
    expect(with_word(3, 5), {"token 5"});
    expect(with_word(3, -5), {"token -5"});
    std::string empty_token = whole;
    empty_token[1024] = 0;
    expect(empty_token, {"token 0 is empty"});

    std::vector<std::string> tokens;
    for (int32_t id = 0; id < 257; id++) tokens.push_back(Tokenizer::bytes().token(id));
    tokens.insert(tokens.begin() + 256, "abc");  // consists of three bytes, not of two tokens
    Tokenizer odd(tokens, {}, {257}, "odd");
    expect(llmc_bytes(odd), {"token 256", "two earlier tokens"});
    std::string twice = llmc_bytes(Tokenizer::bytes());
    twice[1024 + 2 * 'a' + 1] = 'b';
    expect(twice, {"tokens 97 and 98 are both \"b\""});
}

TEST_CASE("tokenizer files: llm.c's merges are found in tokens made of merged tokens") {
    TemporaryDirectory directory;
    std::vector<std::string> tokens;
    for (int32_t id = 0; id < 256; id++) tokens.push_back(Tokenizer::bytes().token(id));
    // In "abcd", "ab" and "cd" are merged before they are merged with each other.
    for (const char* token : {"ab", "cd", "abcd", "abcde", "<|endoftext|>"}) tokens.push_back(token);
    write_bytes(directory / "tokenizer.bin", llmc_bytes(Tokenizer(tokens, {}, {260}, "made")));
    const Tokenizer tokenizer = Tokenizer::load(directory / "tokenizer.bin");
    const std::vector<Merge>& merges = tokenizer.merges();
    REQUIRE(merges.size() == 4);
    CHECK(merges[2].key() == Merge{256, 257}.key());
    CHECK(merges[3].key() == Merge{258, 'e'}.key());
}

TEST_CASE("tokenizer files: a flipped byte causes at most an error") {
    TemporaryDirectory directory;
    std::string path = directory / "tokenizer.json";
    int refused = 0;
    for (const std::string& whole : {small_tokenizer().json(), llmc_bytes(small_tokenizer())}) {
        std::vector<int> places = random_integers(400, 1, int(whole.size())), values = random_integers(400, 2, 256);
        for (size_t i = 0; i < places.size(); i++) {
            std::string damaged = whole;
            damaged[size_t(places[i])] = char(values[i]);
            write_bytes(path, damaged);
            try {
                Tokenizer tokenizer = Tokenizer::load(path);
                CHECK(tokenizer.vocab_size() == 275);
            } catch (const Error& error) {
                CHECK(error.code == Exit::data);
                refused++;
            }
        }
    }
    CHECK(refused > 100);
}
