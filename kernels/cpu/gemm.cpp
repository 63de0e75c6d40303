// Matrix products: the cutting into tiles, and our own multiplication of float panels.
//
// A tile is computed in chunks of the depth. Of each chunk the right operand's part is copied into strips, (depth,
// kTileCols) each, and the left operand's part, kLeftRows rows at a time, into an order in which the innermost loop
// reads it forward; both become float on the way, and rows of floats are read where they are. The strips stay in the
// second-level cache, the one in use in the first (Goto, van de Geijn, "Anatomy of high-performance matrix
// multiplication", ACM TOMS 34(3), 2008). A copied element is used hundreds of times.
#include "kernels/cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/tiles.h"

namespace {

constexpr int kMaxTileRows = 768, kMaxTileCols = 384;
constexpr int kMinTileRows = 48, kMinTileCols = 96;

constexpr int kChunk = 256;            // of the depth
constexpr int kLeftRows = 96;          // of the left operand that are copied at a time
constexpr int kRowStep = kChunk + 16;  // of a copied row: not a multiple of 4096 bytes

constexpr size_t kLeftElements = size_t(kLeftRows) * kRowStep;
constexpr size_t kRightElements = size_t(kMaxTileCols) * kRowStep;
constexpr size_t kStagingElements = size_t(kTileCols) * kRowStep;

static_assert(kLeftRows % kTileRows == 0, "a copied part of the left operand is whole groups of rows");
static_assert(kMaxTileCols % kTileCols == 0, "a tile is whole strips");
static_assert(kMaxTileCols <= int(kStagingElements) && kLeftRows <= int(kStagingElements) && kChunk % 4 == 0,
              "the staging area holds a row of either operand, or kTileCols rows of whole transposed squares");

int divide_up(int count, int piece) { return (count + piece - 1) / piece; }

// The extent in the fewest equal pieces of at most `largest`: their size in whole units.
int even_piece(int extent, int largest, int unit) {
    return divide_up(divide_up(extent, divide_up(extent, largest)), unit) * unit;
}

template <class T> void to_floats(float* out, const T* inp, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] = to_float(inp[i]);
}

// A row as floats: itself, or converted into `staging`.
const float* as_floats(const float* row, int, float*) { return row; }
template <class T> const float* as_floats(const T* row, int count, float* staging) {
    to_floats(staging, row, count);
    return staging;
}

struct Panels {
    float* right;    // strips of (depth, kTileCols)
    float* left;     // (rows, kRowStep); of a transposed operand groups of (depth, kTileRows)
    float* staging;  // (kTileCols, kRowStep)
};

// Distance of two strips or groups. The 16 beyond the depth keep them from falling into the same sets of the cache.
constexpr size_t kStripStep = size_t(kChunk + 16) * kTileCols;
constexpr size_t kGroupStep = size_t(kChunk + 16) * kTileRows;

// Row by row from (depth, count) into strips of (depth, width). The last strip is filled up with 0.
template <int width, class T>
void deal(float* out, size_t out_step, const T* inp, size_t inp_step, int depth, int count, float* staging) {
    for (int k = 0; k < depth; k++) {
        const float* row = as_floats(inp + k * inp_step, count, staging);
        float* place = out + k * width;
        int i = 0;
        for (; i + width <= count; i += width, place += out_step) std::memcpy(place, row + i, width * sizeof(float));
        if (i < count) std::fill(std::copy(row + i, row + count, place), place + width, 0.0f);
    }
}

// Columns from `cols` up to a whole strip become 0.
template <class T> void copy_right(const Panels& panels, const Matrix<T>& right, int depth, int cols) {
    if (!right.transposed) {
        deal<kTileCols>(panels.right, kStripStep, right.data, right.step, depth, cols, panels.staging);
        return;
    }
    float* strip = panels.right;
    for (int col = 0; col < cols; col += kTileCols, strip += kStripStep) {
        const T* part = right.block(0, col).data;
        const int width = std::min(kTileCols, cols - col);
        for (int c = 0; c < width; c++) to_floats(panels.staging + c * kRowStep, part + c * right.step, depth);
        std::fill(panels.staging + width * kRowStep, panels.staging + kStagingElements, 0.0f);
        tile_transpose({strip, kTileCols, panels.staging, kRowStep, kTileCols, divide_up(depth, 4) * 4, 1.0f});
    }
}

// The left operand's rows as the innermost loop reads them: `group_step` elements from one group of kTileRows rows to
// the next, `step` from row to row, or, transposed, from column to column.
struct Left {
    const float* data;
    int step;
    size_t group_step;
    bool transposed;
};

template <class T> Left copy_left(const Panels& panels, const Matrix<T>& left, int rows, int depth) {
    if (left.transposed) {
        deal<kTileRows>(panels.left, kGroupStep, left.data, left.step, depth, rows, panels.staging);
        return {panels.left, kTileRows, kGroupStep, true};
    }
    if constexpr (std::is_same_v<T, float>) return {left.data, int(left.step), kTileRows * left.step, false};
    for (int row = 0; row < rows; row++) to_floats(panels.left + row * kRowStep, left.data + row * left.step, depth);
    return {panels.left, kRowStep, size_t(kTileRows) * kRowStep, false};
}

// out (rows, kTileCols) = or += the left rows times one strip, a group of rows at a time.
void multiply_strip(const Left& left, TileProduct product) {
    const int rows = product.rows;
    for (int row = 0; row < rows; row += kTileRows) {
        product.rows = std::min(kTileRows, rows - row);
        for (int r = 0; r < product.rows; r++) __builtin_prefetch(product.out + r * product.out_step, 1);
        if (left.transposed)
            tile_product_of_transposed(product);
        else
            tile_product(product);
        product.out += kTileRows * product.out_step;
        product.left += left.group_step;
    }
}

// How a result is cut: into tiles of equal size, but for the last of each row and column of tiles.
class Tiling {
public:
    Tiling(int rows, int cols, int enough_tiles);
    int count() const { return tiles_down_ * tiles_across_; }
    Tile tile(int index, float* data) const;
    size_t tile_bytes() const { return size_t(tile_rows_) * tile_cols_ * sizeof(float); }

private:
    void cut(int largest_rows, int largest_cols);

    int rows_, cols_;
    int tile_rows_ = 0, tile_cols_ = 0;
    int tiles_down_ = 0, tiles_across_ = 0;
};

// Tiles are as large as they may be, unless there are too few of them.
Tiling::Tiling(int rows, int cols, int enough_tiles) : rows_(rows), cols_(cols) {
    cut(kMaxTileRows, kMaxTileCols);
    while (count() < enough_tiles && (tile_rows_ > kMinTileRows || tile_cols_ > kMinTileCols)) {
        if (tile_rows_ > kMinTileRows && (tile_rows_ >= tile_cols_ || tile_cols_ <= kMinTileCols))
            cut(std::max(kMinTileRows, tile_rows_ / 2), tile_cols_);
        else
            cut(tile_rows_, std::max(kMinTileCols, tile_cols_ / 2));
    }
}

void Tiling::cut(int largest_rows, int largest_cols) {
    tile_rows_ = even_piece(rows_, largest_rows, kTileRows);
    tile_cols_ = even_piece(cols_, largest_cols, kTileCols);
    tiles_down_ = divide_up(rows_, tile_rows_);
    tiles_across_ = divide_up(cols_, tile_cols_);
}

// Successive tiles run along the shorter side, so that they share a part of the larger operand.
Tile Tiling::tile(int index, float* data) const {
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

Tile rows_of(const Tile& tile, int row, int rows) {
    return {tile.data + row * tile.step, tile.step, tile.row + row, tile.col, rows, tile.cols};
}

// part = or += the product's chunk from k on, whose right operand has been copied.
template <class T> void multiply_chunk(const Product<T>& product, const Tile& part, const Panels& panels, int k) {
    const int depth = std::min(kChunk, product.depth - k);
    const Left left = copy_left(panels, product.left.block(part.row, k), part.rows, depth);
    const float* strip = panels.right;
    for (int col = 0; col < part.cols; col += kTileCols, strip += kStripStep)
        multiply_strip(left, {.out = part.data + col,
                              .out_step = int(part.step),
                              .left = left.data,
                              .left_step = left.step,
                              .right = strip,
                              .right_step = kTileCols,
                              .rows = part.rows,
                              .cols = kTileCols,
                              .depth = depth,
                              .accumulate = k > 0});
}

using Finish = std::function<void(const Tile&)>;

template <class T>
void multiply_tile(const Product<T>& product, const Tile& tile, const Panels& panels, const Finish& finish) {
    for (int k = 0; k < product.depth; k += kChunk) {
        copy_right(panels, product.right.block(k, tile.col), std::min(kChunk, product.depth - k), tile.cols);
        for (int row = 0; row < tile.rows; row += kLeftRows) {
            const Tile part = rows_of(tile, row, std::min(kLeftRows, tile.rows - row));
            multiply_chunk(product, part, panels, k);
            if (k + kChunk >= product.depth) finish(part);
        }
    }
}

// How an element is summed does not depend on the tile it lies in, so here the cutting may look at the threads: large
// tiles are copied fewer times, and three for each thread let all of them finish at about the same time.
template <class T> void multiply_panels(const Product<T>& product, const Finish& finish) {
    const Tiling tiling(product.rows, product.cols, 3 * omp_get_max_threads());
    const size_t panel_bytes = (kRightElements + kLeftElements + kStagingElements) * sizeof(float);
#pragma omp parallel
    {
        float* data = reinterpret_cast<float*>(thread_memory(tiling.tile_bytes() + panel_bytes));
        float* right = data + tiling.tile_bytes() / sizeof(float);
        const Panels panels = {right, right + kRightElements, right + kRightElements + kLeftElements};
#pragma omp for schedule(dynamic)
        for (int i = 0; i < tiling.count(); i++) multiply_tile(product, tiling.tile(i, data), panels, finish);
    }
}

// The library may sum the elements of different tiles in different orders, so here the cutting depends on the shape
// alone.
template <class T> void multiply_library(const Product<T>& product, const Finish& finish) {
    constexpr int kEnoughTiles = 24;
    const Tiling tiling(product.rows, product.cols, kEnoughTiles);
    size_t scratch_bytes = 0;
    for (int i = 0; i < tiling.count(); i++)
        scratch_bytes = std::max(scratch_bytes, library_scratch_bytes(product, tiling.tile(i, nullptr)));
    bool done = true;
#pragma omp parallel reduction(&& : done)
    {
        std::byte* memory = thread_memory(tiling.tile_bytes() + scratch_bytes);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < tiling.count(); i++) {
            const Tile tile = tiling.tile(i, reinterpret_cast<float*>(memory));
            done = library_product(product, tile, memory + tiling.tile_bytes()) && done;
            finish(tile);
        }
    }
    if (!done)
        fail(Exit::os, "not enough memory: oneDNN refused to multiply (%d, %d) by (%d, %d)", product.rows,
             product.depth, product.depth, product.cols);
}

}  // namespace

template <class T>
void multiply(const Product<T>& product, ProductPath path, const std::function<void(const Tile&)>& finish) {
    if (path == ProductPath::library)
        multiply_library(product, finish);
    else
        multiply_panels(product, finish);
}

template void multiply(const Product<float>&, ProductPath, const std::function<void(const Tile&)>&);
template void multiply(const Product<bf16>&, ProductPath, const std::function<void(const Tile&)>&);
template void multiply(const Product<fp16>&, ProductPath, const std::function<void(const Tile&)>&);
