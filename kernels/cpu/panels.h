// Our own matrix multiplication: panels of both operands, copied into the order in which they are read.
//
// A tile of the result is computed in slices of the depth. Of each slice the right operand's part is copied into
// strips, (depth, kTileCols) each, and the left operand's part, kPanelRows rows at a time, into an order in which the
// innermost loop reads it forward; rows of floats are read where they are. The strips stay in the second-level cache,
// the one in use in the first (Goto, van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3),
// 2008). A copied element is used hundreds of times.
//
// A panel's elements are floats, converted from any type as they are copied, or pairs of bf16 along the depth, where
// bf16 are not converted. Both have 4 bytes, so that all sizes are the same, and a slice of pairs is twice as deep. An
// odd depth ends in a pair whose second half is 0 in both operands.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tiles.h"

inline int divide_up(int count, int piece) { return (count + piece - 1) / piece; }

// Values of the depth in an element.
template <class Element> inline constexpr int values_in = 1;
template <> inline constexpr int values_in<Bf16Pair> = 2;

inline constexpr int kSlice = 256;            // elements of the depth
inline constexpr int kPanelRows = 96;         // of the left operand that are copied at a time
inline constexpr int kPanelCols = 384;        // of the right operand
inline constexpr int kRowStep = kSlice + 16;  // of a copied row: not a multiple of 4096 bytes

inline constexpr size_t kLeftElements = size_t(kPanelRows) * kRowStep;
inline constexpr size_t kRightElements = size_t(kPanelCols) * kRowStep;
inline constexpr size_t kStagingElements = size_t(kTileCols) * kRowStep;
inline constexpr size_t kPanelBytes = (kRightElements + kLeftElements + kStagingElements) * sizeof(float);

static_assert(kPanelRows % kTileRows == 0, "a copied part of the left operand is whole groups of rows");
static_assert(kPanelCols % kTileCols == 0, "a copied part of the right operand is whole strips");
static_assert(kPanelCols <= int(kStagingElements) && kPanelRows <= int(kStagingElements) && kSlice % 4 == 0,
              "the staging area holds a row of either operand, or kTileCols rows of whole transposed squares");
static_assert(sizeof(Bf16Pair) == sizeof(float), "panels of both have one size");

// Distance of two strips or groups. The 16 beyond the depth keep them from falling into the same sets of the cache.
inline constexpr size_t kStripStep = size_t(kSlice + 16) * kTileCols;
inline constexpr size_t kGroupStep = size_t(kSlice + 16) * kTileRows;

// Memory of one thread.
template <class Element> struct Panels {
    Element* right;    // strips of (depth, kTileCols)
    Element* left;     // (rows, kRowStep); of a transposed operand groups of (depth, kTileRows)
    Element* staging;  // (kTileCols, kRowStep)

    explicit Panels(std::byte* memory)  // kPanelBytes, aligned to 64
        : right(reinterpret_cast<Element*>(memory)), left(right + kRightElements), staging(left + kLeftElements) {}
};

// Elements of `count` values that follow each other along the depth.
template <class T> void copy_along_depth(float* out, const T* inp, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] = to_float(inp[i]);
}
inline void copy_along_depth(Bf16Pair* out, const bf16* inp, int count) {
    if (count % 2) out[count / 2] = {inp[count - 1].bits};
    std::memcpy(out, inp, size_t(count / 2) * sizeof(Bf16Pair));
}

// The first element along the depth for each of `count` neighbours across it: in `staging`, or floats where they are.
// The neighbours' next values lie `step` behind, if more than one value of the depth is left.
inline const float* elements_across(const float* inp, size_t, int, int, float*) { return inp; }
template <class T> const float* elements_across(const T* inp, size_t, int, int count, float* staging) {
    copy_along_depth(staging, inp, count);
    return staging;
}
inline const Bf16Pair* elements_across(const bf16* inp, size_t step, int depth, int count, Bf16Pair* staging) {
    if (depth == 1) {
        for (int i = 0; i < count; i++) staging[i] = {inp[i].bits};
        return staging;
    }
    const bf16* next = inp + step;
#pragma omp simd
    for (int i = 0; i < count; i++) staging[i] = {inp[i].bits | uint32_t(next[i].bits) << 16};
    return staging;
}

// Row by row from (depth, count) into strips of (depth, width). The last strip is filled up with 0.
template <int width, class Element, class T>
void deal(Element* out, size_t out_step, const T* inp, size_t inp_step, int depth, int count, Element* staging) {
    for (int k = 0; k < depth; k += values_in<Element>, out += width) {
        const Element* row = elements_across(inp + k * inp_step, inp_step, depth - k, count, staging);
        Element* place = out;
        int i = 0;
        for (; i + width <= count; i += width, place += out_step) std::memcpy(place, row + i, width * sizeof(Element));
        if (i < count) std::fill(std::copy(row + i, row + count, place), place + width, Element{});
    }
}

// Columns from `cols` up to a whole strip become 0.
template <class Element, class T>
void copy_right(const Panels<Element>& panels, const Matrix<T>& right, int depth, int cols) {
    if (!right.transposed) {
        deal<kTileCols>(panels.right, kStripStep, right.data, right.step, depth, cols, panels.staging);
        return;
    }
    const int elements = divide_up(depth, values_in<Element>);
    Element* strip = panels.right;
    for (int col = 0; col < cols; col += kTileCols, strip += kStripStep) {
        const T* part = right.block(0, col).data;
        const int width = std::min(kTileCols, cols - col);
        for (int c = 0; c < width; c++) copy_along_depth(panels.staging + c * kRowStep, part + c * right.step, depth);
        std::fill(panels.staging + width * kRowStep, panels.staging + kStagingElements, Element{});
        tile_transpose(TileTransposeOf<Element>{.out = strip,
                                                .out_step = kTileCols,
                                                .inp = panels.staging,
                                                .inp_step = kRowStep,
                                                .rows = kTileCols,
                                                .cols = divide_up(elements, 4) * 4});
    }
}

// The left operand's rows as the innermost loop reads them: `group_step` elements from one group of kTileRows rows to
// the next, `step` from row to row, or, transposed, from column to column.
template <class Element> struct Left {
    const Element* data;
    int step;
    size_t group_step;
    bool transposed;
};

template <class Element, class T>
Left<Element> copy_left(const Panels<Element>& panels, const Matrix<T>& left, int rows, int depth) {
    if (left.transposed) {
        deal<kTileRows>(panels.left, kGroupStep, left.data, left.step, depth, rows, panels.staging);
        return {panels.left, kTileRows, kGroupStep, true};
    }
    if constexpr (std::is_same_v<T, float>) return {left.data, int(left.step), kTileRows * left.step, false};
    for (int row = 0; row < rows; row++)
        copy_along_depth(panels.left + row * kRowStep, left.data + row * left.step, depth);
    return {panels.left, kRowStep, size_t(kTileRows) * kRowStep, false};
}

// out (rows, kTileCols) = or += the left rows times one strip, a group of rows at a time.
template <class Element> void multiply_strip(const Left<Element>& left, TileProductOf<Element> product) {
    const int rows = product.rows;
    for (int row = 0; row < rows; row += kTileRows) {
        product.rows = std::min(kTileRows, rows - row);
        for (int r = 0; r < product.rows; r++) __builtin_prefetch(product.out + r * product.out_step, 1);
        if (left.transposed)
            run_tile_product<true>(product);
        else
            run_tile_product<false>(product);
        product.out += kTileRows * product.out_step;
        product.left += left.group_step;
    }
}

// part = or += the left operand's slice times the right operand's, which has been copied.
template <class Element, class T>
void multiply_panels(const Panels<Element>& panels, const Matrix<T>& left_slice, int depth, const Tile& part,
                     bool accumulate) {
    const Left<Element> left = copy_left(panels, left_slice, part.rows, depth);
    const Element* strip = panels.right;
    for (int col = 0; col < part.cols; col += kTileCols, strip += kStripStep)
        multiply_strip(left, {.out = part.data + col,
                              .out_step = int(part.step),
                              .left = left.data,
                              .left_step = left.step,
                              .right = strip,
                              .right_step = kTileCols,
                              .rows = part.rows,
                              .cols = kTileCols,
                              .depth = divide_up(depth, values_in<Element>),
                              .accumulate = accumulate});
}
