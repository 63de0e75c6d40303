// Where everything lies: the one place that hands out a rank's memory, run dry for the plan and again for real.
#include "model/state.h"

#include <algorithm>
#include <bit>

#include "kernels/check.h"

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

// The largest that a window has to hold, in elements: the bucket of no block has one of its own.
size_t window_elements(const TensorLayout& layout, int window) {
    size_t most = 0;
    for (size_t i = 0; i < layout.buckets.size(); i++)
        if ((i == 0) == (window == 0)) most = std::max(most, layout.buckets[i].piece * size_t(layout.ranks));
    return most;
}

template <class T>
void place_windows(Window<T>* windows, const TensorLayout& layout, const char* category, const char* name,
                   Arena& arena) {
    for (int i = 0; i < kWindows; i++)
        windows[i].values = arena.take<T>(category, format("%s_window_%d", name, i), window_elements(layout, i));
}

// Pointers to tensors in the windows that their buckets take turns in.
template <class T> GptTensors<T> window_views(const TensorLayout& layout, const Window<T>* windows) {
    return tensor_views<T>(layout, [&](const Tensor& tensor) -> T* {
        T* values = windows[window_of(tensor.bucket)].values;
        return values ? values + (tensor.begin - layout.bucket_of(tensor).begin) : nullptr;
    });
}

template <class Act> void place_parameters(GptState<Act>& s, Arena& arena) {
    const bool sharded = s.options.is_sharded();
    s.master = arena.take<float>("master weights", "master", owned_elements(s));
    if constexpr (std::is_same_v<Act, float>)
        s.own_param = s.master;
    else
        s.own_param = arena.take<Act>("compute weights", "own_param", owned_elements(s));
    if (!s.options.keeps_whole_parameters()) {
        place_windows(s.param_window, s.layout, "compute weights", "param", arena);
        s.params = window_views(s.layout, s.param_window);
        return;
    }
    s.param = sharded ? arena.take<Act>("compute weights", "param", s.layout.elements) : s.own_param;
    s.params = tensor_views(s.layout, s.param);
    s.param_ready.resize(s.layout.buckets.size());
}

template <class Act> void place_gradients(GptState<Act>& s, Arena& arena) {
    const GptOptions& options = s.options;
    if (options.keeps_whole_gradients()) {
        const int levels = options.deterministic_reduce ? std::bit_width(unsigned(options.micro_steps)) : 1;
        for (int level = 0; level < levels; level++)
            s.levels.push_back(arena.take<float>("gradients", level == 0 ? "grad" : format("grad_level_%d", level),
                                                 s.layout.elements));
        s.grad = s.levels[0];
        s.grads = tensor_views(s.layout, s.grad);
    } else {
        place_windows(s.grad_window, s.layout, "gradients", "grad", arena);
        for (int i = 0; options.micro_steps > 1 && i < kWindows; i++)
            s.grad_window[i].reduced = arena.take<float>("gradients", format("reduced_window_%d", i),
                                                         window_elements(s.layout, i) / size_t(options.ranks));
        s.grads = window_views(s.layout, s.grad_window);
    }
    s.own_grad = options.is_sharded() ? arena.take<float>("gradients", "own_grad", owned_elements(s)) : s.grad;
    size_t largest_piece = 0;
    for (const Bucket& bucket : s.layout.buckets) largest_piece = std::max(largest_piece, bucket.piece);
    s.comm_scratch =
        arena.take<std::byte>("scratch", "comm_scratch",
                              reduce_scatter_scratch_bytes(largest_piece, options.ranks, options.deterministic_reduce));
}

}  // namespace

template <class Act> GptState<Act> place_state(const GptOptions& options, Arena& arena) {
    GptState<Act> s;
    s.options = options;
    s.layout = lay_out_tensors(options.shape, options.ranks, options.bucket_bytes / sizeof(float));
    place_parameters(s, arena);
    if (options.training) {
        place_gradients(s, arena);
        const size_t owned = owned_elements(s);
        s.m = arena.take<float>("optimizer state", "m", owned);
        if (options.optimizer == OptimizerKind::adamw) s.v = arena.take<float>("optimizer state", "v", owned);
        s.host_all_chunks = chunk_grid(s.layout);
        s.host_own_chunks = owned_chunks(s.layout, s.host_all_chunks, options.rank, !options.is_sharded());
        s.all_chunks = arena.take<ops::Chunk>("control", "all_chunks", s.host_all_chunks.size());
        s.own_chunks = arena.take<ops::Chunk>("control", "own_chunks", s.host_own_chunks.size());
        s.grad_norm = arena.take<ops::GradNorm>("control", "grad_norm", 1);
        s.scratch = arena.take<std::byte>("scratch", "scratch", scratch_bytes<Act>(options));
    }
    s.acts = place_activations<Act>(options, arena);

    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    s.tokens = arena.take<int>("control", "tokens", tokens);
    s.targets = arena.take<int>("control", "targets", tokens);
    s.sums = arena.take<double>("control", "sums", step_sums(s).count());
    s.scalars = arena.take<ops::StepScalars>("control", "scalars", 1);
    return s;
}

template GptState<float> place_state(const GptOptions&, Arena&);
template GptState<bf16> place_state(const GptOptions&, Arena&);
template GptState<fp16> place_state(const GptOptions&, Arena&);
