// prepare with existing tokenizers and with a vocabulary of characters.
#include <set>

#include "data/tokenizer/encoder.h"
#include "runtime/io/files.h"
#include "runtime/io/utf8.h"
#include "test/support/expect_error.h"
#include "test/support/prepare_fixture.h"

TEST_CASE_METHOD(PrepareFixture, "prepare: with a tokenizer whose documents begin with a special token") {
    const nlohmann::ordered_json families =
        nlohmann::ordered_json::parse(read_file("test/recorded/tokenizers/tokenizer_families.json"))["families"];
    write_bytes(directory_ / "llama3.json", families["llama3"]["tokenizer"].dump());
    write_bytes(directory_ / "lines.jsonl", "{\"text\": \"Citizen\"}\n{\"text\": \"speak\"}\n");
    options_.inputs = {directory_ / "lines.jsonl"};
    options_.tokenizer = directory_ / "llama3.json";
    options_.vocab_size = 0;
    options_.val_fraction = 0;
    prepare_quietly();

    const Tokenizer tokenizer = Tokenizer::load(directory_ / "llama3.json");
    Encoder encoder(tokenizer);
    std::vector<int32_t> expected;
    for (const char* text : {"Citizen", "speak"}) {
        expected.insert(expected.end(), {tokenizer.eot(), tokenizer.document_start()});
        for (const int32_t id : encoder.encode(text)) expected.push_back(id);
    }
    TokenStream stream(expand_glob(out_ + "/train_*.bin", "train"), tokenizer.vocab_size());
    std::vector<int32_t> tokens(stream.token_count());
    stream.read(0, tokens.size(), tokens.data());
    CHECK(tokens == expected);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: with a vocabulary of characters") {
    const std::string text = "ba\u00e9\xff \u4e2d\nab\n" + lines(20) + "z\u00e8\n";  // \u00e8 and z are held out
    write_bytes(directory_ / "text.txt", text);
    options_.tokenizer = "chars";
    options_.vocab_size = 0;
    prepare_quietly();
    const Tokenizer tokenizer = Tokenizer::load(out_ + "/tokenizer.json");
    std::set<std::string> characters;
    size_t n_characters = 0;
    for (size_t at = 0, length; at < text.size(); at += length, n_characters++) {
        length = std::max<size_t>(utf8_length(std::string_view(text).substr(at)), 1);
        characters.insert(text.substr(at, length));
    }
    REQUIRE(summary_.vocab_size == int(characters.size()) + 1);
    int32_t id = 0;  // in the order of code points, as in nanoGPT's prepare.py
    for (const std::string& character : characters) CHECK(tokenizer.token(id++) == character);
    CHECK(tokenizer.token(id) == kEndOfText);
    std::vector<int32_t> ids = tokens("train");
    const std::vector<int32_t> val = tokens("val");
    CHECK(ids.size() + val.size() == 2 + n_characters);
    ids.insert(ids.end(), val.begin() + 1, val.end());
    CHECK(tokenizer.decode(ids) == kEndOfText + text);
    CHECK(tokenizer.warning().empty());
    CHECK(Encoder(tokenizer).encode("q\u00eaa") == Encoder(tokenizer).encode("a"));  // they do not occur

    // Dropout needs merges to skip; a wrong size is rejected.
    options_.bpe_dropout = 0.5;
    prepare_quietly();
    CHECK(tokens("train") == std::vector<int32_t>(ids.begin(), ids.end() - ptrdiff_t(val.size()) + 1));
    options_.vocab_size = 257;
    expect_error(Exit::usage, {"257", "\"chars\""}, [&] { prepare_quietly(); });
}

TEST_CASE("prepare: the characters of tinyshakespeare have nanoGPT's ids") {
    std::set<std::string, std::less<>> characters;
    for (const char character : std::string("\n !$&',-.3:;?")) characters.emplace(1, character);
    for (char letter = 'A'; letter <= 'Z'; letter++)
        characters.insert({std::string(1, letter), std::string(1, char(letter - 'A' + 'a'))});
    REQUIRE(characters.size() == 65);
    const Tokenizer tokenizer = Tokenizer::characters(characters);
    CHECK(tokenizer.eot() == 65);
    CHECK(Encoder(tokenizer).encode("First Citizen:\nBefore we") ==
          std::vector<int32_t>{18, 47, 56, 57, 58, 1,  15, 47, 58, 47, 64, 43,
                               52, 10, 0,  14, 43, 44, 53, 56, 43, 1,  61, 43});
}

TEST_CASE_METHOD(PrepareFixture, "prepare: imports nanoGPT's ids of characters") {
    std::string ids;
    for (int i = 0; i < 300; i++) ids += {char(i % 65), '\0'};
    write_bytes(directory_ / "train.bin", ids);
    write_bytes(directory_ / "val.bin", ids.substr(0, 100));
    options_.inputs = {directory_ / "train.bin", directory_ / "val.bin"};
    options_.vocab_size = 65;
    prepare_quietly();
    CHECK(summary_.train.tokens == 300);
    CHECK(summary_.val.tokens == 50);
    CHECK(tokens("train")[64] == 64);
    options_.vocab_size = 64;
    expect_error(Exit::data, {"token 64 is 64", "64 tokens"}, [&] { prepare_quietly(); });
    options_.tokenizer = "chars";
    expect_error(Exit::usage, {"--tokenizer chars", "tokenizer.json"}, [&] { prepare_quietly(); });
    options_.tokenizer = "bpe";
    options_.inputs = {directory_ / "text.txt"};
    expect_error(Exit::usage, {"64", "257 to"}, [&] { prepare_quietly(); });
}

TEST_CASE_METHOD(PrepareFixture, "prepare: the chosen end-of-text token is saved with the data") {
    nlohmann::ordered_json tokenizer = nlohmann::ordered_json::parse(
        read_file("test/recorded/tokenizers/tokenizer_families.json"))["families"]["deepseek"]["tokenizer"];
    tokenizer["added_tokens"][0]["content"] = "<|finis|>";
    write_bytes(directory_ / "finis.json", tokenizer.dump());
    options_.tokenizer = directory_ / "finis.json";
    options_.vocab_size = 0;
    expect_error(Exit::data, {"--end-of-text"}, [&] { prepare_quietly(); });
    options_.end_of_text = "<|finis|>";
    prepare_quietly();
    const Tokenizer saved = Tokenizer::load(out_ + "/tokenizer.json");
    CHECK(saved.token(saved.eot()) == "<|finis|>");
    CHECK(saved.digest() == dataset()["tokenizer"]["xxh3"]);
    // A data set that replaces it has its own end-of-text token.
    options_.tokenizer = "bytes";
    expect_error(Exit::usage, {"--end-of-text", "\"bytes\""}, [&] { prepare_quietly(); });
    options_.end_of_text = "";
    prepare_quietly();
    CHECK(Tokenizer::load(out_ + "/tokenizer.json").digest() == Tokenizer::bytes().digest());
}

TEST_CASE_METHOD(PrepareFixture, "prepare: bytes without a token are dropped and reported") {
    const nlohmann::ordered_json families =
        nlohmann::ordered_json::parse(read_file("test/recorded/tokenizers/tokenizer_families.json"))["families"];
    write_bytes(directory_ / "missing.json", families["smollm2_missing_bytes"]["tokenizer"].dump());
    write_bytes(directory_ / "text.txt", "In the\x04 beginning\x04\x05 God\n");
    options_.tokenizer = directory_ / "missing.json";
    options_.vocab_size = 0;
    options_.val_fraction = 0;
    prepare_quietly();
    CHECK_THAT(progress_.at(0), ContainsSubstring("of 256 bytes have no token: encoding drops them"));
    CHECK(summary_.train.text_bytes == 24);
    const Tokenizer tokenizer = Tokenizer::load(out_ + "/tokenizer.json");
    TokenStream stream({out_ + "/train_000000.bin"}, tokenizer.vocab_size());
    std::vector<int32_t> ids(stream.token_count());
    stream.read(0, ids.size(), ids.data());
    CHECK(tokenizer.decode(ids) == kEndOfText + std::string("In the beginning God\n"));
}
