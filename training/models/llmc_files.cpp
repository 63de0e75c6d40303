#include "training/models/llmc_files.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "data/shards/shards.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/header_word.h"
#include "runtime/io/reject_file.h"

namespace {

constexpr size_t kHeaderWords = 256, kHeaderBytes = kHeaderWords * sizeof(int32_t);
constexpr int32_t kModelMagic = 20240326, kDebugStateMagic = 20240327, kEvalMagic = 20240522,
                  kOptimizerMagic = 20240527, kLlama3Magic = 20240803;
constexpr int32_t kFp32Version = 3, kBf16Version = 5, kDebugStateVersion = 2;

std::string_view header_of(const MappedFile& file, int32_t magic, const char* what) {
    if (header_word(file.text(), 0) != magic)
        reject_file(file.path(), "not %s of llm.c: the file has %zu bytes and looks like %s", what, file.size(),
                    describe_content(file.text().substr(0, kHeaderBytes), file.size()));
    if (file.size() < kHeaderBytes)
        reject_file(file.path(), "the header of %s has %zu bytes, but the file ends after %zu", what, kHeaderBytes,
                    file.size());
    return file.text();
}

// Returns a header word, which must be from 1 to `most`.
int checked_word(const MappedFile& file, size_t index, const char* name, int most) {
    const int32_t value = header_word(file.text(), index);
    if (value < 1 || value > most)
        reject_file(file.path(), "word %zu of the header, %s, is %d, but must be from 1 to %d", index, name, value,
                    most);
    return value;
}

void check_size(const MappedFile& file, size_t bytes, const std::string& numbers) {
    if (file.size() != bytes)
        reject_file(file.path(), "%s make %zu bytes, but the file has %zu%s", numbers, bytes, file.size(),
                    file.size() < bytes ? ": it is truncated" : "");
}

}  // namespace

std::optional<LlmcKind> llmc_kind(std::string_view first_bytes) {
    switch (header_word(first_bytes, 0)) {
        case kModelMagic: return LlmcKind::model;
        case kDebugStateMagic: return LlmcKind::debug_state;
        case kEvalMagic: return LlmcKind::eval;
        case kOptimizerMagic: return LlmcKind::optimizer_state;
        case kLlama3Magic: return LlmcKind::llama3;
        default: return std::nullopt;
    }
}

LlmcModel::LlmcModel(const std::string& path) : file(path) {
    if (llmc_kind(file.text()) == LlmcKind::llama3)
        reject_file(path, "llm.c Llama 3 model; only llm.c's GPT-2 models are supported");
    const int32_t version = header_word(header_of(file, kModelMagic, "a model"), 1);
    if (version != kFp32Version && version != kBf16Version)
        reject_file(path, "llm.c model of version %d; only versions 3 (fp32) and 5 (bf16) are supported", version);
    type = version == kFp32Version ? Dtype::fp32 : Dtype::bf16;
    shape.n_positions = checked_word(file, 2, "max_seq_len", 1 << 24);
    shape.vocab_size = checked_word(file, 3, "vocab_size", 1 << 24);
    shape.n_layer = checked_word(file, 4, "num_layers", 10000);
    shape.n_head = checked_word(file, 5, "num_heads", 65536);
    shape.n_embd = checked_word(file, 6, "channels", 65536);
    padded_vocab = checked_word(file, 7, "padded_vocab_size", 1 << 25);
    if (shape.n_embd % shape.n_head != 0)
        reject_file(path, "words 6 and 5 of the header: channels (%d) must be a multiple of num_heads (%d)",
                    shape.n_embd, shape.n_head);
    if (padded_vocab < shape.vocab_size)
        reject_file(path, "words 7 and 3 of the header: padded_vocab_size (%d) must be at least vocab_size (%d)",
                    padded_vocab, shape.vocab_size);
    check_size(file, kHeaderBytes + llmc_elements(shape, padded_vocab) * size_of(type),
               format("max_seq_len %d, vocab_size %d, num_layers %d, num_heads %d, channels %d, padded_vocab_size %d "
                      "and %s",
                      shape.n_positions, shape.vocab_size, shape.n_layer, shape.n_head, shape.n_embd, padded_vocab,
                      name_of(type)));
}

std::vector<float> LlmcModel::values(size_t first, size_t count) const {
    const ConstView array(file.data() + kHeaderBytes, type);
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = float(element(array, first + i));
    return values;
}

void LlmcModel::load(const Gpt& gpt) const {
    const GptShape& wanted = gpt.options().shape;
    for (const auto& [name, has, needs] : {std::tuple{"n_layer", shape.n_layer, wanted.n_layer},
                                           {"n_head", shape.n_head, wanted.n_head},
                                           {"n_embd", shape.n_embd, wanted.n_embd},
                                           {"n_positions", shape.n_positions, wanted.n_positions},
                                           {"vocab_size", shape.vocab_size, wanted.vocab_size}})
        if (has != needs) fail(Exit::config, "%s: %s is %d, but this run needs %d", file.path(), name, has, needs);
    size_t begin = 0;
    for (const LlmcTensor& entry : llmc_tensors(gpt.layout(), gpt.master_tensors(), padded_vocab)) {
        set_file_values(entry.tensor, values(begin, elements_of(entry.tensor)));
        begin += entry.file_elements;
    }
}

void write_llmc_model(const std::string& path, const Gpt& gpt, Dtype type) {
    if (file_exists(path) || directory_exists(path)) fail(Exit::cannot_create, "%s exists; nothing was written", path);
    const GptShape& shape = gpt.options().shape;
    const int32_t version = type == Dtype::fp32 ? kFp32Version : kBf16Version;
    const int32_t words[kHeaderWords] = {kModelMagic,   version,      shape.n_positions, shape.vocab_size,
                                         shape.n_layer, shape.n_head, shape.n_embd,      shape.padded_vocab()};
    const size_t bytes = sizeof(words) + llmc_elements(shape, shape.padded_vocab()) * size_of(type);
    write_file_atomically(path, bytes, [&](OutputFile& file) {
        file.append(words, sizeof(words));
        for (const LlmcTensor& entry : llmc_tensors(gpt.layout(), gpt.master_tensors(), shape.padded_vocab())) {
            std::vector<float> values = file_values(entry.tensor);
            values.resize(entry.file_elements);
            file.append(bytes_of(values, type));
        }
        require(file.size() == bytes, "llm.c: the tensors end at byte %zu of %zu", file.size(), bytes);
    });
}

// ---------------------------------------------------------------------------------------------------------------------

LlmcDebugState::LlmcDebugState(const std::string& path) : file(path) {
    const int32_t version = header_word(header_of(file, kDebugStateMagic, "a debug state"), 1);
    if (version != kDebugStateVersion)
        reject_file(path, "llm.c debug state of version %d; only version %d is supported", version, kDebugStateVersion);
    batch = checked_word(file, 2, "the batch size", 1 << 20);
    seq_len = checked_word(file, 3, "the sequence length", 1 << 24);
    const size_t least = kHeaderBytes + 2 * rows() * sizeof(int32_t);
    if (file.size() < least)
        reject_file(path,
                    "%d sequences of %d tokens and their targets end at byte %zu, but the file has %zu: it is "
                    "truncated",
                    batch, seq_len, least, file.size());
}

template <class T> std::span<const T> LlmcDebugState::array(size_t first_word, size_t count) const {
    return {reinterpret_cast<const T*>(file.data() + kHeaderBytes) + first_word, count};
}

std::span<const int32_t> LlmcDebugState::tokens() const { return array<int32_t>(0, rows()); }
std::span<const int32_t> LlmcDebugState::targets() const { return array<int32_t>(rows(), rows()); }

void LlmcDebugState::check(const LlmcModel& model) const {
    const std::string& path = file.path();
    if (seq_len > model.shape.n_positions)
        reject_file(path, "its sequences have %d tokens, but the model has %d positions", seq_len,
                    model.shape.n_positions);
    const size_t words = 2 * rows() + logits_count(model) + 1 + llmc_elements(model.shape, model.padded_vocab);
    check_size(file, kHeaderBytes + words * sizeof(float),
               format("%d sequences of %d tokens and the model %s", batch, seq_len, model.file.path().c_str()));
    for (const auto& [what, ids] : {std::pair{"token", tokens()}, {"target", targets()}})
        for (size_t i = 0; i < ids.size(); i++)
            if (ids[i] < 0 || ids[i] >= model.shape.vocab_size)
                reject_file(path, "%s %zu is %d, but the model has a vocabulary of %d", what, i, ids[i],
                            model.shape.vocab_size);
}

std::span<const float> LlmcDebugState::logits(const LlmcModel& model) const {
    return array<float>(2 * rows(), logits_count(model));
}

float LlmcDebugState::loss(const LlmcModel& model) const {
    return array<float>(2 * rows() + logits_count(model), 1)[0];
}

std::span<const float> LlmcDebugState::gradients(const LlmcModel& model) const {
    return array<float>(2 * rows() + logits_count(model) + 1, llmc_elements(model.shape, model.padded_vocab));
}
