#include "model/layers.h"

#include <algorithm>

// Starts to gather all rows of `own`, which has this rank's rows, in x.group->gathered.
static Ticket start_gather(const LayerContext& x, ConstView own) {
    const TensorParallelGroup& group = *x.group;
    const size_t bytes = size_t(x.own_rows()) * size_t(x.shape->n_embd) * size_of(own.dtype);
    return all_gather(group.gathered.data, own.data, bytes, group.comm, x.stream);
}

ConstView gather_rows(const LayerContext& x, ConstView own) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return own;
    wait(start_gather(x, own), group.comm, x.stream);
    return group.gathered;
}

// Returns the place for this rank's term of a sum of all rows, which sum_rows() writes to `own`.
static View rows_to_sum(const LayerContext& x, View own) { return x.group->comm.size == 1 ? own : x.group->gathered; }

static Ticket start_sum(const LayerContext& x, View own, ConstView terms) {
    const size_t count = size_t(x.own_rows()) * size_t(x.shape->n_embd);
    return reduce_scatter_sum({.out = own, .scratch = x.group->scratch, .inp = terms, .count = count}, x.group->comm,
                              x.stream);
}

static void sum_rows(const LayerContext& x, View own) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size > 1) wait(start_sum(x, own, group.gathered), group.comm, x.stream);
}

void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out) {
    run(x.stream, ops::embedding_forward,
        {.out = rows_to_sum(x, out.view),
         .tokens = tokens,
         .wte = wte.weight.value,
         .wpe = wpe.weight.value,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .channels = wte.weight.cols,
         .positions = x.decode ? x.decode->positions : nullptr,
         .starts = x.starts,
         .part = {.first_token = x.group->comm.rank * wte.weight.rows,
                  .tokens = wte.weight.rows,
                  .first_row = x.first_row(),
                  .rows = x.own_rows()}});
    sum_rows(x, out.view);
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

void residual_norm_backward(const LayerContext& x, const LayerWeights& w, ConstView residual,
                            const NormActivations& norm, ConstView dout, View dresidual, bool accumulate_dresidual) {
    run(x.stream, ops::norm_backward,
        {.dinp = dresidual,
         .dweight = w.weight.grad,
         .dbias = w.bias.grad,
         .scratch = x.scratch,
         .dout = dout,
         .inp = residual,
         .weight = w.weight.value,
         .mean = norm.mean.view.as<float>(),
         .rstd = norm.rstd.view.as<float>(),
         .rows = x.own_rows(),
         .cols = x.shape->n_embd,
         .accumulate_dinp = accumulate_dresidual,
         .accumulate = x.accumulate},
        {w.weight.name});
}

void linear_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                    const LinearActivation& activation) {
    if (x.has(out)) return;
    run(x.stream, ops::matmul_forward,
        {.out = out.view,
         .pre_activation = activation.function == ActivationFunction::relu2 ? nullptr : activation.kept,
         .inp = inp,
         .weight = w.weight.value,
         .bias = w.bias.value,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = activation.function},
        {w.weight.name});
}

void linear_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout) {
    run(x.stream, ops::matmul_backward_weight,
        {.dweight = w.weight.grad,
         .dbias = w.bias.grad,
         .scratch = x.scratch,
         .dout = dout,
         .inp = inp,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .accumulate = x.accumulate},
        {w.weight.name});
}

static void linear_backward_input(const LayerContext& x, const LayerWeights& w, ConstView dout, View dinp,
                                  const LinearActivation& activation = {}) {
    run(x.stream, ops::matmul_backward_input,
        {.dinp = dinp,
         .dout = dout,
         .weight = w.weight.value,
         .kept = activation.kept,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = activation.function},
        {w.weight.name});
}

void linear_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                     const LinearActivation& activation) {
    if (!x.defers_weights) linear_backward_weight(x, w, inp, dout);
    linear_backward_input(x, w, dout, dinp, activation);
}

void column_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                             const LinearActivation& activation) {
    if (!x.has(out)) linear_forward(x, w, gather_rows(x, inp), out, activation);
}

// Gathers the input during the GEMM of its gradient, which it sums during the GEMM of the weight's.
void column_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return linear_backward(x, w, inp, dout, dinp);
    const Ticket gathered = x.defers_weights ? Ticket() : start_gather(x, inp);
    linear_backward_input(x, w, dout, group.terms);
    wait(gathered, group.comm, x.stream);
    const Ticket summed = start_sum(x, dinp, group.terms);
    if (!x.defers_weights) linear_backward_weight(x, w, group.gathered, dout);
    wait(summed, group.comm, x.stream);
}

void column_parallel_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout) {
    linear_backward_weight(x, w, gather_rows(x, inp), dout);
}

void row_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out) {
    if (x.has(out)) return;
    LayerWeights term = w;
    if (x.group->comm.rank > 0) term.bias.value = nullptr;  // the sum has it once
    linear_forward(x, term, inp, {rows_to_sum(x, out.view), false});
    sum_rows(x, out.view);
}

// Each rank computes the whole gradient of the bias.
void row_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                           const LinearActivation& activation) {
    linear_backward(x, w, inp, gather_rows(x, dout), dinp, activation);
}

void row_parallel_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout) {
    linear_backward_weight(x, w, inp, gather_rows(x, dout));
}

namespace {

// The first of some channels in all rows, which have `width` channels.
struct Channels {
    View first;
    int width;
    Channels from(int channel) const { return {first.from(size_t(channel)), width}; }
};

void copy_channels(const LayerContext& x, const Channels& to, const Channels& from, int count) {
    const size_t element = size_of(to.first.dtype);
    copy_rows_on_device(to.first.data, size_t(to.width) * element, from.first.data, size_t(from.width) * element,
                        size_t(count) * element, size_t(x.rows), x.stream);
}

// The arrays of qkv of ranks with the same key/value head.
struct SharedHead {
    const LayerContext& x;
    Channels qkv;                                                                             // of whole heads
    int queries = x.shape->attention_channels(), part = x.shape->computed_kv_channels() / 2;  // of the keys, the values
    Channels computed = {x.group->computed_qkv, queries + 2 * part};  // what this rank's weights compute

    size_t part_elements() const { return 2 * size_t(part) * size_t(x.rows); }
    // The keys and values that a rank of x.group->kv_head computes.
    Channels kv(int rank) const { return {x.group->kv_parts.from(size_t(rank) * part_elements()), 2 * part}; }
    Channels own_kv() const { return kv(x.group->kv_head.rank); }
    // Copies all parts to qkv, or from it.
    void copy_parts(bool to_qkv) const {
        for (int rank = 0; rank < x.shape->kv_head_parts; rank++)
            for (const int is_value : {0, 1}) {
                const Channels in_part = kv(rank).from(is_value * part);
                const Channels in_qkv = qkv.from(queries + is_value * x.shape->head_size() + rank * part);
                copy_channels(x, to_qkv ? in_qkv : in_part, to_qkv ? in_part : in_qkv, part);
            }
    }
};

}  // namespace

void qkv_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& qkv) {
    if (x.shape->kv_head_parts == 1 || x.has(qkv)) return column_parallel_forward(x, w, inp, qkv);
    const Comm& comm = x.group->kv_head;
    const SharedHead head{x, {qkv.view, x.shape->qkv_channels()}};
    const Channels own = head.own_kv();
    column_parallel_forward(x, w, inp, {head.computed.first, false});
    copy_channels(x, head.qkv, head.computed, head.queries);
    copy_channels(x, own, head.computed.from(head.queries), own.width);
    const size_t bytes = head.part_elements() * size_of(qkv.view.dtype);
    wait(all_gather(x.group->kv_parts.data, own.first.data, bytes, comm, x.stream), comm, x.stream);
    head.copy_parts(true);
}

void qkv_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, View dqkv, View dinp) {
    if (x.shape->kv_head_parts > 1) {
        const Comm& comm = x.group->kv_head;
        const SharedHead head{x, {dqkv, x.shape->qkv_channels()}};
        const Channels own = head.own_kv();
        head.copy_parts(false);
        const ReduceScatter op{own.first, x.group->scratch, x.group->kv_parts, head.part_elements()};
        wait(reduce_scatter_sum(op, comm, x.stream), comm, x.stream);
        copy_channels(x, head.computed, head.qkv, head.queries);
        copy_channels(x, head.computed.from(head.queries), own, own.width);
        copy_channels(x, {dqkv, head.computed.width}, head.computed, head.computed.width);
    }
    column_parallel_backward(x, w, inp, dqkv, dinp);
}

// Drops this rank's rows. The first chunks of sequences and the second ones have different starts.
static void drop(const LayerContext& x, DropoutSite site, View out, ConstView inp) {
    const auto channels = size_t(x.shape->n_embd);
    const bool has_chunks = x.starts.first != x.starts.second;
    const int first = x.first_row(), end = first + x.own_rows();
    const int second_chunks = has_chunks ? std::clamp(x.rows / 2, first, end) : end;
    for (const auto& [from, to, start] :
         {std::tuple(first, second_chunks, x.starts.first), {second_chunks, end, x.starts.second}})
        if (from < to)
            run(x.stream, ops::dropout,
                {.out = out.from(size_t(from - first) * channels),
                 .inp = inp.from(size_t(from - first) * channels),
                 .mask = x.dropout_at(site),
                 .count = size_t(x.seq_len) * channels,
                 .first = size_t(from) * channels,
                 .elements = size_t(to - from) * channels,
                 .start = size_t(start) * channels});
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

void heads_forward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, const Activation& qkv,
                   const AttentionActivations& attn) {
    if (!x.shape->changes_heads() || x.has(qkv)) return;
    run(x.stream, ops::qk_norm_rope_forward,
        {.qkv = qkv.view,
         .raw = attn.raw.view,
         .rstd = attn.rstd.view.as<float>(),
         .q_weight = q_norm.weight.value,
         .k_weight = k_norm.weight.value,
         .table = x.rope_table,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .n_head = x.shape->n_head,
         .n_kv_head = x.shape->kv_heads(),
         .head_size = x.shape->head_size(),
         .rotary = x.shape->rotary(),
         .eps = float(x.shape->norm_eps),
         .positions = x.decode ? x.decode->positions : nullptr,
         .starts = x.starts});
}

void heads_backward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, ConstView qkv,
                    const AttentionActivations& attn, View dqkv) {
    if (!x.shape->changes_heads()) return;
    run(x.stream, ops::qk_norm_rope_backward,
        {.dqkv = dqkv,
         .dq_weight = q_norm.weight.grad,
         .dk_weight = k_norm.weight.grad,
         .scratch = x.scratch,
         .qkv = qkv,
         .raw = attn.raw,
         .rstd = attn.rstd.view.as<float>(),
         .q_weight = q_norm.weight.value,
         .k_weight = k_norm.weight.value,
         .table = x.rope_table,
         .batch = x.batch,
         .seq_len = x.seq_len,
         .n_head = x.shape->n_head,
         .n_kv_head = x.shape->kv_heads(),
         .head_size = x.shape->head_size(),
         .rotary = x.shape->rotary(),
         .accumulate = x.accumulate,
         .starts = x.starts});
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
    column_parallel_backward(x, fc, inp, dfc, dinp);
}

// Returns the sums of the logits' rows over all parts of the vocabulary.
static const ops::VocabularySums* sum_vocabulary(const LayerContext& x, const LayerWeights& w, const HeadPass& head,
                                                 int row, int vocab) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return nullptr;
    ops::VocabularySums* own = group.sums + size_t(group.comm.rank) * size_t(x.rows);
    run(x.stream, ops::vocabulary_sums,
        {.out = own,
         .logits = head.logits,
         .targets = head.targets + row,
         .rows = x.rows,
         .vocab = vocab,
         .padded_vocab = w.weight.rows,
         .first_token = group.comm.rank * w.weight.rows,
         .softcap = float(x.shape->final_softcap)});
    const size_t bytes = size_t(x.rows) * sizeof(*own);
    wait(all_gather(group.sums, own, bytes, group.comm, x.stream), group.comm, x.stream);
    return group.sums;
}

void head_forward_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, int head_rows,
                           const HeadPass& head) {
    const size_t C = size_t(w.weight.cols);
    const int first_token = x.group->comm.rank * w.weight.rows;
    const int vocab = std::clamp(x.shape->vocab_size - first_token, 0, w.weight.rows);
    const bool is_training = bool(head.dinp);
    const ConstView all = gather_rows(x, inp);
    const View dall = rows_to_sum(x, head.dinp);  // may be `all`: the gradient of a row overwrites it after its use
    LayerContext part = x;
    for (int row = 0; row < x.rows; row += head_rows) {
        part.rows = std::min(head_rows, x.rows - row);
        part.accumulate = x.accumulate || row > 0;
        const ConstView rows = all.from(size_t(row) * C);
        linear_forward(part, w, rows, {head.logits});
        run(x.stream, ops::cross_entropy,
            {.logits = head.logits,
             .loss = head.loss + row,
             .targets = head.targets + row,
             .loss_scale = head.loss_scale,
             .rows = part.rows,
             .vocab = vocab,
             .padded_vocab = w.weight.rows,
             .grad_scale = head.grad_scale,
             .write_dlogits = is_training,
             .softcap = float(x.shape->final_softcap),
             .z_loss = head.z_loss,
             .sums = sum_vocabulary(part, w, head, row, vocab),
             .parts = x.group->comm.size,
             .first_token = first_token});
        if (is_training) linear_backward(part, w, rows, head.logits, dall.from(size_t(row) * C));
    }
    if (is_training) sum_rows(x, head.dinp);
}
