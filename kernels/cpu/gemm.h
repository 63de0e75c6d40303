// Matrix products cut into tiles of the result, each computed by one thread.
//
// The cutting depends on the shape alone and no sum is shared between threads, so the bits do not depend on their
// number. A tile is computed in float, in memory of its thread; then the caller's function takes it, still in the
// cache, and stores what it wants of it, rounded once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "kernels/check.h"
#include "kernels/cpu/parallel.h"
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

// Who multiplies. `panels`: our own kernel, in float, on panels of the operands that are converted as they are copied.
// `library`: oneDNN, in the type of the operands.
enum class ProductPath { panels, library };

// The faster of the two on this machine for operands of this type: the library where it has matrix instructions (AMX).
ProductPath fastest_product_path(Dtype dtype);

// One line for the log: what carries out products, by precision.
std::string matmul_path();

// A rectangle of the result.
struct Tile {
    float* data;   // (rows, cols)
    size_t step;   // elements from row to row
    int row, col;  // its place in the result
    int rows, cols;
};

// How a result is cut: into equal tiles but for the last of each row and column.
class Tiling {
public:
    Tiling(int rows, int cols);
    int count() const { return tiles_down_ * tiles_across_; }
    Tile tile(int index, float* data) const;
    size_t tile_step() const { return tile_cols_; }
    size_t tile_elements() const { return size_t(tile_rows_) * tile_cols_; }

private:
    int rows_, cols_;
    int tile_rows_, tile_cols_;
    int tiles_down_, tiles_across_;
};

// One tile of the product by our own kernel; scratch holds panel_scratch_bytes().
template <class T> void panel_product(const Product<T>& product, const Tile& tile, std::byte* scratch);
size_t panel_scratch_bytes();

// One tile by oneDNN; false if it could not. library_scratch_bytes() must have been called before the threads start: it
// makes what the library wants to make once for each shape of tile.
template <class T> bool library_product(const Product<T>& product, const Tile& tile, std::byte* scratch);
template <class T> size_t library_scratch_bytes(const Product<T>& product, const Tiling& tiling);

// Computes the product and calls finish(tile) for every tile of it, from many threads.
// Fails with Exit::os when the library refuses, for which lack of memory is the one reason.
template <class T, class Finish> void multiply(const Product<T>& product, ProductPath path, Finish&& finish) {
    const Tiling tiling(product.rows, product.cols);
    const bool by_library = path == ProductPath::library;
    const size_t scratch_bytes = by_library ? library_scratch_bytes(product, tiling) : panel_scratch_bytes();
    const size_t tile_bytes = tiling.tile_elements() * sizeof(float);
    bool done = true;
#pragma omp parallel reduction(&& : done)
    {
        std::byte* memory = thread_memory(tile_bytes + scratch_bytes);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < tiling.count(); i++) {
            const Tile tile = tiling.tile(i, reinterpret_cast<float*>(memory));
            std::byte* scratch = memory + tile_bytes;
            if (by_library)
                done = library_product(product, tile, scratch) && done;
            else
                panel_product(product, tile, scratch);
            finish(tile);
        }
    }
    if (!done)
        fail(Exit::os, "not enough memory: oneDNN refused to multiply (%d, %d) by (%d, %d)", product.rows,
             product.depth, product.depth, product.cols);
}
