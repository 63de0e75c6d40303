// Section "model": options, aliases, family defaults and consistency checks.
#include "kernels/base/dropout.h"
#include "runtime/config/config.h"
#include "runtime/config/options.h"

std::vector<Option> model_options(Config& config) {
    Config::Model& m = config.model;
    return {
        {"model.family", &m.family, kAnything, "sets the defaults of the architecture keys, from activation to z_loss",
         Effect::none},
        {"model.n_layer", &m.n_layer, between(1, 10000), "number of transformer blocks"},
        {"model.n_head", &m.n_head, between(1, 65536), "query heads per block"},
        {"model.n_kv_head", &m.given_kv_heads, between(0, 65536),
         "key/value heads per block, each shared by a group of query heads; must divide n_head. 0: n_head"},
        {"model.n_embd", &m.n_embd, between(1, 65536), "embedding dimension (model width)"},
        {"model.head_size", &m.given_head_size, between(0, 65536), "dimension of a head; 0: n_embd / n_head"},
        {"model.hidden_size_mlp", &m.given_hidden, between(0, 1 << 20),
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
        {"model.rope_theta", &m.rope.theta, between(1, 1e12), "rope: base of the frequencies"},
        {"model.rope_fraction", &m.rope.fraction, between(0, 1), "rope: fraction of each head that is rotated"},
        {"model.rope_scaling", &m.rope.scaling, kAnything,
         "rope: frequency scaling for sequences longer than rope_original_positions"},
        {"model.rope_factor", &m.rope.factor, between(1, 1e6), "rope_scaling: factor by which the context is extended"},
        {"model.rope_original_positions", &m.rope.original_positions, between(0, 1 << 24),
         "llama3, yarn: n_positions before the extension; 0: n_positions"},
        {"model.rope_low_freq_factor", &m.rope.low_freq_factor, between(1e-6, 1e6),
         "llama3: frequencies with fewer periods than this in rope_original_positions are divided by rope_factor"},
        {"model.rope_high_freq_factor", &m.rope.high_freq_factor, between(1e-6, 1e6),
         "llama3: frequencies with more periods than this in rope_original_positions are unchanged"},
        {"model.rope_beta_fast", &m.rope.beta_fast, between(1e-6, 1e6),
         "yarn: frequencies with more periods than this in rope_original_positions are unchanged"},
        {"model.rope_beta_slow", &m.rope.beta_slow, between(1e-6, 1e6),
         "yarn: frequencies with fewer periods than this in rope_original_positions are divided by rope_factor"},
        {"model.rope_attention_factor", &m.rope.attention_factor, between(0, 1e6),
         "yarn: factor on rotated queries and keys; 0: 0.1 ln(rope_factor) + 1"},
        {"model.attention_bias", &m.attention_bias, kAnything,
         "biases of the attention projections. none; qkv: query, key and value; all: also the output projection"},
        {"model.mlp_bias", &m.mlp_bias, kAnything, "biases in the MLP"},
        {"model.qk_norm", &m.qk_norm, kAnything,
         "RMSNorm of each query and key head before the rotation; unit: without weights"},
        {"model.attention_scale", &m.given_attention_scale, between(0, 1e6),
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
        {"model.dropout", &m.dropout, between(0, ops::kMaxDropout),
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
        m.rope.theta = 500000;  // as in Llama 3
    }
    if (family == ModelFamily::qwen2 || family == ModelFamily::qwen3) m.rope.theta = 1e6, m.norm_eps = 1e-6;
    if (family == ModelFamily::qwen2) m.attention_bias = AttentionBias::qkv;
    if (family == ModelFamily::qwen3) m.qk_norm = QkNorm::weight;

    for (int GptShape::*size :
         {&GptShape::n_layer, &GptShape::n_head, &GptShape::given_kv_heads, &GptShape::n_embd,
          &GptShape::given_head_size, &GptShape::given_hidden, &GptShape::n_positions, &GptShape::vocab_size})
        m.*size = model.*size;
    m.init_from = model.init_from;
    m.dropout = model.dropout;
    model = std::move(m);
}

namespace {

std::vector<bool> windows_of(const Config::Model& m) {
    std::vector<bool> layers;
    for (int layer = 0; layer < m.n_layer; layer++) layers.push_back(m.window(layer) > 0);
    return layers;
}

// The model with every setting that has no effect reset to its default.
Config::Model without_unused(Config::Model m) {
    const Config::Model unused;
    m.init_from = unused.init_from, m.dropout = unused.dropout, m.z_loss = unused.z_loss;
    if (m.position != PositionKind::rope) m.rope.theta = unused.rope.theta;
    if (m.rope.scaling == RopeScaling::none || m.rope.scaling == RopeScaling::linear)
        m.rope.original_positions = m.n_positions;
    if (m.rope.scaling != RopeScaling::llama3)
        m.rope.low_freq_factor = unused.rope.low_freq_factor, m.rope.high_freq_factor = unused.rope.high_freq_factor;
    if (m.rope.scaling != RopeScaling::yarn) {
        m.rope.beta_fast = unused.rope.beta_fast, m.rope.beta_slow = unused.rope.beta_slow;
        m.rope.attention_factor = unused.rope.attention_factor;
    }
    m.given_attention_scale = m.attention_scale();
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
