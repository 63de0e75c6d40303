// LayerNorm and RMSNorm. A row is read once from memory and then from the L1 cache. The gradients of weight and bias
// are summed over fixed blocks of rows, then over the blocks in order.
#include <cmath>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_blocks.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

// The parts of a norm, as template arguments, so that absent parts cost nothing.
template <bool kHasMean, bool kHasWeight, bool kHasBias> struct NormParts {
    static constexpr bool has_mean = kHasMean, has_weight = kHasWeight, has_bias = kHasBias;

    static float centered(float x, float mean) { return has_mean ? x - mean : x; }
    template <class T> static float times_weight(float x, const T* weight, int c) {
        return has_weight ? x * to_float(weight[c]) : x;
    }
};

// Calls body.operator()<NormParts<flags...>>().
template <bool... known, class Body> void with_parts(Body&& body) { body.template operator()<NormParts<known...>>(); }
template <bool... known, class Body, class... Flags> void with_parts(Body&& body, bool flag, Flags... more) {
    flag ? with_parts<known..., true>(body, more...) : with_parts<known..., false>(body, more...);
}

struct RowStatistics {
    float mean, rstd;
};

template <class Parts, class T> RowStatistics row_statistics(const T* x, int cols, float eps) {
    float mean = 0;
    if constexpr (Parts::has_mean) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < cols; c++) sum += to_float(x[c]);
        mean = sum / cols;
    }
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < cols; c++) {
        float centered = Parts::centered(to_float(x[c]), mean);
        squares += centered * centered;
    }
    return {mean, 1.0f / std::sqrt(squares / cols + eps)};
}

// Normalizes row `row` of `inp`.
template <class Parts, class T> void normalize_row(const ResidualNormForward& op, const T* inp, size_t row) {
    const T* x = inp + row * op.cols;
    T* out = op.out.as<T>() + row * op.cols;
    const T *weight = op.weight.as<T>(), *bias = op.bias.as<T>();
    const int cols = op.cols;
    const RowStatistics row_is = row_statistics<Parts>(x, cols, op.eps);
    const float mean = row_is.mean, rstd = row_is.rstd;
#pragma omp simd
    for (int c = 0; c < cols; c++) {
        const float value = Parts::times_weight(Parts::centered(to_float(x[c]), mean) * rstd, weight, c);
        out[c] = from_float<T>(Parts::has_bias ? value + to_float(bias[c]) : value);
    }
    if (Parts::has_mean) op.mean[row] = mean;
    op.rstd[row] = rstd;
}

template <class Parts, class T> void normalize_rows(const ResidualNormForward& op) {
    parallel_for(op.rows, [&](size_t row) {
        if (!op.branch) return normalize_row<Parts>(op, op.inp.as<T>(), row);
        T* residual = op.residual.as<T>() + row * op.cols;
        const T* inp = op.inp.as<T>() + row * op.cols;
        const T* branch = op.branch.as<T>() + row * op.cols;
#pragma omp simd
        for (int c = 0; c < op.cols; c++) residual[c] = from_float<T>(to_float(inp[c]) + to_float(branch[c]));
        normalize_row<Parts>(op, static_cast<const T*>(op.residual.as<T>()), row);
    });
}

// The means over a row that its dinp needs.
struct RowMeans {
    float dnorm, dnorm_norm;
};

template <class Parts, class T>
RowMeans add_parameter_gradients(float* dweight, float* dbias, const NormBackward& op, size_t row) {
    const T* dout = op.dout.as<T>() + row * op.cols;
    const T* inp = op.inp.as<T>() + row * op.cols;
    const T* weight = op.weight.as<T>();
    const int cols = op.cols;
    const float mean = Parts::has_mean ? op.mean[row] : 0, rstd = op.rstd[row];
    float dnorm_sum = 0, dnorm_norm_sum = 0;
#pragma omp simd reduction(+ : dnorm_sum, dnorm_norm_sum)
    for (int c = 0; c < cols; c++) {
        float g = to_float(dout[c]);
        float norm = Parts::centered(to_float(inp[c]), mean) * rstd;
        float dnorm = Parts::times_weight(g, weight, c);
        if constexpr (Parts::has_bias) dbias[c] += g;
        if constexpr (Parts::has_weight) dweight[c] += g * norm;
        if constexpr (Parts::has_mean) dnorm_sum += dnorm;
        dnorm_norm_sum += dnorm * norm;
    }
    return {dnorm_sum / cols, dnorm_norm_sum / cols};
}

// Not inlined: inside the loop over rows the compiler does not vectorize it for fp16.
template <class Parts, class T, bool accumulate>
[[gnu::noinline]] void store_input_gradient(const NormBackward& op, size_t row, RowMeans means) {
    T* dinp = op.dinp.as<T>() + row * op.cols;
    const T* dout = op.dout.as<T>() + row * op.cols;
    const T* inp = op.inp.as<T>() + row * op.cols;
    const T* weight = op.weight.as<T>();
    const int cols = op.cols;
    const float mean = Parts::has_mean ? op.mean[row] : 0, rstd = op.rstd[row];
#pragma omp simd
    for (int c = 0; c < cols; c++) {
        float norm = Parts::centered(to_float(inp[c]), mean) * rstd;
        float dnorm = Parts::times_weight(to_float(dout[c]), weight, c);
        float value = (Parts::centered(dnorm, means.dnorm) - norm * means.dnorm_norm) * rstd;
        dinp[c] = from_float<T>(accumulate ? to_float(dinp[c]) + value : value);
    }
}

// Computes dinp, and the sums of dweight and dbias over each block of rows.
template <class Parts, class T> void differentiate_rows(const NormBackward& op) {
    float* partials = static_cast<float*>(op.scratch);  // (n_blocks, 2, cols)
    const size_t block = rows_per_block(op.rows);
    parallel_blocks(op.rows, block, [&](size_t begin, size_t end) {
        float* dweight = partials + begin / block * 2 * op.cols;
        float* dbias = dweight + op.cols;
        std::fill(dweight, dbias + op.cols, 0.0f);
        for (size_t row = begin; row < end; row++) {
            const RowMeans means = add_parameter_gradients<Parts, T>(dweight, dbias, op, row);
            op.accumulate_dinp ? store_input_gradient<Parts, T, true>(op, row, means)
                               : store_input_gradient<Parts, T, false>(op, row, means);
        }
    });
}

}  // namespace

void residual_norm_forward(const ResidualNormForward& op, Stream) {
    dispatch("residual_norm_forward", {op.residual, op.out, op.inp, op.branch, op.weight, op.bias}, [&]<class T>() {
        with_parts([&]<class Parts>() { normalize_rows<Parts, T>(op); }, op.mean, bool(op.weight), bool(op.bias));
    });
    set_amax(op.out, size_t(op.rows) * size_t(op.cols));
}

void norm_backward(const NormBackward& op, Stream) {
    dispatch("norm_backward", {op.dinp, op.dout, op.inp, op.weight}, [&]<class T>() {
        require(bool(op.weight) == bool(op.dweight), "norm_backward: weight requires dweight and vice versa");
        with_parts([&]<class Parts>() { differentiate_rows<Parts, T>(op); }, op.mean, bool(op.weight), op.dbias);
        const float* partials = static_cast<const float*>(op.scratch);
        constexpr size_t kColumns = 256;
        parallel_blocks(op.cols, kColumns, [&](size_t begin, size_t end) {
            const size_t blocks = n_blocks(op.rows);
            for (auto [out, sums] : {std::pair(op.dweight, partials), std::pair(op.dbias, partials + op.cols)})
                sum_blocks(out, sums, blocks, op.cols, int(begin), int(end), op.accumulate);
        });
    });
    set_amax(op.dinp, size_t(op.rows) * size_t(op.cols));
}

size_t norm_backward_scratch_bytes(const NormBackward& op) { return n_blocks(op.rows) * 2 * op.cols * sizeof(float); }

}  // namespace ops
