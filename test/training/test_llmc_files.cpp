// llm.c's files compared with the files that test/recorded/llmc/make_llmc_files.py wrote with PyTorch and
// transformers, and damaged files.

#include <algorithm>
#include <cstring>
#include <iterator>

#include "data/evaluation/eval_file.h"
#include "data/tokenizer/tokenizer.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "training/models/llmc_files.h"

namespace {

constexpr const char* kModel = "test/recorded/llmc/model.bin";
constexpr const char* kModelBf16 = "test/recorded/llmc/model_bf16.bin";
constexpr const char* kDebugState = "test/recorded/llmc/debug_state.bin";
constexpr const char* kTokenizer = "test/recorded/llmc/tokenizer.bin";
constexpr const char* kEval = "test/recorded/llmc/eval.bin";
constexpr size_t kHeaderBytes = 1024;
constexpr int kVocab = 269, kPadded = 384, kChannels = 12;

Gpt model_of(const GptShape& shape) {
    return Gpt({.shape = shape, .batch = 1, .seq_len = 1, .optimizer = {}, .head_rows = 1, .training = false},
               comm_single());
}

Gpt loaded(const std::string& path) {
    const LlmcModel model(path);
    Gpt gpt = model_of(model.shape);
    model.load(gpt);
    return gpt;
}

std::string written(const Gpt& gpt, Dtype type) {
    TemporaryDirectory directory;
    write_llmc_model(directory / "model.bin", gpt, type);
    return read_file(directory / "model.bin");
}

// The bytes with words of 32 or 16 bits replaced.
template <class Word = int32_t> std::string with_word(std::string bytes, size_t index, Word value) {
    std::memcpy(bytes.data() + index * sizeof(Word), &value, sizeof(Word));
    return bytes;
}

// The file with these bytes must fail with these words, and so must the file cut at any place or with a byte added.
template <class Read> class Refusals {
public:
    explicit Refusals(Read read) : read_(read) {}
    void expect(const std::string& bytes, std::initializer_list<std::string> words) {
        const std::string path = directory_ / "file.bin";
        write_bytes(path, bytes);
        const std::string sentence = expect_error(Exit::data, words, [&] { read_(path); });
        CHECK_THAT(sentence, ContainsSubstring("file.bin"));
    }
    void expect_cut(const std::string& bytes) {
        for (size_t size = 0; size < bytes.size(); size += size < 1100 ? 97 : bytes.size() / 50 + 1)
            expect(bytes.substr(0, size), {std::to_string(size)});
        expect(bytes.substr(0, bytes.size() - 1), {});
        expect(bytes + "x", {std::to_string(bytes.size() + 1)});
    }

private:
    Read read_;
    TemporaryDirectory directory_;
};

}  // namespace

TEST_CASE("llm.c: importing and exporting a model gives the same bits", "[llmc]") {
    const Gpt gpt = loaded(kModel), rounded = loaded(kModelBf16);
    CHECK((written(gpt, Dtype::fp32) == read_file(kModel)));
    CHECK((written(gpt, Dtype::bf16) == read_file(kModelBf16)));  // rounded by PyTorch
    CHECK((written(rounded, Dtype::bf16) == read_file(kModelBf16)));
    CHECK((written(rounded, Dtype::fp32) != read_file(kModel)));
}

TEST_CASE("llm.c: bf16 is rounded to nearest even", "[llmc]") {
    TemporaryDirectory directory;
    const std::string path = directory / "model.bin";
    const struct {
        uint32_t fp32;
        uint16_t bf16;
    } cases[] = {{0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x3f80ffff, 0x3f81},
                 {0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0x80000001, 0x8000}, {0x00018000, 0x0002}};
    std::string bytes = read_file(kModel);
    for (size_t i = 0; i < std::size(cases); i++) bytes = with_word(bytes, kHeaderBytes / 4 + i, cases[i].fp32);
    write_bytes(path, bytes);
    const std::string narrow = written(loaded(path), Dtype::bf16);
    for (size_t i = 0; i < std::size(cases); i++) {
        uint16_t word;
        std::memcpy(&word, narrow.data() + kHeaderBytes + 2 * i, 2);
        INFO(std::hex << cases[i].fp32);
        CHECK(word == cases[i].bf16);
    }
}

TEST_CASE("llm.c: the padding of the vocabulary is ignored and written as zeros", "[llmc]") {
    TemporaryDirectory directory;
    const std::string path = directory / "model.bin", good = read_file(kModel);
    const size_t begin = kHeaderBytes + size_t(kVocab) * kChannels * 4, end = kHeaderBytes + kPadded * kChannels * 4;
    std::string filled = good;
    std::fill(filled.begin() + std::ptrdiff_t(begin), filled.begin() + std::ptrdiff_t(end), '\x3f');
    write_bytes(path, filled);
    CHECK((written(loaded(path), Dtype::fp32) == good));
    // Other programs may pad to a different number of rows, or not at all.
    write_bytes(path, with_word(good.substr(0, begin) + good.substr(end), 7, kVocab));
    CHECK(LlmcModel(path).padded_vocab == kVocab);
    CHECK((written(loaded(path), Dtype::fp32) == good));
}

TEST_CASE("llm.c: a model of other sizes is rejected, and an existing file is kept", "[llmc]") {
    const LlmcModel model(kModel);
    const Gpt gpt = loaded(kModel);
    for (int GptShape::*size :
         {&GptShape::n_layer, &GptShape::n_head, &GptShape::n_embd, &GptShape::n_positions, &GptShape::vocab_size}) {
        GptShape other = model.shape;
        other.*size = size == &GptShape::n_head ? 1 : 2 * (other.*size);
        if (size == &GptShape::n_head) other.given_kv_heads = 1;
        const Gpt wrong = model_of(other);
        expect_error(Exit::config, {kModel, std::to_string(model.shape.*size), std::to_string(other.*size)},
                     [&] { model.load(wrong); });
    }
    expect_error(Exit::cannot_create, {kModel, "exists"}, [&] { write_llmc_model(kModel, gpt, Dtype::fp32); });
    expect_error(Exit::cannot_create, {"test/recorded"}, [&] { write_llmc_model("test/recorded", gpt, Dtype::fp32); });
}

TEST_CASE("llm.c: damaged models are rejected", "[llmc]") {
    Refusals refusals([](const std::string& path) { LlmcModel model(path); });
    for (const char* path : {kModel, kModelBf16}) {
        const std::string good = read_file(path);
        refusals.expect(with_word(good, 0, 20240325), {"not a model"});
        refusals.expect(with_word(good, 0, 20240803), {"Llama 3"});
        for (const int version : {-1, 0, 1, 2, 4, 6})
            refusals.expect(with_word(good, 1, version), {"version " + std::to_string(version)});
        const char* names[] = {"max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size"};
        for (size_t word = 2; word < 8; word++)
            for (const int value : {0, -1, INT32_MIN, INT32_MAX})
                refusals.expect(with_word(good, word, value), {names[word - 2], std::to_string(value)});
        refusals.expect(with_word(good, 1, path == kModel ? 5 : 3), {std::to_string(good.size())});
        refusals.expect(with_word(good, 2, 11), {"max_seq_len 11", std::to_string(good.size())});
        refusals.expect(with_word(good, 3, 385), {"padded_vocab_size (384)", "vocab_size (385)"});
        refusals.expect(with_word(good, 4, 3), {"num_layers 3", std::to_string(good.size())});
        refusals.expect(with_word(good, 4, 10000), {"num_layers 10000"});
        refusals.expect(with_word(good, 5, 5), {"channels (12)", "num_heads (5)"});
        refusals.expect(with_word(good, 6, 15), {"channels 15", std::to_string(good.size())});
        refusals.expect(with_word(good, 7, 268), {"padded_vocab_size (268)"});
        refusals.expect(with_word(good, 7, 385), {"padded_vocab_size 385", std::to_string(good.size())});
        refusals.expect_cut(good);
    }
}

TEST_CASE("llm.c: damaged debug states are rejected", "[llmc]") {
    const LlmcModel model(kModel);
    Refusals refusals([&](const std::string& path) { LlmcDebugState(path).check(model); });
    const std::string good = read_file(kDebugState);
    CHECK_NOTHROW(LlmcDebugState(kDebugState).check(model));
    refusals.expect(with_word(good, 0, 20240326), {"not a debug state"});
    refusals.expect(with_word(good, 1, 1), {"version 1"});
    for (const size_t word : {2, 3})
        for (const int value : {0, -1, INT32_MIN, INT32_MAX})
            refusals.expect(with_word(good, word, value), {std::to_string(value)});
    refusals.expect(with_word(good, 2, 1), {"1 sequences of 7", std::to_string(good.size())});
    refusals.expect(with_word(good, 3, 6), {"2 sequences of 6", std::to_string(good.size())});
    refusals.expect(with_word(good, 3, 11), {"11 tokens", "10 positions"});
    refusals.expect(with_word(good, 256 + 3, kVocab), {"token 3 is 269"});
    refusals.expect(with_word(good, 256 + 14 + 5, -1), {"target 5 is -1"});
    refusals.expect_cut(good);
}

TEST_CASE("llm.c: eval files are read", "[llmc]") {
    const std::vector<MultipleChoice> questions = read_eval_file(kEval);
    REQUIRE(questions.size() == 5);
    for (int i = 0; i < 5; i++) {  // the formulas of test/recorded/llmc/make_llmc_files.py
        const MultipleChoice& question = questions[size_t(i)];
        CHECK(question.label == (2 * i + 1) % 4);
        REQUIRE(question.context.size() == size_t(3 + i));
        for (int j = 0; j < 3 + i; j++) CHECK(question.context[size_t(j)] == (31 * i + 7 * j + 1) % kVocab);
        REQUIRE(question.completions.size() == 4);
        for (int c = 0; c < 4; c++) {
            const std::vector<int32_t>& completion = question.completions[size_t(c)];
            REQUIRE(completion.size() == size_t(1 + (c + i) % 3));
            for (int j = 0; j < int(completion.size()); j++)
                CHECK(completion[size_t(j)] == (17 * i + 5 * c + 3 * j + 2) % kVocab);
        }
    }
    CHECK(longest_sequence(questions) == 10);  // question 4: 7 + 3
    CHECK_NOTHROW(check_vocabulary(questions, 168, kEval));
    expect_error(Exit::data, {kEval, "question 4", "token 167", "167 tokens"},
                 [&] { check_vocabulary(questions, 167, kEval); });
}

TEST_CASE("llm.c: damaged eval files are rejected", "[llmc]") {
    Refusals refusals([](const std::string& path) { read_eval_file(path); });
    const std::string good = read_file(kEval);
    auto changed = [&](size_t word, int value) { return with_word(good, kHeaderBytes / 2 + word, uint16_t(value)); };
    refusals.expect(with_word(good, 0, 20240523), {"not a complete llm.c eval file"});
    refusals.expect(with_word(good, 1, 2), {"version 2"});
    for (const int count : {0, -1, 65536}) refusals.expect(with_word(good, 2, count), {std::to_string(count)});
    refusals.expect(with_word(good, 2, 4), {"4 questions", std::to_string(good.size())});
    refusals.expect(with_word(good, 2, 6), {"within question 5"});
    refusals.expect(with_word(good, 3, 58), {"longest question", "58"});
    refusals.expect(changed(0, 65534), {"question 0", "start marker is 65534", "65535"});
    refusals.expect(changed(1, 12), {"question 0", "header says 12"});
    refusals.expect(changed(2, 1), {"question 0", "number is 1"});
    refusals.expect(changed(3, 4), {"question 0", "4 completions", "label 4"});
    refusals.expect(changed(4, 1), {"question 0", "1 completions"});
    refusals.expect(changed(4, 3), {"question 0", "header says"});
    refusals.expect(changed(5, 0), {"question 0", "context has no tokens"});
    refusals.expect(changed(5, 65535), {"within question 0, the context"});
    refusals.expect(changed(9, 0), {"question 0", "completion 0 has no tokens"});
    refusals.expect_cut(good);
}

TEST_CASE("llm.c: tokenizers equal the files of llm.c's PyTorch script", "[llmc]") {
    const Tokenizer tokenizer = Tokenizer::load(kTokenizer);
    CHECK(tokenizer.vocab_size() == kVocab);
    CHECK(tokenizer.merges().size() == 12);
    CHECK((tokenizer.llmc() == read_file(kTokenizer)));

    auto with_token = [](const std::string& token, bool is_special) {
        std::vector<std::string> tokens;
        std::vector<int32_t> special = {256};
        for (int byte = 0; byte < 256; byte++) tokens.emplace_back(1, char(byte));
        tokens.push_back(kEndOfText);
        tokens.push_back(token);
        if (is_special) special.push_back(257);
        return Tokenizer(tokens, {}, special, "test");
    };
    CHECK(with_token(std::string(255, 'a'), false).llmc().size() == kHeaderBytes + 256 * 2 + 14 + 256);
    expect_error(Exit::data, {"token 257", "256 bytes", "255"},
                 [&] { with_token(std::string(256, 'a'), false).llmc(); });
    expect_error(Exit::data, {"token 257", "<|pad|>", "special"}, [&] { with_token("<|pad|>", true).llmc(); });
}

TEST_CASE("llm.c: a model has its layout's number of elements, for any number of layers") {
    constexpr int kPaddedRows = 128;
    for (const int layers : {1, 2, 3, 7, 48})
        for (const int width : {2, 64, 768}) {
            const GptShape shape{
                .n_layer = layers, .n_head = 2, .n_embd = width, .n_positions = 16, .vocab_size = 100};
            const size_t rows = size_t(shape.padded_vocab()), all = lay_out_tensors(shape).parameters;
            CHECK(llmc_elements(shape, kPaddedRows) == all + (kPaddedRows - rows) * size_t(width));
        }
}
