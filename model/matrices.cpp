#include "model/matrices.h"

#include <cmath>
#include <numeric>
#include <span>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/soap.h"
#include "model/state.h"

namespace {

// x a + x x^T x b + (x x^T)^2 x c
struct Polynomial {
    float a, b, c;
};

// Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
constexpr Polynomial kNewtonSchulz[] = {{3.4445f, -4.7750f, 2.0315f},
                                        {3.4445f, -4.7750f, 2.0315f},
                                        {3.4445f, -4.7750f, 2.0315f},
                                        {3.4445f, -4.7750f, 2.0315f},
                                        {3.4445f, -4.7750f, 2.0315f}};
// Optimal polynomials of Amsel et al., "The Polar Express", arXiv 2505.16932, algorithm 1, with a margin of 2 % for
// rounding: singular values from 1e-3 to 1 become 0.86 to 1.14.
constexpr Polynomial kPolarExpress[] = {{8.1565545f, -22.4832929f, 15.8787699f},
                                        {4.0429299f, -2.8089175f, 0.5000178f},
                                        {3.8916678f, -2.7724842f, 0.5060648f},
                                        {3.2857537f, -2.3681295f, 0.4644902f},
                                        {2.3465413f, -1.7097828f, 0.4232355f}};

std::span<const Polynomial> polynomials_of(const OptimizerSettings& settings) {
    if (settings.muon_iteration == MuonIteration::polar_express) return kPolarExpress;
    return kNewtonSchulz;
}

// adamw_rms gives the update the size of AdamW's, about 0.2 per element (Liu et al., "Muon is scalable for LLM
// training", arXiv 2502.16982, section 2.2); both are torch.optim.Muon's.
float scale_of(const OptimizerSettings& settings, const Matrix& matrix) {
    const double rows = matrix.rows, cols = matrix.cols;
    if (settings.muon_scale == MuonScale::adamw_rms) return float(0.2 * std::sqrt(std::max(rows, cols)));
    return float(std::sqrt(std::max(1.0, rows / cols)));
}

// Without bf16 arithmetic in the model, the iteration has FP32's precision.
Dtype type_of_iteration(const GptState& s) { return s.options.precision == Dtype::fp32 ? Dtype::fp32 : Dtype::bf16; }

const OptimizerRow& row_of(const GptState& s) { return optimizer_row(s.update.rules[size_t(s.matrix.rule)].rule); }

// A piece of a matrix: elements [first, first + count) of its tensor.
struct Piece {
    size_t first, count;
};

// The piece of a matrix that a rank updates.
Piece piece_of(const GptState& s, const Matrix& matrix, int rank) {
    if (!s.options.is_sharded()) return {matrix.first, matrix.count()};
    const TensorPart part = part_of(s.layout, s.layout.tensors[size_t(matrix.tensor)], rank);
    const size_t first = std::max(part.first, matrix.first);
    const size_t end = std::min(part.first + part.count, matrix.first + matrix.count());
    return {first, end > first ? end - first : 0};
}

// The place of an element of a tensor in `direction`, of this rank's part.
View direction_at(const GptState& s, const Matrix& matrix, size_t element) {
    const size_t first = owned_part(s.options, s.layout, s.layout.tensors[size_t(matrix.tensor)]).first;
    return s.matrix.direction.from(s.update.tensors[size_t(matrix.tensor)].state_begin + element - first);
}

// An own matrix as a whole.
View whole_matrix(const GptState& s, size_t number) {
    const MatrixState& state = s.matrix;
    return s.options.is_sharded() ? state.whole.from(state.whole_begin[number])
                                  : direction_at(s, state.matrices[number], state.matrices[number].first);
}

Exchange::Message message(int rank, View values, size_t count) {
    return {rank, values.data, count * size_of(values.dtype)};
}

// Without shards, owners have all directions, and only results travel.
void list_messages(GptState& s) {
    MatrixState& state = s.matrix;
    const bool is_sharded = s.options.is_sharded();
    const int me = s.options.rank;
    for (size_t number = 0; number < state.matrices.size(); number++) {
        const Matrix& matrix = state.matrices[number];
        const Piece mine = piece_of(s, matrix, me);
        if (mine.count > 0 && (is_sharded || matrix.owner != me)) {
            const Exchange::Message piece = message(matrix.owner, direction_at(s, matrix, mine.first), mine.count);
            if (is_sharded) state.directions.send.push_back(piece);
            state.results.receive.push_back(piece);
        }
        for (int rank = 0; matrix.owner == me && rank < s.options.ranks; rank++) {
            const Piece theirs = piece_of(s, matrix, rank);
            if (theirs.count == 0 || (!is_sharded && rank == me)) continue;
            const View values = whole_matrix(s, number).from(theirs.first - matrix.first);
            const Exchange::Message piece = message(rank, values, theirs.count);
            if (is_sharded) state.directions.receive.push_back(piece);
            state.results.send.push_back(piece);
        }
    }
}

// out = scale (a x + (b gram + c gram^2) x), with gram = x x^T, or x^T x on the other side if that is smaller.
void apply_polynomial(const GptState& s, const Matrix& matrix, View out, const Polynomial& p, float scale) {
    const MatrixState& state = s.matrix;
    const int rows = matrix.rows, cols = matrix.cols, n = matrix.smaller();
    const size_t gram_count = size_t(n) * size_t(n);
    const bool is_wide = rows <= cols;
    if (is_wide) {
        multiply_by_transposed(s, state.gram, state.x, state.x, rows, rows, cols);
    } else {
        run(s.stream, ops::matmul_backward_weight,
            {.dweight = state.gram_sums,
             .dbias = nullptr,
             .scratch = state.scratch,
             .dout = state.x,
             .inp = state.x,
             .rows = rows,
             .n = cols,
             .k = cols,
             .accumulate = false});
        run(s.stream, ops::cast, {.out = state.gram, .inp = state.gram_sums, .count = gram_count});
    }
    // The Gram matrix is symmetric, so it is its own transpose.
    multiply_by_transposed(s, state.product, state.gram, state.gram, n, n, n);
    run(s.stream, ops::scaled_add,
        {.out = state.gram, .a = state.gram, .b = state.product, .count = gram_count, .alpha = p.b, .beta = p.c});
    if (is_wide)
        run(s.stream, ops::matmul_backward_input,
            {.dinp = state.product,
             .dout = state.gram,
             .weight = state.x,
             .kept = nullptr,
             .rows = rows,
             .n = rows,
             .k = cols});
    else
        multiply_by_transposed(s, state.product, state.x, state.gram, rows, cols, cols);
    run(s.stream, ops::scaled_add,
        {.out = out, .a = state.x, .b = state.product, .count = matrix.count(), .alpha = scale * p.a, .beta = scale});
}

// Replaces an own matrix by the nearest matrix with orthogonal rows or columns, times the scale of its update.
void orthogonalize(const GptState& s, size_t number) {
    const OptimizerSettings& settings = s.options.optimizer;
    const Matrix& matrix = s.matrix.matrices[number];
    const View values = whole_matrix(s, number);
    run(s.stream, ops::frobenius_normalize,
        {.out = s.matrix.x, .inp = values, .scratch = s.matrix.scratch, .count = matrix.count(), .eps = 1e-7f});
    const bool normalizes_rows = row_of(s).kind == OptimizerKind::normuon;
    const std::span<const Polynomial> polynomials = polynomials_of(settings);
    for (const Polynomial& polynomial : polynomials) {
        const bool is_result = &polynomial == &polynomials.back() && !normalizes_rows;
        apply_polynomial(s, matrix, is_result ? values : s.matrix.x, polynomial,
                         is_result ? scale_of(settings, matrix) : 1);
    }
    // The norm of an orthogonal matrix, times the same scale: with adamw_rms the paper's 0.2 sqrt(rows cols).
    if (normalizes_rows)
        run(s.stream, ops::row_normalize,
            {.out = values,
             .inp = s.matrix.x,
             .v = s.matrix.slots[0][number],
             .scratch = s.matrix.scratch,
             .grad_norm = s.grad_norm,
             .rows = matrix.rows,
             .cols = matrix.cols,
             .beta2 = float(settings.muon_beta2),
             .one_minus_beta2 = float(1 - settings.muon_beta2),
             .eps = 1e-8f,
             .norm = scale_of(settings, matrix) * std::sqrt(float(matrix.smaller()))});
}

}  // namespace

void multiply_by_transposed(const GptState& s, View out, View a, View b, int rows, int n, int k) {
    run(s.stream, ops::matmul_forward,
        {.out = out, .pre_activation = nullptr, .inp = a, .weight = b, .bias = nullptr, .rows = rows, .n = n, .k = k});
}

std::vector<Matrix> lay_out_matrices(const TensorLayout& layout) {
    std::vector<Matrix> matrices;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const TensorRow& row = tensor_table()[size_t(tensor.row)];
        if (row.role != TensorRole::matrix) continue;
        size_t first = 0;
        const std::vector<int> stacked = row.stacked_rows ? (layout.shape.*row.stacked_rows)() : std::vector<int>();
        for (size_t part = 0; part < std::max<size_t>(stacked.size(), 1); part++) {
            const bool is_alone = stacked.empty();
            matrices.push_back({.name = is_alone ? tensor.name : format("%s.%zu", tensor.name.c_str(), part),
                                .tensor = int(i),
                                .first = first,
                                .rows = is_alone ? tensor.rows : stacked[part],
                                .cols = tensor.cols});
            first += matrices.back().count();
        }
    }
    // The matrix with the most work first, each to the rank with the least so far.
    std::vector<size_t> order(matrices.size());
    std::iota(order.begin(), order.end(), size_t(0));
    const auto work = [&](size_t i) {
        const double small = matrices[i].smaller(), count = double(matrices[i].count());
        return 4 * small * count + 2 * small * small * small;
    };
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return work(a) > work(b); });
    std::vector<double> load(size_t(layout.ranks), 0.0);
    for (const size_t i : order) {
        const auto least = std::ranges::min_element(load);
        matrices[i].owner = int(least - load.begin());
        *least += work(i);
    }
    return matrices;
}

size_t slot_elements(const MatrixSlot& slot, const Matrix& matrix) {
    size_t elements = 1;
    for (const size_t size : slot.shape(size_t(matrix.rows), size_t(matrix.cols))) elements *= size;
    return elements;
}

std::vector<NamedTensor> name_matrix_state(const GptState& s) {
    std::vector<NamedTensor> named;
    const MatrixState& state = s.matrix;
    for (size_t i = 0; i < state.slots.size(); i++) {
        const MatrixSlot& slot = row_of(s).matrix_slots[i];
        for (size_t number = 0; number < state.matrices.size(); number++) {
            const Matrix& matrix = state.matrices[number];
            float* values = state.slots[i][number];
            named.push_back({slot.name + "." + matrix.name, slot.shape(size_t(matrix.rows), size_t(matrix.cols)),
                             values, 0, values ? slot_elements(slot, matrix) : 0});
        }
    }
    return named;
}

void place_matrices(GptState& s, Arena& arena) {
    MatrixState& state = s.matrix;
    for (size_t r = 0; r < s.update.rules.size(); r++)
        if (optimizer_row(s.update.rules[r].rule).is_of_matrices()) state.rule = int(r);
    if (state.rule < 0) return;
    state.matrices = lay_out_matrices(s.layout);

    const bool is_soap = row_of(s).kind == OptimizerKind::soap;
    size_t whole = 0, largest = 0, largest_gram = 0, sums = 0, scratch = 0;
    for (const Matrix& matrix : state.matrices) {
        state.whole_begin.push_back(whole);
        if (matrix.owner != s.options.rank) continue;
        whole += round_up(matrix.count(), kTensorAlignment);
        if (is_soap) {
            const SoapMemory memory = soap_memory(matrix);
            largest = largest_gram = std::max(largest, memory.square);
            sums = std::max(sums, memory.panels), scratch = std::max(scratch, memory.scratch_bytes);
            continue;
        }
        largest = std::max(largest, matrix.count());
        largest_gram = std::max(largest_gram, size_t(matrix.smaller()) * size_t(matrix.smaller()));
        sums = largest_gram;
        ops::FrobeniusNormalize norm{};
        norm.count = matrix.count();
        ops::MatmulBackwardWeight gram{};
        gram.rows = matrix.rows, gram.n = gram.k = matrix.cols;
        ops::RowNormalize rows{};
        rows.rows = matrix.rows;
        scratch =
            std::max({scratch, ops::frobenius_normalize_scratch_bytes(norm), ops::row_normalize_scratch_bytes(rows),
                      matrix.rows > matrix.cols ? ops::matmul_backward_weight_scratch_bytes(gram) : 0});
    }
    for (const MatrixSlot& slot : row_of(s).matrix_slots) {
        std::vector<float*>& places = state.slots.emplace_back();
        size_t elements = 0;
        for (const Matrix& matrix : state.matrices)
            elements += matrix.owner == s.options.rank ? round_up(slot_elements(slot, matrix), kTensorAlignment) : 0;
        float* next = arena.take<float>("optimizer state", slot.name, elements);
        for (const Matrix& matrix : state.matrices) {
            const bool is_own = matrix.owner == s.options.rank;
            places.push_back(is_own ? next : nullptr);
            if (is_own && next) next += round_up(slot_elements(slot, matrix), kTensorAlignment);
        }
    }
    const Dtype type = is_soap ? Dtype::fp32 : type_of_iteration(s), exchange = row_of(s).exchange;
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    state.direction = arena.take("matrices", "direction", rule.elements, exchange);
    if (s.options.is_sharded()) state.whole = arena.take("matrices", "whole", whole, exchange);
    state.x = arena.take("matrices", "x", largest, type);
    state.gram = arena.take("matrices", "gram", largest_gram, type);
    state.product = arena.take("matrices", "product", std::max(largest, largest_gram), type);
    state.gram_sums = arena.take<float>("matrices", "gram_sums", sums);
    state.scratch = arena.take<std::byte>("matrices", "matrix_scratch", scratch);
    list_messages(s);
}

Ticket begin_matrices(GptState& s) {
    MatrixState& state = s.matrix;
    if (state.rule < 0) return {};
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    run(s.stream, ops::momentum_direction,
        {.direction = state.direction,
         .m = rule.slots.empty() ? nullptr : rule.slots[0],
         .grad = s.own_grad,
         .chunks = s.update_chunks + rule.first_chunk,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_chunks = rule.n_chunks,
         .nesterov = s.options.optimizer.nesterov},
        note_of_rule(s, rule));
    if (!s.options.is_sharded()) return {};
    return exchange(state.directions, s.comm, s.stream);
}

void finish_matrices(GptState& s, Ticket directions) {
    MatrixState& state = s.matrix;
    if (state.rule < 0) return;
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    const bool is_soap = rule.rule == OptimizerKind::soap;
    s.update_time.stop(s.stream);
    wait(directions, s.comm, s.stream);
    s.update_time.start(s.stream);
    for (size_t number = 0; number < state.matrices.size(); number++)
        if (state.matrices[number].owner == s.options.rank) {
            if (is_soap)
                soap_direction(s, number, whole_matrix(s, number));
            else
                orthogonalize(s, number);
        }
    if (is_soap && s.update_number == 1) return;  // only finds the bases
    s.update_time.stop(s.stream);
    if (s.comm.size > 1) wait(exchange(state.results, s.comm, s.stream), s.comm, s.stream);
    s.update_time.start(s.stream);
    run(s.stream, ops::apply_direction,
        {.master = s.master,
         .param = s.options.precision == Dtype::fp32 ? View() : s.own_param,
         .direction = state.direction,
         .chunks = s.update_chunks + rule.first_chunk,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_chunks = rule.n_chunks,
         .cautious = s.options.optimizer.cautious_decay},
        note_of_rule(s, rule));
}
