// The three GEMMs of a linear layer. Each tile is finished while it is in the cache.
#include "kernels/cpu/matmul.h"

#include <functional>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace {

// Calls store(row of the tile, offset in the whole result, number of columns) for each row of a tile.
template <class Store> void for_each_row(const Tile& tile, int result_cols, Store&& store) {
    for (int row = 0; row < tile.rows; row++)
        store(tile.data + row * tile.step, size_t(tile.row + row) * result_cols + tile.col, tile.cols);
}

// The operands of a GEMM as multiply() takes them.
template <class T> struct Operands {
    const T *left, *right;
    float scale;  // of their product

    void scale_sums(const Tile& tile) const {
        if (scale == 1) return;
        for (int row = 0; row < tile.rows; row++)
#pragma omp simd
            for (int col = 0; col < tile.cols; col++) tile.data[row * tile.step + col] *= scale;
    }
};

// Returns the elements of an array of 8 bits in bf16, which represents them exactly. `memory` keeps them.
const bf16* widened(const char* op, ConstView array, size_t count, std::vector<bf16>& memory) {
    constexpr size_t kBlock = 1 << 15;
    if (memory.size() < count) memory.resize(count);
    ops::dispatch_fp8(op, array.dtype, [&]<class T>() {
        parallel_blocks(count, kBlock, [&](size_t begin, size_t end) {
            const T* inp = array.as<T>();
            for (size_t i = begin; i < end; i++) memory[i] = from_float<bf16>(to_float(inp[i]));
        });
    });
    return memory.data();
}

// The type that multiply() takes.
Dtype operand_type(ConstView array) { return is_fp8(array.dtype) ? Dtype::bf16 : array.dtype; }

float scale_of(ConstView array) { return array.scale ? *array.scale : 1; }

// Calls body(Operands).
template <class Body>
void with_operands(const char* op, ConstView left, size_t left_count, ConstView right, size_t right_count, Body body) {
    if (!is_fp8(left.dtype))
        return ops::dispatch(op, {left, right}, [&]<class T>() { body(Operands<T>{left.as<T>(), right.as<T>(), 1}); });
    static std::vector<bf16> left_memory, right_memory;
    body(Operands<bf16>{widened(op, left, left_count, left_memory), widened(op, right, right_count, right_memory),
                        scale_of(left) * scale_of(right)});
}

// Calls multiply() with a reference to `finish`: a copy of a large one would allocate memory.
template <class T, class Body> void multiply_tiles(const Product<T>& product, ProductPath path, const Body& finish) {
    multiply(product, path, std::ref(finish));
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
    const char* const name = "matmul_forward";
    const size_t rows = size_t(op.rows), n = size_t(op.n), k = size_t(op.k);
    ops::require_gemm(name, op.inp, op.weight, op.rows, op.n, op.k);
    ops::gemm_type(name, op.inp, {op.out, op.pre_activation, op.bias});
    const bool is_symmetric = op.inp.data == op.weight.data && op.rows == op.n && !op.bias &&
                              op.activation == ActivationFunction::none && path != ProductPath::library;
    const bool keeps_sum = op.activation != ActivationFunction::none && op.activation != ActivationFunction::relu2;
    ops::require_activation_array(name, op.activation, keeps_sum, op.pre_activation);
    with_operands(name, op.inp, rows * k, op.weight, n * k, [&]<class T>(const Operands<T>& operands) {
        const Product<T> product = {.left = {operands.left, k, false},
                                    .right = {operands.right, k, true},
                                    .rows = op.rows,
                                    .cols = op.n,
                                    .depth = op.k,
                                    .is_symmetric = is_symmetric};
        multiply_tiles(product, path, [&](const Tile& tile) {
            operands.scale_sums(tile);
            if (is_symmetric) return store_symmetric(op.out.as<T>(), tile, op.n);
            if (op.bias) add_bias(tile, op.bias.as<T>());
            T* out = op.out.as<T>();
            if (op.activation == ActivationFunction::none) return store_tile(out, tile, op.n);
            ops::dispatch(name, op.activation, [&]<ActivationFunction function>() {
                for_each_row(tile, op.n, [&](const float* values, size_t offset, int count) {
                    store_activation<function>(out + offset, op.pre_activation.from(offset).as<T>(), values, count);
                });
            });
        });
    });
}

void matmul_backward_input_by(ProductPath path, const ops::MatmulBackwardInput& op) {
    const char* const name = "matmul_backward_input";
    const size_t rows = size_t(op.rows), n = size_t(op.n), k = size_t(op.k);
    ops::require_gemm(name, op.dout, op.weight, op.rows, op.n, op.k);
    ops::gemm_type(name, op.dout, {op.dinp, op.kept});
    ops::require_activation_array(name, op.activation, op.activation != ActivationFunction::none, op.kept);
    const bool transposed = is_fp8(op.weight.dtype);
    with_operands(name, op.dout, rows * n, op.weight, n * k, [&]<class T>(const Operands<T>& operands) {
        const Product<T> product = {.left = {operands.left, n, false},
                                    .right = {operands.right, transposed ? n : k, transposed},
                                    .rows = op.rows,
                                    .cols = op.k,
                                    .depth = op.n};
        multiply_tiles(product, path, [&](const Tile& tile) {
            operands.scale_sums(tile);
            T* dinp = op.dinp.as<T>();
            const T* kept = op.kept.as<T>();
            if (op.activation == ActivationFunction::none) return store_tile(dinp, tile, op.k);
            ops::dispatch(name, op.activation, [&]<ActivationFunction function>() {
                for_each_row(tile, op.k, [&](const float* values, size_t offset, int count) {
                    store_times_gradient<function>(dinp + offset, kept + offset, values, count);
                });
            });
        });
    });
}

void matmul_backward_weight_by(ProductPath path, const ops::MatmulBackwardWeight& op) {
    const char* const name = "matmul_backward_weight";
    const size_t rows = size_t(op.rows), n = size_t(op.n), k = size_t(op.k);
    ops::require_gemm(name, op.dout, op.inp, op.rows, op.n, op.k);
    const bool is_symmetric =
        op.dout.data == op.inp.data && op.n == op.k && !op.accumulate && path != ProductPath::library;
    const bool transposed = is_fp8(op.dout.dtype);
    with_operands(name, op.dout, rows * n, op.inp, rows * k, [&]<class T>(const Operands<T>& operands) {
        const Product<T> product = {.left = {operands.left, transposed ? rows : n, !transposed},
                                    .right = {operands.right, transposed ? rows : k, transposed},
                                    .rows = op.n,
                                    .cols = op.k,
                                    .depth = op.rows,
                                    .is_symmetric = is_symmetric};
        multiply_tiles(product, path, [&](const Tile& tile) {
            operands.scale_sums(tile);
            if (is_symmetric) return store_symmetric(op.dweight, tile, op.k);
            for_each_row(tile, op.k, [&](const float* values, size_t offset, int count) {
                store_sum(op.dweight + offset, values, count, op.accumulate);
            });
        });
    });
    if (!op.dbias) return;
    const ConstView dout = op.wide_dout ? op.wide_dout : op.dout;
    ops::dispatch(name, {dout}, [&]<class T>() { column_sums(op.dbias, dout.as<T>(), op.rows, op.n, op.accumulate); });
}

namespace ops {

void matmul_forward(const MatmulForward& op, Stream) {
    matmul_forward_by(fastest_product_path(operand_type(op.inp)), op);
    set_amax(op.out, size_t(op.rows) * size_t(op.n));
}

void matmul_backward_input(const MatmulBackwardInput& op, Stream) {
    matmul_backward_input_by(fastest_product_path(operand_type(op.dout)), op);
}

void matmul_backward_weight(const MatmulBackwardWeight& op, Stream) {
    matmul_backward_weight_by(fastest_product_path(operand_type(op.dout)), op);
}

// The CPU uses thread-local memory instead of scratch.
size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight&) { return 0; }

}  // namespace ops
