#include "model/matrices.h"

#include <numeric>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/muon.h"
#include "model/soap.h"
#include "model/state.h"

namespace {

// The functions of an optimizer of matrices.
struct MatrixFunctions {
    OptimizerKind kind;
    // Returns what the direction of an own matrix needs.
    MatrixMemory (*memory)(const GptOptions& options, const Matrix& matrix);
    // Replaces the momentum or the gradient of an own matrix, in the exchange's type, by the direction of the step.
    void (*direct)(const GptState& s, size_t number, View values);
};
constexpr MatrixFunctions kFunctions[] = {{OptimizerKind::muon, muon_memory, muon_direction},
                                          {OptimizerKind::normuon, muon_memory, normuon_direction},
                                          {OptimizerKind::soap, soap_memory, soap_direction},
                                          {OptimizerKind::soap_muon, soap_muon_memory, soap_muon_direction}};

const OptimizerRow& row_of(const GptState& s) { return optimizer_row(s.update.rules[size_t(s.matrix.rule)].rule); }

const MatrixFunctions& functions_of(const GptState& s) {
    const auto* functions = std::ranges::find(kFunctions, row_of(s).kind, &MatrixFunctions::kind);
    require(functions != std::end(kFunctions), "%s has no functions of matrices", name_of(row_of(s).kind));
    return *functions;
}

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
void list_messages(GptState& s, size_t number, MatrixGroup& group) {
    const bool is_sharded = s.options.is_sharded();
    const int me = s.options.rank;
    const Matrix& matrix = s.matrix.matrices[number];
    const Piece mine = piece_of(s, matrix, me);
    if (mine.count > 0 && (is_sharded || matrix.owner != me)) {
        const Exchange::Message piece = message(matrix.owner, direction_at(s, matrix, mine.first), mine.count);
        if (is_sharded) group.directions.send.push_back(piece);
        group.results.receive.push_back(piece);
    }
    for (int rank = 0; matrix.owner == me && rank < s.options.ranks; rank++) {
        const Piece theirs = piece_of(s, matrix, rank);
        if (theirs.count == 0 || (!is_sharded && rank == me)) continue;
        const View values = whole_matrix(s, number).from(theirs.first - matrix.first);
        const Exchange::Message piece = message(rank, values, theirs.count);
        if (is_sharded) group.directions.receive.push_back(piece);
        group.results.send.push_back(piece);
    }
}

// Tensors are sorted by bucket.
void group_matrices(GptState& s) {
    MatrixState& state = s.matrix;
    for (size_t number = 0; number < state.matrices.size(); number++) {
        const int bucket = s.layout.tensors[size_t(state.matrices[number].tensor)].bucket;
        if (state.groups.empty() || state.groups.back().bucket != bucket)
            state.groups.push_back({bucket, number, number, 0, 0, {}, {}, {}});
        list_messages(s, number, state.groups.back());
        state.groups.back().end++;
    }
}

}  // namespace

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

MatrixMemory larger(const MatrixMemory& a, const MatrixMemory& b) {
    return {a.type, std::max(a.x, b.x), std::max(a.gram, b.gram), std::max(a.gram_sums, b.gram_sums),
            std::max(a.scratch_bytes, b.scratch_bytes)};
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

    size_t whole = 0;
    MatrixMemory most;
    for (const Matrix& matrix : state.matrices) {
        state.whole_begin.push_back(whole);
        if (matrix.owner != s.options.rank) continue;
        whole += round_up(matrix.count(), kTensorAlignment);
        most = larger(functions_of(s).memory(s.options, matrix), most);
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
    const Dtype exchange = row_of(s).exchange;
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    state.direction = arena.take("matrices", "direction", rule.elements, exchange);
    if (s.options.is_sharded()) state.whole = arena.take("matrices", "whole", whole, exchange);
    state.x = arena.take("matrices", "x", most.x, most.type);
    state.gram = arena.take("matrices", "gram", most.gram, most.type);
    state.product = arena.take("matrices", "product", most.x, most.type);
    state.gram_sums = arena.take<float>("matrices", "gram_sums", most.gram_sums);
    state.scratch = arena.take<std::byte>("matrices", "matrix_scratch", most.scratch_bytes);
    group_matrices(s);
}

void load_matrices(GptState& s) {
    if (s.matrix.rule < 0) return;
    const RuleState& rule = s.update.rules[size_t(s.matrix.rule)];
    int next = rule.first_chunk;
    for (MatrixGroup& group : s.matrix.groups) {
        group.first_chunk = next;
        while (next < rule.first_chunk + rule.n_chunks &&
               s.layout.tensors[size_t(s.host_update_chunks[size_t(next)].tensor)].bucket == group.bucket)
            next++;
        group.n_chunks = next - group.first_chunk;
    }
    require(next == rule.first_chunk + rule.n_chunks, "matrices: their chunks are not sorted by bucket");
}

void begin_matrices(GptState& s) {
    MatrixState& state = s.matrix;
    if (state.rule < 0) return;
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    run(s.stream, ops::momentum_direction,
        {.direction = state.direction,
         .m = rule.slots.empty() ? View() : rule.slots[0],
         .grad = s.own_grad,
         .chunks = s.update_chunks + rule.first_chunk,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_chunks = rule.n_chunks,
         .nesterov = s.options.optimizer.nesterov},
        note_of_chunks(s, rule.first_chunk, rule.n_chunks));
    for (MatrixGroup& group : state.groups)
        if (s.options.is_sharded()) group.ticket = exchange(group.directions, s.comm, s.stream);
}

void finish_matrices(GptState& s) {
    MatrixState& state = s.matrix;
    if (state.rule < 0) return;
    const bool has_step = s.update_number >= row_of(s).first_update;
    for (MatrixGroup& group : state.groups) {
        s.update_time.stop(s.stream);
        if (s.options.is_sharded()) wait(group.ticket, s.comm, s.stream);
        s.update_time.start(s.stream);
        for (size_t number = group.first; number < group.end; number++)
            if (state.matrices[number].owner == s.options.rank)
                functions_of(s).direct(s, number, whole_matrix(s, number));
        if (has_step && s.comm.size > 1) group.ticket = exchange(group.results, s.comm, s.stream);
    }
    for (const MatrixGroup& group : state.groups) {
        if (!has_step) break;
        s.update_time.stop(s.stream);
        if (s.comm.size > 1) wait(group.ticket, s.comm, s.stream);
        s.update_time.start(s.stream);
        apply_directions(s, group.first_chunk, group.n_chunks, state.direction, s.options.optimizer.cautious_decay);
    }
}
