// Products of matrices in double, and the places of a model's matrices.
#pragma once

#include <vector>

#include "model/matrices.h"
#include "model/tensors.h"

using Doubles = std::vector<double>;

// (rows, cols) times (cols, n)
inline Doubles product(const Doubles& a, const Doubles& b, int rows, int cols, int n) {
    Doubles out(size_t(rows) * size_t(n));
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < cols; k++)
            for (int j = 0; j < n; j++) out[size_t(i * n + j)] += a[size_t(i * cols + k)] * b[size_t(k * n + j)];
    return out;
}

inline Doubles transposed(const Doubles& a, int rows, int cols) {
    Doubles out(a.size());
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) out[size_t(j * rows + i)] = a[size_t(i * cols + j)];
    return out;
}

// The place of a matrix in the concatenated values of all tensors.
inline size_t place_of(const TensorLayout& layout, const Matrix& matrix) {
    size_t place = matrix.first;
    for (int i = 0; i < matrix.tensor; i++) place += layout.tensors[size_t(i)].count;
    return place;
}
