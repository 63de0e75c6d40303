// The table of activations. Each row has the lowest recompute level at which backward recomputes the activation. Below
// that level a per-layer activation is kept, in separate memory for each layer. From that level up all layers share one
// buffer.
#include "model/activations.h"

#include <algorithm>
#include <cstring>
#include <variant>

#include "kernels/base/check.h"
#include "model/fp8.h"
#include "model/tensors.h"

namespace {

struct ActivationSizes {
    size_t tokens;               // B T
    size_t rows;                 // of the residual stream: B T / tensor-parallel ranks
    size_t parts;                // TensorParallelGroup::parts
    size_t head_rows;            // min(options.head_rows, B T)
    GptShape shape;              // this rank's part
    bool has_input, has_output;  // of the model, on this stage

    size_t if_any(bool is_needed, int each) const { return is_needed ? tokens * size_t(each) : 0; }
    size_t per_row() const { return rows; }
    size_t per_mean() const { return shape.norm == NormKind::layernorm ? rows : 0; }
    size_t per_channel() const { return rows * size_t(shape.n_embd); }
    size_t per_gathered() const { return if_any(rows < tokens, shape.n_embd); }
    size_t per_term() const { return if_any(rows < tokens || parts > 1, int(parts) * shape.n_embd); }
    size_t per_embedding() const { return has_input && shape.embedding_norm ? per_channel() : 0; }
    size_t per_embedding_mean() const { return has_input && shape.embedding_norm ? per_mean() : 0; }
    size_t per_embedding_rstd() const { return has_input && shape.embedding_norm ? rows : 0; }
    size_t per_output() const { return has_output ? per_channel() : 0; }
    size_t per_output_mean() const { return has_output ? per_mean() : 0; }
    size_t per_output_rstd() const { return has_output ? rows : 0; }
    size_t per_loss() const { return has_output ? tokens : 0; }
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
    size_t per_fc_gradient() const { return tokens * size_t(shape.fc_channels()); }
    size_t per_logit() const { return has_output ? head_rows * size_t(shape.padded_vocab()) : 0; }
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
    unsigned is = 0;

    bool per_layer() const { return place.index() == 1; }
};

// ActivationRow::is
constexpr unsigned kShared = 1;    // among all layers and micro-steps at every level: only the next op reads it
constexpr unsigned kDeferred = 2;  // kept between two passes of a micro-step's backward pass, if it has two
constexpr unsigned kOperand = 4;   // of linear layers, with an amax
constexpr unsigned kInput = 8;     // of blocks, which may be in host memory

// For activations that are kept at every level.
constexpr Recompute kNever = Recompute::automatic;

constexpr size_t kWindows = 2;  // of device memory for activations in host memory

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
        {"residual", kept, &S::per_channel, residual, kNever, [](B& b) -> A& { return b.residual; }, kInput},
        {"norm1", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm1.out; }, kOperand},
        {"norm1_mean", kept, &S::per_mean, statistic, R::block, [](B& b) -> A& { return b.norm1.mean; }},
        {"norm1_rstd", kept, &S::per_row, statistic, R::block, [](B& b) -> A& { return b.norm1.rstd; }},
        {"qkv", kept, &S::per_qkv, branch, R::block, [](B& b) -> A& { return b.qkv; }},
        {"qk_raw", kept, &S::per_raw, branch, R::block, [](B& b) -> A& { return b.attn.raw; }},
        {"qk_rstd", kept, &S::per_normed_head, statistic, R::block, [](B& b) -> A& { return b.attn.rstd; }},
        {"attn", kept, &S::per_attention, branch, R::block, [](B& b) -> A& { return b.attn.out; }, kOperand},
        {"attn_lse", kept, &S::per_head, statistic, R::block, [](B& b) -> A& { return b.attn.lse; }},
        {"residual_mid", kept, &S::per_channel, residual, R::block, [](B& b) -> A& { return b.residual_mid; }},
        {"norm2", kept, &S::per_channel, branch, R::norm, [](B& b) -> A& { return b.norm2.out; }, kOperand},
        {"norm2_mean", kept, &S::per_mean, statistic, R::block, [](B& b) -> A& { return b.norm2.mean; }},
        {"norm2_rstd", kept, &S::per_row, statistic, R::block, [](B& b) -> A& { return b.norm2.rstd; }},
        {"fc", kept, &S::per_fc, branch, R::block, [](B& b) -> A& { return b.mlp.fc; }},
        {"fc_act", kept, &S::per_hidden, branch, R::gelu, [](B& b) -> A& { return b.mlp.act; }, kOperand},
        {"fc_relu2", kept, &S::per_relu2, branch, R::block, [](B& b) -> A& { return b.mlp.act; }, kOperand},
        {"residual_f", kept, &S::per_output, residual, kNever, [](G& g) -> A& { return g.residual_f; }},
        {"norm_f", kept, &S::per_output, branch, kNever, [](G& g) -> A& { return g.norm_f.out; }},
        {"norm_f_mean", kept, &S::per_output_mean, statistic, kNever, [](G& g) -> A& { return g.norm_f.mean; }},
        {"norm_f_rstd", kept, &S::per_output_rstd, statistic, kNever, [](G& g) -> A& { return g.norm_f.rstd; }},
        {"branch", kept, &S::per_channel, branch, R::block, [](B& b) -> A& { return b.attn_proj; }, kShared},
        {"branch", kept, &S::per_channel, branch, kNever, [](B& b) -> A& { return b.mlp.out; }, kShared},
        {"gathered", kept, &S::per_gathered, branch, kNever, [](G& g) -> A& { return g.gathered; }, kShared},
        {"loss", kept, &S::per_loss, statistic, kNever, [](G& g) -> A& { return g.loss; }, kShared},
        {"logits", "logits", &S::per_logit, branch, kNever, [](G& g) -> A& { return g.logits; }, kShared},
        {"terms", kBackward, &S::per_term, branch, kNever, [](G& g) -> A& { return g.terms; }, kShared},
        {"dresidual", kBackward, &S::per_channel, residual, kNever, [](G& g) -> A& { return g.dresidual; },
         kShared | kOperand},
        {"dbranch", kBackward, &S::per_branch, branch, kNever, [](G& g) -> A& { return g.dbranch; },
         kShared | kOperand},
        {"dwide", kBackward, &S::per_wide, branch, kNever, [](G& g) -> A& { return g.dwide; }, kShared | kOperand},
        {"dmlp", kBackward, &S::per_channel, branch, kNever, [](B& b) -> A& { return b.dmlp; }, kDeferred},
        {"dfc", kBackward, &S::per_fc_gradient, branch, kNever, [](B& b) -> A& { return b.dfc; }, kDeferred},
        {"dattn", kBackward, &S::per_channel, branch, kNever, [](B& b) -> A& { return b.dattn; }, kDeferred},
        {"dqkv", kBackward, &S::per_qkv, branch, kNever, [](B& b) -> A& { return b.dqkv; }, kDeferred},
    };
    return table;
}

}  // namespace

std::vector<Pass> passes_of(const GptOptions& options, int micro_steps) {
    const PipelineParallel& pipeline = options.pipeline;
    return schedule_passes(pipeline.schedule, pipeline.size, pipeline.chunks, micro_steps)[size_t(pipeline.rank)];
}

int micro_steps_deferred(const GptOptions& options) {
    const bool defers = options.training && options.pipeline.defers_weights();
    return defers ? most_deferred(passes_of(options, options.micro_steps)) : 0;
}

std::vector<int> micro_steps_in_flight(const GptOptions& options) {
    const auto& [rank, stages, schedule, chunks, layers] = options.pipeline;
    std::vector<int> counts(size_t(chunks), 1);
    if (!options.training || stages == 1) return counts;
    if (chunks == 1) {  // see schedule_passes()
        const int most = schedule == PipelineSchedule::zero_bubble ? stages : stages - rank;
        return {schedule == PipelineSchedule::gpipe ? options.micro_steps : std::min(most, options.micro_steps)};
    }
    const std::vector<Pass> passes = passes_of(options, options.micro_steps);
    for (size_t chunk = 0; chunk < counts.size(); chunk++) counts[chunk] = most_in_flight(passes, int(chunk));
    return counts;
}

// The places of one row of the table, in the order of its memory. A single slot stands for all of them.
static std::vector<Activation*> places_of(const ActivationRow& row, const std::vector<LayerRange>& ranges,
                                          const std::vector<int>& in_flight, std::vector<GptActivations>& slots) {
    std::vector<Activation*> places;
    const auto of = [&](int slot) -> GptActivations& { return slots[size_t(slot) % slots.size()]; };
    for (int slot = 0; !row.per_layer() && slot < std::ranges::max(in_flight); slot++)
        places.push_back(&std::get<0>(row.place)(of(slot)));
    for (size_t chunk = 0; row.per_layer() && chunk < ranges.size(); chunk++)
        for (int slot = 0; slot < in_flight[chunk]; slot++)
            for (int layer = ranges[chunk].first; layer < ranges[chunk].end(); layer++)
                places.push_back(&std::get<1>(row.place)(of(slot).block[size_t(layer)]));
    return places;
}

size_t residual_elements(const GptOptions& options) {
    return options.part().rows() / size_t(options.tensor_parallel.size) * size_t(options.shape.n_embd);
}

// Successive activations of `count` elements have different windows.
static void place_on_host(const std::vector<Activation*>& places, View windows, View host, size_t count) {
    for (size_t i = 0; i < places.size(); i++) {
        const size_t window = i % kWindows;
        *places[i] = {.view = windows.from(window * count),
                      .is_kept = true,
                      .on_host = host.from(i * count),
                      .window = int(window)};
    }
}

std::vector<GptActivations> place_activations(const GptOptions& options, Arena& arena) {
    const size_t tokens = options.part().rows();
    const auto parts = size_t(options.tensor_parallel.size);
    const ActivationSizes sizes{.tokens = tokens,
                                .rows = tokens / parts,
                                .parts = size_t(terms_of_sums(options)) / parts,
                                .head_rows = std::min(size_t(options.head_rows), tokens),
                                .shape = options.shape.part(int(parts)),
                                .has_input = options.pipeline.is_first(),
                                .has_output = options.pipeline.is_last()};
    GptActivations empty;
    empty.block.resize(size_t(options.shape.n_layer));
    const std::vector<LayerRange> ranges = own_layers(options);
    const std::vector<int> in_flight = micro_steps_in_flight(options);
    const std::vector<int> deferred(in_flight.size(), micro_steps_deferred(options));
    const size_t n_slots = arena.has_memory() ? size_t(std::ranges::max(in_flight)) : 1;  // a plan only counts
    std::vector<GptActivations> slots(n_slots, empty);

    const bool has_amax = keeps_amax(options);
    const char* name = "";
    View buffer;
    for (const ActivationRow& row : activation_table()) {
        if (row.category == kBackward && !options.training) continue;
        const bool is_recomputed = options.recompute >= row.recomputed_from;
        const bool is_shared = row.is & kShared || is_recomputed || !options.training;
        const size_t count = round_up((sizes.*row.count)(), kTensorAlignment);
        const std::vector<Activation*> places =
            places_of(row, ranges, row.is & kDeferred ? deferred : in_flight, slots);
        if (count == 0 || places.empty()) continue;
        // The residual stream and the branches currently have the same type.
        const Dtype dtype = row.storage == Storage::statistic ? Dtype::fp32 : options.precision;
        const size_t arrays = is_shared ? 1 : places.size();
        if (options.offload_activations && row.is & kInput && !is_shared) {
            place_on_host(places, arena.take(row.category, row.name, count * kWindows, dtype),
                          arena.take(row.category, row.name, count * arrays, dtype, true), count);
            continue;
        }
        if (std::strcmp(row.name, name) != 0) buffer = arena.take(row.category, row.name, count * arrays, dtype);
        name = row.name;
        float* amax = nullptr;
        if (has_amax && row.is & kOperand) amax = arena.take<float>(kFp8Operands, format("%s_amax", name), arrays);
        for (size_t i = 0; i < places.size(); i++) {
            places[i]->view = buffer && !is_shared ? buffer.from(i * count) : buffer;
            places[i]->view.amax = amax && !is_shared ? amax + i : amax;
            places[i]->is_kept = !is_recomputed;
        }
    }
    return slots;
}
