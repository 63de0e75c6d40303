#include "model/huggingface.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/device.h"
#include "model/state.h"

std::vector<HfTensor> hf_tensors(const Gpt& gpt) {
    const GptShape& shape = gpt.options().shape;
    const std::vector<StateTensor> masters = gpt.master_tensors();
    std::vector<HfTensor> tensors;
    for (size_t i = 0; i < masters.size(); i++) {
        const Tensor& tensor = gpt.layout().tensors[i];
        const auto& row = tensor_table()[size_t(tensor.row)];
        const std::string prefix = tensor.layer < 0 ? "" : "h." + std::to_string(tensor.layer) + ".";
        HfTensor hf{prefix + row.hf_name, masters[i].shape, masters[i], row.hf_transposed};
        if (row.rows == &GptShape::padded_vocab) hf.shape[0] = size_t(shape.vocab_size);
        if (hf.transposed) std::swap(hf.shape[0], hf.shape[1]);
        tensors.push_back(std::move(hf));
    }
    return tensors;
}

bool is_hf_mask(const std::string& name) { return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"); }

namespace {

// (rows, cols) to (cols, rows).
std::vector<float> transpose(const std::vector<float>& from, size_t rows, size_t cols) {
    std::vector<float> to(from.size());
    for (size_t row = 0; row < rows; row++)
        for (size_t col = 0; col < cols; col++) to[col * rows + row] = from[row * cols + col];
    return to;
}

size_t elements(const HfTensor& tensor) {
    size_t count = 1;
    for (size_t extent : tensor.shape) count *= extent;
    return count;
}

}  // namespace

void set_hf_values(const HfTensor& tensor, const std::vector<float>& values) {
    require(values.size() == elements(tensor), "%s: %zu values for %zu elements", tensor.name.c_str(), values.size(),
            elements(tensor));
    const std::vector<float> ours =
        tensor.transposed ? transpose(values, tensor.shape[0], tensor.shape[1]) : std::vector<float>();
    // The vocabulary's padding, which Hugging Face does not have, is left alone, and so is what other ranks own.
    const StateTensor& master = tensor.master;
    const size_t end = std::min(master.first + master.count, values.size());
    if (end <= master.first) return;
    copy_to_device(master.values, (tensor.transposed ? ours : values).data() + master.first,
                   (end - master.first) * sizeof(float), Stream{});
}

std::vector<float> hf_values(const HfTensor& tensor) {
    std::vector<float> values(elements(tensor));
    require(tensor.master.first == 0 && tensor.master.count >= values.size(), "%s: not whole on this rank",
            tensor.name.c_str());
    copy_to_host(values.data(), tensor.master.values, values.size() * sizeof(float), Stream{});
    synchronize(Stream{});
    return tensor.transposed ? transpose(values, tensor.shape[1], tensor.shape[0]) : values;
}

nlohmann::ordered_json hf_config(const GptShape& shape, int eot) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"attn_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"resid_pdrop", 0.0},
            {"bos_token_id", eot},
            {"eos_token_id", eot},
            {"initializer_range", 0.02},
            {"layer_norm_epsilon", 1e-5},
            {"n_ctx", shape.n_positions},
            {"n_embd", shape.n_embd},
            {"n_head", shape.n_head},
            {"n_layer", shape.n_layer},
            {"n_positions", shape.n_positions},
            {"tie_word_embeddings", true},
            {"torch_dtype", "float32"},
            {"vocab_size", shape.vocab_size}};
}

namespace {

// The two JSON values are equal, or the key is absent and Hugging Face's default is the expected value.
void expect(const nlohmann::ordered_json& config, const char* key, const nlohmann::ordered_json& expected,
            bool default_is_expected, const std::string& origin) {
    const auto found = config.find(key);
    if (found == config.end() ? default_is_expected : *found == expected) return;
    fail(Exit::config, "%s: %s is %s, this run needs %s", origin.c_str(), key,
         found == config.end() ? "absent" : found->dump().c_str(), expected.dump().c_str());
}

}  // namespace

void check_hf_config(const nlohmann::ordered_json& config, const GptShape& shape, const std::string& origin) {
    if (!config.is_object()) fail(Exit::config, "%s: not a JSON object", origin.c_str());
    expect(config, "model_type", "gpt2", false, origin);
    expect(config, "n_layer", shape.n_layer, false, origin);
    expect(config, "n_head", shape.n_head, false, origin);
    expect(config, "n_embd", shape.n_embd, false, origin);
    expect(config, "n_positions", shape.n_positions, false, origin);
    expect(config, "vocab_size", shape.vocab_size, false, origin);
    expect(config, "activation_function", "gelu_new", true, origin);
    expect(config, "layer_norm_epsilon", 1e-5, true, origin);
    expect(config, "tie_word_embeddings", true, true, origin);
    expect(config, "scale_attn_weights", true, true, origin);
    expect(config, "scale_attn_by_inverse_layer_idx", false, true, origin);
    expect(config, "add_cross_attention", false, true, origin);
    const auto inner = config.find("n_inner");
    if (inner != config.end() && !inner->is_null()) expect(config, "n_inner", shape.hidden(), true, origin);
}
