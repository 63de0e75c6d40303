// Adafactor's ops.
#include <cstddef>

#include "test/reference/reference.h"
#include "test/reference/update_rules.h"

namespace ref {

// rows[r, 0] += g^2 and cols[c, 0] += g^2 for each element (r, c) of a layer
void factor_sums(const ops::FactorSums& op) {
    for (int i = 0; i < op.n_chunks && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::FactorLayer& layer = op.layers[op.chunks[i].layer];
        for (ptrdiff_t e = ptrdiff_t(op.chunks[i].begin); e < ptrdiff_t(op.chunks[i].begin) + op.chunks[i].count; e++) {
            const double g = double(op.grad[e]) * op.grad_norm->scale;
            op.rows[2 * (layer.first_row + size_t((e - layer.begin) / layer.cols))] += g * g;
            op.cols[2 * (layer.first_col + size_t((e - layer.begin) % layer.cols))] += g * g;
        }
    }
}

// factored_average() of each row and each column, and the mean of the rows'
void factor_moments(const ops::FactorMoments& op) {
    for (int i = 0; i < op.n_layers && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::FactorLayer& layer = op.layers[i];
        const auto move = [&](float& v, const double* sums, double count) {
            v = float(factored_average(op.scalars[layer.group], (sums[0] + sums[1]) / count, double(v)));
        };
        double sum = 0;
        for (size_t row = layer.first_row; row < layer.first_row + size_t(layer.rows); row++) {
            move(op.row_v[row], op.rows + 2 * row, layer.cols);
            sum += double(op.row_v[row]);
        }
        for (size_t col = layer.first_col; col < layer.first_col + size_t(layer.cols); col++)
            move(op.col_v[col], op.cols + 2 * col, layer.rows);
        op.mean[i] = float(sum / layer.rows);
    }
}

// grad = factored_element(),  sums[index, 0] = sum of master^2,  sums[index, 1] = sum of grad^2
void factored_direction(const ops::FactoredDirection& op) {
    for (int i = 0; i < op.n_chunks && op.grad_norm->non_finite_tensor < 0; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        const ops::FactorLayer& layer = op.layers[chunk.layer];
        double* sums = op.sums + 2 * chunk.index;
        sums[0] = sums[1] = 0;
        for (ptrdiff_t e = ptrdiff_t(chunk.begin); e < ptrdiff_t(chunk.begin) + chunk.count; e++) {
            const double row_v = op.row_v[layer.first_row + size_t((e - layer.begin) / layer.cols)];
            const double col_v = op.col_v[layer.first_col + size_t((e - layer.begin) % layer.cols)];
            const double direction =
                factored_element(op.scalars[chunk.group], layer.is_factored, double(op.grad[e]) * op.grad_norm->scale,
                                 row_v, col_v, double(op.mean[chunk.layer]));
            op.grad[e] = float(direction);
            sums[0] += element(op.master, e) * element(op.master, e), sums[1] += direction * direction;
        }
    }
}

}  // namespace ref
