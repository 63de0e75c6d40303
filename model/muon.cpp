#include "model/muon.h"

#include <algorithm>
#include <cmath>

#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/state.h"

namespace {

constexpr int kIterations = 5;

// x a + x x^T x b + (x x^T)^2 x c
struct Polynomial {
    float a, b, c;
};

// Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
constexpr Polynomial kNewtonSchulz = {3.4445f, -4.7750f, 2.0315f};
// Optimal polynomials of Amsel et al., "The Polar Express", arXiv 2505.16932, algorithm 1, with a margin of 2 % for
// rounding: singular values from 1e-3 to 1 become 0.86 to 1.14.
constexpr Polynomial kPolarExpress[kIterations] = {{8.1565545f, -22.4832929f, 15.8787699f},
                                                   {4.0429299f, -2.8089175f, 0.5000178f},
                                                   {3.8916678f, -2.7724842f, 0.5060648f},
                                                   {3.2857537f, -2.3681295f, 0.4644902f},
                                                   {2.3465413f, -1.7097828f, 0.4232355f}};

// adamw_rms gives the update the size of AdamW's, about 0.2 per element (Liu et al., "Muon is scalable for LLM
// training", arXiv 2502.16982, section 2.2); both are torch.optim.Muon's.
float scale_of(const OptimizerSettings& settings, const Matrix& matrix) {
    const double rows = matrix.rows, cols = matrix.cols;
    if (settings.muon_scale == MuonScale::adamw_rms) return float(0.2 * std::sqrt(std::max(rows, cols)));
    return float(std::sqrt(std::max(1.0, rows / cols)));
}

// Without bf16 arithmetic in the model, the iteration has FP32's precision.
Dtype type_of_iteration(const GptOptions& options) {
    return options.precision == Dtype::fp32 ? Dtype::fp32 : Dtype::bf16;
}

// A working array in the iteration's type, which may be shorter than the array's.
View in_iteration(const GptState& s, View array) { return {array.data, type_of_iteration(s.options)}; }

// out = scale (a x + (b gram + c gram^2) x), with gram = x x^T, or x^T x on the other side if that is smaller.
void apply_polynomial(const GptState& s, const Matrix& matrix, View out, const Polynomial& p, float scale) {
    const View x = in_iteration(s, s.matrix.x), gram = in_iteration(s, s.matrix.gram),
               change = in_iteration(s, s.matrix.product);
    const int rows = matrix.rows, cols = matrix.cols, n = matrix.smaller();
    const size_t gram_count = size_t(n) * size_t(n);
    const bool is_wide = rows <= cols;
    if (is_wide) {
        multiply_by_transposed(s, gram, x, x, rows, rows, cols);
    } else {
        multiply_transposed(s, s.matrix.gram_sums, x, x, rows, cols, cols);
        run(s.stream, ops::cast, {.out = gram, .inp = s.matrix.gram_sums, .count = gram_count});
    }
    // The Gram matrix is symmetric, so it is its own transpose.
    multiply_by_transposed(s, change, gram, gram, n, n, n);
    run(s.stream, ops::scaled_add,
        {.out = gram, .a = gram, .b = change, .count = gram_count, .alpha = p.b, .beta = p.c});
    if (is_wide)
        multiply(s, change, gram, x, rows, rows, cols);
    else
        multiply_by_transposed(s, change, x, gram, rows, cols, cols);
    run(s.stream, ops::scaled_add,
        {.out = out, .a = x, .b = change, .count = matrix.count(), .alpha = scale * p.a, .beta = scale});
}

// Writes the nearest matrix with orthogonal rows or columns, times `scale`. out: MatrixState::x, or `values`.
void orthogonalize(const GptState& s, const Matrix& matrix, View out, View values, float scale) {
    const View x = in_iteration(s, s.matrix.x);
    run(s.stream, ops::frobenius_normalize,
        {.out = x, .inp = values, .scratch = s.matrix.scratch, .count = matrix.count(), .eps = 1e-7f});
    const bool is_polar_express = s.options.optimizer.muon_iteration == MuonIteration::polar_express;
    for (int i = 0; i < kIterations; i++) {
        const bool is_last = i + 1 == kIterations;
        const Polynomial& polynomial = is_polar_express ? kPolarExpress[i] : kNewtonSchulz;
        apply_polynomial(s, matrix, is_last ? out : x, polynomial, is_last ? scale : 1);
    }
}

}  // namespace

MatrixMemory muon_memory(const GptOptions& options, const Matrix& matrix) {
    const size_t gram = size_t(matrix.smaller()) * size_t(matrix.smaller());
    ops::FrobeniusNormalize norm{};
    norm.count = matrix.count();
    ops::MatmulBackwardWeight gram_sums{};
    gram_sums.rows = matrix.rows, gram_sums.n = gram_sums.k = matrix.cols;
    ops::RowNormalize rows{};
    rows.rows = matrix.rows;
    return {.type = type_of_iteration(options),
            .x = matrix.count(),
            .gram = gram,
            .gram_sums = gram,
            .scratch_bytes =
                std::max({ops::frobenius_normalize_scratch_bytes(norm), ops::row_normalize_scratch_bytes(rows),
                          matrix.rows > matrix.cols ? ops::matmul_backward_weight_scratch_bytes(gram_sums) : 0})};
}

void multiply_by_transposed(const GptState& s, View out, View a, View b, int rows, int n, int k) {
    run(s.stream, ops::matmul_forward,
        {.out = out, .pre_activation = nullptr, .inp = a, .weight = b, .bias = nullptr, .rows = rows, .n = n, .k = k});
}

void multiply(const GptState& s, View out, View a, View b, int rows, int k, int n) {
    run(s.stream, ops::matmul_backward_input,
        {.dinp = out, .dout = a, .weight = b, .kept = nullptr, .rows = rows, .n = k, .k = n});
}

void multiply_transposed(const GptState& s, View out, View a, View b, int rows, int n, int cols) {
    run(s.stream, ops::matmul_backward_weight,
        {.dweight = out.as<float>(),
         .dbias = nullptr,
         .scratch = s.matrix.scratch,
         .dout = a,
         .inp = b,
         .rows = rows,
         .n = n,
         .k = cols,
         .accumulate = false});
}

void muon_direction(const GptState& s, size_t number, View values) {
    const Matrix& matrix = s.matrix.matrices[number];
    orthogonalize(s, matrix, values, values, scale_of(s.options.optimizer, matrix));
}

void normuon_direction(const GptState& s, size_t number, View values) {
    const OptimizerSettings& settings = s.options.optimizer;
    const Matrix& matrix = s.matrix.matrices[number];
    orthogonalize(s, matrix, s.matrix.x, values, 1);
    // The norm of an orthogonal matrix, times Muon's scale: with adamw_rms the paper's 0.2 sqrt(rows cols).
    run(s.stream, ops::row_normalize,
        {.out = values,
         .inp = s.matrix.x,
         .v = state_of(s, 0, number),
         .scratch = s.matrix.scratch,
         .grad_norm = s.grad_norm,
         .rows = matrix.rows,
         .cols = matrix.cols,
         .beta2 = float(settings.muon_beta2),
         .one_minus_beta2 = float(1 - settings.muon_beta2),
         .eps = 1e-8f,
         .norm = scale_of(settings, matrix) * std::sqrt(float(matrix.smaller()))});
}
