// The three GEMMs of a linear layer: cuBLASLt (matmul_products.h), with its epilogues if they meet the contract of
// ops.h.
//
// GELU and SiLU forward: ops.h requires f of the sum rounded to T, with the same bits as activation_forward on the
// stored sum, so that recomputation changes nothing. The library's GELU uses the unrounded sum (a difference of up
// to 1.13 units of T's round-off of the sum) and a different tanh, so by default the GEMM stores the sum, then
// activation_forward runs. That reads and writes 8 rows C elements per layer (8u): 2.2 ms of a 97 ms step of GPT-2 124M
// at 4.3 TB/s. The library's epilogue needs 4u for its second output; MatmulSettings::gelu_epilogue
// uses it in 16 bits for gelu_new with a bias. dGELU: it is never recomputed, so it uses the library's DGELU, which on
// an H200 deviates by up to two roundings to T. Float, and cases that the library does not support (other activations,
// leading dimensions of aux that are not a multiple of 8, one-element sums): one of our kernels finishes float sums,
// kMatmulSumsBytes at a time, and a value is rounded to T once.
#include <algorithm>

#include "kernels/base/choices.h"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_epilogue.h"
#include "kernels/cuda/matmul/matmul_plan.h"
#include "kernels/cuda/matmul/matmul_products.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace {

// Computes float sums of product.d (m, n) in place if `out` is float, otherwise in as many columns at a time as the
// sums buffer holds. finish(sums, first column, columns) computes the result from them.
template <class Finish> void multiply_and_finish(Product product, Stream stream, Finish finish) {
    product.epilogue = Epilogue::none;
    if (product.d.dtype == Dtype::fp32) {
        multiply_plain(product, stream);
        return finish(product.d.as<const float>(), size_t(0), size_t(product.n));
    }
    const size_t column_bytes = size_t(product.m) * sizeof(float);
    require(column_bytes <= kMatmulSumsBytes,
            "matmul: %d output features need %zu bytes per row, but the buffer has %zu", product.m, column_bytes,
            kMatmulSumsBytes);
    float* sums = matmul_sums(stream);
    const ConstView b = product.b;
    const int all = product.n, at_once = int(std::min(kMatmulSumsBytes / column_bytes, size_t(all)));
    product.d = sums;
    for (int first = 0; first < all; first += at_once) {
        product.b = b.from(size_t(first) * size_t(product.k));
        product.n = std::min(at_once, all - first);
        multiply_plain(product, stream);
        finish(static_cast<const float*>(sums), size_t(first), size_t(product.n));
    }
}

// Calls add_bias on all sums.
void multiply_and_add_bias(const Product& product, bool relu2, Stream stream) {
    const View out = product.d;
    const ConstView bias(product.bias, out.dtype);
    multiply_and_finish(product, stream, [&](const float* sums, size_t first, size_t columns) {
        add_bias({.out = out.from(first * size_t(product.m)),
                  .sums = sums,
                  .bias = bias,
                  .rows = columns,
                  .cols = product.m,
                  .relu2 = relu2},
                 stream);
    });
}

// out = inp weight^T + bias.
void multiply_add_bias(const Product& product, Stream stream) {
    if (!multiply(product, stream)) multiply_and_add_bias(product, false, stream);
}

}  // namespace

namespace ops {

void matmul_forward(const MatmulForward& op, Stream stream) {
    require_gemm("matmul_forward", op.inp, op.weight, op.rows, op.n, op.k);
    const bool keeps_sum = op.activation != ActivationFunction::none && op.activation != ActivationFunction::relu2;
    require_activation_array("matmul_forward", op.activation, keeps_sum, op.pre_activation);
    const Dtype dtype = gemm_type("matmul_forward", op.inp, {op.out, op.pre_activation, op.bias});
    const size_t count = size_t(op.rows) * size_t(op.n);
    const bool may_fuse = op.activation == ActivationFunction::gelu_new && op.bias && dtype != Dtype::fp32;
    if (op.activation == ActivationFunction::relu2) {
        multiply_and_add_bias(product_of(op), true, stream);
    } else if (!(may_fuse && matmul_settings().gelu_epilogue && multiply(with_gelu(op), stream))) {
        multiply_add_bias(product_of(op), stream);
        if (op.activation != ActivationFunction::none)
            return activation_forward(
                {.out = op.out, .inp = op.pre_activation, .count = count, .activation = op.activation}, stream);
    }
    set_amax(op.out, count, stream);
}

void matmul_backward_input(const MatmulBackwardInput& op, Stream stream) {
    require_gemm("matmul_backward_input", op.dout, op.weight, op.rows, op.n, op.k);
    const bool is_activated = op.activation != ActivationFunction::none;
    require_activation_array("matmul_backward_input", op.activation, is_activated, op.kept);
    const Dtype dtype = gemm_type("matmul_backward_input", op.dout, {op.dinp, op.kept});
    Product product = product_of(op);
    if (!is_activated) return multiply_add_bias(product, stream);

    const bool has_epilogue = op.activation == ActivationFunction::gelu_new && dtype != Dtype::fp32;
    if (has_epilogue && multiply(product, stream)) return;
    product.aux = nullptr;
    multiply_and_finish(product, stream, [&](const float* sums, size_t first, size_t columns) {
        const size_t begin = first * size_t(op.k);
        times_activation_gradient({.out = op.dinp.from(begin),
                                   .sums = sums,
                                   .kept = op.kept.from(begin),
                                   .count = columns * size_t(op.k),
                                   .activation = op.activation},
                                  stream);
    });
}

void matmul_backward_weight(const MatmulBackwardWeight& op, Stream stream) {
    require_gemm("matmul_backward_weight", op.dout, op.inp, op.rows, op.n, op.k);
    Product product = product_of(op);
    if (!op.dbias) return multiply_plain(product, stream);

    ColumnSums bias_sums{.out = op.dbias,
                         .scratch = static_cast<float*>(op.scratch),
                         .values = op.wide_dout ? op.wide_dout : op.dout,
                         .rows = op.rows,
                         .cols = op.n,
                         .accumulate = op.accumulate};
    if (product.epilogue == Epilogue::bias_gradient && multiply(product, stream)) {
        if (!op.accumulate) return;
        bias_sums.values = bias_sums.scratch;
        bias_sums.rows = 1;
    } else {
        product.bias = nullptr;
        product.epilogue = Epilogue::none;
        multiply_plain(product, stream);
    }
    column_sums(bias_sums, stream);
}

size_t matmul_backward_weight_scratch_bytes(const MatmulBackwardWeight& op) {
    return std::max(column_sums_scratch_bytes(op.rows, op.n), size_t(op.n) * sizeof(float));
}

}  // namespace ops
