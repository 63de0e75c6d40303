// The model in the order of llm.c's files: the same tensors with the same dimensions under other names, all layers of
// one after the other. Reads and writes no files.
#pragma once

#include "model/gpt.h"

// One tensor of one layer. In a file its elements follow those of the tensor before it.
struct LlmcTensor {
    const char* name;      // llm.c's, the same for all layers: "qkvw"
    int layer;             // -1 if not per layer
    NamedTensor tensor;    // under our name, without the vocabulary's padding
    size_t file_elements;  // with the padding, which comes behind the tensor's own elements
};

// The model's tensors, of which `tensors` are the masters or the gradients in the order of `layout`, as a file whose
// vocabulary is padded to `padded_vocab` rows has them.
std::vector<LlmcTensor> llmc_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& tensors,
                                     int padded_vocab);

// The elements of all tensors in such a file.
size_t llmc_elements(const GptShape& shape, int padded_vocab);
