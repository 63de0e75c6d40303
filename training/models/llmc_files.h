// llm.c model files (model_*.bin, gpt2_124M.bin; versions 3 and 5) and debug states (gpt2_124M_debug_state.bin; version
// 2). The formats are little-endian: a header of 256 words, then arrays without gaps.
#pragma once

#include <span>

#include "model/llmc.h"
#include "runtime/io/files.h"

// The kinds of llm.c files by their first word, except token shards and tokenizers (see data/).
enum class LlmcKind { model, debug_state, eval, optimizer_state, llama3 };
// Returns nullopt if the bytes are not the beginning of an llm.c file.
std::optional<LlmcKind> llmc_kind(std::string_view first_bytes);

// A memory-mapped model file. The constructor fails with Exit::data, naming the file and the header field, unless all
// numbers are valid and match the file's size.
struct LlmcModel {
    MappedFile file;
    GptShape shape;
    int padded_vocab = 0;  // rows of wte in the file, at least the vocabulary
    Dtype type = Dtype::fp32;

    explicit LlmcModel(const std::string& path);

    // `count` elements starting at `first`, counted over all tensors of the file.
    std::vector<float> values(size_t first, size_t count) const;

    // Sets this rank's part of the model's master weights exactly; ignores the padding. Fails with Exit::config, naming
    // the file and both sizes, if the model has a different shape.
    void load(const Gpt& gpt) const;
};

// Writes the master weights as version 3 (fp32, exact) or 5 (bf16, rounded to nearest even), with zeros as padding.
// Requires the whole model on this rank. Fails with Exit::cannot_create if the file exists.
void write_llmc_model(const std::string& path, const Gpt& gpt, Dtype type);

// A memory-mapped debug state: tokens and targets (B, T), a model's logits and loss, and the gradients of that loss.
struct LlmcDebugState {
    MappedFile file;
    int batch = 0, seq_len = 0;

    // Fails with Exit::data, naming the file and the field, if the header is invalid.
    explicit LlmcDebugState(const std::string& path);

    // Fails with Exit::data, naming file, position and numbers, unless the file's size matches the model and all tokens
    // and targets are within its vocabulary.
    void check(const LlmcModel& model) const;

    std::span<const int32_t> tokens() const;
    std::span<const int32_t> targets() const;

    // These require check(model). Logits: (B, T, V). Gradients: in the order of llmc_tensors().
    std::span<const float> logits(const LlmcModel& model) const;
    float loss(const LlmcModel& model) const;
    std::span<const float> gradients(const LlmcModel& model) const;

    size_t rows() const { return size_t(batch) * size_t(seq_len); }

private:
    template <class T> std::span<const T> array(size_t first_word, size_t count) const;
    size_t logits_count(const LlmcModel& model) const { return rows() * size_t(model.shape.vocab_size); }
};
