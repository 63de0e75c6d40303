#include "model/factors.h"

#include <algorithm>
#include <iterator>

#include "kernels/base/check.h"
#include "kernels/comm.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/matrices.h"
#include "model/pieces.h"
#include "model/state.h"

namespace {

// Returns the matrices of a tensor, or the tensor as one layer, each whole. A vector is one row.
std::vector<Matrix> layers_of(const TensorLayout& layout, int number, const std::vector<Matrix>& matrices) {
    std::vector<Matrix> layers;
    std::ranges::copy_if(matrices, std::back_inserter(layers), [&](const Matrix& m) { return m.tensor == number; });
    const Tensor& tensor = layout.tensors[size_t(number)];
    const std::vector<size_t> shape = logical_shape(layout, tensor);
    if (layers.empty())
        layers.push_back({tensor.name, number, 0, shape.size() > 1 ? int(shape[0]) : 1, int(shape.back())});
    return layers;
}

// Places a layer of a tensor, and the part of it that this rank has.
void place_layer(FactorState& state, size_t number, const TensorLayout& layout, const Matrix& whole,
                 ops::FactorLayer layer) {
    const TensorRow& row = *layout.tensors[size_t(whole.tensor)].row;
    const int parts = row.is_divided() ? layout.tensor_parallel.size : 1, rank = layout.tensor_parallel.rank % parts;
    layer.first_row = state.rows, layer.first_col = state.cols;
    layer.rows = row.is_padded() ? layout.whole.vocab_size : whole.rows, layer.cols = whole.cols;
    state.host_layers[number] = layer;
    state.names[number] = whole.name;
    state.rows += size_t(whole.rows), state.cols += size_t(whole.cols);
    if (layer.is_factored && row.division == Division::rows)
        layer.rows = whole.rows / parts, layer.first_row += size_t(rank * layer.rows);
    else
        layer.cols = whole.cols / parts, layer.first_col += size_t(rank * layer.cols);
    state.host_parts[number] = layer;
}

// Returns the layers, their names and the lengths of the arrays.
FactorState lay_out_factors(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update) {
    FactorState state;
    const std::vector<Matrix> matrices = lay_out_matrices(layout);
    const size_t tensors = layout.tensors.size();
    state.host_layers.resize(tensors * kMaxStacked), state.host_parts.resize(tensors * kMaxStacked);
    state.names.resize(tensors * kMaxStacked);
    for (const bool divided : {true, false}) {
        for (size_t i = 0; i < tensors; i++) {
            const TensorRow& row = *layout.tensors[i].row;
            if (row.is_divided() != divided || update.row_of(i).scope != UpdateScope::factors) continue;
            const TensorPart part = owned_part(options, layout, layout.tensors[i]);
            size_t number = i * kMaxStacked;
            for (const Matrix& whole : layers_of(layout, int(i), matrices)) {
                const ptrdiff_t begin = ptrdiff_t(part.shard_begin + whole.first) - ptrdiff_t(part.first);
                const bool is_factored = row.role != TensorRole::vector;
                place_layer(state, number++, layout, whole, {begin, 0, 0, 0, 0, update.tensors[i].group, is_factored});
            }
        }
        if (divided) state.divided_rows = state.rows, state.divided_cols = state.cols;
    }
    return state;
}

// Names the averages that a rank has, or with `once` those that it saves.
std::vector<NamedTensor> name_factors(const GptOptions& options, const TensorLayout& layout, const FactorState& state,
                                      bool once) {
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < state.host_layers.size(); i++) {
        const ops::FactorLayer &layer = state.host_layers[i], &part = state.host_parts[i];
        if (layer.cols == 0) continue;
        const Tensor& tensor = layout.tensors[i / size_t(kMaxStacked)];
        const bool is_saved = !tensor.is_copy && options.rank == 0, is_first = options.tensor_parallel.rank == 0;
        const auto name = [&](const char* slot, float* values, int whole, int count, const std::vector<Box>& boxes) {
            const size_t here = !once || (is_saved && (is_first || !boxes.empty())) ? size_t(count) : 0;
            named.push_back(
                {format("%s.%s", slot, state.names[i].c_str()), {size_t(whole)}, values, 0, here, false, boxes});
        };
        if (layer.is_factored) {
            name("row_v", state.row_v + layer.first_row, layer.rows, layer.rows, {});
            name("col_v", state.col_v + layer.first_col, layer.cols, layer.cols, {});
        } else {
            name("v", state.col_v + part.first_col, layer.cols, part.cols, boxes_of(layout, tensor));
        }
    }
    return named;
}

}  // namespace

void place_factors(GptState& s, Arena& arena) {
    FactorState& state = s.factors;
    state = lay_out_factors(s.options, s.layout, s.update);
    if (state.cols == 0) return;
    state.row_v = arena.take<float>("optimizer state", "row_v", state.rows);
    state.col_v = arena.take<float>("optimizer state", "col_v", state.cols);
    state.sums = arena.take<double>("control", "factor_sums", 2 * (state.rows + state.cols));
    state.means = arena.take<float>("control", "factor_means", state.host_layers.size());
    state.layers = arena.take<ops::FactorLayer>("control", "factor_layers", state.host_layers.size());
    state.parts = arena.take<ops::FactorLayer>("control", "factor_parts", state.host_parts.size());
}

void load_factors(GptState& s) {
    const std::vector<ops::FactorLayer>&layers = s.factors.host_layers, &parts = s.factors.host_parts;
    if (s.factors.cols == 0) return;
    copy_to_device(s.factors.layers, layers.data(), layers.size() * sizeof(ops::FactorLayer), s.stream);
    copy_to_device(s.factors.parts, parts.data(), parts.size() * sizeof(ops::FactorLayer), s.stream);
    for (size_t i = 0; i < layers.size(); i++) {
        const TensorRow& row = *s.layout.tensors[i / size_t(kMaxStacked)].row;
        const size_t addends =
            row.is_divided() ? 1 : size_t(s.group.comm.size);  // in TrustState::sums, of each element
        s.trust.host_layers[i].count = addends * size_t(layers[i].rows) * size_t(layers[i].cols);
    }
}

std::vector<NamedTensor> name_factors(const GptState& s, bool once) {
    return name_factors(s.options, s.layout, s.factors, once);
}

size_t factor_elements(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update) {
    size_t elements = 0;
    for (const NamedTensor& tensor : name_factors(options, layout, lay_out_factors(options, layout, update), true))
        elements += tensor.count;
    return elements;
}

void direct_factored(GptState& s, const RuleState& rule) {
    const FactorState& state = s.factors;
    const size_t n_sums = 2 * (state.rows + state.cols);
    double* col_sums = state.sums + 2 * state.rows;
    clear(state.sums, n_sums, s.stream);
    for (Pieces pieces(s, chunks_of(s, rule), {own_gradients(s, ChunkArray::reads)}); pieces.next();)
        run(s.stream, ops::factor_sums,
            {.rows = state.sums,
             .cols = col_sums,
             .grad = pieces[0].as<float>(),
             .chunks = pieces.chunks(),
             .layers = state.parts,
             .grad_norm = s.grad_norm,
             .n_chunks = pieces.n_chunks()},
            pieces.note());
    if (s.options.is_sharded()) add_over(s, s.comms.data, state.sums, n_sums);
    add_over(s, s.group.comm, state.sums, 2 * state.divided_rows);
    add_over(s, s.group.comm, col_sums, 2 * state.divided_cols);
    run(s.stream, ops::factor_moments,
        {.row_v = state.row_v,
         .col_v = state.col_v,
         .mean = state.means,
         .rows = state.sums,
         .cols = col_sums,
         .layers = state.layers,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_layers = int(state.host_layers.size())});
    for (Pieces pieces(s, chunks_of(s, rule),
                       {own_gradients(s, ChunkArray::updates), {s.master, &ops::Chunk::begin, ChunkArray::reads}});
         pieces.next();)
        run(s.stream, ops::factored_direction,
            {.grad = pieces[0].as<float>(),
             .sums = s.trust.sums,
             .master = pieces[1],
             .row_v = state.row_v,
             .col_v = state.col_v,
             .mean = state.means,
             .chunks = pieces.chunks(),
             .layers = state.parts,
             .scalars = s.update_scalars,
             .grad_norm = s.grad_norm,
             .n_chunks = pieces.n_chunks()},
            pieces.note());
}
