// Where everything lies: the one place that hands out a rank's memory, run dry for the plan and again for real.
#include "model/state.h"

#include <algorithm>

template <class Act> GptActivations<Act> place_activations(const GptOptions& options, Arena& arena) {
    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    const ActivationSizes sizes{tokens, std::min(size_t(options.head_rows), tokens), options.shape};
    GptActivations<Act> acts{};
    acts.block.resize(size_t(options.shape.n_layer));

    for (const auto& row : activation_table<Act>()) {
        if (row.training_only && !options.training) continue;
        const bool shared = !options.training || options.recompute >= row.shared_from;
        const size_t layers = row.per_layer ? acts.block.size() : 1;
        const size_t bytes = (sizes.*row.count)() * row.element_bytes;
        std::byte* memory = arena.take<std::byte>(row.category, row.name, shared ? bytes : bytes * layers);
        for (size_t layer = 0; memory && layer < layers; layer++)
            row.set(acts, layer, memory + (shared ? 0 : layer * bytes));
    }
    return acts;
}

namespace {

template <class Act> size_t scratch_bytes(const GptOptions& options) {
    const GptShape& shape = options.shape;
    const int BT = options.batch * options.seq_len, C = shape.n_embd;
    const int head_rows = std::min(options.head_rows, BT);
    size_t most = 0;
    auto need = [&](size_t bytes) { most = std::max(most, bytes); };
    auto need_for_weight = [&](int rows, int n, int k) {
        ops::MatmulBackwardWeight<Act> op{};
        op.rows = rows, op.n = n, op.k = k;
        need(ops::matmul_backward_weight_scratch_bytes(op));
    };
    need_for_weight(head_rows, shape.padded_vocab(), C);
    need_for_weight(BT, shape.qkv_channels(), C);
    need_for_weight(BT, C, C);
    need_for_weight(BT, shape.hidden(), C);
    need_for_weight(BT, C, shape.hidden());

    ops::NormBackward<Act> norm{};
    norm.rows = BT, norm.cols = C;
    need(ops::norm_backward_scratch_bytes(norm));

    ops::EmbeddingBackward<Act> embedding{};
    embedding.batch = options.batch, embedding.seq_len = options.seq_len, embedding.channels = C;
    embedding.vocab = shape.padded_vocab(), embedding.n_positions = shape.n_positions;
    need(ops::embedding_backward_scratch_bytes(embedding));

    ops::AttentionBackward<Act> attention{};
    attention.batch = options.batch, attention.seq_len = options.seq_len, attention.n_head = shape.n_head;
    attention.n_kv_head = shape.n_kv_head, attention.head_size = shape.head_size();
    need(ops::attention_backward_scratch_bytes(attention));
    return most;
}

}  // namespace

template <class Act> GptState<Act> place_state(const GptOptions& options, Arena& arena) {
    GptState<Act> s;
    s.options = options;
    s.layout = lay_out_tensors(options.shape);
    const size_t elements = s.layout.elements;

    s.master = arena.take<float>("master weights", "master", elements);
    if constexpr (std::is_same_v<Act, float>)
        s.param = s.master;
    else
        s.param = arena.take<Act>("compute weights", "param", elements);
    s.params = tensor_views(s.layout, s.param);

    if (options.training) {
        s.grad = arena.take<float>("gradients", "grad", elements);
        s.grads = tensor_views(s.layout, s.grad);
        s.m = arena.take<float>("optimizer state", "m", elements);
        if (options.optimizer == OptimizerKind::adamw) s.v = arena.take<float>("optimizer state", "v", elements);
        s.host_chunks = chunk_grid(s.layout);
        s.chunks = arena.take<ops::Chunk>("control", "chunks", s.host_chunks.size());
        s.chunk_sums = arena.take<double>("control", "chunk_sums", s.host_chunks.size());
        s.grad_norm = arena.take<ops::GradNorm>("control", "grad_norm", 1);
        s.scratch = arena.take<std::byte>("scratch", "scratch", scratch_bytes<Act>(options));
    }
    s.acts = place_activations<Act>(options, arena);

    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    s.tokens = arena.take<int>("control", "tokens", tokens);
    s.targets = arena.take<int>("control", "targets", tokens);
    s.loss_sum = arena.take<double>("control", "loss_sum", 1);
    s.scalars = arena.take<ops::StepScalars>("control", "scalars", 1);
    return s;
}

template GptState<float> place_state(const GptOptions&, Arena&);
template GptState<bf16> place_state(const GptOptions&, Arena&);
template GptState<fp16> place_state(const GptOptions&, Arena&);
