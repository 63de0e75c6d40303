// GEMM, split into tiles of the result. One thread computes each tile.
//
// Threads never share a sum, so the bits do not depend on their number. A tile is computed in float in thread-local
// memory. Then the caller's function reads it from the cache and stores the result, rounded once.
#pragma once

#include <functional>
#include <string>

#include "kernels/numeric.h"

// A row-major matrix, or the transpose of one.
template <class T> struct Matrix {
    const T* data;
    size_t step;      // elements from one stored row to the next
    bool transposed;  // memory holds the transpose

    Matrix block(int row, int col) const {
        return {data + (transposed ? col * step + row : row * step + col), step, transposed};
    }
};

// The product left right.
template <class T> struct Product {
    Matrix<T> left;   // (rows, depth)
    Matrix<T> right;  // (depth, cols)
    int rows, cols, depth;
    // The right operand is the transpose of the left one, the same array. So the result is symmetric, and our kernel
    // computes little more than the part on and below the diagonal: tiles do not cover the rest.
    bool is_symmetric = false;
};

// The GEMM implementation. `float_panels`: our kernel, which copies the operands into float panels. `bf16_panels`: the
// same with bf16 panels, only for bf16 operands. `library`: oneDNN, in the type of the operands.
enum class ProductPath { float_panels, bf16_panels, library };

// Returns the fastest implementation on this machine for operands of this type.
ProductPath fastest_product_path(Dtype dtype);

// Returns one line for the log: the implementation for each precision.
std::string matmul_path();

// A part of the result.
struct Tile {
    float* data;   // (rows, cols)
    size_t step;   // elements from row to row
    int row, col;  // position in the result
    int rows, cols;
};

// Computes the product. Calls finish(tile) on many threads, for tiles that cover the result, or the necessary part of a
// symmetric one, exactly once.
// Fails with Exit::os if the library fails, which happens only if memory is insufficient.
using Finish = std::function<void(const Tile&)>;
template <class T> void multiply(const Product<T>& product, ProductPath path, const Finish& finish);
