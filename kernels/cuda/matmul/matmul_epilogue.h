// Small kernels that finish a GEMM's sums where the library has no epilogue for it, or not one with the promised bits.
#pragma once

#include "kernels/base/choices.h"
#include "kernels/device.h"
#include "kernels/tensor.h"

// out = sums + bias, rounded to its type. `out` may be `sums` where it is float.
struct AddBias {
    View out;           // (rows, cols)  =
    const float* sums;  // (rows, cols)
    ConstView bias;     // (cols), or null
    size_t rows;
    int cols;
};
void add_bias(const AddBias& op, Stream stream);

// out = relu2(sums + bias), rounded to its type. `out` may be `sums` where it is float.
void add_bias_relu2(const AddBias& op, Stream stream);

// out = sums f'(kept), rounded to its type. `out` may be `sums` where it is float.
struct TimesGradient {
    View out;           // (count)  =
    const float* sums;  // (count)
    ConstView kept;     // (count), as ops::MatmulBackwardInput has it
    size_t count;
    ActivationFunction activation;
};
void times_activation_gradient(const TimesGradient& op, Stream stream);

// The sums of each column, in an order that depends on the sizes alone.
struct ColumnSums {
    float* out;        // (cols)  = or += by `accumulate`
    float* scratch;    // column_sums_scratch_bytes
    ConstView values;  // (rows, cols)
    int rows, cols;
    bool accumulate;
};
void column_sums(const ColumnSums& op, Stream stream);
size_t column_sums_scratch_bytes(int rows, int cols);

// Numbers near the normal distribution, mean 0, deviation 1: what products are timed on, since zeros would draw less
// power and so run at a higher clock than real data.
struct RandomFill {
    View out;  // (count)  =
    size_t count;
    unsigned seed;
};
void random_fill(const RandomFill& op, Stream stream);
