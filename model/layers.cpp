#include "model/layers.h"

#include <algorithm>

void embedding_forward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                       const Activation& out) {
    for (int number = 0; number < x.segments; number++) {
        const LayerContext segment = x.of_segment(number);
        const size_t row = x.segment_row(number);
        run(x.stream, ops::embedding_forward,
            {.out = rows_to_sum(x, out.view).from(row * size_t(wte.weight.cols)),
             .tokens = tokens + row,
             .wte = wte.weight.value,
             .wpe = x.group->comm.rank == 0 ? wpe.weight.value : nullptr,
             .batch = segment.batch,
             .seq_len = x.seq_len,
             .channels = wte.weight.cols,
             .positions = x.decode ? x.decode->positions : nullptr,
             .starts = segment.starts,
             .part = {.first_token = x.group->comm.rank * wte.weight.rows, .tokens = wte.weight.rows}});
    }
    sum_rows(x, out.view, rows_to_sum(x, out.view));
}

// A part of a tensor's sum over the ranks that adds nothing: x + -0 is x, also if x is -0.
static void fill_with_nothing(const LayerContext& x, float* out, size_t count) {
    if (out) run(x.stream, ops::fill, {.out = out, .count = count, .value = -0.0f});
}

// With terms, the first rank of a ring has the gradients of all its ranks' rows.
void embedding_backward(const LayerContext& x, const LayerWeights& wte, const LayerWeights& wpe, const int* tokens,
                        ConstView dout, bool has_head_part) {
    const size_t channels = size_t(wte.weight.cols), rows = size_t(x.rows);
    const Comm& ring = x.ring->comm;
    ConstView all = gather_rows(x, dout);
    LayerContext whole = x;
    if (const SegmentTerms& terms = x.ring->terms; terms.rows) {
        const View own = terms.rows.from(size_t(ring.rank) * rows * channels);
        copy_on_device(own.data, all.data, rows * channels * size_of(own.dtype), x.stream);
        all_gather(terms.rows.data, own.data, rows * channels * size_of(own.dtype), ring, x.stream);
        wait(all_gather(terms.tokens, tokens, rows * sizeof(int), ring, x.stream), ring, x.stream);
        if (ring.rank > 0) {
            fill_with_nothing(x, wte.weight.grad, size_t(wte.weight.rows) * channels);
            return fill_with_nothing(x, wpe.weight.grad, size_t(wpe.weight.rows) * channels);
        }
        all = terms.rows, tokens = terms.tokens;
        whole.batch *= ring.size, whole.rows *= ring.size, whole.segments *= ring.size;
    }
    for (int number = 0; number < whole.segments; number++) {
        const LayerContext segment = whole.of_segment(number);
        const size_t row = whole.segment_row(number);
        const bool accumulate = x.accumulate || number > 0;
        run(x.stream, ops::embedding_backward,
            {.dwte = wte.weight.grad,
             .dwpe = wpe.weight.grad,
             .scratch = x.scratch,
             .dout = all.from(row * channels),
             .tokens = tokens + row,
             .batch = segment.batch,
             .seq_len = x.seq_len,
             .channels = wte.weight.cols,
             .vocab = wte.weight.rows,
             .n_positions = wpe.weight.rows,
             .accumulate = accumulate,
             .accumulate_dwte = has_head_part || accumulate,
             .first_token = x.group->comm.rank * wte.weight.rows,
             .starts = segment.starts});
    }
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
    const int n = w.weight.grad || w.bias.grad ? x.group->row_terms : 1, rows = x.own_rows() / n;
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

// Drops this rank's rows. The first chunks of a segment's sequences and the second ones have different starts.
static void drop(const LayerContext& x, DropoutSite site, View out, ConstView inp) {
    const auto channels = size_t(x.shape->n_embd);
    const int rows = x.own_rows() / x.bands(), chunks = x.starts.first == x.starts.second ? x.rows : x.chunk_rows();
    for (int row = 0, count = 0; row < x.own_rows(); row += count) {
        const int from = x.first_row(row / rows) + row % rows, chunk = from / chunks;
        count = std::min(rows - row % rows, (chunk + 1) * chunks - from);
        const ops::ChunkStarts starts = x.of_segment(chunk / 2).starts;
        run(x.stream, ops::dropout,
            {.out = out.from(size_t(row) * channels),
             .inp = inp.from(size_t(row) * channels),
             .mask = x.dropout_at(site),
             .count = size_t(x.seq_len) * channels,
             .first = size_t(from) * channels,
             .elements = size_t(count) * channels,
             .start = size_t(starts.start(chunk % 2, 2)) * channels});
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

// Sets what the forward and the backward op of a segment's heads have in common.
static void set_heads(auto& op, const LayerContext& x, int segment, const LayerWeights& q_norm,
                      const LayerWeights& k_norm, const AttentionActivations& attn) {
    const size_t head = x.segment_row(segment) * size_t(x.shape->n_head + x.shape->kv_heads());
    op.raw = attn.raw.view.from(head * size_t(x.shape->head_size()));
    op.rstd = attn.rstd.view.from(head).as<float>();
    op.q_weight = q_norm.weight.value;
    op.k_weight = k_norm.weight.value;
    op.table = x.rope_table;
    op.batch = x.batch / x.segments;
    op.seq_len = x.seq_len;
    op.n_head = x.shape->n_head;
    op.n_kv_head = x.shape->kv_heads();
    op.head_size = x.shape->head_size();
    op.rotary = x.shape->rotary();
    op.starts = x.of_segment(segment).starts;
}

void heads_forward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, const Activation& qkv,
                   const AttentionActivations& attn) {
    if (!x.shape->changes_heads() || x.has(qkv)) return;
    for (int number = 0; number < x.segments; number++) {
        ops::QkNormRopeForward op{};
        set_heads(op, x, number, q_norm, k_norm, attn);
        op.qkv = qkv.view.from(x.segment_row(number) * size_t(x.shape->qkv_channels()));
        op.eps = float(x.shape->norm_eps);
        op.positions = x.decode ? x.decode->positions : nullptr;
        run(x.stream, ops::qk_norm_rope_forward, op);
    }
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

// Adds the terms of segments, which are sums over the heads of all ranks of x.group. Only its first rank has the sum.
static void sum_head_vectors(const LayerContext& x, float* dq_weight, float* dk_weight) {
    const TensorParallelGroup& group = *x.group;
    float* const terms = x.ring->terms.head_vectors;
    const int size = x.shape->head_size();
    const size_t own = round_up(2 * size_t(x.segments * size), size_t(group.comm.size)) / size_t(group.comm.size);
    float* const part = terms + size_t(group.comm.rank) * own;
    reduce_scatter_sum({part, group.scratch, terms, own}, group.comm, x.stream);
    wait(all_gather(terms, part, own * sizeof(float), group.comm, x.stream), group.comm, x.stream);
    for (const auto& [out, first] : {std::pair(dq_weight, terms), {dk_weight, terms + x.segments * size}}) {
        if (group.comm.rank > 0)
            fill_with_nothing(x, out, size_t(size));
        else
            sum_vector(x, out, first, x.segments, size);
    }
}

void heads_backward(const LayerContext& x, const LayerWeights& q_norm, const LayerWeights& k_norm, ConstView qkv,
                    const AttentionActivations& attn, View dqkv) {
    if (!x.shape->changes_heads()) return;
    const bool has_terms = q_norm.weight.grad && x.ring->terms.head_vectors;
    for (int number = 0; number < x.segments; number++) {
        const size_t first = x.segment_row(number) * size_t(x.shape->qkv_channels());
        ops::QkNormRopeBackward op{};
        set_heads(op, x, number, q_norm, k_norm, attn);
        op.dqkv = dqkv.from(first);
        op.dq_weight = q_norm.weight.grad;
        op.dk_weight = k_norm.weight.grad;
        op.scratch = x.scratch;
        op.qkv = qkv.from(first);
        op.accumulate = x.accumulate;
        if (has_terms) {
            op.dq_weight = x.ring->terms.head_vectors + number * op.head_size;
            op.dk_weight = op.dq_weight + x.segments * op.head_size;
        }
        if (op.dq_weight && x.group->parts > 1)
            heads_backward_by_part(x.of_segment(number), op);
        else
            run(x.stream, ops::qk_norm_rope_backward, op);
    }
    if (has_terms) sum_head_vectors(x, q_norm.weight.grad, k_norm.weight.grad);
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
    some.fp8 = nullptr;  // the head's logits need more digits
    const int segment_rows = x.rows / x.segments;
    for (int row = 0; row < x.rows; row += some.rows) {
        // Some whole segments, or a part of one.
        const int left = segment_rows - row % segment_rows, segments = std::max(head_rows / segment_rows, 1);
        some.rows = std::min({head_rows, segments * segment_rows, segments > 1 ? x.rows - row : left});
        some.segments = std::max(some.rows / segment_rows, 1);
        some.accumulate = x.accumulate || left < segment_rows;
        some.terms = {.first = row / segment_rows, .is_complete = some.rows >= left};
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
            some.terms.element = size_t(part) * size_t(rows.tokens) * C;
            if (is_training)
                linear_backward(some, rows.weights(part), part_inp, rows.logits(part), dall.from(place * C));
        }
    }
    if (is_training) sum_rows(x, head.dinp, dall, group.parts);
}
