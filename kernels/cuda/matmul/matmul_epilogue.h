// Small kernels that finish a GEMM's sums if the library has no epilogue with the required bits.
#pragma once

#include "kernels/base/choices.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

// out = sums + bias, or relu2 of that, rounded to out's type. If out is float, it may be `sums`.
struct AddBias {
    View out;           // (rows, cols)  =
    const float* sums;  // (rows, cols)
    ConstView bias;     // (cols), or null
    size_t rows;
    int cols;
    bool relu2;
};
void add_bias(const AddBias& op, Stream stream);

// out = sums f'(kept), rounded to out's type. If out is float, it may be `sums`.
struct TimesGradient {
    View out;           // (count)  =
    const float* sums;  // (count)
    ConstView kept;     // (count), as in ops::MatmulBackwardInput
    size_t count;
    ActivationFunction activation;
};
void times_activation_gradient(const TimesGradient& op, Stream stream);

// Sums each column, in an order that depends only on the sizes.
struct ColumnSums {
    float* out;        // (cols)  = or += by `accumulate`
    float* scratch;    // column_sums_scratch_bytes
    ConstView values;  // (rows, cols)
    int rows, cols;
    bool accumulate;
};
void column_sums(const ColumnSums& op, Stream stream);
size_t column_sums_scratch_bytes(int rows, int cols);
