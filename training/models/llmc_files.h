// llm.c's files of a model: model_*.bin, gpt2_124M.bin (versions 3 and 5) and gpt2_124M_debug_state.bin (version 2).
// The formats are little-endian: 256 words of header, then arrays without gaps.
#pragma once

#include <span>

#include "model/llmc.h"
#include "runtime/io/io.h"

// What the first word of llm.c's files says they are, besides token shards and tokenizers (data/).
enum class LlmcKind { model, debug_state, eval, optimizer_state, llama3 };
// nullopt if it is none of them.
std::optional<LlmcKind> llmc_kind(std::string_view first_bytes);

// A mapped model file. The constructor fails with Exit::data, naming the file and the field of its header, unless every
// number is possible and they agree with the file's size.
struct LlmcModel {
    MappedFile file;
    GptShape shape;
    int padded_vocab = 0;  // rows of wte in the file, at least the vocabulary
    Dtype type = Dtype::fp32;

    explicit LlmcModel(const std::string& path);

    // `count` elements from `first` on, counted over all tensors of the file.
    std::vector<float> values(size_t first, size_t count) const;

    // Sets this rank's part of the model's master weights, bit by bit; the padding is ignored. Fails with Exit::config,
    // naming the file and both sizes, if the model is not of this shape.
    void load(const Gpt& gpt) const;
};

// Writes the master weights as llm.c's version 3 (fp32, exactly) or 5 (bf16, rounded to nearest even), with zeros as
// padding. Requires the whole model on this rank. Fails with Exit::cannot_create if there is such a file.
void write_llmc_model(const std::string& path, const Gpt& gpt, Dtype type);

// A mapped debug state: tokens and targets (B, T), what a model made of them, and the gradients of the mean loss.
struct LlmcDebugState {
    MappedFile file;
    int batch = 0, seq_len = 0;

    // Fails with Exit::data, naming the file and the field, if the header cannot be sound.
    explicit LlmcDebugState(const std::string& path);

    // Fails with Exit::data, naming file, position and numbers, unless the file is one of this model: its size, and
    // tokens and targets inside the vocabulary.
    void check(const LlmcModel& model) const;

    std::span<const int32_t> tokens() const;
    std::span<const int32_t> targets() const;

    // The rest needs the model, and the file to have been checked against it. Logits: (B, T, V). Gradients: in the
    // order of llmc_tensors().
    std::span<const float> logits(const LlmcModel& model) const;
    float loss(const LlmcModel& model) const;
    std::span<const float> gradients(const LlmcModel& model) const;

    size_t rows() const { return size_t(batch) * size_t(seq_len); }

private:
    template <class T> std::span<const T> array(size_t first_word, size_t count) const;
    size_t logits_count(const LlmcModel& model) const { return rows() * size_t(model.shape.vocab_size); }
};
