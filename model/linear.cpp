// The linear layers, and the collectives of the ranks that divide them.
#include <array>
#include <bit>

#include "kernels/comm.h"
#include "kernels/op_stream.h"
#include "model/activations.h"
#include "model/fp8.h"
#include "model/layers.h"
#include "model/tensors.h"

namespace {

// A band of rows: see LayerContext::bands().
struct Band {
    LayerContext x;
    size_t row;           // the first of its rows
    size_t first, count;  // its elements in arrays of this rank's rows of the residual stream

    Band(const LayerContext& all, int number) : x(all) {
        x.rows = all.rows / all.bands();
        x.accumulate = all.accumulate || number > 0;
        row = size_t(number) * size_t(x.rows);
        count = size_t(x.own_rows()) * size_t(x.shape->n_embd), first = size_t(number) * count;
    }
    ConstView of(ConstView rows, int cols) const { return rows.from(row * size_t(cols)); }
    View of(View rows, int cols) const { return rows.from(row * size_t(cols)); }
    LinearActivation of(const LinearActivation& activation, int cols) const {
        return {activation.function, activation.kept ? of(activation.kept, cols) : nullptr};
    }
    void forward(const LayerWeights& w, ConstView inp, View out, const LinearActivation& activation = {}) const {
        linear_forward(x, w, of(inp, w.weight.cols), {of(out, w.weight.rows), false}, of(activation, w.weight.rows));
    }
    // Starts to gather the rows of `own`, which has this rank's rows, in x.group->gathered.
    Ticket gather(ConstView own) const {
        return all_gather(of(x.group->gathered, x.shape->n_embd).data, own.from(first).data, count * size_of(own.dtype),
                          x.group->comm, x.stream);
    }
    // Starts to add all ranks' sums.
    Ticket sum(View own, ConstView sums) const {
        const ReduceScatter op{own.from(first), x.group->scratch, of(sums, x.shape->n_embd), count};
        return reduce_scatter_sum(op, x.group->comm, x.stream);
    }
};

}  // namespace

// Starts to gather all rows. Returns the tickets of the first and the last band.
static std::array<Ticket, 2> start_gather(const LayerContext& x, ConstView own) {
    const Ticket first = Band(x, 0).gather(own);
    return {first, x.bands() > 1 ? Band(x, 1).gather(own) : first};
}

ConstView gather_rows(const LayerContext& x, ConstView own) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return own;
    wait(start_gather(x, own).back(), group.comm, x.stream);
    return group.gathered;
}

View rows_to_sum(const LayerContext& x, View own) { return x.group->comm.size == 1 ? own : x.group->gathered; }

// Starts sum_rows().
static Ticket start_sum(const LayerContext& x, View own, ConstView terms, int n) {
    const TensorParallelGroup& group = *x.group;
    if (n > 1) {
        const View sum = group.comm.size == 1 ? own : group.sum;
        const size_t count = size_t(x.rows) * size_t(x.shape->n_embd);
        run(x.stream, ops::sum_terms, {.out = sum, .terms = terms, .n = n, .count = count});
        terms = sum;
    }
    Ticket last;
    for (int band = 0; group.comm.size > 1 && band < x.bands(); band++) last = Band(x, band).sum(own, terms);
    return last;
}

void sum_rows(const LayerContext& x, View own, ConstView terms, int n) {
    wait(start_sum(x, own, terms, n), x.group->comm, x.stream);
}

void copy_channels(const LayerContext& x, View to, int to_width, ConstView from, int from_width, int count, int rows) {
    const size_t element = size_of(to.dtype);
    copy_rows_on_device(to.data, size_t(to_width) * element, from.data, size_t(from_width) * element,
                        size_t(count) * element, size_t(rows), x.stream);
}

// Returns a term of a sum of all rows.
static View term_at(const LayerContext& x, View terms, int number) {
    return terms.from(size_t(number) * size_t(x.rows) * size_t(x.shape->n_embd));
}

void linear_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                    const LinearActivation& activation) {
    if (x.has(out)) return;
    ConstView weight = w.weight.value;
    if (x.fp8) {
        inp = fp8_rows(x, x.fp8->input, inp, x.rows, w.weight.cols);
        weight = fp8_rows(x, x.fp8->weight, weight, w.weight.rows, w.weight.cols);
    }
    run(x.stream, ops::matmul_forward,
        {.out = out.view,
         .pre_activation = activation.function == ActivationFunction::relu2 ? nullptr : activation.kept,
         .inp = inp,
         .weight = weight,
         .bias = w.bias.value,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = activation.function},
        {w.weight.name});
}

// Returns a partial sum of a sum with terms.
static float* level_of(const LayerContext& x, float* out, int level, size_t element) {
    return level == 0 || !out ? out : x.ring->terms.levels[size_t(level) - 1] + element;
}

float* term_of(const LayerContext& x, float* out, int number, size_t element) {
    return level_of(x, out, std::popcount(unsigned(number)), element);
}

void add_term(const LayerContext& x, float* out, int number, size_t count, size_t element) {
    for (int level = std::popcount(unsigned(number)); out && number % 2 == 1; level--, number /= 2)
        run(x.stream, ops::add,
            {.out = level_of(x, out, level - 1, element), .inp = level_of(x, out, level, element), .count = count});
}

// keeps_rows: x.fp8->gradient also has the gradient by rows afterwards.
static void linear_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout,
                                   bool keeps_rows) {
    const size_t n = size_t(w.weight.rows), k = size_t(w.weight.cols), bias = x.terms.element + n * k;
    for (int number = 0; number < x.segments; number++) {
        const size_t row = x.segment_row(number);
        // A second term is added to the first one by its GEMM, with the same bits as by add_term().
        const bool joins = (x.terms.first + number) % 2 == 1 && x.terms.is_complete && !x.accumulate;
        const int term = x.terms.first + number - joins;
        ops::MatmulBackwardWeight op{.dweight = term_of(x, w.weight.grad, term, x.terms.element),
                                     .dbias = term_of(x, w.bias.grad, term, bias),
                                     .scratch = x.scratch,
                                     .dout = dout.from(row * n),
                                     .inp = inp.from(row * k),
                                     .rows = x.rows / x.segments,
                                     .n = w.weight.rows,
                                     .k = w.weight.cols,
                                     .accumulate = x.accumulate || joins};
        if (x.fp8) {
            op.wide_dout = op.dout;
            op.dout = fp8_columns(x, x.fp8->gradient, op.dout, op.rows, op.n, keeps_rows);
            op.inp = fp8_columns(x, x.fp8->input, op.inp, op.rows, op.k);
        }
        run(x.stream, ops::matmul_backward_weight, op, {w.weight.name});
        if (!x.terms.is_complete) continue;
        add_term(x, w.weight.grad, joins ? term / 2 : term, n * k, x.terms.element);
        add_term(x, w.bias.grad, joins ? term / 2 : term, n, bias);
    }
}

void linear_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout) {
    linear_backward_weight(x, w, inp, dout, false);
}

// With x.fp8, dout may be by rows in 8 bits.
static void linear_backward_input(const LayerContext& x, const LayerWeights& w, ConstView dout, View dinp,
                                  const LinearActivation& activation = {}) {
    ConstView weight = w.weight.value;
    if (x.fp8) {
        if (!is_fp8(dout.dtype)) dout = fp8_rows(x, x.fp8->gradient, dout, x.rows, w.weight.rows);
        weight = fp8_columns(x, x.fp8->weight, weight, w.weight.rows, w.weight.cols);
    }
    run(x.stream, ops::matmul_backward_input,
        {.dinp = dinp,
         .dout = dout,
         .weight = weight,
         .kept = activation.kept,
         .rows = x.rows,
         .n = w.weight.rows,
         .k = w.weight.cols,
         .activation = activation.function},
        {w.weight.name});
}

void linear_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                     const LinearActivation& activation) {
    const bool in_one_pass = x.fp8 && !x.defers_weights && x.segments == 1;
    if (!x.defers_weights) linear_backward_weight(x, w, inp, dout, in_one_pass);
    linear_backward_input(x, w, in_one_pass ? ConstView(x.fp8->gradient.rows) : dout, dinp, activation);
}

void column_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out,
                             const LinearActivation& activation) {
    if (x.has(out)) return;
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return linear_forward(x, w, inp, out, activation);
    const std::array<Ticket, 2> gathered = start_gather(x, inp);
    for (int band = 0; band < x.bands(); band++) {
        wait(gathered[size_t(band)], group.comm, x.stream);
        Band(x, band).forward(w, group.gathered, out.view, activation);
    }
}

// Computes the terms of the input's gradient, one for each part of the output channels.
static void column_terms(const LayerContext& x, const LayerWeights& w, ConstView dout,
                         std::initializer_list<int> stacked) {
    const TensorParallelGroup& group = *x.group;
    if (group.parts == 1) return linear_backward_input(x, w, dout, group.terms);
    LayerWeights part = w;
    const int width = part.weight.rows = w.weight.rows / group.parts, cols = w.weight.cols;
    part.weight.value = group.part_weight;
    for (int number = 0; number < group.parts; number++) {
        int first = 0;
        for (const int rows : stacked) {
            const int count = rows / group.parts, from = first + number * count, to = first / group.parts;
            copy_channels(x, group.part_channels.from(size_t(to)), width, dout.from(size_t(from)), w.weight.rows, count,
                          x.rows);
            copy_channels(x, group.part_weight.from(size_t(to) * size_t(cols)), cols,
                          w.weight.value.from(size_t(from) * size_t(cols)), cols, cols, count);
            first += rows;
        }
        linear_backward_input(x, part, group.part_channels, term_at(x, group.terms, number));
    }
}

// Gathers the input during the GEMM of its gradient, which it sums during the GEMM of the weight's.
void column_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                              std::initializer_list<int> stacked) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size * group.parts == 1) return linear_backward(x, w, inp, dout, dinp);
    const bool is_gathered = !x.defers_weights && group.comm.size > 1;
    const Ticket gathered = is_gathered ? start_gather(x, inp).back() : Ticket();
    column_terms(x, w, dout, stacked);
    wait(gathered, group.comm, x.stream);
    const Ticket summed = start_sum(x, dinp, group.terms, group.parts);
    if (!x.defers_weights) linear_backward_weight(x, w, is_gathered ? group.gathered : inp, dout);
    wait(summed, group.comm, x.stream);
}

void column_parallel_backward_weight(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout) {
    linear_backward_weight(x, w, gather_rows(x, inp), dout);
}

// The output has a term for each part of the input channels. Only one of all ranks' terms has the bias.
void row_parallel_forward(const LayerContext& x, const LayerWeights& w, ConstView inp, const Activation& out) {
    if (x.has(out)) return;
    const TensorParallelGroup& group = *x.group;
    LayerWeights part = w;
    if (group.comm.rank > 0) part.bias.value = nullptr;
    if (group.parts == 1) {
        const View sums = rows_to_sum(x, out.view);
        Ticket summed;
        for (int band = 0; band < x.bands(); band++) {
            Band(x, band).forward(part, inp, sums);
            if (group.comm.size > 1) summed = Band(x, band).sum(out.view, sums);
        }
        return wait(summed, group.comm, x.stream);
    }
    const int width = part.weight.cols = w.weight.cols / group.parts;
    for (int number = 0; number < group.parts; number++) {
        const auto first = size_t(number) * size_t(width);
        copy_channels(x, group.part_channels, width, inp.from(first), w.weight.cols, width, x.rows);
        copy_channels(x, group.part_weight, width, w.weight.value.from(first), w.weight.cols, width, w.weight.rows);
        part.weight.value = group.part_weight;
        if (number > 0) part.bias.value = nullptr;
        linear_forward(x, part, group.part_channels, {term_at(x, group.terms, number), false});
    }
    sum_rows(x, out.view, group.terms, group.parts);
}

// Each rank computes the whole gradient of the bias.
void row_parallel_backward(const LayerContext& x, const LayerWeights& w, ConstView inp, ConstView dout, View dinp,
                           const LinearActivation& activation) {
    const TensorParallelGroup& group = *x.group;
    if (group.comm.size == 1) return linear_backward(x, w, inp, dout, dinp, activation);
    const int inputs = w.weight.cols, outputs = w.weight.rows;
    const std::array<Ticket, 2> gathered = start_gather(x, dout);
    for (int number = 0; number < x.bands(); number++) {
        wait(gathered[size_t(number)], group.comm, x.stream);
        const Band band(x, number);
        linear_backward(band.x, w, band.of(inp, inputs), band.of(group.gathered, outputs), band.of(dinp, inputs),
                        band.of(activation, inputs));
    }
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
    copy_channels(x, to.first, to.width, from.first, from.width, count, x.rows);
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
    const int part = x.shape->computed_kv_channels() / 2;
    column_parallel_backward(x, w, inp, dqkv, dinp, {x.shape->attention_channels(), part, part});
}
