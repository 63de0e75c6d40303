// The table of activations. Each row has the lowest recompute level at which backward recomputes the activation. Below
// that level a per-layer activation is kept, in separate memory for each layer. From that level up all layers share one
// buffer.
#include "model/activations.h"

#include <algorithm>
#include <cstring>
#include <variant>

namespace {

struct ActivationSizes {
    size_t tokens;     // B T
    size_t rows;       // of the residual stream: B T / tensor-parallel ranks
    size_t head_rows;  // min(options.head_rows, B T)
    GptShape shape;    // this rank's part

    size_t if_any(bool is_needed, int each) const { return is_needed ? tokens * size_t(each) : 0; }
    size_t per_token() const { return tokens; }
    size_t per_row() const { return rows; }
    size_t per_mean() const { return shape.norm == NormKind::layernorm ? rows : 0; }
    size_t per_channel() const { return rows * size_t(shape.n_embd); }
    size_t per_gathered() const { return if_any(rows < tokens, shape.n_embd); }
    size_t per_embedding() const { return shape.embedding_norm ? per_channel() : 0; }
    size_t per_embedding_mean() const { return shape.embedding_norm ? per_mean() : 0; }
    size_t per_embedding_rstd() const { return shape.embedding_norm ? rows : 0; }
    size_t per_qkv() const { return tokens * size_t(shape.qkv_channels()); }
    size_t per_raw() const {
        return if_any(shape.has_qk_norm_weight(), (shape.n_head + shape.kv_heads()) * shape.head_size());
    }
    size_t per_normed_head() const { return if_any(shape.qk_norm != QkNorm::none, shape.n_head + shape.kv_heads()); }
    size_t per_attention() const { return tokens * size_t(shape.attention_channels()); }
    size_t per_fc() const { return if_any(shape.keeps_pre_activation(), shape.fc_channels()); }
    size_t per_hidden() const { return if_any(shape.keeps_pre_activation(), shape.hidden()); }
    size_t per_relu2() const { return if_any(!shape.keeps_pre_activation(), shape.hidden()); }
    size_t per_head() const { return tokens * size_t(shape.n_head); }
    size_t per_branch() const { return std::max(per_channel(), per_attention()); }
    size_t per_wide() const {
        return std::max(tokens * size_t(std::max(shape.fc_channels(), shape.qkv_channels())), per_channel());
    }
    size_t per_logit() const { return head_rows * size_t(shape.padded_vocab()); }
};

// The storage types of activations, by kind.
enum class Storage { residual, branch, statistic };

struct ActivationRow {
    const char* name;  // successive rows with the same name share a buffer
    const char* category;
    size_t (ActivationSizes::*count)() const;  // elements, of one layer if per layer; 0: not in this model
    Storage storage;
    Recompute recomputed_from;
    std::variant<Activation& (*)(GptActivations&), Activation& (*)(BlockActivations&)> place;  // second: per layer
    bool is_shared = false;  // among all layers at every level: only the next op reads it

    bool per_layer() const { return place.index() == 1; }
};

// For activations that are kept at every level.
constexpr Recompute kNever = Recompute(int(Recompute::block) + 1);

constexpr const char* kBackward = "backward buffers";  // only training needs them

const std::vector<ActivationRow>& activation_table() {
    using A = Activation;
    using G = GptActivations;
    using B = BlockActivations;
    using S = ActivationSizes;
    using R = Recompute;
    using enum Storage;
    static const char* kept = "activations";
    static const std::vector<ActivationRow> table = {
        {"embedding", kept, &S::per_embedding, residual, kNever, [](G& g) -> A& { return g.embedding; }},
        {"norm_e_mean", kept, &S::per_embedding_mean, statistic, kNever, [](G& g) -> A& { return g.norm_e.mean; }},
        {"norm_e_rstd", kept, &S::per_embedding_rstd, statistic, kNever, [](G& g) -> A& { return g.norm_e.rstd; }},
        {"residual", kept, &S::per_channel, residual, kNever, [](B& b) -> A& { return b.residual; }},
        {"norm1", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm1.out; }},
        {"norm1_mean", kept, &S::per_mean, statistic, R::block, [](B& b) -> A& { return b.norm1.mean; }},
        {"norm1_rstd", kept, &S::per_row, statistic, R::block, [](B& b) -> A& { return b.norm1.rstd; }},
        {"qkv", kept, &S::per_qkv, branch, R::block, [](B& b) -> A& { return b.qkv; }},
        {"qk_raw", kept, &S::per_raw, branch, R::block, [](B& b) -> A& { return b.attn.raw; }},
        {"qk_rstd", kept, &S::per_normed_head, statistic, R::block, [](B& b) -> A& { return b.attn.rstd; }},
        {"attn", kept, &S::per_attention, branch, R::block, [](B& b) -> A& { return b.attn.out; }},
        {"attn_lse", kept, &S::per_head, statistic, R::block, [](B& b) -> A& { return b.attn.lse; }},
        {"residual_mid", kept, &S::per_channel, residual, R::block, [](B& b) -> A& { return b.residual_mid; }},
        {"norm2", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm2.out; }},
        {"norm2_mean", kept, &S::per_mean, statistic, R::block, [](B& b) -> A& { return b.norm2.mean; }},
        {"norm2_rstd", kept, &S::per_row, statistic, R::block, [](B& b) -> A& { return b.norm2.rstd; }},
        {"fc", kept, &S::per_fc, branch, R::block, [](B& b) -> A& { return b.mlp.fc; }},
        {"fc_act", kept, &S::per_hidden, branch, R::gelu, [](B& b) -> A& { return b.mlp.act; }},
        {"fc_relu2", kept, &S::per_relu2, branch, R::block, [](B& b) -> A& { return b.mlp.act; }},
        {"residual_f", kept, &S::per_channel, residual, kNever, [](G& g) -> A& { return g.residual_f; }},
        {"norm_f", kept, &S::per_channel, branch, kNever, [](G& g) -> A& { return g.norm_f.out; }},
        {"norm_f_mean", kept, &S::per_mean, statistic, kNever, [](G& g) -> A& { return g.norm_f.mean; }},
        {"norm_f_rstd", kept, &S::per_row, statistic, kNever, [](G& g) -> A& { return g.norm_f.rstd; }},
        {"branch", kept, &S::per_channel, branch, R::block, [](B& b) -> A& { return b.attn_proj; }, true},
        {"branch", kept, &S::per_channel, branch, kNever, [](B& b) -> A& { return b.mlp.out; }, true},
        {"gathered", kept, &S::per_gathered, branch, kNever, [](G& g) -> A& { return g.gathered; }},
        {"loss", kept, &S::per_token, statistic, kNever, [](G& g) -> A& { return g.loss; }},
        {"logits", "logits", &S::per_logit, branch, kNever, [](G& g) -> A& { return g.logits; }},
        {"dresidual", kBackward, &S::per_channel, residual, kNever, [](G& g) -> A& { return g.dresidual; }},
        {"dbranch", kBackward, &S::per_branch, branch, kNever, [](G& g) -> A& { return g.dbranch; }},
        {"dwide", kBackward, &S::per_wide, branch, kNever, [](G& g) -> A& { return g.dwide; }},
    };
    return table;
}

// The residual stream and the branches currently have the same type.
Dtype type_of(Storage storage, const GptOptions& options) {
    switch (storage) {
        case Storage::residual: return options.precision;
        case Storage::branch: return options.precision;
        case Storage::statistic: return Dtype::fp32;
    }
    return options.precision;
}

}  // namespace

GptActivations place_activations(const GptOptions& options, Arena& arena) {
    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    const auto parts = size_t(options.tensor_parallel.size);
    const ActivationSizes sizes{.tokens = tokens,
                                .rows = tokens / parts,
                                .head_rows = std::min(size_t(options.head_rows), tokens),
                                .shape = options.shape.part(int(parts))};
    GptActivations acts{};
    acts.block.resize(size_t(options.shape.n_layer));

    const char* name = "";
    View buffer;
    for (const ActivationRow& row : activation_table()) {
        if (row.category == kBackward && !options.training) continue;
        const bool is_recomputed = options.recompute >= row.recomputed_from;
        const bool is_shared = row.is_shared || is_recomputed || !options.training;
        const size_t layers = row.per_layer() ? acts.block.size() : 1, count = (sizes.*row.count)();
        if (count == 0) continue;
        const Dtype dtype = type_of(row.storage, options);
        if (std::strcmp(row.name, name) != 0)
            buffer = arena.take(row.category, row.name, count * (is_shared ? 1 : layers), dtype);
        name = row.name;
        for (size_t layer = 0; layer < layers; layer++) {
            Activation& activation =
                row.per_layer() ? std::get<1>(row.place)(acts.block[layer]) : std::get<0>(row.place)(acts);
            activation.view = buffer && !is_shared ? buffer.from(layer * count) : buffer;
            activation.is_kept = !is_recomputed;
        }
    }
    return acts;
}
