// GEMM: the tiling and the choice of implementation.

#include "kernels/cpu/gemm.h"

#include <atomic>

#include "kernels/base/check.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/tiles.h"

namespace {

constexpr int kMaxTileRows = 768, kMaxTileCols = kPanelCols;
constexpr int kMinTileRows = 48, kMinTileCols = 96;

// Splits the extent into the fewest equal pieces of at most `largest`. Returns their size, a multiple of `unit`.
int even_piece(int extent, int largest, int unit) {
    return divide_up(divide_up(extent, divide_up(extent, largest)), unit) * unit;
}

// The tiling of a result: equal tiles, except for the last in each row and column of tiles.
class Tiling {
public:
    // Uses the largest tiles, unless that gives too few of them.
    Tiling(int rows, int cols, int enough_tiles) : rows_(rows), cols_(cols) {
        cut(kMaxTileRows, kMaxTileCols);
        while (count() < enough_tiles && (tile_rows_ > kMinTileRows || tile_cols_ > kMinTileCols)) {
            if (tile_rows_ > kMinTileRows && (tile_rows_ >= tile_cols_ || tile_cols_ <= kMinTileCols))
                cut(std::max(kMinTileRows, tile_rows_ / 2), tile_cols_);
            else
                cut(tile_rows_, std::max(kMinTileCols, tile_cols_ / 2));
        }
    }

    int count() const { return tiles_down_ * tiles_across_; }
    size_t tile_bytes() const { return size_t(tile_rows_) * tile_cols_ * sizeof(float); }
    // Consecutive tiles run along the shorter side, so that they share a part of the larger operand.
    Tile tile(int index, float* data) const {
        const bool run_down = rows_ < cols_;
        const int row = (run_down ? index % tiles_down_ : index / tiles_across_) * tile_rows_;
        const int col = (run_down ? index / tiles_down_ : index % tiles_across_) * tile_cols_;
        return {.data = data,
                .step = size_t(tile_cols_),
                .row = row,
                .col = col,
                .rows = std::min(tile_rows_, rows_ - row),
                .cols = std::min(tile_cols_, cols_ - col)};
    }

private:
    void cut(int largest_rows, int largest_cols) {
        tile_rows_ = even_piece(rows_, largest_rows, kTileRows);
        tile_cols_ = even_piece(cols_, largest_cols, kTileCols);
        tiles_down_ = divide_up(rows_, tile_rows_);
        tiles_across_ = divide_up(cols_, tile_cols_);
    }

    int rows_, cols_;
    int tile_rows_ = 0, tile_cols_ = 0;
    int tiles_down_ = 0, tiles_across_ = 0;
};

Tile rows_of(const Tile& tile, int row, int rows) {
    return {tile.data + row * tile.step, tile.step, tile.row + row, tile.col, rows, tile.cols};
}

// Without the columns that are above the diagonal in all rows.
Tile below_diagonal(Tile tile) {
    tile.cols = std::clamp(tile.row + tile.rows - tile.col, 0, tile.cols);
    return tile;
}

template <class Element, class T>
void multiply_tile(const Product<T>& product, const Tile& tile, const Panels<Element>& panels, const Finish& finish) {
    constexpr int kDepth = kSlice * values_in<Element>;
    for (int k = 0; k < product.depth; k += kDepth) {
        const int depth = std::min(kDepth, product.depth - k);
        copy_right(panels, product.right.block(k, tile.col), depth, tile.cols);
        for (int row = 0; row < tile.rows; row += kPanelRows) {
            Tile part = rows_of(tile, row, std::min(kPanelRows, tile.rows - row));
            if (product.is_symmetric) part = below_diagonal(part);
            if (part.cols == 0) continue;
            multiply_panels(panels, product.left.block(part.row, k), depth, part, k > 0);
            if (k + kDepth >= product.depth) finish(part);
        }
    }
}

// The order of an element's sum does not depend on its tile, so this tiling may depend on the number of threads. Large
// tiles need fewer copies, and three tiles per thread balance the load.
template <class Element, class T> void multiply_in_panels(const Product<T>& product, const Finish& finish) {
    const Tiling tiling(product.rows, product.cols, 3 * loop_threads());
    parallel_blocks(size_t(tiling.count()), 1, [&](size_t i, size_t) {
        std::byte* memory = thread_memory(tiling.tile_bytes() + kPanelBytes);
        const Panels<Element> panels(memory + tiling.tile_bytes());
        const Tile tile = tiling.tile(int(i), reinterpret_cast<float*>(memory));
        multiply_tile(product, product.is_symmetric ? below_diagonal(tile) : tile, panels, finish);
    });
}

// The library may sum elements of different tiles in different orders, so this tiling depends only on the shape.
template <class T> void multiply_library(const Product<T>& product, const Finish& finish) {
    constexpr int kEnoughTiles = 24;
    const Tiling tiling(product.rows, product.cols, kEnoughTiles);
    size_t scratch_bytes = 0;
    for (int i = 0; i < tiling.count(); i++)
        scratch_bytes = std::max(scratch_bytes, library_scratch_bytes(product, tiling.tile(i, nullptr)));
    std::atomic<bool> has_failed = false;
    parallel_blocks(size_t(tiling.count()), 1, [&](size_t i, size_t) {
        std::byte* memory = thread_memory(tiling.tile_bytes() + scratch_bytes);
        const Tile tile = tiling.tile(int(i), reinterpret_cast<float*>(memory));
        if (!library_product(product, tile, memory + tiling.tile_bytes())) has_failed = true;
        finish(tile);
    });
    if (has_failed)
        fail(Exit::os, "not enough memory: oneDNN could not multiply (%d, %d) by (%d, %d)", product.rows, product.depth,
             product.depth, product.cols);
}

}  // namespace

template <class T> void multiply(const Product<T>& product, ProductPath path, const Finish& finish) {
    require(path != ProductPath::bf16_panels || dtype_of<T> == Dtype::bf16, "bf16 panels for %s", name_of(dtype_of<T>));
    if (path == ProductPath::library)
        multiply_library(product, finish);
    else if (path == ProductPath::float_panels)
        multiply_in_panels<float>(product, finish);
    else if constexpr (std::is_same_v<T, bf16>)
        multiply_in_panels<Bf16Pair>(product, finish);
}

template void multiply(const Product<float>&, ProductPath, const Finish&);
template void multiply(const Product<bf16>&, ProductPath, const Finish&);
template void multiply(const Product<fp16>&, ProductPath, const Finish&);
