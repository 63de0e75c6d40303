// The architecture of a GPT: its sizes and the parts of its blocks. The section "model" of a configuration is one; the
// model is built from it. The defaults are GPT-2 124M's.
//
// The letters follow llm.c: B sequences, T positions, C channels, L layers, V vocabulary, Vp vocabulary padded to 128,
// P learned positions; NH query heads, NKV key/value heads, HS head size.
#pragma once

#include <string>
#include <vector>

#include "kernels/base/choices.h"  // IWYU pragma: export

// Rotary position embedding; see rope_table().
struct RopeSettings {
    double theta = 10000;
    double fraction = 1;  // fraction of a head's elements, from the first, that is rotated
    RopeScaling scaling = RopeScaling::none;
    double factor = 1;                                 // linear, llama3, yarn: ratio by which sequences are extended
    int original_positions = 0;                        // llama3, yarn: positions before the scaling; 0: n_positions
    double low_freq_factor = 1, high_freq_factor = 4;  // llama3
    double beta_fast = 32, beta_slow = 1;              // yarn
    double attention_factor = 0;                       // yarn; 0: 0.1 ln(factor) + 1
};

// Sizes that are given as 0 follow from others; read them by the functions below.
struct GptShape {
    int n_layer = 12;
    int n_head = 12;
    int given_kv_heads = 0;
    int n_embd = 768;
    int n_positions = 1024;
    int vocab_size = 50257;
    int given_head_size = 0;
    int given_hidden = 0;

    ActivationFunction activation = ActivationFunction::gelu_new;
    bool gated_mlp = false;
    NormKind norm = NormKind::layernorm;
    bool norm_weight = true, norm_bias = true;
    double norm_eps = 1e-5;
    PositionKind position = PositionKind::learned;
    RopeSettings rope = {};  // if position is rope
    AttentionBias attention_bias = AttentionBias::all;
    bool mlp_bias = true;
    QkNorm qk_norm = QkNorm::none;
    double given_attention_scale = 0;
    int sliding_window = 0;            // 0: none
    std::string window_pattern = "S";  // per layer, repeated: S uses the window, L does not
    double attention_softcap = 0;      // 0: none
    double final_softcap = 0;          // 0: none
    bool tie_embeddings = true;
    bool embedding_norm = false;
    int vocabulary_parts = 1;  // see part()
    int kv_head_parts = 1;     // parts with the same key/value head; each part's weights compute a part of its channels

    int kv_heads() const { return given_kv_heads > 0 ? given_kv_heads : n_head; }
    int head_size() const { return given_head_size > 0 ? given_head_size : n_embd / n_head; }
    // 4 n_embd, or for a gated MLP 8/3 n_embd rounded up to a multiple of 256.
    int hidden() const;
    double attention_scale() const;  // 1 / sqrt(head_size()), rounded to float
    int original_positions() const { return rope.original_positions > 0 ? rope.original_positions : n_positions; }
    // Replaces given sizes of 0, other than the attention scale, by their values.
    void fill_in_sizes();

    // Returns what is wrong with the sizes and parts, naming configuration keys; empty if nothing is.
    std::string problem() const;

    // Tensor parallelism: the sizes of one of `parts` equal parts. A part has some of the heads, of the hidden channels
    // and of the vocabulary's rows; vocab_size stays. If there are more parts than key/value heads, several have the
    // same one.
    GptShape part(int parts) const;
    // Returns why the model cannot have `parts` parts, naming configuration keys; empty if it can.
    std::string parts_problem(int parts) const;

    // Returns the attention window of layer `layer`; 0: none.
    int window(int layer) const;
    // Returns a layer's attention channels times the average number of keys per query: T / 2 or, with a window W below
    // T, W - W^2 / (2 T).
    double attended(int layer, int seq_len) const;
    int rotary() const { return position == PositionKind::rope ? int(head_size() * rope.fraction) : 0; }
    bool changes_heads() const { return rotary() > 0 || qk_norm != QkNorm::none; }
    // False for relu2 without a gate: its backward pass needs only the output.
    bool keeps_pre_activation() const { return gated_mlp || activation != ActivationFunction::relu2; }
    // A multiple of 128, so that every row of logits is aligned and the head's GEMM has whole tiles.
    int padded_vocab() const { return (vocab_size + 127) / 128 * 128 / vocabulary_parts; }

    // Rows and columns of tensors.
    int one() const { return 1; }
    int channels() const { return n_embd; }
    int positions() const { return n_positions; }
    int head_channels() const { return head_size(); }
    int attention_channels() const { return n_head * head_size(); }
    int qkv_channels() const { return (n_head + 2 * kv_heads()) * head_size(); }
    int kv_channels() const { return 2 * kv_heads() * head_size(); }  // keys and values, after the queries
    // The part of them that this part's weights compute.
    int computed_kv_channels() const { return kv_channels() / kv_head_parts; }
    int computed_qkv_channels() const { return attention_channels() + computed_kv_channels(); }
    int fc_channels() const { return gated_mlp ? 2 * hidden() : hidden(); }  // gate, then up

    // The rows of the matrices that a tensor stacks.
    std::vector<int> qkv_rows() const {
        return {attention_channels(), computed_kv_channels() / 2, computed_kv_channels() / 2};
    }
    std::vector<int> fc_rows() const { return std::vector<int>(gated_mlp ? 2 : 1, hidden()); }

    // Whether the model has a tensor; used by tensor_table().
    bool always() const { return true; }
    bool has_positions() const { return position == PositionKind::learned; }
    bool has_norm_weight() const { return norm_weight; }
    bool has_norm_bias() const { return norm_bias; }
    bool has_embedding_norm_weight() const { return embedding_norm && norm_weight; }
    bool has_embedding_norm_bias() const { return embedding_norm && norm_bias; }
    bool has_qkv_bias() const { return attention_bias != AttentionBias::none; }
    bool has_attn_proj_bias() const { return attention_bias == AttentionBias::all; }
    bool has_mlp_bias() const { return mlp_bias; }
    bool has_qk_norm_weight() const { return qk_norm == QkNorm::weight; }
    bool has_head() const { return !tie_embeddings; }
};

// Returns the cosine and sine of position * frequency_i, times yarn's attention factor: (positions, rotary / 2, 2),
// computed in double. frequency_i = theta^(-2 i / rotary), modified by the scaling:
//   linear  divided by `factor`                                     (Chen et al., arXiv 2306.15595, section 2.3)
//   llama3  with n = original_positions * frequency / (2 pi) periods: divided by `factor` below low_freq_factor,
//           unchanged above high_freq_factor, linear in n in between  (Meta's Llama 3.1, apply_scaling in model.py)
//   yarn    divided by `factor` below beta_slow periods, unchanged above beta_fast, linear in i in between
//           (Peng et al., arXiv 2309.00071, section 3.2, with integer bounds as in Hugging Face transformers)
std::vector<float> rope_table(const GptShape& shape, int positions);
