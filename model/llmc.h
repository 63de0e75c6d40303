// The model in the order of llm.c's files: the same tensors and dimensions under other names, with all layers of one
// tensor before the next tensor. Reads and writes no files.
#pragma once

#include "kernels/tensor.h"
#include "model/gpt.h"

// One tensor of one layer. In a file its elements follow those of the previous tensor.
struct LlmcTensor {
    NamedTensor tensor;    // under our name, without the vocabulary's padding
    size_t file_elements;  // including the padding, which follows the tensor's own elements
};

// Returns the model's tensors as stored in a file whose vocabulary is padded to `padded_vocab` rows. `tensors` holds
// the masters or the gradients in the order of `layout`.
std::vector<LlmcTensor> llmc_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& tensors,
                                     int padded_vocab);

// Returns the number of elements of all tensors in such a file.
size_t llmc_elements(const GptShape& shape, int padded_vocab);
