#include "training/models/hf_config.h"

#include <nlohmann/json.hpp>

#include "runtime/io/joined.h"
#include "runtime/io/json.h"

namespace {

using Json = nlohmann::ordered_json;

struct Architecture {
    const char* name;  // in "architectures"
    const char* type;  // in "model_type"
    ModelFamily family;
};

constexpr Architecture kArchitectures[] = {
    {"GPT2LMHeadModel", "gpt2", ModelFamily::gpt2},
    {"LlamaForCausalLM", "llama", ModelFamily::llama},
    {"Qwen2ForCausalLM", "qwen2", ModelFamily::qwen2},
    {"Qwen3ForCausalLM", "qwen3", ModelFamily::qwen3},
};

std::string printed_at(const Json& config, const char* key) {
    const auto found = config.find(key);
    return found == config.end() ? "absent" : printed(*found);
}

// Reads the keys of one object; errors name its origin.
class Reader {
public:
    Reader(const Json& config, const std::string& origin) : config_(config), origin_(origin) {}

    bool has(const char* key) const {
        const auto found = config_.find(key);
        return found != config_.end() && !found->is_null();
    }
    int size(const char* key, int largest = 1 << 24) const {
        const auto found = config_.find(key);
        if (found == config_.end() || !found->is_number_integer() || *found < 1 || *found > largest)
            refuse(key, format("but must be from 1 to %d", largest));
        return found->get<int>();
    }
    int size_or(const char* key, int absent) const { return has(key) ? size(key) : absent; }
    double number_or(const char* key, double absent) const {
        if (!has(key)) return absent;
        if (!config_[key].is_number()) refuse(key, "but must be a number");
        return config_[key];
    }
    bool flag_or(const char* key, bool absent) const {
        if (!has(key)) return absent;
        if (!config_[key].is_boolean()) refuse(key, "but must be true or false");
        return config_[key];
    }
    // The key has this value, or is absent and means it.
    void expect(const char* key, const Json& expected) const {
        if (has(key) && config_[key] != expected) refuse(key, "this program needs " + expected.dump());
    }
    ActivationFunction activation(const char* key, ActivationFunction absent) const {
        if (!has(key)) return absent;
        // Two names for the tanh form of GELU, and two for SiLU.
        for (const auto& [name, function] : {std::pair{"gelu_new", ActivationFunction::gelu_new},
                                             {"gelu_pytorch_tanh", ActivationFunction::gelu_new},
                                             {"silu", ActivationFunction::silu},
                                             {"swish", ActivationFunction::silu},
                                             {"relu2", ActivationFunction::relu2}})
            if (config_[key] == name) return function;
        refuse(key, R"(but must be one of "gelu_new", "gelu_pytorch_tanh", "silu", "relu2")");
    }
    [[noreturn]] void refuse(const char* key, const std::string& reason) const {
        fail(Exit::config, "%s: %s is %s, %s", origin_, key, printed_at(config_, key), reason);
    }
    const Json& operator[](const char* key) const { return config_[key]; }
    const std::string& origin() const { return origin_; }

private:
    const Json& config_;
    const std::string& origin_;
};

[[noreturn]] void refuse_architecture(const Json& config, const std::string& origin) {
    const auto names = config.find("architectures");
    const bool is_named = names != config.end() && names->is_array() && !names->empty() && (*names)[0].is_string();
    fail(Exit::config, "%s: %s, model_type %s, is not supported; supported are %s", origin,
         is_named ? printed((*names)[0]) : "a model without architectures", printed_at(config, "model_type"),
         joined(kArchitectures, ", ", &Architecture::name));
}

const Architecture& architecture_of(const Json& config, const std::string& origin) {
    if (!config.is_object()) fail(Exit::config, "%s: not a JSON object", origin);
    for (const Architecture& one : kArchitectures)
        if (config.contains("model_type") && config["model_type"] == one.type) return one;
    refuse_architecture(config, origin);
}

void read_gpt2(const Reader& hf, Config::Model& m) {
    m.n_layer = hf.size("n_layer");
    m.n_head = hf.size("n_head");
    m.n_embd = hf.size("n_embd");
    m.n_positions = hf.size("n_positions");
    m.given_hidden = hf.size_or("n_inner", 0);
    m.activation = hf.activation("activation_function", ActivationFunction::gelu_new);
    m.norm_eps = hf.number_or("layer_norm_epsilon", 1e-5);
    m.tie_embeddings = hf.flag_or("tie_word_embeddings", true);
    hf.expect("scale_attn_weights", true);
    hf.expect("scale_attn_by_inverse_layer_idx", false);
    hf.expect("add_cross_attention", false);
}

// RoPE settings: rope_parameters of transformers 5, which includes the base, or rope_scaling of transformers 4.
void read_rope(const Reader& hf, Config::Model& m) {
    m.rope.theta = hf.number_or("rope_theta", 10000);
    const char* key = hf.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
    if (!hf.has(key)) return;
    if (!hf[key].is_object()) hf.refuse(key, "but must be an object");
    const std::string origin = hf.origin() + ": " + key;
    const Reader rope(hf[key], origin);
    m.rope.theta = rope.number_or("rope_theta", m.rope.theta);
    const char* type_key = rope.has("rope_type") ? "rope_type" : "type";
    const Json type = rope.has(type_key) ? rope[type_key] : Json("default");
    if (type == "default") return;
    const auto scaling = type.is_string() ? choice_named<RopeScaling>(type.get<std::string>()) : std::nullopt;
    if (!scaling) rope.refuse(type_key, "but must be default, linear, llama3 or yarn");
    m.rope.scaling = *scaling;
    m.rope.factor = rope.number_or("factor", 1);
    m.rope.original_positions = rope.size_or("original_max_position_embeddings", 0);
    if (*scaling == RopeScaling::llama3) {
        m.rope.low_freq_factor = rope.number_or("low_freq_factor", 1);
        m.rope.high_freq_factor = rope.number_or("high_freq_factor", 4);
    }
    if (*scaling == RopeScaling::yarn) {
        m.rope.beta_fast = rope.number_or("beta_fast", 32);
        m.rope.beta_slow = rope.number_or("beta_slow", 1);
        m.rope.attention_factor = rope.number_or("attention_factor", 0);
        for (const char* unread : {"mscale", "mscale_all_dim"})
            if (rope.has(unread)) rope.refuse(unread, "which is not supported");
        rope.expect("truncate", true);
    }
}

// Qwen's sliding window and its layers: a list, or before transformers 4.53 all layers from max_window_layers on.
void read_windows(const Reader& hf, Config::Model& m) {
    if (!hf.flag_or("use_sliding_window", false) || !hf.has("sliding_window")) return;
    m.sliding_window = hf.size("sliding_window");
    m.window_pattern.clear();
    if (hf.has("layer_types")) {
        if (!hf["layer_types"].is_array() || hf["layer_types"].size() != size_t(m.n_layer))
            hf.refuse("layer_types", format("but must be a list of num_hidden_layers (%d) types", m.n_layer));
        for (const Json& type : hf["layer_types"]) {
            if (type != "sliding_attention" && type != "full_attention")
                hf.refuse("layer_types", "but the types must be sliding_attention or full_attention");
            m.window_pattern += type == "sliding_attention" ? 'S' : 'L';
        }
    } else {
        const int first = int(hf.number_or("max_window_layers", 28));
        for (int layer = 0; layer < m.n_layer; layer++) m.window_pattern += layer >= first ? 'S' : 'L';
    }
    if (m.window_pattern.find('S') == std::string::npos) m.sliding_window = 0, m.window_pattern = "S";
    if (m.window_pattern.find('L') == std::string::npos) m.window_pattern = "S";
}

void read_llama_like(const Reader& hf, ModelFamily family, Config::Model& m) {
    m.n_layer = hf.size("num_hidden_layers");
    m.n_head = hf.size("num_attention_heads");
    m.given_kv_heads = hf.size_or("num_key_value_heads", family == ModelFamily::llama ? m.n_head : 32);
    m.n_embd = hf.size("hidden_size");
    m.given_head_size = hf.size_or("head_dim", family == ModelFamily::qwen3 ? 128 : 0);
    m.given_hidden = hf.size("intermediate_size");
    m.n_positions = hf.size_or("max_position_embeddings", family == ModelFamily::llama ? 2048 : 32768);
    m.activation = hf.activation("hidden_act", ActivationFunction::silu);
    m.norm_eps = hf.number_or("rms_norm_eps", 1e-6);
    m.tie_embeddings = hf.flag_or("tie_word_embeddings", false);
    if (family != ModelFamily::qwen2)
        m.attention_bias = hf.flag_or("attention_bias", false) ? AttentionBias::all : AttentionBias::none;
    if (family == ModelFamily::llama) m.mlp_bias = hf.flag_or("mlp_bias", false);
    hf.expect("partial_rotary_factor", 1.0);
    read_rope(hf, m);
    if (family != ModelFamily::llama) read_windows(hf, m);
}

// ---------------------------------------------------------------------------------------------------------------------

Json rope_json(const Config::Model& m) {
    if (m.rope.scaling == RopeScaling::none) return nullptr;
    Json rope = {{"rope_type", name_of(m.rope.scaling)}, {"factor", m.rope.factor}};
    if (m.rope.scaling != RopeScaling::linear) rope["original_max_position_embeddings"] = m.original_positions();
    if (m.rope.scaling == RopeScaling::llama3) {
        rope["low_freq_factor"] = m.rope.low_freq_factor;
        rope["high_freq_factor"] = m.rope.high_freq_factor;
    }
    if (m.rope.scaling == RopeScaling::yarn) {
        rope["beta_fast"] = m.rope.beta_fast;
        rope["beta_slow"] = m.rope.beta_slow;
        if (m.rope.attention_factor > 0) rope["attention_factor"] = m.rope.attention_factor;
    }
    return rope;
}

Json gpt2_json(const Config::Model& m) {
    Json json = {{"activation_function", name_of(m.activation)},
                 {"attn_pdrop", m.dropout},
                 {"embd_pdrop", m.dropout},
                 {"resid_pdrop", m.dropout},
                 {"layer_norm_epsilon", m.norm_eps},
                 {"n_ctx", m.n_positions},
                 {"n_embd", m.n_embd},
                 {"n_head", m.n_head},
                 {"n_layer", m.n_layer},
                 {"n_positions", m.n_positions}};
    if (m.hidden() != 4 * m.n_embd) json["n_inner"] = m.hidden();
    return json;
}

Json llama_like_json(const Config::Model& m, ModelFamily family) {
    Json json = {{"attention_dropout", m.dropout},      {"head_dim", m.head_size()},
                 {"hidden_act", name_of(m.activation)}, {"hidden_size", m.n_embd},
                 {"intermediate_size", m.hidden()},     {"max_position_embeddings", m.n_positions},
                 {"num_attention_heads", m.n_head},     {"num_hidden_layers", m.n_layer},
                 {"num_key_value_heads", m.kv_heads()}, {"rms_norm_eps", m.norm_eps},
                 {"rope_scaling", rope_json(m)},        {"rope_theta", m.rope.theta}};
    if (family != ModelFamily::qwen2) json["attention_bias"] = m.attention_bias == AttentionBias::all;
    if (family == ModelFamily::llama) {
        json["mlp_bias"] = m.mlp_bias;
        return json;
    }
    json["use_sliding_window"] = m.sliding_window > 0;
    json["sliding_window"] = m.sliding_window > 0 ? Json(m.sliding_window) : Json();
    json["max_window_layers"] = m.n_layer;
    for (int layer = 0; layer < m.n_layer; layer++)
        json["layer_types"].push_back(m.window(layer) > 0 ? "sliding_attention" : "full_attention");
    return json;
}

Json config_of(const Architecture& architecture, const Config::Model& m, int eot, Dtype dtype) {
    const bool is_gpt2 = architecture.family == ModelFamily::gpt2;
    Json json = {{"architectures", {architecture.name}}, {"model_type", architecture.type}};
    json.update(is_gpt2 ? gpt2_json(m) : llama_like_json(m, architecture.family));
    json.update({{"bos_token_id", eot},
                 {"eos_token_id", eot},
                 {"initializer_range", 0.02},
                 {"tie_word_embeddings", m.tie_embeddings},
                 {"torch_dtype", dtype == Dtype::fp32   ? "float32"
                                 : dtype == Dtype::bf16 ? "bfloat16"
                                                        : "float16"},
                 {"vocab_size", m.vocab_size}});
    return json;
}

Config::Model model_of(const Json& config, const std::string& origin) {
    const Architecture& architecture = architecture_of(config, origin);
    const Reader hf(config, origin);
    if (hf.has("quantization_config")) hf.refuse("quantization_config", "but quantized weights cannot be trained");
    Config::Model model;
    set_family(model, architecture.family);
    if (architecture.family == ModelFamily::gpt2)
        read_gpt2(hf, model);
    else
        read_llama_like(hf, architecture.family, model);
    model.vocab_size = hf.size("vocab_size");
    return model;
}

// The config.json of the architecture that matches this model.
Json matching_config(const Config::Model& model, int eot, Dtype dtype) {
    const char* nearest = nullptr;
    std::vector<std::string> fewest;
    for (const Architecture& architecture : kArchitectures) {
        const Json config = config_of(architecture, model, eot, dtype);
        const std::vector<std::string> differences = model_differences(model_of(config, architecture.name), model);
        if (differences.empty()) return config;
        if (!nearest || differences.size() < fewest.size()) nearest = architecture.name, fewest = differences;
    }
    fail(Exit::config,
         "cannot export to Hugging Face: no supported architecture matches this model; the nearest is %s, except for "
         "%s",
         nearest, joined(fewest, "; "));
}

}  // namespace

bool is_hf_config(const std::string& text, const std::string& origin) {
    return parse_json(text, origin, Exit::data).contains("model_type");
}

Config::Model hf_model(const std::string& config, const std::string& origin) {
    return model_of(parse_json(config, origin, Exit::data), origin);
}

void check_hf_model(const std::string& config, const Config::Model& model, const std::string& origin) {
    const std::vector<std::string> differences = model_differences(hf_model(config, origin), model);
    if (!differences.empty())
        fail(Exit::config, "%s describes a different model than this run: %s", origin, joined(differences, "; "));
}

std::string hf_architecture(const Config::Model& model) {
    return matching_config(model, 0, Dtype::fp32)["architectures"][0];
}

std::string hf_config(const Config::Model& model, int eot, Dtype dtype) {
    return matching_config(model, eot, dtype).dump(2) + "\n";
}

std::string hf_tokenizer_config(const Config::Model& model, int eot, const std::string& eot_text) {
    const Json special = {{"content", eot_text}, {"lstrip", false},      {"normalized", false},
                          {"rstrip", false},     {"single_word", false}, {"special", true}};
    const Json config = {
        {"add_bos_token", false},
        {"add_prefix_space", false},
        {"added_tokens_decoder", {{std::to_string(eot), special}}},
        {"bos_token", eot_text},
        {"clean_up_tokenization_spaces", false},
        {"eos_token", eot_text},
        {"errors", "replace"},
        {"model_max_length", model.n_positions},
        {"tokenizer_class", model.position == PositionKind::learned ? "GPT2Tokenizer" : "PreTrainedTokenizerFast"},
        {"unk_token", eot_text}};
    return config.dump(2) + "\n";
}

std::string hf_generation_config(int eot) {
    return Json({{"bos_token_id", eot}, {"eos_token_id", eot}, {"pad_token_id", eot}}).dump(2) + "\n";
}
