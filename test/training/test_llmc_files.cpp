// llm.c's files compared with the files that test/recorded/llmc/make_llmc_files.py wrote with PyTorch and
// transformers, and damaged files.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "data/tokenizer/tokenizer.h"
#include "model/inference.h"
#include "model/llmc.h"
#include "runtime/checkpoint/checkpoint.h"
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

// The master weights in the order of a file with `padded` rows of vocabulary, the padding as zeros.
std::vector<float> file_order(const Gpt& gpt, int padded) {
    std::vector<float> all;
    for (const LlmcTensor& entry : llmc_tensors(gpt.layout(), gpt.master_tensors(), padded)) {
        std::vector<float> values = file_values(entry.tensor);
        values.resize(entry.file_elements);
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

// `count` words of a file, from byte `begin` on.
template <class Word> std::vector<Word> words_of(const std::string& bytes, size_t begin, size_t count) {
    REQUIRE(begin + count * sizeof(Word) <= bytes.size());
    std::vector<Word> words(count);
    std::memcpy(words.data(), bytes.data() + begin, count * sizeof(Word));
    return words;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
    std::vector<uint32_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
    return bits;
}

// The norm of the difference, relative to the norm of what is expected.
double relative_error(const std::vector<float>& values, const std::vector<float>& expected) {
    REQUIRE(values.size() == expected.size());
    double squares = 0, error_squares = 0;
    for (size_t i = 0; i < values.size(); i++) {
        squares += double(expected[i]) * expected[i];
        error_squares += std::pow(double(values[i]) - expected[i], 2);
    }
    return std::sqrt(error_squares / squares);
}

std::string with_word(std::string bytes, size_t index, int32_t value) {
    std::memcpy(bytes.data() + index * sizeof(value), &value, sizeof(value));
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

TEST_CASE("llm.c: importing a model gives the same bits", "[llmc]") {
    const std::string file = read_file(kModel), rounded = read_file(kModelBf16);
    const size_t count = (file.size() - kHeaderBytes) / sizeof(float);
    CHECK(bits_of(file_order(loaded(kModel), kPadded)) == words_of<uint32_t>(file, kHeaderBytes, count));
    std::vector<uint32_t> widened;
    for (const uint16_t word : words_of<uint16_t>(rounded, kHeaderBytes, count))
        widened.push_back(uint32_t(word) << 16);
    CHECK(bits_of(file_order(loaded(kModelBf16), kPadded)) == widened);
}

TEST_CASE("llm.c: a model has PyTorch's logits, loss and gradients", "[llmc]") {
    constexpr int kBatch = 2, kLength = 7;
    constexpr size_t kRows = kBatch * kLength, kLogits = kHeaderBytes + 2 * kRows * 4,
                     kLoss = kLogits + kRows * kVocab * 4;
    const std::string state = read_file(kDebugState);
    const std::vector<int> ids = words_of<int>(state, kHeaderBytes, 2 * kRows);  // tokens, then targets
    // 4 standard deviations of the rounding errors of 44 successive sums of up to 384 terms; bf16 weights round more.
    for (const auto& [path, limit] : {std::pair{kModel, 4.4e-5}, {kModelBf16, 0.052}}) {
        INFO(path);
        const LlmcModel model(path);
        Gpt gpt({.shape = model.shape,
                 .batch = kBatch,
                 .seq_len = kLength,
                 .precision = Dtype::fp32,
                 .optimizer = {.name = OptimizerKind::sgd, .weight_decay = 0, .grad_clip = 0},
                 .head_rows = int(kRows)},
                comm_single());
        model.load(gpt);
        gpt.masters_changed();
        gpt.begin_step({});
        gpt.forward(ids.data());
        std::vector<float> logits(kRows * kVocab);
        for (size_t row = 0; row < kRows; row++) logits_of_row(gpt, int(row), logits.data() + row * kVocab);
        CHECK(relative_error(logits, words_of<float>(state, kLogits, logits.size())) < limit);
        gpt.backward(ids.data() + kRows, 1.0f / float(kRows));
        const float loss = float(gpt.end_step().loss_sum / double(kRows));
        CHECK(relative_error({loss}, words_of<float>(state, kLoss, 1)) < limit);
        size_t begin = kLoss + 4;
        for (const LlmcTensor& entry : llmc_tensors(gpt.layout(), gpt.gradient_tensors(), kPadded)) {
            INFO(entry.tensor.name);
            const std::vector<float> values = file_values(entry.tensor);
            CHECK(relative_error(values, words_of<float>(state, begin, values.size())) < limit);
            begin += 4 * entry.file_elements;
        }
        CHECK(begin == state.size());
    }
}

TEST_CASE("llm.c: the padding of the vocabulary is ignored", "[llmc]") {
    TemporaryDirectory directory;
    const std::string path = directory / "model.bin", good = read_file(kModel);
    const std::vector<uint32_t> weights = bits_of(file_order(loaded(kModel), kVocab));
    const size_t begin = kHeaderBytes + size_t(kVocab) * kChannels * 4, end = kHeaderBytes + kPadded * kChannels * 4;
    std::string filled = good;
    std::fill(filled.begin() + std::ptrdiff_t(begin), filled.begin() + std::ptrdiff_t(end), '\x3f');
    write_bytes(path, filled);
    CHECK(bits_of(file_order(loaded(path), kVocab)) == weights);
    // Other programs may pad to a different number of rows, or not at all.
    write_bytes(path, with_word(good.substr(0, begin) + good.substr(end), 7, kVocab));
    CHECK(LlmcModel(path).padded_vocab == kVocab);
    CHECK(bits_of(file_order(loaded(path), kVocab)) == weights);
}

TEST_CASE("llm.c: a model of other sizes is rejected", "[llmc]") {
    const LlmcModel model(kModel);
    for (int GptShape::*size :
         {&GptShape::n_layer, &GptShape::n_head, &GptShape::n_embd, &GptShape::n_positions, &GptShape::vocab_size}) {
        GptShape other = model.shape;
        other.*size = size == &GptShape::n_head ? 1 : 2 * (other.*size);
        if (size == &GptShape::n_head) other.given_kv_heads = 1;
        const Gpt wrong = model_of(other);
        expect_error(Exit::config, {kModel, std::to_string(model.shape.*size), std::to_string(other.*size)},
                     [&] { model.load(wrong); });
    }
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

TEST_CASE("llm.c: a tokenizer has the tokens of its file", "[llmc]") {
    const Tokenizer tokenizer = Tokenizer::load(kTokenizer);
    CHECK(tokenizer.vocab_size() == kVocab);
    CHECK(tokenizer.merges().size() == 12);
    CHECK(tokenizer.eot() == kVocab - 1);
    std::string tokens;
    for (int32_t id = 0; id < kVocab; id++) {
        tokens += char(tokenizer.token(id).size());
        tokens += tokenizer.token(id);
    }
    CHECK((tokens == read_file(kTokenizer).substr(kHeaderBytes)));
}

TEST_CASE("llm.c: a model has its layout's number of elements, for any number of layers") {
    constexpr int kPaddedRows = 128;
    for (const int layers : {1, 2, 3, 7, 48})
        for (const int width : {2, 64, 768}) {
            const GptShape shape{.n_layer = layers, .n_head = 2, .n_embd = width, .n_positions = 16, .vocab_size = 100};
            const size_t rows = size_t(shape.padded_vocab()), all = lay_out_tensors(shape).parameters;
            CHECK(llmc_elements(shape, kPaddedRows) == all + (kPaddedRows - rows) * size_t(width));
        }
}
