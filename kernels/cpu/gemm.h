// Matrix products cut into tiles of the result, each computed by one thread.
//
// The tiling depends on the shape alone and no sum is shared between threads, so the bits do not depend on their
// number. A tile is computed in float, in memory of its thread; then the caller's function reads it, still in the
// cache, and stores the result, rounded once.
#pragma once

#include <functional>
#include <string>

#include "kernels/numeric.h"

// A matrix that lies in memory row by row, or whose transpose does.
template <class T> struct Matrix {
    const T* data;
    size_t step;      // elements from one stored row to the next
    bool transposed;  // what is stored is the transpose

    Matrix block(int row, int col) const {
        return {data + (transposed ? col * step + row : row * step + col), step, transposed};
    }
};

// left right.
template <class T> struct Product {
    Matrix<T> left;   // (rows, depth)
    Matrix<T> right;  // (depth, cols)
    int rows, cols, depth;
};

// The implementation of products. `float_panels`: our own kernel, on panels of the operands that become float as they
// are copied. `bf16_panels`: the same on panels of bf16, for operands of bf16 only. `library`: oneDNN, in the type of
// the operands.
enum class ProductPath { float_panels, bf16_panels, library };

// The fastest on this machine for operands of this type.
ProductPath fastest_product_path(Dtype dtype);

// One line for the log: what carries out products, by precision.
std::string matmul_path();

// A part of the result.
struct Tile {
    float* data;   // (rows, cols)
    size_t step;   // elements from row to row
    int row, col;  // its place in the result
    int rows, cols;
};

// Computes the product and calls finish(tile) from many threads, for tiles that cover the result once.
// Fails with Exit::os if the library fails, for which lack of memory is the one reason.
template <class T>
void multiply(const Product<T>& product, ProductPath path, const std::function<void(const Tile&)>& finish);
