#include "model/llmc.h"

#include "kernels/base/check.h"

// Names in tensor_table().
static constexpr std::string_view kOrder[] = {
    "wte",
    "wpe",
    "norm1.weight",
    "norm1.bias",
    "qkv.weight",
    "qkv.bias",
    "attn_proj.weight",
    "attn_proj.bias",
    "norm2.weight",
    "norm2.bias",
    "fc.weight",
    "fc.bias",
    "fc_proj.weight",
    "fc_proj.bias",
    "norm_f.weight",
    "norm_f.bias",
};

std::vector<LlmcTensor> llmc_tensors(const TensorLayout& layout, const std::vector<NamedTensor>& tensors,
                                     int padded_vocab) {
    require(tensors.size() == layout.tensors.size(), "llm.c: got %zu tensors, expected %zu", tensors.size(),
            layout.tensors.size());
    std::vector<LlmcTensor> ordered;
    for (const std::string_view name : kOrder)
        for (size_t i = 0; i < tensors.size(); i++) {
            const TensorRow& row = *layout.tensors[i].row;
            if (row.name != name) continue;
            LlmcTensor entry{tensors[i], layout.tensors[i].count};
            if (row.is_padded()) {
                entry.tensor = without_padding(tensors[i], layout.shape);
                entry.file_elements = size_t(padded_vocab) * entry.tensor.shape[1];
            }
            ordered.push_back(std::move(entry));
        }
    require(ordered.size() == tensors.size(), "llm.c: the format has no place for %zu of the tensors",
            tensors.size() - ordered.size());
    return ordered;
}

size_t llmc_elements(const GptShape& shape, int padded_vocab) {
    auto parameters_with = [&](int layers) {
        GptShape some = shape;
        some.n_layer = layers;
        return lay_out_tensors(some).parameters;
    };
    // Extrapolated, so that a header that declares many layers costs no time.
    const size_t one = parameters_with(1), layer = parameters_with(2) - one, width = size_t(shape.n_embd);
    const size_t all = one + size_t(shape.n_layer - 1) * layer;
    return all - size_t(shape.padded_vocab()) * width + size_t(padded_vocab) * width;
}
