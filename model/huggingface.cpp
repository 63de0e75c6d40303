#include "model/huggingface.h"

#include <algorithm>

#include "kernels/check.h"
#include "model/state.h"

std::vector<NamedTensor> hf_tensors(const Gpt& gpt) {
    std::vector<NamedTensor> tensors = gpt.master_tensors();
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor& tensor = gpt.layout().tensors[i];
        const auto& row = tensor_table()[size_t(tensor.row)];
        NamedTensor& hf = tensors[i];
        if (row.rows == &GptShape::padded_vocab) hf = without_padding(hf, gpt.options().shape);
        hf.name = (tensor.layer < 0 ? "" : "h." + std::to_string(tensor.layer) + ".") + row.hf_name;
        hf.transposed = row.hf_transposed;
        if (hf.transposed) std::swap(hf.shape[0], hf.shape[1]);
    }
    return tensors;
}

bool is_hf_mask(const std::string& name) { return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"); }

nlohmann::ordered_json hf_config(const GptShape& shape, double dropout, int eot) {
    return {{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"attn_pdrop", dropout},
            {"embd_pdrop", dropout},
            {"resid_pdrop", dropout},
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

nlohmann::ordered_json hf_tokenizer_config(const GptShape& shape, int eot, const std::string& eot_text) {
    const nlohmann::ordered_json special = {{"content", eot_text}, {"lstrip", false},      {"normalized", false},
                                            {"rstrip", false},     {"single_word", false}, {"special", true}};
    return {{"add_bos_token", false},
            {"add_prefix_space", false},
            {"added_tokens_decoder", {{std::to_string(eot), special}}},
            {"bos_token", eot_text},
            {"clean_up_tokenization_spaces", false},
            {"eos_token", eot_text},
            {"errors", "replace"},
            {"model_max_length", shape.n_positions},
            {"tokenizer_class", "GPT2Tokenizer"},
            {"unk_token", eot_text}};
}

nlohmann::ordered_json hf_generation_config(const GptShape& shape, int eot) {
    return {{"bos_token_id", eot}, {"eos_token_id", eot}, {"max_length", shape.n_positions}, {"pad_token_id", eot}};
}

namespace {

// The key is one of the values, or absent and Hugging Face's default is expected.
void expect_any(const nlohmann::ordered_json& config, const char* key, const nlohmann::ordered_json& values,
                const std::string& origin) {
    const auto found = config.find(key);
    if (found == config.end() || std::ranges::find(values, *found) != values.end()) return;
    fail(Exit::config, "%s: %s is %s, this run needs one of %s", origin, key, found->dump(), values.dump());
}

// The two JSON values are equal, or the key is absent and Hugging Face's default is the expected value.
void expect(const nlohmann::ordered_json& config, const char* key, const nlohmann::ordered_json& expected,
            bool default_is_expected, const std::string& origin) {
    const auto found = config.find(key);
    if (found == config.end() ? default_is_expected : *found == expected) return;
    fail(Exit::config, "%s: %s is %s, this run needs %s", origin, key, found == config.end() ? "absent" : found->dump(),
         expected.dump());
}

}  // namespace

GptShape hf_shape(const nlohmann::ordered_json& config, const std::string& origin) {
    auto size = [&](const char* key) {
        const auto found = config.is_object() ? config.find(key) : config.end();
        if (found == config.end() || !found->is_number_unsigned() || *found < 1 || *found > 1 << 24)
            fail(Exit::config, "%s: %s is %s, but must be from 1 to %d", origin, key,
                 found == config.end() ? "absent" : found->dump(), 1 << 24);
        return found->get<int>();
    };
    return {.n_layer = size("n_layer"),
            .n_head = size("n_head"),
            .n_kv_head = size("n_head"),
            .n_embd = size("n_embd"),
            .n_positions = size("n_positions"),
            .vocab_size = size("vocab_size")};
}

void check_hf_config(const nlohmann::ordered_json& config, const GptShape& shape, const std::string& origin) {
    if (!config.is_object()) fail(Exit::config, "%s: not a JSON object", origin);
    expect(config, "model_type", "gpt2", false, origin);
    expect(config, "n_layer", shape.n_layer, false, origin);
    expect(config, "n_head", shape.n_head, false, origin);
    expect(config, "n_embd", shape.n_embd, false, origin);
    expect(config, "n_positions", shape.n_positions, false, origin);
    expect(config, "vocab_size", shape.vocab_size, false, origin);
    expect_any(config, "activation_function", {"gelu_new", "gelu_pytorch_tanh"}, origin);  // two names for one function
    expect(config, "layer_norm_epsilon", 1e-5, true, origin);
    expect(config, "tie_word_embeddings", true, true, origin);
    expect(config, "scale_attn_weights", true, true, origin);
    expect(config, "scale_attn_by_inverse_layer_idx", false, true, origin);
    expect(config, "add_cross_attention", false, true, origin);
    const auto inner = config.find("n_inner");
    if (inner != config.end() && !inner->is_null()) expect(config, "n_inner", shape.hidden(), true, origin);
}
