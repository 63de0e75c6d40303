#include "model/soap.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/muon.h"
#include "model/state.h"

namespace {

constexpr int kPanel = ops::kMaxOrthonormalized;

// A row whose rest has at most this share of the Frobenius norm has only noise of FP32, and keeps its direction.
constexpr float kRankTolerance = 1e-6f;

size_t square_of(int n) { return size_t(n) * size_t(n); }

// average = alpha average + beta value
void accumulate(const GptState& s, View average, View value, size_t count, float alpha, float beta) {
    run(s.stream, ops::scaled_add,
        {.out = average,
         .a = average,
         .b = value,
         .count = count,
         .alpha = alpha,
         .beta = beta,
         .grad_norm = s.grad_norm});
}

// Subtracts from each row of x (rows, n) its components along the rows of q (n_done, n). Result in out, which may be x.
void subtract_components(const GptState& s, View out, View x, View q, int rows, int n_done, int n) {
    const View components = View(s.matrix.gram_sums).from(2 * kPanel * size_t(n)),
               sum = components.from(2 * kPanel * size_t(n));
    multiply_by_transposed(s, components, x, q, rows, n_done, n);
    multiply(s, sum, components, q, rows, n_done, n);
    run(s.stream, ops::scaled_add,
        {.out = out, .a = x, .b = sum, .count = size_t(rows) * size_t(n), .alpha = 1, .beta = -1});
}

// out (n, n) = the orthonormalized rows of image (n, n), by Gram-Schmidt on panels of rows. Where the rows of image are
// dependent, rows of basis, an orthogonal matrix, replace them. If image = basis L with L positive semidefinite, the
// rows that remain and those that replace the others are independent: in the coordinates of `basis` they are rows of a
// semidefinite matrix and unit vectors, and independent rows of such a matrix have a nonsingular principal block.
void orthonormalize(const GptState& s, View out, View image, View basis, int n) {
    const View panel = s.matrix.gram_sums;
    for (int done = 0; done < n; done += kPanel) {
        const int rows = std::min(kPanel, n - done);
        const size_t first = size_t(done) * size_t(n), count = size_t(rows) * size_t(n);
        const View fallback = panel.from(count);
        ops::OrthonormalizeRows op{.out = out.from(first).as<float>(),
                                   .inp = panel.as<float>(),
                                   .fallback = fallback.as<float>(),
                                   .rows = rows,
                                   .cols = n,
                                   .tolerance = kRankTolerance};
        run(s.stream, ops::cast, {.out = panel, .inp = image.from(first).as<float>(), .count = count});
        run(s.stream, ops::cast, {.out = fallback, .inp = basis.from(first).as<float>(), .count = count});
        if (done > 0) subtract_components(s, panel, panel, out, 2 * rows, done, n);
        run(s.stream, ops::orthonormalize_rows, op);
        if (done == 0) continue;
        // The division by small norms has magnified what rounding left of the components.
        subtract_components(s, panel, op.out, out, rows, done, n);
        op.fallback = op.inp;
        run(s.stream, ops::orthonormalize_rows, op);
    }
}

// Replaces a basis (n, n) by the next one of the power method for `average` (n, n), or by the first one.
void update_basis(const GptState& s, View basis, View average, int n, bool is_first) {
    const size_t count = square_of(n);
    const View image = s.matrix.x;
    View before = basis, after = s.matrix.gram, other = s.matrix.product;
    if (is_first) {
        std::vector<float> identity(count);
        for (size_t i = 0; i < count; i += size_t(n) + 1) identity[i] = 1;
        copy_to_device(other.data, identity.data(), count * sizeof(float), s.stream);
        before = other;
    }
    for (int i = 0; i < (is_first ? kSoapInitialIterations : 1); i++) {
        if (i > 0) std::swap(before, after);
        multiply(s, image, before, average, n, n, n);
        run(s.stream, ops::frobenius_normalize,
            {.out = image, .inp = image, .scratch = s.matrix.scratch, .count = count, .eps = 1e-30f});
        orthonormalize(s, after, image, before, n);
    }
    accumulate(s, basis, after, count, 0, 1);
}

// Adds the products of an own gradient to L and R.
void update_averages(const GptState& s, size_t number, View gradient, const ops::UpdateScalars& scalars) {
    const MatrixState& state = s.matrix;
    const int rows = state.matrices[number].rows, cols = state.matrices[number].cols;
    const View left = state_of(s, 2, number), right = state_of(s, 3, number);
    multiply_by_transposed(s, state.product, gradient, gradient, rows, rows, cols);
    accumulate(s, left, state.product, square_of(rows), scalars.beta2, scalars.one_minus_beta2);
    multiply_transposed(s, state.product, gradient, gradient, rows, cols, cols);
    accumulate(s, right, state.product, square_of(cols), scalars.beta2, scalars.one_minus_beta2);
}

// out = QL x QR^T
void rotate(const GptState& s, size_t number, View out, View x) {
    const MatrixState& state = s.matrix;
    const int rows = state.matrices[number].rows, cols = state.matrices[number].cols;
    multiply(s, state.product, state_of(s, 4, number), x, rows, rows, cols);
    multiply_by_transposed(s, out, state.product, state_of(s, 5, number), rows, cols, cols);
}

// Replaces the rotated gradient, in MatrixState::x, by Adam's direction, which is rotated back to `out`.
void finish_direction(const GptState& s, size_t number, View out, View rotated_m, const ops::UpdateScalars& scalars) {
    const MatrixState& state = s.matrix;
    const Matrix& matrix = state.matrices[number];
    const int rows = matrix.rows, cols = matrix.cols;
    run(s.stream, ops::adam_direction,
        {.out = state.x.as<float>(),
         .v = state_of(s, 1, number),
         .m = rotated_m.as<float>(),
         .grad = state.x.as<float>(),
         .grad_norm = s.grad_norm,
         .count = matrix.count(),
         .scalars = scalars});
    multiply(s, state.product, state.x, state_of(s, 5, number), rows, cols, cols);
    multiply_transposed(s, out, state_of(s, 4, number), state.product, rows, rows, cols);
}

// Replaces the bases of an own matrix, if they are due in this step.
void update_bases(const GptState& s, size_t number) {
    const MatrixState& state = s.matrix;
    const bool is_first = s.step.update == 1;
    if ((s.step.update - 1) % s.options.optimizer.soap_interval != 0) return;
    update_basis(s, state_of(s, 4, number), state_of(s, 2, number), state.matrices[number].rows, is_first);
    update_basis(s, state_of(s, 5, number), state_of(s, 3, number), state.matrices[number].cols, is_first);
}

ops::UpdateScalars scalars_of(const GptState& s, const Matrix& matrix) {
    return s.host_update_scalars[size_t(s.update.tensors[size_t(matrix.tensor)].group)];
}

}  // namespace

MatrixMemory soap_memory(const GptOptions&, const Matrix& matrix) {
    const int side = std::max(matrix.rows, matrix.cols);
    ops::FrobeniusNormalize norm{};
    norm.count = square_of(side);
    ops::MatmulBackwardWeight gram{}, rotation{};
    gram.rows = rotation.rows = rotation.n = matrix.rows, gram.n = gram.k = rotation.k = matrix.cols;
    return {.type = Dtype::fp32,
            .x = square_of(side),
            .gram = square_of(side),
            .gram_sums = 6 * kPanel * size_t(side),
            .scratch_bytes =
                std::max({ops::frobenius_normalize_scratch_bytes(norm), ops::matmul_backward_weight_scratch_bytes(gram),
                          ops::matmul_backward_weight_scratch_bytes(rotation)})};
}

MatrixMemory soap_muon_memory(const GptOptions& options, const Matrix& matrix) {
    return larger(soap_memory(options, matrix), muon_memory(options, matrix));
}

void soap_direction(const GptState& s, size_t number, View values) {
    const MatrixState& state = s.matrix;
    const Matrix& matrix = state.matrices[number];
    const View m = state_of(s, 0, number);
    const ops::UpdateScalars scalars = scalars_of(s, matrix);
    update_averages(s, number, values, scalars);
    if (s.step.update > 1) {
        accumulate(s, m, values, matrix.count(), scalars.beta1, scalars.one_minus_beta1);
        rotate(s, number, state.gram, m);
        rotate(s, number, state.x, values);
        finish_direction(s, number, values, state.gram, scalars);
    }
    update_bases(s, number);
}

void soap_muon_direction(const GptState& s, size_t number, View values) {
    const OptimizerSettings& settings = s.options.optimizer;
    const MatrixState& state = s.matrix;
    const Matrix& matrix = state.matrices[number];
    const View m = state_of(s, 0, number);
    const float momentum = float(settings.momentum), rest = float(1 - settings.momentum);
    ops::UpdateScalars scalars = scalars_of(s, matrix);
    scalars.beta2 = float(settings.muon_beta2), scalars.one_minus_beta2 = float(1 - settings.muon_beta2);
    scalars.bias_correction1 = scalars.root_bias_correction2 = 1;
    update_averages(s, number, values, scalars);
    accumulate(s, m, values, matrix.count(), momentum, rest);
    accumulate(s, values, m, matrix.count(), settings.nesterov ? rest : 0, settings.nesterov ? momentum : 1);
    if (s.step.update > 1) {
        rotate(s, number, state.x, values);
        finish_direction(s, number, values, state.x, scalars);
    }
    muon_direction(s, number, values);
    update_bases(s, number);
}
