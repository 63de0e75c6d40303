// The three GEMMs of a linear layer. Each tile is finished while it is in the cache.
#include "kernels/cpu/matmul.h"

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/shared/dispatch.h"

namespace {

// Calls store(row of the tile, offset in the whole result, number of columns) for each row of a tile.
template <class Store> void for_each_row(const Tile& tile, int result_cols, Store&& store) {
    for (int row = 0; row < tile.rows; row++)
        store(tile.data + row * tile.step, size_t(tile.row + row) * result_cols + tile.col, tile.cols);
}

template <class T> void add_bias(const Tile& tile, const T* bias) {
    for (int row = 0; row < tile.rows; row++) {
        float* values = tile.data + row * tile.step;
#pragma omp simd
        for (int col = 0; col < tile.cols; col++) values[col] += to_float(bias[tile.col + col]);
    }
}

template <class T> void store_tile(T* out, const Tile& tile, int result_cols) {
    for_each_row(tile, result_cols,
                 [&](const float* values, size_t offset, int count) { convert(out + offset, values, size_t(count)); });
}

// Stores the sums of a symmetric result (n, n) that are on and below the diagonal, and their mirror images.
template <class T> void store_symmetric(T* out, const Tile& tile, int n) {
    for (int row = 0; row < tile.rows; row++) {
        const int count = std::min(tile.cols, tile.row + row + 1 - tile.col);
        if (count > 0) convert(out + size_t(tile.row + row) * n + tile.col, tile.data + row * tile.step, size_t(count));
    }
    for (int col = 0; col < tile.cols; col++) {
        T* mirror = out + size_t(tile.col + col) * n + tile.row;
        for (int row = std::max(0, tile.col + col + 1 - tile.row); row < tile.rows; row++)
            mirror[row] = from_float<T>(tile.data[row * tile.step + col]);
    }
}

// Finishes a forward GEMM. relu2 uses the unrounded sums, other activations the stored (rounded) ones.
template <ActivationFunction function, class T>
void store_activation(T* out, T* pre_activation, const float* values, int count) {
    if constexpr (function == ActivationFunction::relu2) {
#pragma omp simd
        for (int i = 0; i < count; i++) out[i] = from_float<T>(relu2(values[i]));
    } else {
        convert(pre_activation, values, size_t(count));
        activation_block<function>(out, pre_activation, size_t(count));
    }
}

template <ActivationFunction function, class T>
void store_times_gradient(T* out, const T* kept, const float* values, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] = from_float<T>(values[i] * gradient_from_kept<function>(to_float(kept[i])));
}

void store_sum(float* out, const float* values, int count, bool accumulate) {
    if (!accumulate) {
        std::copy_n(values, count, out);
        return;
    }
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] += values[i];
}

// out = or += column sums of values (rows, cols). Sums rows in groups first, to keep the error small.
template <class T> void column_sums(float* out, const T* values, int rows, int cols, bool accumulate) {
    constexpr int kColumns = 128, kGroup = 64;
    parallel_blocks(cols, kColumns, [&](size_t begin, size_t end) {
        const int count = int(end - begin);
        float sums[kColumns] = {};
        for (int group = 0; group < rows; group += kGroup) {
            float group_sums[kColumns] = {};
            for (int row = group; row < std::min(rows, group + kGroup); row++) {
                const T* value = values + size_t(row) * cols + begin;
#pragma omp simd
                for (int i = 0; i < count; i++) group_sums[i] += to_float(value[i]);
            }
            for (int i = 0; i < count; i++) sums[i] += group_sums[i];
        }
        store_sum(out + begin, sums, count, accumulate);
    });
}

}  // namespace

void matmul_forward_by(ProductPath path, const ops::MatmulForward& op) {
    ops::require_gemm_sizes("matmul_forward", op.rows, op.n, op.k);
    const bool is_symmetric = op.inp.data == op.weight.data && op.rows == op.n && !op.bias &&
                              op.activation == ActivationFunction::none && path != ProductPath::library;
    const bool keeps_sum = op.activation != ActivationFunction::none && op.activation != ActivationFunction::relu2;
    ops::require_activation_array("matmul_forward", op.activation, keeps_sum, op.pre_activation);
    ops::dispatch("matmul_forward", {op.out, op.pre_activation, op.inp, op.weight, op.bias}, [&]<class T>() {
        const Product<T> product = {.left = {op.inp.as<T>(), size_t(op.k), false},
                                    .right = {op.weight.as<T>(), size_t(op.k), true},
                                    .rows = op.rows,
                                    .cols = op.n,
                                    .depth = op.k,
                                    .is_symmetric = is_symmetric};
        multiply(product, path, [&](const Tile& tile) {
            if (is_symmetric) return store_symmetric(op.out.as<T>(), tile, op.n);
            if (op.bias) add_bias(tile, op.bias.as<T>());
            T* out = op.out.as<T>();
            if (op.activation == ActivationFunction::none) return store_tile(out, tile, op.n);
            ops::dispatch("matmul_forward", op.activation, [&]<ActivationFunction function>() {
                for_each_row(tile, op.n, [&](const float* values, size_t offset, int count) {
                    store_activation<function>(out + offset, op.pre_activation.from(offset).as<T>(), values, count);
                });
            });
        });
    });
}

void matmul_backward_input_by(ProductPath path, const ops::MatmulBackwardInput& op) {
    ops::require_gemm_sizes("matmul_backward_input", op.rows, op.n, op.k);
    ops::require_activation_array("matmul_backward_input", op.activation, op.activation != ActivationFunction::none,
                                  op.kept);
    ops::dispatch("matmul_backward_input", {op.dinp, op.dout, op.weight, op.kept}, [&]<class T>() {
        const Product<T> product = {.left = {op.dout.as<T>(), size_t(op.n), false},
                                    .right = {op.weight.as<T>(), size_t(op.k), false},
                                    .rows = op.rows,
                                    .cols = op.k,
                                    .depth = op.n};
        multiply(product, path, [&](const Tile& tile) {
            T* dinp = op.dinp.as<T>();
            const T* kept = op.kept.as<T>();
            if (op.activation == ActivationFunction::none) return store_tile(dinp, tile, op.k);
            ops::dispatch("matmul_backward_input", op.activation, [&]<ActivationFunction function>() {
                for_each_row(tile, op.k, [&](const float* values, size_t offset, int count) {
                    store_times_gradient<function>(dinp + offset, kept + offset, values, count);
                });
            });
        });
    });
}

void matmul_backward_weight_by(ProductPath path, const ops::MatmulBackwardWeight& op) {
    ops::require_gemm_sizes("matmul_backward_weight", op.rows, op.n, op.k);
    const bool is_symmetric =
        op.dout.data == op.inp.data && op.n == op.k && !op.accumulate && path != ProductPath::library;
    ops::dispatch("matmul_backward_weight", {op.dout, op.inp}, [&]<class T>() {
        const Product<T> product = {.left = {op.dout.as<T>(), size_t(op.n), true},
                                    .right = {op.inp.as<T>(), size_t(op.k), false},
                                    .rows = op.n,
                                    .cols = op.k,
                                    .depth = op.rows,
                                    .is_symmetric = is_symmetric};
        multiply(product, path, [&](const Tile& tile) {
            if (is_symmetric) return store_symmetric(op.dweight, tile, op.k);
            for_each_row(tile, op.k, [&](const float* values, size_t offset, int count) {
                store_sum(op.dweight + offset, values, count, op.accumulate);
            });
        });
        if (op.dbias) column_sums(op.dbias, op.dout.as<T>(), op.rows, op.n, op.accumulate);
    });
}

namespace ops {

void matmul_forward(const MatmulForward& op, Stream) { matmul_forward_by(fastest_product_path(op.inp.dtype), op); }

void matmul_backward_input(const MatmulBackwardInput& op, Stream) {
    matmul_backward_input_by(fastest_product_path(op.dout.dtype), op);
}

void matmul_backward_weight(const MatmulBackwardWeight& op, Stream) {
    matmul_backward_weight_by(fastest_product_path(op.dout.dtype), op);
}

// The CPU uses thread-local memory instead of scratch.
size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight&) { return 0; }

}  // namespace ops
