// What is done to a product's sums where the library does it not, or not to the bit as promised: small kernels.
#pragma once

#include <cstddef>

#include "kernels/device.h"

// out = sums + bias, rounded to T. `out` may be `sums` where T is float.
template <class T> struct AddBias {
    T* out;             // (rows, cols)  =
    const float* sums;  // (rows, cols)
    const T* bias;      // (cols), or null
    size_t rows;
    int cols;
};
template <class T> void add_bias(const AddBias<T>& op, Stream stream);

// out = sums gelu'(pre_gelu), rounded to T. `out` may be `sums` where T is float.
template <class T> struct TimesGeluGradient {
    T* out;             // (count)  =
    const float* sums;  // (count)
    const T* pre_gelu;  // (count)
    size_t count;
};
template <class T> void times_gelu_gradient(const TimesGeluGradient<T>& op, Stream stream);

// The sums of each column, in an order that depends on the sizes alone.
template <class T> struct ColumnSums {
    float* out;       // (cols)  = or += by `accumulate`
    float* scratch;   // column_sums_scratch_bytes
    const T* values;  // (rows, cols)
    int rows, cols;
    bool accumulate;
};
template <class T> void column_sums(const ColumnSums<T>& op, Stream stream);
size_t column_sums_scratch_bytes(int rows, int cols);

// Numbers near the normal distribution, mean 0, deviation 1: what products are timed on, since zeros would draw less
// power and so run at a higher clock than real data.
template <class T> struct RandomFill {
    T* out;  // (count)  =
    size_t count;
    unsigned seed;
};
template <class T> void random_fill(const RandomFill<T>& op, Stream stream);
