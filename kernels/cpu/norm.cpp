// Layer normalisation. A row is read from memory once and then again out of the innermost cache. The gradients of
// weight and bias are summed over fixed blocks of rows, then over the blocks in order.
#include <cmath>

#include "kernels/cpu/parallel.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace ops {

namespace {

struct RowStatistics {
    float mean, rstd;
};

template <class T> RowStatistics row_statistics(const T* x, int cols, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < cols; c++) sum += to_float(x[c]);
    const float mean = sum / cols;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < cols; c++) {
        float centered = to_float(x[c]) - mean;
        squares += centered * centered;
    }
    return {mean, 1.0f / std::sqrt(squares / cols + eps)};
}

// For row `row` of `inp`, the tensor to normalise.
template <class T> void normalize_row(const ResidualNormForward& op, const T* inp, size_t row) {
    const T* x = inp + row * op.cols;
    T* out = op.out.as<T>() + row * op.cols;
    const T *weight = op.weight.as<T>(), *bias = op.bias.as<T>();
    const int cols = op.cols;
    const RowStatistics row_is = row_statistics(x, cols, op.eps);
    const float mean = row_is.mean, rstd = row_is.rstd;
#pragma omp simd
    for (int c = 0; c < cols; c++)
        out[c] = from_float<T>((to_float(x[c]) - mean) * rstd * to_float(weight[c]) + to_float(bias[c]));
    op.mean[row] = mean;
    op.rstd[row] = rstd;
}

// Few enough blocks that their sums cost little beside the rows, enough of them for many threads.
constexpr int kMaxBlocks = 128;
constexpr int kMinBlockRows = 16;

int rows_per_block(int rows) { return std::max(kMinBlockRows, (rows + kMaxBlocks - 1) / kMaxBlocks); }
int n_blocks(int rows) { return (rows + rows_per_block(rows) - 1) / rows_per_block(rows); }

// Adds the row's part to dweight and dbias, and returns the means over the row that its dinp needs.
struct RowMeans {
    float dnorm, dnorm_norm;
};

template <class T> RowMeans add_parameter_gradients(float* dweight, float* dbias, const NormBackward& op, size_t row) {
    const T* dout = op.dout.as<T>() + row * op.cols;
    const T* inp = op.inp.as<T>() + row * op.cols;
    const T* weight = op.weight.as<T>();
    const int cols = op.cols;
    const float mean = op.mean[row], rstd = op.rstd[row];
    float dnorm_sum = 0, dnorm_norm_sum = 0;
#pragma omp simd reduction(+ : dnorm_sum, dnorm_norm_sum)
    for (int c = 0; c < cols; c++) {
        float g = to_float(dout[c]);
        float norm = (to_float(inp[c]) - mean) * rstd;
        float dnorm = g * to_float(weight[c]);
        dbias[c] += g;
        dweight[c] += g * norm;
        dnorm_sum += dnorm;
        dnorm_norm_sum += dnorm * norm;
    }
    return {dnorm_sum / cols, dnorm_norm_sum / cols};
}

// Not inlined: inside the loop over rows the compiler does not vectorise it for fp16.
template <class T, bool accumulate>
[[gnu::noinline]] void store_input_gradient(const NormBackward& op, size_t row, RowMeans means) {
    T* dinp = op.dinp.as<T>() + row * op.cols;
    const T* dout = op.dout.as<T>() + row * op.cols;
    const T* inp = op.inp.as<T>() + row * op.cols;
    const T* weight = op.weight.as<T>();
    const int cols = op.cols;
    const float mean = op.mean[row], rstd = op.rstd[row];
#pragma omp simd
    for (int c = 0; c < cols; c++) {
        float norm = (to_float(inp[c]) - mean) * rstd;
        float dnorm = to_float(dout[c]) * to_float(weight[c]);
        float value = (dnorm - means.dnorm - norm * means.dnorm_norm) * rstd;
        dinp[c] = from_float<T>(accumulate ? to_float(dinp[c]) + value : value);
    }
}

// out (+)= the column sums of partials (blocks, 2, cols) over blocks, for one of the two.
void sum_blocks(float* out, const float* partials, int blocks, int cols, int begin, int end, bool accumulate) {
    if (!accumulate) std::fill(out + begin, out + end, 0.0f);
    for (int b = 0; b < blocks; b++) {
        const float* partial = partials + size_t(b) * 2 * cols;
#pragma omp simd
        for (int c = begin; c < end; c++) out[c] += partial[c];
    }
}

}  // namespace

void residual_norm_forward(const ResidualNormForward& op, Stream) {
    dispatch("residual_norm_forward", {op.residual, op.out, op.inp, op.branch, op.weight, op.bias}, [&]<class T>() {
        parallel_for(op.rows, [&](size_t row) {
            if (!op.branch) return normalize_row(op, op.inp.as<T>(), row);
            T* residual = op.residual.as<T>() + row * op.cols;
            const T* inp = op.inp.as<T>() + row * op.cols;
            const T* branch = op.branch.as<T>() + row * op.cols;
#pragma omp simd
            for (int c = 0; c < op.cols; c++) residual[c] = from_float<T>(to_float(inp[c]) + to_float(branch[c]));
            normalize_row(op, static_cast<const T*>(op.residual.as<T>()), row);
        });
    });
}

void norm_backward(const NormBackward& op, Stream) {
    dispatch("norm_backward", {op.dinp, op.dout, op.inp, op.weight}, [&]<class T>() {
        float* partials = static_cast<float*>(op.scratch);  // (n_blocks, 2, cols)
        const size_t block = rows_per_block(op.rows);
        parallel_blocks(op.rows, block, [&](size_t begin, size_t end) {
            float* dweight = partials + begin / block * 2 * op.cols;
            float* dbias = dweight + op.cols;
            std::fill(dweight, dbias + op.cols, 0.0f);
            for (size_t row = begin; row < end; row++) {
                const RowMeans means = add_parameter_gradients<T>(dweight, dbias, op, row);
                op.accumulate_dinp ? store_input_gradient<T, true>(op, row, means)
                                   : store_input_gradient<T, false>(op, row, means);
            }
        });
        constexpr size_t kColumns = 256;
        parallel_blocks(op.cols, kColumns, [&](size_t begin, size_t end) {
            const int blocks = n_blocks(op.rows);
            sum_blocks(op.dweight, partials, blocks, op.cols, int(begin), int(end), op.accumulate);
            sum_blocks(op.dbias, partials + op.cols, blocks, op.cols, int(begin), int(end), op.accumulate);
        });
    });
}

size_t norm_backward_scratch_bytes(const NormBackward& op) {
    return size_t(n_blocks(op.rows)) * 2 * op.cols * sizeof(float);
}

}  // namespace ops
