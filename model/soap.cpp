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

// out (rows, n) = a (rows, k) b (k, n)
void multiply(const GptState& s, View out, View a, View b, int rows, int k, int n) {
    run(s.stream, ops::matmul_backward_input,
        {.dinp = out, .dout = a, .weight = b, .kept = nullptr, .rows = rows, .n = k, .k = n});
}

// out (n, cols) = a (rows, n)^T b (rows, cols)
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

void soap_direction(const GptState& s, size_t number, View gradient) {
    const MatrixState& state = s.matrix;
    const Matrix& matrix = state.matrices[number];
    const int rows = matrix.rows, cols = matrix.cols;
    const View m = state.slots[0][number], left = state.slots[2][number], right = state.slots[3][number];
    const View left_basis = state.slots[4][number], right_basis = state.slots[5][number];
    const ops::UpdateScalars& scalars = s.host_update_scalars[size_t(s.update.tensors[size_t(matrix.tensor)].group)];
    const bool is_first = s.update_number == 1;

    multiply_by_transposed(s, state.product, gradient, gradient, rows, rows, cols);
    accumulate(s, left, state.product, square_of(rows), scalars.beta2, scalars.one_minus_beta2);
    multiply_transposed(s, state.product, gradient, gradient, rows, cols, cols);
    accumulate(s, right, state.product, square_of(cols), scalars.beta2, scalars.one_minus_beta2);
    if (!is_first) {
        accumulate(s, m, gradient, matrix.count(), scalars.beta1, scalars.one_minus_beta1);
        multiply(s, state.product, left_basis, m, rows, rows, cols);
        multiply_by_transposed(s, state.gram, state.product, right_basis, rows, cols, cols);
        multiply(s, state.product, left_basis, gradient, rows, rows, cols);
        multiply_by_transposed(s, state.x, state.product, right_basis, rows, cols, cols);
        run(s.stream, ops::adam_direction,
            {.out = state.x.as<float>(),
             .v = state.slots[1][number],
             .m = state.gram.as<float>(),
             .grad = state.x.as<float>(),
             .grad_norm = s.grad_norm,
             .count = matrix.count(),
             .scalars = scalars});
        multiply(s, state.product, state.x, right_basis, rows, cols, cols);
        multiply_transposed(s, gradient, left_basis, state.product, rows, rows, cols);
    }
    if ((s.update_number - 1) % s.options.optimizer.soap_interval != 0) return;
    update_basis(s, left_basis, left, rows, is_first);
    update_basis(s, right_basis, right, cols, is_first);
}
