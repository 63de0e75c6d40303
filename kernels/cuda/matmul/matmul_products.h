// The three GEMMs of a linear layer for the library, each with its preferred epilogue.
#pragma once

#include "kernels/cuda/matmul/matmul_plan.h"
#include "kernels/ops.h"

//     out (rows, n) = inp weight^T + bias      the library's d (n, rows) = weight^T (n, k) inp (k, rows)
// With pre_activation, d is the sum, to which the activation is applied later.
inline Product product_of(const ops::MatmulForward& op) {
    return {.d = op.pre_activation ? op.pre_activation : op.out,
            .a = op.weight,
            .b = op.inp,
            .bias = const_cast<void*>(op.bias.data),
            .transpose_a = true,
            .m = op.n,
            .n = op.rows,
            .k = op.k,
            .epilogue = op.bias ? Epilogue::bias : Epilogue::none};
}

// The same with out = gelu_new(sum) in the library's epilogue.
inline Product with_gelu(const ops::MatmulForward& op) {
    Product product = product_of(op);
    product.d = op.out;
    product.aux = op.pre_activation.data;
    product.epilogue = Epilogue::gelu;
    return product;
}

//     dinp (rows, k) = dout weight             d (k, rows) = weight (k, n) dout (n, rows); weight^T (n, k) in 8 bits
// The library has an epilogue for gelu_new's gradient.
inline Product product_of(const ops::MatmulBackwardInput& op) {
    const bool has_gelu = op.activation == ActivationFunction::gelu_new;
    return {.d = op.dinp,
            .a = op.weight,
            .b = op.dout,
            .aux = has_gelu ? const_cast<void*>(op.kept.data) : nullptr,
            .transpose_a = is_fp8(op.weight.dtype),
            .m = op.k,
            .n = op.rows,
            .k = op.n,
            .epilogue = has_gelu ? Epilogue::dgelu : Epilogue::none};
}

//     dweight (n, k) = dout^T inp              d (k, n) = inp (k, rows) dout^T (rows, n), d float; dbias: sums of
//                                              dout along rows, in the same pass over dout (BGRADB)
// In 8 bits inp^T (rows, k) and dout (rows, n) are in memory, and the library has no sums of dout.
// The library always overwrites the bias gradient. If it must be added to, the sums go to scratch.
inline Product product_of(const ops::MatmulBackwardWeight& op) {
    const bool is_8_bits = is_fp8(op.dout.dtype), has_sums = op.dbias && !is_8_bits;
    return {.d = op.dweight,
            .a = op.inp,
            .b = op.dout,
            .bias = !has_sums ? nullptr : op.accumulate ? op.scratch : op.dbias,
            .transpose_a = is_8_bits,
            .transpose_b = !is_8_bits,
            .m = op.k,
            .n = op.n,
            .k = op.rows,
            .epilogue = has_sums ? Epilogue::bias_gradient : Epilogue::none,
            .accumulate = op.accumulate};
}
