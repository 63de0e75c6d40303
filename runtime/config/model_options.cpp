// Section "model": options, aliases, family defaults and consistency checks.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "kernels/base/dropout.h"
#include "runtime/config/options.h"
#include "runtime/io/io.h"

std::vector<Option> model_options(Config& config) {
    Config::Model& m = config.model;
    return {
        {"model.family", &m.family, kAnything, "sets the defaults of the architecture keys, from activation to z_loss",
         Effect::none},
        {"model.n_layer", &m.n_layer, between(1, 10000), "number of transformer blocks"},
        {"model.n_head", &m.n_head, between(1, 65536), "query heads per block"},
        {"model.n_kv_head", &m.n_kv_head, between(0, 65536),
         "key/value heads per block, each shared by a group of query heads; must divide n_head. 0: n_head"},
        {"model.n_embd", &m.n_embd, between(1, 65536), "embedding dimension (model width)"},
        {"model.head_size", &m.head_size, between(0, 65536), "dimension of a head; 0: n_embd / n_head"},
        {"model.hidden_size_mlp", &m.hidden_size_mlp, between(0, 1 << 20),
         "hidden dimension of the MLP; 0: 4 n_embd, or for a gated MLP 8/3 n_embd rounded up to a multiple of 256"},
        {"model.n_positions", &m.n_positions, between(1, 1 << 24), "maximum sequence length"},
        {"model.vocab_size", &m.vocab_size, between(1, 1 << 24), "vocabulary size"},

        {"model.activation", &m.activation, kAnything, "activation function of the MLP"},
        {"model.gated_mlp", &m.gated_mlp, kAnything,
         "compute the MLP as down(activation(gate(x)) * up(x)), with silu SwiGLU, instead of down(activation(up(x)))"},
        {"model.norm", &m.norm, kAnything, "type of norm before attention, the MLP and the head"},
        {"model.norm_eps", &m.norm_eps, between(1e-12, 1), "added to the variance or mean square under the root"},
        {"model.norm_weight", &m.norm_weight, kAnything, "norms have a weight per channel"},
        {"model.norm_bias", &m.norm_bias, kAnything, "norms have a bias per channel"},
        {"model.position", &m.position, kAnything,
         "learned: position embeddings are added to the token embeddings; rope: queries and keys are rotated"},
        {"model.rope_theta", &m.rope_theta, between(1, 1e12), "rope: base of the frequencies"},
        {"model.rope_fraction", &m.rope_fraction, between(0, 1), "rope: fraction of each head that is rotated"},
        {"model.rope_scaling", &m.rope_scaling, kAnything,
         "rope: frequency scaling for sequences longer than rope_original_positions"},
        {"model.rope_factor", &m.rope_factor, between(1, 1e6), "rope_scaling: factor by which the context is extended"},
        {"model.rope_original_positions", &m.rope_original_positions, between(0, 1 << 24),
         "llama3, yarn: n_positions before the extension; 0: n_positions"},
        {"model.rope_low_freq_factor", &m.rope_low_freq_factor, between(1e-6, 1e6),
         "llama3: frequencies with fewer periods than this in rope_original_positions are divided by rope_factor"},
        {"model.rope_high_freq_factor", &m.rope_high_freq_factor, between(1e-6, 1e6),
         "llama3: frequencies with more periods than this in rope_original_positions are unchanged"},
        {"model.rope_beta_fast", &m.rope_beta_fast, between(1e-6, 1e6),
         "yarn: frequencies with more periods than this in rope_original_positions are unchanged"},
        {"model.rope_beta_slow", &m.rope_beta_slow, between(1e-6, 1e6),
         "yarn: frequencies with fewer periods than this in rope_original_positions are divided by rope_factor"},
        {"model.rope_attention_factor", &m.rope_attention_factor, between(0, 1e6),
         "yarn: factor on rotated queries and keys; 0: 0.1 ln(rope_factor) + 1"},
        {"model.attention_bias", &m.attention_bias, kAnything,
         "biases of the attention projections. none; qkv: query, key and value; all: also the output projection"},
        {"model.mlp_bias", &m.mlp_bias, kAnything, "biases in the MLP"},
        {"model.qk_norm", &m.qk_norm, kAnything,
         "RMSNorm of each query and key head before the rotation; unit: without weights"},
        {"model.attention_scale", &m.attention_scale, between(0, 1e6),
         "scale of the attention scores; 0: 1 / sqrt(head_size)"},
        {"model.sliding_window", &m.sliding_window, between(0, 1 << 24),
         "tokens that each token attends to, itself included, in sliding-window layers; 0: no sliding window"},
        {"model.window_pattern", &m.window_pattern, kSomeText,
         "attention of the layers, repeated over the depth. S: sliding window; L: full; e.g. \"SSSL\""},
        {"model.attention_softcap", &m.attention_softcap, between(0, 1e6),
         "soft cap c on attention scores, c tanh(score / c); 0: off"},
        {"model.final_softcap", &m.final_softcap, between(0, 1e6), "soft cap c on logits, c tanh(logit / c); 0: off"},
        {"model.tie_embeddings", &m.tie_embeddings, kAnything, "the head shares its matrix with the token embedding"},
        {"model.embedding_norm", &m.embedding_norm, kAnything, "apply a norm after the embedding"},
        {"model.z_loss", &m.z_loss, between(0, 1),
         "coefficient of the squared log of the softmax denominator in the loss; excluded from the reported loss"},

        {"model.init_from", &m.init_from, kAnything,
         "checkpoint, Hugging Face directory or llm.c model file to load the initial weights from; empty: random, as "
         "in GPT-2"},
        {"model.dropout", &m.dropout, between(0, ops::kLargestDropout),
         "dropout rate of embeddings, attention probabilities and the outputs of attention and MLP, in steps of "
         "1/65536; 0: no dropout"},
    };
}

const std::vector<Alias>& model_aliases() {
    static const std::vector<Alias> aliases = {
        {"model_type", "family"},
        {"num_hidden_layers", "n_layer"},
        {"num_attention_heads", "n_head"},
        {"num_key_value_heads", "n_kv_head"},
        {"hidden_size", "n_embd"},
        {"head_dim", "head_size"},
        {"intermediate_size", "hidden_size_mlp"},
        {"n_inner", "hidden_size_mlp"},
        {"max_position_embeddings", "n_positions"},
        {"hidden_act", "activation"},
        {"activation_function", "activation"},
        {"rms_norm_eps", "norm_eps"},
        {"layer_norm_epsilon", "norm_eps"},
        {"partial_rotary_factor", "rope_fraction"},
        {"original_max_position_embeddings", "rope_original_positions"},
        {"attn_logit_softcapping", "attention_softcap"},
        {"final_logit_softcapping", "final_softcap"},
        {"tie_word_embeddings", "tie_embeddings"},
    };
    return aliases;
}

void set_family(Config::Model& model, ModelFamily family) {
    Config::Model m;  // GPT-2 defaults
    m.family = family;
    const bool is_llama_like =
        family == ModelFamily::llama || family == ModelFamily::qwen2 || family == ModelFamily::qwen3;
    if (is_llama_like) {
        m.activation = ActivationFunction::silu;
        m.gated_mlp = true;
        m.norm = NormKind::rmsnorm;
        m.norm_bias = m.mlp_bias = m.tie_embeddings = false;
        m.position = PositionKind::rope;
        m.attention_bias = AttentionBias::none;
        m.rope_theta = 500000;  // as in Llama 3
    }
    if (family == ModelFamily::qwen2 || family == ModelFamily::qwen3) m.rope_theta = 1e6, m.norm_eps = 1e-6;
    if (family == ModelFamily::qwen2) m.attention_bias = AttentionBias::qkv;
    if (family == ModelFamily::qwen3) m.qk_norm = QkNorm::weight;

    for (int Config::Model::*size : {&Config::Model::n_layer, &Config::Model::n_head, &Config::Model::n_kv_head,
                                     &Config::Model::n_embd, &Config::Model::head_size, &Config::Model::hidden_size_mlp,
                                     &Config::Model::n_positions, &Config::Model::vocab_size})
        m.*size = model.*size;
    m.init_from = model.init_from;
    m.dropout = model.dropout;
    model = std::move(m);
}

Config::Model with_sizes(Config::Model m) {
    constexpr int kMultiple = 256;
    if (m.n_kv_head == 0) m.n_kv_head = m.n_head;
    if (m.head_size == 0) m.head_size = m.n_embd / m.n_head;
    if (m.hidden_size_mlp == 0)
        m.hidden_size_mlp = m.gated_mlp ? (8 * m.n_embd / 3 + kMultiple - 1) / kMultiple * kMultiple : 4 * m.n_embd;
    if (m.rope_original_positions == 0) m.rope_original_positions = m.n_positions;
    return m;
}

bool has_window(const Config::Model& m, int layer) {
    return m.sliding_window > 0 && m.window_pattern[size_t(layer) % m.window_pattern.size()] == 'S';
}

namespace {

void check_sizes(const Config::Model& m, const std::string& origin) {
    if (m.head_size == 0 && m.n_embd % m.n_head != 0)
        fail(Exit::config, "%s: model.n_embd (%d) must be a multiple of model.n_head (%d) unless head_size is set",
             origin, m.n_embd, m.n_head);
    if (m.n_kv_head > 0 && m.n_head % m.n_kv_head != 0)
        fail(Exit::config, "%s: model.n_head (%d) must be a multiple of model.n_kv_head (%d)", origin, m.n_head,
             m.n_kv_head);
}

void check_rope(const Config::Model& m, const std::string& origin) {
    if (m.position != PositionKind::rope) {
        if (m.rope_scaling != RopeScaling::none)
            fail(Exit::config, "%s: model.rope_scaling \"%s\" needs model.position \"rope\", is \"%s\"", origin,
                 name_of(m.rope_scaling), name_of(m.position));
        if (m.rope_fraction != 1)
            fail(Exit::config, "%s: model.rope_fraction (%g) needs model.position \"rope\", is \"%s\"", origin,
                 m.rope_fraction, name_of(m.position));
        return;
    }
    const int head_size = with_sizes(m).head_size;
    const double rotated = head_size * m.rope_fraction;
    if (rotated < 2 || std::fmod(rotated, 2) != 0)
        fail(Exit::config,
             "%s: model.rope_fraction (%g) of model.head_size (%d) must be an even number of elements, is %g", origin,
             m.rope_fraction, head_size, rotated);
    if (m.rope_scaling == RopeScaling::none && m.rope_factor != 1)
        fail(Exit::config, "%s: model.rope_factor (%g) needs model.rope_scaling \"linear\", \"llama3\" or \"yarn\"",
             origin, m.rope_factor);
    if (m.rope_scaling == RopeScaling::llama3 && m.rope_high_freq_factor <= m.rope_low_freq_factor)
        fail(Exit::config, "%s: model.rope_high_freq_factor (%g) must be larger than model.rope_low_freq_factor (%g)",
             origin, m.rope_high_freq_factor, m.rope_low_freq_factor);
    if (m.rope_scaling == RopeScaling::yarn && m.rope_beta_fast <= m.rope_beta_slow)
        fail(Exit::config, "%s: model.rope_beta_fast (%g) must be larger than model.rope_beta_slow (%g)", origin,
             m.rope_beta_fast, m.rope_beta_slow);
}

void check_windows(const Config::Model& m, const std::string& origin) {
    const std::string& pattern = m.window_pattern;
    if (pattern.find_first_not_of("SL") != std::string::npos)
        fail(Exit::config, "%s: model.window_pattern must consist of S and L, is %s", origin, printed(pattern));
    if (m.sliding_window == 0 && pattern != "S")
        fail(Exit::config, "%s: model.window_pattern \"%s\" needs model.sliding_window, which is 0", origin, pattern);
    if (pattern.size() > size_t(m.n_layer))
        fail(Exit::config, "%s: model.window_pattern (%zu letters) must not be longer than model.n_layer (%d)", origin,
             pattern.size(), m.n_layer);
}

}  // namespace

void check_model(const Config::Model& model, const std::string& origin) {
    check_sizes(model, origin);
    check_rope(model, origin);
    check_windows(model, origin);
}

namespace {

std::vector<bool> windows_of(const Config::Model& m) {
    std::vector<bool> layers;
    for (int layer = 0; layer < m.n_layer; layer++) layers.push_back(has_window(m, layer));
    return layers;
}

// The model with every setting that has no effect reset to its default.
Config::Model without_unused(Config::Model m) {
    const Config::Model unused;
    m.init_from = unused.init_from, m.dropout = unused.dropout, m.z_loss = unused.z_loss;
    if (m.position != PositionKind::rope) m.rope_theta = unused.rope_theta;
    if (m.rope_scaling == RopeScaling::none || m.rope_scaling == RopeScaling::linear)
        m.rope_original_positions = m.n_positions;
    if (m.rope_scaling != RopeScaling::llama3)
        m.rope_low_freq_factor = unused.rope_low_freq_factor, m.rope_high_freq_factor = unused.rope_high_freq_factor;
    if (m.rope_scaling != RopeScaling::yarn) {
        m.rope_beta_fast = unused.rope_beta_fast, m.rope_beta_slow = unused.rope_beta_slow;
        m.rope_attention_factor = unused.rope_attention_factor;
    }
    if (m.attention_scale == 0) m.attention_scale = 1 / std::sqrt(double(with_sizes(m).head_size));
    return m;
}

}  // namespace

std::vector<std::string> model_differences(const Config::Model& from, const Config::Model& to) {
    Config before, after;
    before.model = without_unused(from), after.model = without_unused(to);
    if (from.window_pattern != to.window_pattern && windows_of(from) == windows_of(to))
        before.model.window_pattern = after.model.window_pattern;
    return config_differences(before, after);
}

std::string joined(const std::vector<std::string>& differences) {
    std::string text;
    for (const std::string& difference : differences) text += (text.empty() ? "" : "; ") + difference;
    return text;
}
