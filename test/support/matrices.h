// Products of matrices in double, and the places of a model's matrices.
#pragma once

#include <algorithm>
#include <cmath>
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

// The textbook: X = G / |G|, then X = a X + (b A + c A A) X with A = X X^T, on the transpose if there are more rows
// than columns (torch.optim.Muon).
inline Doubles orthogonalized(Doubles x, int rows, int cols, bool polar_express) {
    constexpr double kPolar[5][3] = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                                     {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                                     {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                                     {3.285753657755655, -2.3681294933425376, 0.46449024233002106},
                                     {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
    if (rows > cols)
        return transposed(orthogonalized(transposed(x, rows, cols), cols, rows, polar_express), cols, rows);
    double sum = 0;
    for (const double value : x) sum += value * value;
    for (double& value : x) value /= std::max(std::sqrt(sum), 1e-7);
    for (int step = 0; step < 5; step++) {
        const double a = polar_express ? kPolar[step][0] : 3.4445, b = polar_express ? kPolar[step][1] : -4.7750;
        const double c = polar_express ? kPolar[step][2] : 2.0315;
        Doubles gram = product(x, transposed(x, rows, cols), rows, cols, rows);
        const Doubles square = product(gram, gram, rows, rows, rows);
        for (size_t i = 0; i < gram.size(); i++) gram[i] = b * gram[i] + c * square[i];
        const Doubles change = product(gram, x, rows, rows, cols);
        for (size_t i = 0; i < x.size(); i++) x[i] = a * x[i] + change[i];
    }
    return x;
}

// The place of a matrix in the concatenated values of all tensors.
inline size_t place_of(const TensorLayout& layout, const Matrix& matrix) {
    size_t place = matrix.first;
    for (int i = 0; i < matrix.tensor; i++) place += layout.tensors[size_t(i)].count;
    return place;
}
