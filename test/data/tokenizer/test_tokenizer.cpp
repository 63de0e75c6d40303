#include <map>
#include <nlohmann/json.hpp>

#include "data/tokenizer/encoder.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "test/support/add_text.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"

static Tokenizer hugging_face_tokenizer() {
    return Tokenizer::load("test/recorded/tokenizers/tokenizer_huggingface.json");
}
static std::string corpus() { return read_file("test/recorded/tokenizers/tokenizer_corpus.txt"); }

static Tokenizer train(std::string_view text, int vocab_size) {
    BpeTrainer trainer;
    add_text(trainer, text);
    return trainer.train(vocab_size);
}

// Merges as bytes, because ids differ between tokenizers with kEndOfText first and last.
static std::vector<std::pair<std::string, std::string>> merge_bytes(const Tokenizer& tokenizer) {
    std::vector<std::pair<std::string, std::string>> merges;
    for (auto [left, right] : tokenizer.merges()) merges.emplace_back(tokenizer.token(left), tokenizer.token(right));
    return merges;
}

static std::string random_text(uint64_t seed, size_t count, const std::vector<std::string>& alphabet) {
    std::string text;
    for (int i : random_integers(count, seed, int(alphabet.size()))) text += alphabet[size_t(i)];
    return text;
}

static std::string random_bytes(uint64_t seed, size_t count) {
    std::string text;
    for (int byte : random_integers(count, seed, 256)) text += char(byte);
    return text;
}

// Characters, white space of all kinds, and bytes that are not UTF-8 (truncated, overlong, surrogate, beyond U+10FFFF).
static const std::vector<std::string> kDifficult = {"a",
                                                    "b",
                                                    "'s",
                                                    "'",
                                                    "7",
                                                    ".",
                                                    " ",
                                                    "  ",
                                                    "\n",
                                                    "\t",
                                                    "\r\n",
                                                    "\v",
                                                    "é",
                                                    "日",
                                                    "😀",
                                                    "\u00a0",
                                                    "\u0085",
                                                    "\u2003",
                                                    "\u2028",
                                                    "\u3000",
                                                    "\u1680",
                                                    "\u202f",
                                                    "\u180e",
                                                    "\u0301",
                                                    "\xff",
                                                    "\x80",
                                                    "\xe2\x80",
                                                    "\xe3\x80",
                                                    "\xc2",
                                                    "\xc0\x80",
                                                    "\xe0\x80\x80",
                                                    "\xed\xa0\x80",
                                                    "\xf4\x90\x80\x80",
                                                    "\xf0\x9f\x98"};

// The texts in `path` must be encoded to the ids recorded there, and decoded from them.
static void check_reference_ids(const Tokenizer& tokenizer, const std::string& path) {
    Encoder encoder(tokenizer);
    auto cases = parse_json(read_file(path), path, Exit::data);
    REQUIRE(cases.size() >= 15);
    for (const auto& reference : cases) {
        std::string text = reference["text"].get<std::string>();
        INFO(text);
        CHECK(encoder.encode(text) == reference["ids"].get<std::vector<int32_t>>());
        CHECK(tokenizer.decode(encoder.encode(text)) == text);
    }
}

TEST_CASE("tokenizer: every text has Hugging Face's ids") {
    check_reference_ids(hugging_face_tokenizer(), "test/recorded/tokenizers/tokenizer_reference.json");
}

TEST_CASE("tokenizer: GPT-2's vocabulary gives the ids of Hugging Face's tokenizers and tiktoken") {
    Tokenizer gpt2 = Tokenizer::load("data/gpt2/vocab.json");
    CHECK(gpt2.vocab_size() == 50257);
    CHECK(gpt2.eot() == 50256);
    CHECK(gpt2.merges().size() == 50000);
    check_reference_ids(gpt2, "test/recorded/tokenizers/gpt2_reference.json");
}

TEST_CASE("tokenizer: training gives Hugging Face's merges") {
    Tokenizer reference = hugging_face_tokenizer();
    Tokenizer trained = train(corpus(), reference.vocab_size());
    CHECK(trained.vocab_size() == 600);
    CHECK(trained.eot() == 599);
    CHECK(reference.eot() == 0);
    CHECK(merge_bytes(trained) == merge_bytes(reference));
}

TEST_CASE("tokenizer: decoding the ids of any bytes gives the bytes") {
    Tokenizer byte_tokenizer = Tokenizer::bytes(), bpe = hugging_face_tokenizer();
    REQUIRE(byte_tokenizer.vocab_size() == 257);
    REQUIRE(byte_tokenizer.eot() == 256);
    for (const Tokenizer* tokenizer : {&byte_tokenizer, &bpe}) {
        Encoder encoder(*tokenizer);
        auto comes_back = [&](const std::string& text) {
            std::vector<int32_t> ids = encoder.encode(text);
            size_t bytes = 0;
            for (int32_t id : ids) bytes += size_t(tokenizer->token_bytes(id));
            return tokenizer->decode(ids) == text && bytes == text.size();
        };
        for (int a = 0; a < 256; a++)
            for (int b = 0; b < 256; b++)
                if (!comes_back({char(a), char(b)})) FAIL("bytes " << a << ' ' << b);
        for (uint64_t seed = 0; seed < 200; seed++) {
            CHECK(comes_back(random_bytes(seed, seed)));
            CHECK(comes_back(random_text(seed, 100, kDifficult)));
        }
        CHECK(comes_back("text that says <|endoftext|> is no end of text"));
        CHECK(tokenizer->token_bytes(tokenizer->eot()) == 0);
        CHECK(tokenizer->decode(std::vector<int32_t>{tokenizer->eot()}) == kEndOfText);
        CHECK(encoder.encode("").empty());
        std::vector<int32_t> ids = encoder.encode("<|endoftext|>");
        CHECK(std::find(ids.begin(), ids.end(), tokenizer->eot()) == ids.end());
        expect_error(Exit::internal, {"-1"}, [&] { tokenizer->decode(std::vector<int32_t>{-1}); });
        expect_error(Exit::internal, {"600"}, [&] { tokenizer->decode(std::vector<int32_t>{600}); });
    }
    CHECK(Encoder(byte_tokenizer).encode("A\xff") == std::vector<int32_t>{65, 255});
}

static std::vector<std::string> pieces(std::string_view text) {
    std::vector<std::string> result;
    static Pretokenizer pretokenizer;
    pretokenizer.split(text, [&](std::string_view piece) { result.emplace_back(piece); });
    return result;
}

TEST_CASE("tokenizer: the pieces of GPT-2's pattern, and of bytes that are not UTF-8") {
    using Pieces = std::vector<std::string>;
    CHECK(pieces("").empty());
    CHECK(pieces("It's  12 o'clock,\n\n they'll say!?  ") ==
          Pieces{"It", "'s", " ", " 12", " o", "'", "clock", ",", "\n\n", " they", "'ll", " say", "!?", "  "});
    CHECK(pieces("'S x_y 3½日本") == Pieces{"'", "S", " x", "_", "y", " 3½", "日本"});
    CHECK(pieces("a\xff\xfe b") == Pieces{"a", "\xff\xfe", " b"});
    for (std::string invalid : {"\x80", "\xc2", "\xc1\x80", "\xe2\x80", "\xe0\x9f\x80", "\xed\xa0\x80",
                                "\xf0\x8f\x80\x80", "\xf0\x9f\x98", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80"})
        CHECK(pieces("!" + invalid + "!") == Pieces{"!", invalid, "!"});
    for (std::string valid :
         {"\xc2\xa1", "\xe0\xa5\xb0", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbd"})
        CHECK(pieces("!" + valid + "!").size() == 1);
}

TEST_CASE("tokenizer: white space is Unicode's") {
    auto is_space = [](int c) {
        return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
               (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
    };
    for (int c = 1; c < 0x3100; c++) {
        std::string character;
        if (c < 0x80)
            character = {char(c)};
        else if (c < 0x800)
            character = {char(0xc0 | c >> 6), char(0x80 | (c & 63))};
        else
            character = {char(0xe0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
        INFO("U+" << std::hex << c);
        CHECK((pieces(character + "\n").size() == 1) == is_space(c));
        size_t expected_cut = !is_space(c) ? 1 + character.size() : c < 0x80 ? 1 : 0;
        CHECK(last_safe_cut("!" + character + "\n", SafeCut::by_gpt2) == expected_cut);
    }
}

TEST_CASE("tokenizer: text may be split where last_safe_cut says") {
    int cuts = 0;
    for (uint64_t seed = 0; seed < 1000; seed++) {
        std::string text = random_text(seed, 24, kDifficult);
        for (size_t length = 1; length <= text.size(); length++) {
            size_t cut = last_safe_cut(std::string_view(text).substr(0, length), SafeCut::by_gpt2);
            if (cut == 0) continue;
            CHECK(cut < length);
            cuts++;
            std::vector<std::string> parts = pieces(std::string_view(text).substr(0, cut));
            for (const std::string& piece : pieces(std::string_view(text).substr(cut))) parts.push_back(piece);
            if (parts != pieces(text)) FAIL("cut at " << cut << " of " << quoted(text, 200));
        }
    }
    CHECK(cuts > 10'000);
    CHECK(last_safe_cut("") == 0);
    CHECK(last_safe_cut(" ") == 0);
    CHECK(last_safe_cut("a\u2581 b\tc\nd", SafeCut::by_spaces) == 0);
    CHECK(last_safe_cut("a  b\tc", SafeCut::by_spaces) == 1);
    CHECK(last_safe_cut("a\t b\tc", SafeCut::by_spaces) == 2);
    CHECK(last_safe_cut("a\u2581 b", SafeCut::by_gpt2) == 4);
    CHECK(last_safe_cut(" a") == 0);
    CHECK(last_safe_cut("a ") == 1);
    CHECK(last_safe_cut("a b  c") == 3);
    CHECK(last_safe_cut("a b\u3000 c") == 1);
}

// The definition: repeatedly merge the pair of the lowest rank, the leftmost one of equal pairs.
static std::vector<int32_t> encode_by_definition(const Tokenizer& tokenizer, std::string_view word) {
    std::vector<int32_t> ids;
    for (char byte : word) ids.push_back(tokenizer.byte_id(uint8_t(byte)));
    for (;;) {
        size_t best = ids.size();
        Tokenizer::Merged merge = {INT32_MAX, 0};
        for (size_t i = 0; i + 1 < ids.size(); i++)
            if (auto merged = tokenizer.merged(ids[i], ids[i + 1]); merged && merged->rank < merge.rank)
                best = i, merge = *merged;
        if (best == ids.size()) return ids;
        ids[best] = merge.id;
        ids.erase(ids.begin() + std::ptrdiff_t(best) + 1);
    }
}

TEST_CASE("tokenizer: merging with a heap follows the definition") {
    std::string text = random_text(1, 20'000, {"a", "a", "b", "c", " "});
    for (int vocab_size : {260, 280, 400, 900}) {
        Tokenizer tokenizer = train(text, vocab_size);
        Encoder encoder(tokenizer);
        for (uint64_t seed = 0; seed < 300; seed++) {
            std::string word = random_text(seed, 1 + seed % 80, {"a", "a", "b", "c"});
            INFO(word);
            CHECK(encoder.encode(word) == encode_by_definition(tokenizer, word));
        }
        CHECK(encoder.encode(std::string(1000, 'a')) == encode_by_definition(tokenizer, std::string(1000, 'a')));
    }
}

TEST_CASE("tokenizer: a word of a quarter megabyte takes no longer than other text") {
    Tokenizer tokenizer = train(random_text(1, 20'000, {"a", "b", "c", " "}), 600);
    std::string word = random_text(2, 1 << 18, {"a", "b", "c"});
    CHECK(tokenizer.decode(Encoder(tokenizer).encode(word)) == word);
}

TEST_CASE("tokenizer: cached words have the same ids") {
    Tokenizer tokenizer = hugging_face_tokenizer();
    Encoder encoder(tokenizer);
    std::string text;
    for (int i = 0; i < 150'000; i++)
        text += format(" %x", unsigned(i) * 2654435761u);  // more words than the cache holds
    std::vector<int32_t> first = encoder.encode(text);
    CHECK(encoder.encode(text) == first);
    CHECK(tokenizer.decode(first) == text);
    CHECK(encoder.encode(corpus()) == Encoder(tokenizer).encode(corpus()));
}

// Each way to split `word` with its frequency in 20,000 trials.
static std::map<std::string, double> shares_of_cuts(const Tokenizer& tokenizer, const std::string& word, double p) {
    constexpr int kTries = 20'000;
    Encoder encoder(tokenizer, p, 7);
    std::map<std::string, double> shares;
    for (int i = 0; i < kTries; i++) {
        std::string cut;
        for (int32_t id : encoder.encode(word, uint64_t(i))) cut += (cut.empty() ? "" : "|") + tokenizer.token(id);
        shares[cut] += 1.0 / kTries;
    }
    return shares;
}

TEST_CASE("tokenizer: BPE-dropout skips merges at its rate") {
    Tokenizer bytes = Tokenizer::bytes();
    std::vector<std::string> tokens;
    for (int id = 0; id < 256; id++) tokens.push_back(bytes.token(id));
    for (const char* more : {"ab", "abc", "xy", kEndOfText}) tokens.emplace_back(more);
    const Tokenizer tokenizer(tokens, {{'a', 'b'}, {256, 'c'}, {'x', 'y'}}, {259}, "test");
    const double p = 0.3, q = 1 - p;
    auto near = [](double share, double expected) { return std::abs(share - expected) < 5 * 0.5 / std::sqrt(20'000); };

    auto one_after_the_other = shares_of_cuts(tokenizer, "abc", p);
    CHECK(near(one_after_the_other["a|b|c"], p));
    CHECK(near(one_after_the_other["ab|c"], q * p));
    CHECK(near(one_after_the_other["abc"], q * q));
    // A skipped merge is tried again after another merge.
    auto side_by_side = shares_of_cuts(tokenizer, "abxy", p);
    CHECK(near(side_by_side["ab|xy"], q * q + p * q * q));
    CHECK(near(side_by_side["ab|x|y"], q * p));
    CHECK(near(side_by_side["a|b|xy"], p * q * p));
    CHECK(near(side_by_side["a|b|x|y"], p * p));
    CHECK(shares_of_cuts(tokenizer, "abcxy", 0).at("abc|xy") > 0.999);
}

TEST_CASE("tokenizer: BPE-dropout preserves the text and depends only on seed and stream") {
    Tokenizer tokenizer = hugging_face_tokenizer();
    Encoder encoder(tokenizer, 0.1, 1), twin(tokenizer, 0.1, 1), other(tokenizer, 0.1, 2);
    const std::vector<int32_t> first = encoder.encode(corpus()), second = encoder.encode(corpus(), 1);
    CHECK(tokenizer.decode(first) == corpus());
    CHECK(tokenizer.decode(second) == corpus());
    CHECK(first == twin.encode(corpus()));
    CHECK(first != second);
    CHECK(first != other.encode(corpus()));
    CHECK(first.size() > Encoder(tokenizer).encode(corpus()).size());
}

// Counts all pairs again before each merge.
static std::vector<std::pair<std::string, std::string>> train_by_definition(std::string_view text, size_t n_tokens) {
    std::vector<std::pair<std::vector<std::string>, int>> words;
    std::map<std::string, int> counts;
    Pretokenizer().split(text, [&](std::string_view word) { counts[std::string(word)]++; });
    for (const auto& [word, count] : counts) {
        words.emplace_back(std::vector<std::string>(), count);
        for (char byte : word) words.back().first.emplace_back(1, byte);
    }
    std::map<std::string, int> age;  // an id's meaning: the order in which tokens were created
    for (uint8_t byte : gpt2_byte_order()) age.emplace(std::string(1, char(byte)), int(age.size()));
    std::vector<std::pair<std::string, std::string>> merges;
    while (age.size() < n_tokens) {
        std::map<std::pair<int, int>, int> pairs;
        std::map<int, std::string> token;
        for (const auto& [bytes, id] : age) token[id] = bytes;
        for (const auto& [symbols, count] : words)
            for (size_t i = 0; i + 1 < symbols.size(); i++) pairs[{age[symbols[i]], age[symbols[i + 1]]}] += count;
        auto best = pairs.begin();
        for (auto pair = pairs.begin(); pair != pairs.end(); ++pair)
            if (pair->second > best->second) best = pair;
        if (best == pairs.end() || best->second < 2) break;
        std::pair<std::string, std::string> merge = {token[best->first.first], token[best->first.second]};
        merges.push_back(merge);
        if (!age.emplace(merge.first + merge.second, int(age.size())).second) FAIL("two merges give the same token");
        for (auto& [symbols, count] : words)
            for (size_t i = 0; i + 1 < symbols.size(); i++)
                if (symbols[i] == merge.first && symbols[i + 1] == merge.second) {
                    symbols[i] += symbols[i + 1];
                    symbols.erase(symbols.begin() + std::ptrdiff_t(i) + 1);
                }
    }
    return merges;
}

TEST_CASE("tokenizer: training with running counts follows the definition") {
    for (uint64_t seed = 0; seed < 40; seed++) {
        size_t letters = 1 + seed % 4;
        std::vector<std::string> alphabet = {"a", "b", "c", "d"};
        alphabet.resize(letters);
        for (int i = 0; i < int(seed % 3); i++) alphabet.push_back(" ");
        std::string text = random_text(seed, 60 + 10 * seed, alphabet);
        INFO(text);
        CHECK(merge_bytes(train(text, 330)) == train_by_definition(text, 329));
    }
}

TEST_CASE("tokenizer: training stops when no pair occurs twice") {
    CHECK(train("", 300).vocab_size() == 257);
    CHECK(train("a bc def", 300).vocab_size() == 257);
    CHECK(train("ab ab", 300).vocab_size() == 258);
}

TEST_CASE("tokenizer: training on pieces in any order equals training on the whole") {
    std::string text = corpus();
    size_t cut = last_safe_cut(std::string_view(text).substr(0, text.size() / 2));
    REQUIRE(cut > 1000);
    BpeTrainer trainer;
    add_text(trainer, std::string_view(text).substr(cut));
    add_text(trainer, std::string_view(text).substr(0, cut));
    CHECK(trainer.train(500).digest() == train(text, 500).digest());
    CHECK(train(text, 500).digest() != train(text, 501).digest());
}

TEST_CASE("tokenizer: a bounded number of words keeps the frequent ones") {
    BpeTrainer trainer(100);
    for (int i = 0; i < 20'000; i++) add_text(trainer, i % 4 ? format(" %d", i * 7919) : " frequent");
    Tokenizer tokenizer = trainer.train(280);
    std::vector<std::string> tokens;
    for (int32_t id = 0; id < tokenizer.vocab_size(); id++) tokens.push_back(tokenizer.token(id));
    CHECK(std::find(tokens.begin(), tokens.end(), " frequent") != tokens.end());
}
