#include "model/factors.h"

#include "kernels/base/check.h"
#include "kernels/comm.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/matrices.h"
#include "model/state.h"

namespace {

// Returns the layers, their names and the lengths of the arrays.
FactorState lay_out_factors(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update) {
    FactorState state;
    const std::vector<Matrix> matrices = lay_out_matrices(layout);
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        const Tensor& tensor = layout.tensors[i];
        const TensorRow& row = tensor_table()[size_t(tensor.row)];
        const bool is_vector = row.role == TensorRole::vector;
        std::vector<Matrix> layers;
        for (const Matrix& matrix : matrices)
            if (matrix.tensor == int(i)) layers.push_back(matrix);
        if (layers.empty())
            layers.push_back({.name = tensor.name,
                              .tensor = int(i),
                              .first = 0,
                              .rows = is_vector ? 1 : tensor.rows,
                              .cols = is_vector ? int(tensor.count) : tensor.cols});
        if (update.row_of(i).scope != UpdateScope::factors) layers.clear();
        layers.resize(kMaxStacked);
        const TensorPart part = owned_part(options, layout, tensor);
        for (const Matrix& layer : layers) {
            state.names.push_back(layer.name);
            const bool is_padded = row.rows == &GptShape::padded_vocab && layer.rows > 0;
            state.host_layers.push_back({.begin = ptrdiff_t(part.shard_begin + layer.first) - ptrdiff_t(part.first),
                                         .first_row = state.rows,
                                         .first_col = state.cols,
                                         .rows = is_padded ? options.shape.vocab_size : layer.rows,
                                         .cols = layer.cols,
                                         .group = update.tensors[i].group,
                                         .is_factored = !is_vector});
            state.rows += size_t(layer.rows), state.cols += size_t(layer.cols);
        }
    }
    return state;
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
}

void load_factors(GptState& s) {
    const std::vector<ops::FactorLayer>& layers = s.factors.host_layers;
    if (s.factors.cols == 0) return;
    copy_to_device(s.factors.layers, layers.data(), layers.size() * sizeof(ops::FactorLayer), s.stream);
    for (size_t i = 0; i < layers.size(); i++)
        s.trust.host_layers[i].count = size_t(layers[i].rows) * size_t(layers[i].cols);
}

std::vector<NamedTensor> name_factors(const GptState& s, bool once) {
    const FactorState& state = s.factors;
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < state.host_layers.size(); i++) {
        const ops::FactorLayer& layer = state.host_layers[i];
        const bool is_copy = s.layout.tensors[i / size_t(kMaxStacked)].is_copy;
        const auto name = [&](const char* slot, float* values, size_t count) {
            named.push_back({format("%s.%s", slot, state.names[i].c_str()),
                             {count},
                             values,
                             0,
                             once && (is_copy || s.options.rank > 0) ? 0 : count});
        };
        if (layer.rows == 0) continue;
        if (layer.is_factored) name("row_v", state.row_v + layer.first_row, size_t(layer.rows));
        name(layer.is_factored ? "col_v" : "v", state.col_v + layer.first_col, size_t(layer.cols));
    }
    return named;
}

size_t factor_elements(const GptOptions& options, const TensorLayout& layout, const UpdateLayout& update) {
    size_t elements = 0, i = 0;
    for (const ops::FactorLayer& layer : lay_out_factors(options, layout, update).host_layers)
        if (!layout.tensors[i++ / size_t(kMaxStacked)].is_copy)
            elements += size_t(layer.is_factored ? layer.rows + layer.cols : layer.cols);
    return elements;
}

void direct_factored(GptState& s, const RuleState& rule) {
    const FactorState& state = s.factors;
    const ops::Chunk* chunks = s.update_chunks + rule.first_chunk;
    const size_t n_sums = 2 * (state.rows + state.cols);
    double* col_sums = state.sums + 2 * state.rows;
    ops::fill({.out = reinterpret_cast<float*>(state.sums), .count = 2 * n_sums, .value = 0}, s.stream);
    run(s.stream, ops::factor_sums,
        {.rows = state.sums,
         .cols = col_sums,
         .grad = s.own_grad,
         .chunks = chunks,
         .layers = state.layers,
         .grad_norm = s.grad_norm,
         .n_chunks = rule.n_chunks},
        note_of_chunks(s, rule.first_chunk, rule.n_chunks));
    s.update_time.stop(s.stream);
    if (s.options.is_sharded())
        wait(all_reduce_sum(state.sums, n_sums, s.comms.data, s.stream), s.comms.data, s.stream);
    s.update_time.start(s.stream);
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
    run(s.stream, ops::factored_direction,
        {.grad = s.own_grad,
         .sums = s.trust.sums,
         .master = s.master,
         .row_v = state.row_v,
         .col_v = state.col_v,
         .mean = state.means,
         .chunks = chunks,
         .layers = state.layers,
         .scalars = s.update_scalars,
         .grad_norm = s.grad_norm,
         .n_chunks = rule.n_chunks},
        note_of_chunks(s, rule.first_chunk, rule.n_chunks));
}
