// Our GEMM: copies panels of both operands into the order in which the innermost loop reads them.
//
// A tile of the result is computed in slices of the depth. For each slice, the right operand is copied into strips of
// (depth, kTileCols). The left operand is copied kPanelRows rows at a time into an order that the innermost loop reads
// sequentially; rows of floats are not copied. The strips stay in the L2 cache, the current one in L1 (Goto, van de
// Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008). A copied element is used hundreds
// of times.
//
// Elements of a panel are floats, converted from any type during the copy, or pairs of unconverted bf16 along the
// depth. Both have 4 bytes, so all sizes are the same, and a slice of pairs is twice as deep. An odd depth ends with a
// pair whose second half is 0 in both operands.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/tiles.h"
#include "kernels/numeric.h"

inline int divide_up(int count, int piece) { return (count + piece - 1) / piece; }

// The number of values along the depth in an element.
template <class Element> inline constexpr int values_in = 1;
template <> inline constexpr int values_in<Bf16Pair> = 2;

inline constexpr int kSlice = 256;            // elements along the depth
inline constexpr int kPanelRows = 96;         // rows of the left operand copied at a time
inline constexpr int kPanelCols = 384;        // columns of the right operand copied at a time
inline constexpr int kRowStep = kSlice + 16;  // stride of copied rows, not a multiple of 4096 bytes

inline constexpr size_t kLeftElements = size_t(kPanelRows) * kRowStep;
inline constexpr size_t kRightElements = size_t(kPanelCols) * kRowStep;
inline constexpr size_t kStagingElements = size_t(kTileCols) * kRowStep;
inline constexpr size_t kPanelBytes = (kRightElements + kLeftElements + kStagingElements) * sizeof(float);

static_assert(kPanelRows % kTileRows == 0, "a left panel consists of whole groups of rows");
static_assert(kPanelCols % kTileCols == 0, "a right panel consists of whole strips");
static_assert(kPanelCols <= int(kStagingElements) && kPanelRows <= int(kStagingElements) && kSlice % 4 == 0,
              "the staging area holds a row of either operand, or kTileCols rows of whole transposed squares");
static_assert(sizeof(Bf16Pair) == sizeof(float), "panels of both types have the same size");

// Stride of strips and groups. The 16 extra elements of depth avoid conflicts in the cache sets.
inline constexpr size_t kStripStep = size_t(kSlice + 16) * kTileCols;
inline constexpr size_t kGroupStep = size_t(kSlice + 16) * kTileRows;

// Panel memory of one thread.
template <class Element> struct Panels {
    Element* right;    // strips of (depth, kTileCols)
    Element* left;     // (rows, kRowStep); for a transposed operand, groups of (depth, kTileRows)
    Element* staging;  // (kTileCols, kRowStep)

    explicit Panels(std::byte* memory)  // kPanelBytes, aligned to 64
        : right(reinterpret_cast<Element*>(memory)), left(right + kRightElements), staging(left + kLeftElements) {}
};

// Copies `count` consecutive values along the depth into elements.
template <class T> void copy_along_depth(float* out, const T* inp, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) out[i] = to_float(inp[i]);
}
inline void copy_along_depth(Bf16Pair* out, const bf16* inp, int count) {
    if (count % 2) out[count / 2] = {inp[count - 1].bits};
    std::memcpy(out, inp, size_t(count / 2) * sizeof(Bf16Pair));
}

// Returns the first element along the depth for each of `count` adjacent columns: in `staging`, or in place for floats.
// The next value of a column is at `step`, if more than one value of the depth is left.
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

// Copies (depth, count) row by row into strips of (depth, width). Pads the last strip with 0.
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

// Pads the columns from `cols` to a whole strip with 0.
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

// The rows of the left operand for the innermost loop. `group_step`: elements between groups of kTileRows rows; `step`:
// elements between rows, or between columns if transposed.
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

// out (rows, kTileCols) = or += left rows times one strip, one group of rows at a time.
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

// part = or += slice of the left operand times the copied slice of the right operand.
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
