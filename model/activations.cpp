// The table of activations. A row has the recompute level from which on backward recomputes the activation. Below that
// level a per-layer activation is kept, in memory of its own for each layer; from that level on all layers share one
// buffer.
#include "model/activations.h"

#include <algorithm>
#include <cstring>
#include <variant>

namespace {

struct ActivationSizes {
    size_t tokens;     // B T
    size_t head_rows;  // min(options.head_rows, B T)
    GptShape shape;

    size_t per_token() const { return tokens; }
    size_t per_channel() const { return tokens * size_t(shape.n_embd); }
    size_t per_qkv() const { return tokens * size_t(shape.qkv_channels()); }
    size_t per_hidden() const { return tokens * size_t(shape.hidden()); }
    size_t per_head() const { return tokens * size_t(shape.n_head); }
    size_t per_wide() const { return tokens * size_t(std::max(shape.hidden(), shape.qkv_channels())); }
    size_t per_logit() const { return head_rows * size_t(shape.padded_vocab()); }
};

// The storage types of activations, by kind.
enum class Storage { residual, branch, statistic };

struct ActivationRow {
    const char* name;  // successive rows of one name are one buffer
    const char* category;
    size_t (ActivationSizes::*count)() const;  // elements, of one layer if per layer
    Storage storage;
    Recompute recomputed_from;
    std::variant<Activation& (*)(GptActivations&), Activation& (*)(BlockActivations&)> place;  // the second: per layer
    bool is_shared = false;  // by all layers at every level: only the next op reads it

    bool per_layer() const { return place.index() == 1; }
};

// For rows that are kept at every level.
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
        {"residual", kept, &S::per_channel, residual, kNever, [](B& b) -> A& { return b.residual; }},
        {"norm1", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm1.out; }},
        {"norm1_mean", kept, &S::per_token, statistic, R::block, [](B& b) -> A& { return b.norm1.mean; }},
        {"norm1_rstd", kept, &S::per_token, statistic, R::block, [](B& b) -> A& { return b.norm1.rstd; }},
        {"qkv", kept, &S::per_qkv, branch, R::block, [](B& b) -> A& { return b.qkv; }},
        {"attn", kept, &S::per_channel, branch, R::block, [](B& b) -> A& { return b.attn.out; }},
        {"attn_lse", kept, &S::per_head, statistic, R::block, [](B& b) -> A& { return b.attn.lse; }},
        {"residual_mid", kept, &S::per_channel, residual, R::block, [](B& b) -> A& { return b.residual_mid; }},
        {"norm2", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm2.out; }},
        {"norm2_mean", kept, &S::per_token, statistic, R::block, [](B& b) -> A& { return b.norm2.mean; }},
        {"norm2_rstd", kept, &S::per_token, statistic, R::block, [](B& b) -> A& { return b.norm2.rstd; }},
        {"fc", kept, &S::per_hidden, branch, R::block, [](B& b) -> A& { return b.mlp.fc; }},
        {"fc_gelu", kept, &S::per_hidden, branch, R::gelu, [](B& b) -> A& { return b.mlp.gelu; }},
        {"residual_f", kept, &S::per_channel, residual, kNever, [](G& g) -> A& { return g.residual_f; }},
        {"norm_f", kept, &S::per_channel, branch, kNever, [](G& g) -> A& { return g.norm_f.out; }},
        {"norm_f_mean", kept, &S::per_token, statistic, kNever, [](G& g) -> A& { return g.norm_f.mean; }},
        {"norm_f_rstd", kept, &S::per_token, statistic, kNever, [](G& g) -> A& { return g.norm_f.rstd; }},
        {"branch", kept, &S::per_channel, branch, R::block, [](B& b) -> A& { return b.attn_proj; }, true},
        {"branch", kept, &S::per_channel, branch, kNever, [](B& b) -> A& { return b.mlp.out; }, true},
        {"loss", kept, &S::per_token, statistic, kNever, [](G& g) -> A& { return g.loss; }},
        {"logits", "logits", &S::per_logit, branch, kNever, [](G& g) -> A& { return g.logits; }},
        {"dresidual", kBackward, &S::per_channel, residual, kNever, [](G& g) -> A& { return g.dresidual; }},
        {"dbranch", kBackward, &S::per_channel, branch, kNever, [](G& g) -> A& { return g.dbranch; }},
        {"dwide", kBackward, &S::per_wide, branch, kNever, [](G& g) -> A& { return g.dwide; }},
    };
    return table;
}

// The residual stream and the branches have one type so far.
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
    const ActivationSizes sizes{tokens, std::min(size_t(options.head_rows), tokens), options.shape};
    GptActivations acts{};
    acts.block.resize(size_t(options.shape.n_layer));

    const char* name = "";
    View buffer;
    for (const ActivationRow& row : activation_table()) {
        if (row.category == kBackward && !options.training) continue;
        const bool is_recomputed = options.recompute >= row.recomputed_from;
        const bool is_shared = row.is_shared || is_recomputed || !options.training;
        const size_t layers = row.per_layer() ? acts.block.size() : 1, count = (sizes.*row.count)();
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
