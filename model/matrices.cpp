#include "model/matrices.h"

#include <numeric>
#include <span>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/muon.h"
#include "model/offload.h"
#include "model/pieces.h"
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

Grid grid_of(const GptOptions& options) { return {options.ranks, options.tensor_parallel.size}; }

// Whether a rank has only pieces of matrices.
bool has_pieces(const GptOptions& options) { return options.is_sharded() || options.tensor_parallel.size > 1; }

bool is_divided_by_columns(const TensorLayout& layout, const Matrix& matrix) {
    const Division division = layout.tensors[size_t(matrix.tensor)].row->division;
    return layout.tensor_parallel.size > 1 && division == Division::columns;
}

// A piece of a matrix: elements [first, first + count) of the tensor on its rank.
struct Piece {
    size_t first, count;
};

// The piece of a matrix that a rank updates.
Piece piece_of(const GptState& s, const Matrix& matrix, const Grid::Place& rank) {
    if (!s.options.is_sharded()) return {matrix.first, part_elements(s.layout, matrix)};
    const TensorPart part = part_of(s.layout, s.layout.tensors[size_t(matrix.tensor)], rank.data);
    const size_t first = std::max(part.first, matrix.first);
    const size_t end = std::min(part.first + part.count, matrix.first + part_elements(s.layout, matrix));
    return {first, end > first ? end - first : 0};
}

// The place of an element of a tensor in `direction`, of this rank's part.
View direction_at(const GptState& s, const Matrix& matrix, size_t element) {
    const size_t first = owned_part(s.options, s.layout, s.layout.tensors[size_t(matrix.tensor)]).first;
    return s.matrix.direction.from(s.update.tensors[size_t(matrix.tensor)].state_begin + element - first);
}

// An own matrix. With tensor parallelism its parts in the order of ranks: rows in their order, or the columns of each
// rank.
View whole_matrix(const GptState& s, size_t number) {
    const MatrixState& state = s.matrix;
    return has_pieces(s.options) ? state.whole.from(state.whole_begin[number])
                                 : direction_at(s, state.matrices[number], state.matrices[number].first);
}

// Replaces an own matrix by the direction of its step.
void direct(const GptState& s, size_t number) {
    const Matrix& matrix = s.matrix.matrices[number];
    const View values = whole_matrix(s, number), joined = s.matrix.joined;
    if (!is_divided_by_columns(s.layout, matrix)) return functions_of(s).direct(s, number, values);
    const auto parts = size_t(s.options.tensor_parallel.size), rows = size_t(matrix.rows);
    const size_t bytes = size_t(matrix.cols) * size_of(values.dtype), part_bytes = bytes / parts;
    const auto copy_parts = [&](bool join) {
        for (size_t part = 0; part < parts; part++) {
            void *apart = values.from(part * part_elements(s.layout, matrix)).data,
                 *side_by_side = joined.as<std::byte>() + part * part_bytes;
            if (join)
                copy_rows_on_device(side_by_side, bytes, apart, part_bytes, part_bytes, rows, s.stream);
            else
                copy_rows_on_device(apart, part_bytes, side_by_side, bytes, part_bytes, rows, s.stream);
        }
    };
    copy_parts(true);
    functions_of(s).direct(s, number, joined);
    copy_parts(false);
}

Exchange::Message message(int rank, View values, size_t count) {
    return {rank, values.data, count * size_of(values.dtype)};
}

// Without shards, all data ranks have the same directions, and the ranks with the owner's place along `data` send
// theirs. An owner that has the whole matrix needs none.
void list_messages(GptState& s, size_t number, MatrixGroup& group) {
    const Grid grid = grid_of(s.options);
    const int me = s.options.stage_rank();
    const Matrix& matrix = s.matrix.matrices[number];
    const bool is_sharded = s.options.is_sharded(), is_whole = !has_pieces(s.options);
    const int owner_data = grid.place_of(matrix.owner).data;
    const Piece mine = piece_of(s, matrix, grid.place_of(me));
    if (mine.count > 0 && !(is_whole && matrix.owner == me)) {
        const Exchange::Message piece = message(matrix.owner, direction_at(s, matrix, mine.first), mine.count);
        if (is_sharded || s.options.rank == owner_data) group.directions.send.push_back(piece);
        group.results.receive.push_back(piece);
    }
    for (int rank = 0; matrix.owner == me && rank < grid.size(); rank++) {
        const Grid::Place place = grid.place_of(rank);
        const Piece theirs = piece_of(s, matrix, place);
        if (theirs.count == 0 || (is_whole && rank == me)) continue;
        const size_t begin = size_t(place.tensor) * part_elements(s.layout, matrix);
        const View values = whole_matrix(s, number).from(begin + theirs.first - matrix.first);
        const Exchange::Message piece = message(rank, values, theirs.count);
        if (is_sharded || place.data == owner_data) group.directions.receive.push_back(piece);
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
    const int parts = layout.tensor_parallel.size;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const TensorRow& row = *tensor.row;
        if (row.role != TensorRole::matrix) continue;
        require(parts == 1 || row.is_divided(), "%s is a matrix that ranks do not divide", tensor.name.c_str());
        const int cols = (layout.whole.*row.cols)();
        const bool is_alone = !row.stacked_rows;
        size_t first = 0, number = 0;
        for (const int rows : is_alone ? std::vector{(layout.whole.*row.rows)()} : (layout.whole.*row.stacked_rows)()) {
            matrices.push_back({.name = is_alone ? tensor.name : format("%s.%zu", tensor.name.c_str(), number++),
                                .tensor = int(i),
                                .first = first,
                                .rows = rows,
                                .cols = cols});
            first += part_elements(layout, matrices.back());
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
    std::vector<double> load(size_t(layout.ranks * parts), 0.0);
    for (const size_t i : order) {
        const auto least = std::ranges::min_element(load);
        matrices[i].owner = int(least - load.begin());
        *least += work(i);
    }
    return matrices;
}

size_t part_elements(const TensorLayout& layout, const Matrix& matrix) {
    return matrix.count() / size_t(layout.tensor_parallel.size);
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

// The place of a slot in a window.
static size_t place_in_window(const GptState& s, size_t slot, const Matrix& matrix) {
    size_t elements = 0;
    for (const MatrixSlot& before : std::span(row_of(s).matrix_slots).first(slot))
        elements += round_up(slot_elements(before, matrix), kTensorAlignment);
    return elements;
}

static int window_of(const MatrixState& state, size_t number) {
    return int(std::ranges::find(state.own, number) - state.own.begin()) % 2;
}

float* state_of(const GptState& s, size_t slot, size_t number) {
    const MatrixState& state = s.matrix;
    if (!state.windows[0]) return state.slots[slot][number];
    return state.windows[window_of(state, number)] + place_in_window(s, slot, state.matrices[number]);
}

// Copies the state of the own matrix with this index between host memory and its window.
static void copy_state(GptState& s, size_t index, bool to_device) {
    const MatrixState& state = s.matrix;
    if (!state.windows[0] || index >= state.own.size()) return;
    const size_t number = state.own[index];
    for (size_t slot = 0; slot < state.slots.size(); slot++) {
        const View host(state.slots[slot][number], Dtype::fp32), device(state_of(s, slot, number), Dtype::fp32);
        copy_offloaded(s, to_device ? device : host, to_device ? host : device,
                       slot_elements(row_of(s).matrix_slots[slot], state.matrices[number]),
                       s.offload.stream(window_of(state, number)));
    }
}

// Computes the direction of the own matrix with this index.
static void direct_next(GptState& s, size_t index) {
    const size_t number = s.matrix.own[index];
    if (s.matrix.windows[0]) wait_for(s.stream, s.offload.stream(window_of(s.matrix, number)));
    direct(s, number);
    copy_state(s, index, false);
    copy_state(s, index + 2, true);
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

    const int me = s.options.stage_rank();
    size_t whole = 0, joined = 0, window = 0;
    MatrixMemory most;
    for (const Matrix& matrix : state.matrices) {
        state.whole_begin.push_back(whole);
        if (matrix.owner != me) continue;
        state.own.push_back(size_t(&matrix - state.matrices.data()));
        window = std::max(window, place_in_window(s, row_of(s).matrix_slots.size(), matrix));
        whole += round_up(matrix.count(), kTensorAlignment);
        if (is_divided_by_columns(s.layout, matrix)) joined = std::max(joined, matrix.count());
        most = larger(functions_of(s).memory(s.options, matrix), most);
    }
    for (const MatrixSlot& slot : row_of(s).matrix_slots) {
        std::vector<float*>& places = state.slots.emplace_back();
        size_t elements = 0;
        for (const Matrix& matrix : state.matrices)
            elements += matrix.owner == me ? round_up(slot_elements(slot, matrix), kTensorAlignment) : 0;
        float* next = arena.take<float>("optimizer state", slot.name, elements, s.options.offload_optimizer);
        for (const Matrix& matrix : state.matrices) {
            const bool is_own = matrix.owner == me;
            places.push_back(is_own ? next : nullptr);
            if (is_own && next) next += round_up(slot_elements(slot, matrix), kTensorAlignment);
        }
    }
    for (int i = 0; s.options.offload_optimizer && window > 0 && i < 2; i++)
        state.windows[i] = arena.take<float>("offload", format("matrix_window_%d", i), window);
    const Dtype exchange = row_of(s).exchange;
    const RuleState& rule = s.update.rules[size_t(state.rule)];
    state.direction = arena.take("matrices", "direction", rule.elements, exchange);
    if (has_pieces(s.options)) state.whole = arena.take("matrices", "whole", whole, exchange);
    if (joined > 0) state.joined = arena.take("matrices", "joined", joined, exchange);
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
    for (Pieces pieces(
             s, chunks_of(s, rule),
             {{rule.slot(0), &ops::Chunk::state_begin, ChunkArray::updates}, own_gradients(s, ChunkArray::reads)});
         pieces.next();)
        run(s.stream, ops::momentum_direction,
            {.direction = state.direction,
             .m = pieces[0],
             .grad = pieces[1].as<float>(),
             .chunks = pieces.chunks(),
             .scalars = s.update_scalars,
             .grad_norm = s.grad_norm,
             .n_chunks = pieces.n_chunks(),
             .nesterov = s.options.optimizer.nesterov},
            pieces.note());
    for (MatrixGroup& group : state.groups)
        if (has_pieces(s.options)) group.ticket = exchange(group.directions, s.comms.stage, s.stream);
}

void finish_matrices(GptState& s) {
    MatrixState& state = s.matrix;
    if (state.rule < 0) return;
    const bool has_step = s.step.update >= row_of(s).first_update;
    for (const size_t index : {0, 1}) copy_state(s, index, true);
    size_t next = 0;
    for (MatrixGroup& group : state.groups) {
        if (has_pieces(s.options)) wait_outside_update(s, s.comms.stage, group.ticket);
        for (size_t number = group.first; number < group.end; number++)
            if (state.matrices[number].owner == s.options.stage_rank()) direct_next(s, next++);
        if (has_step && s.comms.stage.size > 1) group.ticket = exchange(group.results, s.comms.stage, s.stream);
    }
    for (const MatrixGroup& group : state.groups) {
        if (!has_step) break;
        if (s.comms.stage.size > 1) wait_outside_update(s, s.comms.stage, group.ticket);
        apply_directions(s, update_chunks(s, group.first_chunk, group.n_chunks), state.direction,
                         s.options.optimizer.cautious_decay);
    }
}
