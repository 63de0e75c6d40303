#include "model/layers.h"

#include <algorithm>

void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out) {
    run(x.stream, ops::embedding_forward,
        {.out = rows_to_sum(x, out.view),
         .tokens = tokens,
         .wte = wte.weight.value,
         .wpe = x.group->comm.rank == 0 ? wpe.weight.value : nullptr,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .channels = wte.weight.cols,
         .positions = x.decode ? x.decode->positions : nullptr,
         .starts = x.starts,
         .part = {.first_token = x.group->comm.rank * wte.weight.rows, .tokens = wte.weight.rows}});
    sum_rows(x, out.view, rows_to_sum(x, out.view));
}

void embedding_backward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                        ConstView dout, bool has_head_part) {
    run(x.stream, ops::embedding_backward,
        {.dwte = wte.weight.grad,
         .dwpe = wpe.weight.grad,
         .scratch = x.scratch,
         .dout = gather_rows(x, dout),
         .tokens = tokens,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .channels = wte.weight.cols,
         .vocab = wte.weight.rows,
         .n_positions = wpe.weight.rows,
         .accumulate = x.accumulate,
         .accumulate_dwte = has_head_part || x.accumulate,
         .first_token = x.group->comm.rank * wte.weight.rows,
         .starts = x.starts});
}

void residual_norm_forward(const LayerContext& x, const LayerWeights& w, ResidualSum in, const Activation& residual,
                           const NormActivations& norm) {
    const bool adds = in.branch && !x.has(residual);
    if (!adds && x.has(norm.out)) return;
    run(x.stream, ops::residual_norm_forward,
        {.residual = adds ? residual.view : nullptr,
         .out = norm.out.view,
         .mean = norm.mean.view.as<float>(),
         .rstd = norm.rstd.view.as<float>(),
         .inp = adds ? in.residual : residual,
         .branch = adds ? in.branch : nullptr,
         .weight = w.weight.value,
         .bias = w.bias.value,
         .rows = x.own_rows(),
         .cols = x.shape->n_embd,
         .eps = float(x.shape->norm_eps)},
        {w.weight.name});
}

// Adds `n` terms of a vector's gradient.
static void sum_vector(const LayerContext& x, float* out, const float* terms, int n, int count) {
    if (out) run(x.stream, ops::sum_terms, {.out = out, .terms = terms, .n = n, .count = size_t(count)});
}

void residual_norm_backward(const LayerContext& x, const LayerWeights& w, ConstView residual,
                            const NormActivations& norm, ConstView dout, View dresidual, bool accumulate_dresidual) {
    const int n = w.weight.grad || w.bias.grad ? x.group->parts : 1, rows = x.own_rows() / n;
    const auto channels = size_t(x.shape->n_embd);
    float* const terms = x.group->vectors;
    for (int part = 0; part < n; part++) {
        const size_t row = size_t(part) * size_t(rows), first = row * channels;
        float* const term = terms + size_t(part) * channels;
        run(x.stream, ops::norm_backward,
            {.dinp = dresidual.from(first),
             .dweight = n == 1 || !w.weight.grad ? w.weight.grad : term,
             .dbias = n == 1 || !w.bias.grad ? w.bias.grad : term + size_t(n) * channels,
             .scratch = x.scratch,
             .dout = dout.from(first),
             .inp = residual.from(first),
             .weight = w.weight.value,
             .mean = norm.mean.view ? norm.mean.view.as<float>() + row : nullptr,
             .rstd = norm.rstd.view.as<float>() + row,
             .rows = rows,
             .cols = x.shape->n_embd,
             .accumulate_dinp = accumulate_dresidual,
             .accumulate = x.accumulate},
            {w.weight.name});
    }
    if (n == 1) return;
    sum_vector(x, w.weight.grad, terms, n, x.shape->n_embd);
    sum_vector(x, w.bias.grad, terms + size_t(n) * channels, n, x.shape->n_embd);
}

// Drops this rank's rows. The first chunks of sequences and the second ones have different starts.
static void drop(const LayerContext& x, DropoutSite site, View out, ConstView inp) {
    const auto channels = size_t(x.shape->n_embd);
    const bool has_chunks = x.starts.first != x.starts.second;
    const int rows = x.own_rows() / x.bands();
    for (int row = 0; row < x.own_rows(); row += rows) {
        const int first = x.first_row(row / rows), end = first + rows;
        const int second_chunks = has_chunks ? std::clamp(x.rows / 2, first, end) : end;
        for (const auto& [from, to, start] :
             {std::tuple(first, second_chunks, x.starts.first), {second_chunks, end, x.starts.second}})
            if (from < to)
                run(x.stream, ops::dropout,
                    {.out = out.from(size_t(row + from - first) * channels),
                     .inp = inp.from(size_t(row + from - first) * channels),
                     .mask = x.dropout_at(site),
                     .count = size_t(x.seq_len) * channels,
                     .first = size_t(from) * channels,
                     .elements = size_t(to - from) * channels,
                     .start = size_t(start) * channels});
    }
}

void dropout_forward(const LayerContext& x, DropoutSite site, const Activation& out) {
    if (x.dropout && !x.has(out)) drop(x, site, out.view, out);
}

ConstView dropout_backward(const LayerContext& x, DropoutSite site, ConstView dout, View buffer) {
    if (x.dropout)
        drop(x, site, buffer, dout);
    else if (x.defers_weights)
        copy_on_device(buffer.data, dout.data, size_t(x.own_rows()) * size_t(x.shape->n_embd) * size_of(dout.dtype),
                       x.stream);
    else
        return dout;
    return buffer;
}

// Sets what the forward and the backward op of heads have in common.
static void set_heads(auto& op, const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm,
                      const AttentionActivations& attn) {
    op.raw = attn.raw.view;
    op.rstd = attn.rstd.view.as<float>();
    op.q_weight = q_norm.weight.value;
    op.k_weight = k_norm.weight.value;
    op.table = x.rope_table;
    op.batch = x.batch;
    op.seq_len = x.seq_len;
    op.n_head = x.shape->n_head;
    op.n_kv_head = x.shape->kv_heads();
    op.head_size = x.shape->head_size();
    op.rotary = x.shape->rotary();
    op.starts = x.starts;
}

void heads_forward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, const Activation& qkv,
                   const AttentionActivations& attn) {
    if (!x.shape->changes_heads() || x.has(qkv)) return;
    ops::QkNormRopeForward op{};
    set_heads(op, x, q_norm, k_norm, attn);
    op.qkv = qkv.view;
    op.eps = float(x.shape->norm_eps);
    op.positions = x.decode ? x.decode->positions : nullptr;
    run(x.stream, ops::qk_norm_rope_forward, op);
}

// The sums over heads have a term for each part of the heads, whose arrays are copied.
static void heads_backward_by_part(const LayerContext& x, const ops::QkNormRopeBackward& whole) {
    const int n = x.group->parts, size = whole.head_size, all = whole.n_head + whole.n_kv_head;
    ops::QkNormRopeBackward op = whole;
    op.n_head /= n, op.n_kv_head /= n;
    const int heads = op.n_head + op.n_kv_head, width = (heads + op.n_kv_head) * size;
    const View dqkv = x.group->part_channels, raw = x.group->part_raw;
    float* const rstd = x.group->part_rstd;
    op.dqkv = dqkv, op.qkv = nullptr, op.raw = raw, op.rstd = rstd;
    // Copies the queries and keys of a part, `each` elements of a head, from the arrays of all heads or back to them.
    const auto copy = [&](int number, View to, int to_width, ConstView from, int from_width, int each, bool is_back) {
        for (const bool is_key : {false, true}) {
            const int count = (is_key ? op.n_kv_head : op.n_head) * each, in_part = (is_key ? op.n_head : 0) * each;
            const int in_all = (is_key ? whole.n_head : 0) * each + number * count;
            copy_channels(x, to.from(size_t(is_back ? in_all : in_part)), to_width,
                          from.from(size_t(is_back ? in_part : in_all)), from_width, count, x.rows);
        }
    };
    for (int number = 0; number < n; number++) {
        const int dqkv_width = (all + whole.n_kv_head) * size;
        copy(number, dqkv, width, whole.dqkv, dqkv_width, size, false);
        copy(number, raw, heads * size, whole.raw, all * size, size, false);
        copy(number, rstd, heads, whole.rstd, all, 1, false);
        op.dq_weight = x.group->vectors + number * size, op.dk_weight = x.group->vectors + (n + number) * size;
        run(x.stream, ops::qk_norm_rope_backward, op);
        copy(number, whole.dqkv, dqkv_width, dqkv, width, size, true);
    }
    sum_vector(x, whole.dq_weight, x.group->vectors, n, size);
    sum_vector(x, whole.dk_weight, x.group->vectors + n * size, n, size);
}

void heads_backward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, ConstView qkv,
                    const AttentionActivations& attn, View dqkv) {
    if (!x.shape->changes_heads()) return;
    ops::QkNormRopeBackward op{};
    set_heads(op, x, q_norm, k_norm, attn);
    op.dqkv = dqkv;
    op.dq_weight = q_norm.weight.grad;
    op.dk_weight = k_norm.weight.grad;
    op.scratch = x.scratch;
    op.qkv = qkv;
    op.accumulate = x.accumulate;
    if (op.dq_weight && x.group->parts > 1) return heads_backward_by_part(x, op);
    run(x.stream, ops::qk_norm_rope_backward, op);
}

// The activation at the end of an MLP's first GEMM; with a gate it is a separate op.
static LinearActivation activation_of(const LayerContext& x, const MlpActivations& mlp) {
    const ActivationFunction function = x.shape->activation;
    if (x.shape->gated_mlp) return {};
    return {function, function == ActivationFunction::relu2 ? mlp.act.view : mlp.fc.view};
}

void mlp_forward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                 const MlpActivations& mlp) {
    const ActivationFunction activation = x.shape->activation;
    const int hidden = x.shape->hidden();
    if (x.shape->gated_mlp) {
        column_parallel_forward(x, fc, inp, mlp.fc);
        if (!x.has(mlp.act))
            run(x.stream, ops::gated_activation_forward,
                {.out = mlp.act.view, .inp = mlp.fc, .rows = x.rows, .hidden = hidden, .activation = activation});
    } else if (!x.has(mlp.fc) || activation == ActivationFunction::relu2) {
        column_parallel_forward(x, fc, inp, mlp.act, activation_of(x, mlp));
    } else if (!x.has(mlp.act)) {
        run(x.stream, ops::activation_forward,
            {.out = mlp.act.view, .inp = mlp.fc, .count = size_t(x.rows) * size_t(hidden), .activation = activation});
    }
    row_parallel_forward(x, proj, mlp.act, mlp.out);
}

void mlp_backward(const LayerContext& x, const LayerWeights& fc, const LayerWeights& proj, ConstView inp,
                  const MlpActivations& mlp, ConstView dout, View dfc, View dact, View dinp) {
    const bool gated = x.shape->gated_mlp;
    row_parallel_backward(x, proj, mlp.act, dout, gated ? dact : dfc, activation_of(x, mlp));
    if (gated)
        run(x.stream, ops::gated_activation_backward,
            {.dinp = dfc,
             .dout = dact,
             .inp = mlp.fc,
             .rows = x.rows,
             .hidden = x.shape->hidden(),
             .activation = x.shape->activation});
    const int hidden = x.shape->hidden();
    if (gated) return column_parallel_backward(x, fc, inp, dfc, dinp, {hidden, hidden});
    column_parallel_backward(x, fc, inp, dfc, dinp, {hidden});
}

// The rows of logits that head_forward_backward() processes at a time: each part of the vocabulary has its own array.
struct HeadRows {
    const LayerContext& x;
    const LayerWeights& w;
    const HeadPass& head;
    int first;  // of all rows
    // Of a part.
    int tokens = w.weight.rows / x.group->parts;

    int first_token(int part) const { return (x.group->comm.rank * x.group->parts + part) * tokens; }
    int vocab(int part) const { return std::clamp(x.shape->vocab_size - first_token(part), 0, tokens); }
    View logits(int part) const { return head.logits.from(size_t(part) * size_t(x.rows) * size_t(tokens)); }
    LayerWeights weights(int part) const {
        LayerWeights result = w;
        const size_t begin = size_t(part) * size_t(tokens) * size_t(w.weight.cols);
        result.weight.rows = tokens, result.weight.value = w.weight.value.from(begin);
        if (w.weight.grad) result.weight.grad = w.weight.grad + begin;
        return result;
    }
};

// Returns the sums of the logits' rows over all parts of the vocabulary.
static const ops::VocabularySums* sum_vocabulary(const HeadRows& rows) {
    const LayerContext& x = rows.x;
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size * group.parts == 1) return nullptr;
    const size_t each = size_t(x.rows), own = size_t(group.comm.rank * group.parts) * each;
    for (int part = 0; part < group.parts; part++)
        run(x.stream, ops::vocabulary_sums,
            {.out = group.sums + own + size_t(part) * each,
             .logits = rows.logits(part),
             .targets = rows.head.targets + rows.first,
             .rows = x.rows,
             .vocab = rows.vocab(part),
             .padded_vocab = rows.tokens,
             .first_token = rows.first_token(part),
             .softcap = float(x.shape->final_softcap)});
    const size_t bytes = size_t(group.parts) * each * sizeof(ops::VocabularySums);
    wait(all_gather(group.sums, group.sums + own, bytes, group.comm, x.stream), group.comm, x.stream);
    return group.sums;
}

void head_forward_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, int head_rows,
                           const HeadPass& head) {
    const size_t C = size_t(w.weight.cols);
    const TensorParallelGroup& group = *x.group;
    const bool is_training = bool(head.dinp);
    const ConstView all = gather_rows(x, inp);
    // May be `all`: the gradient of a row overwrites it after its use.
    const View dall = group.parts > 1 ? group.terms : rows_to_sum(x, head.dinp);
    LayerContext some = x;
    for (int row = 0; row < x.rows; row += head_rows) {
        some.rows = std::min(head_rows, x.rows - row);
        some.accumulate = x.accumulate || row > 0;
        const HeadRows rows{some, w, head, row};
        const ConstView part_inp = all.from(size_t(row) * C);
        for (int part = 0; part < group.parts; part++)
            linear_forward(some, rows.weights(part), part_inp, {rows.logits(part)});
        const ops::VocabularySums* const sums = sum_vocabulary(rows);
        for (int part = 0; part < group.parts; part++) {
            run(x.stream, ops::cross_entropy,
                {.logits = rows.logits(part),
                 .loss = head.loss + row,
                 .targets = head.targets + row,
                 .loss_scale = head.loss_scale,
                 .rows = some.rows,
                 .vocab = rows.vocab(part),
                 .padded_vocab = rows.tokens,
                 .grad_scale = head.grad_scale,
                 .write_dlogits = is_training,
                 .softcap = float(x.shape->final_softcap),
                 .z_loss = head.z_loss,
                 .sums = sums,
                 .parts = group.comm.size * group.parts,
                 .first_token = rows.first_token(part)});
            const size_t place = size_t(part) * size_t(x.rows) + size_t(row);
            if (is_training)
                linear_backward(some, rows.weights(part), part_inp, rows.logits(part), dall.from(place * C));
        }
    }
    if (is_training) sum_rows(x, head.dinp, dall, group.parts);
}
