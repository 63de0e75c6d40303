// llm.c model files (model_*.bin, gpt2_124M.bin; versions 3 and 5). The format is little-endian: a header of 256 words,
// then arrays without gaps.
#pragma once

#include "kernels/numeric.h"
#include "model/gpt.h"
#include "model/shape.h"
#include "runtime/io/files.h"

// Returns whether the first bytes identify an llm.c model, valid or not, of GPT-2's or Llama 3's architecture.
bool is_llmc_model(std::string_view first_bytes);

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
