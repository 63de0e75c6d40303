// Products and transposes of small matrices in the L1 and L2 caches: of floats, and of pairs of bf16.
//
// A step is the distance between rows, in elements. Rows are aligned to whole vectors: base pointers to 64 bytes, steps
// and numbers of columns to kTileCols, so that loops over columns have no remainder.
#pragma once

#include "kernels/cpu/lanes.h"

// The part of a product that stays in registers during the loop over the depth: as many sums as fit in addition to the
// operands: 6 x 2 of 16 registers with AVX2, 12 x 2 of 32 with AVX-512. Both hide the latency of two FMA units.
inline constexpr int kTileRows = kLanes == 16 ? 12 : 6;
inline constexpr int kTileCols = 2 * kLanes;

inline constexpr int round_up_to_tile(int cols) { return (cols + kTileCols - 1) / kTileCols * kTileCols; }
inline constexpr int round_down_to_tile(int cols) { return cols / kTileCols * kTileCols; }

// out = left right, or out += left right. The depth counts elements: floats, or pairs of bf16.
template <class Element> struct TileProductOf {
    float* out;  // (rows, cols)  = or += by `accumulate`
    int out_step;
    const Element* left;  // (rows, depth), or (depth, rows) for functions with a transposed left operand
    int left_step;
    const Element* right;  // (depth, cols)
    int right_step;
    int rows, cols, depth;
    bool accumulate;
};
using TileProduct = TileProductOf<float>;

template <int rows, bool left_transposed, class Element>
inline void product_in_registers(const TileProductOf<Element>& op, int row, int col) {
    const int row_step = left_transposed ? 1 : op.left_step;
    const int depth_step = left_transposed ? op.left_step : 1;
    const Element* left = op.left + row * row_step;
    const Element* right = op.right + col;
    float* out = op.out + row * op.out_step + col;
    // Unrolled explicitly, so that the sums are registers and not an array in memory.
    Lanes sum[rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = Lanes{};
    for (int k = 0; k < op.depth; k++, left += depth_step, right += op.right_step) {
        const auto right0 = load_lanes(right), right1 = load_lanes(right + kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            sum[r][0] = add_product(sum[r][0], left[r * row_step], right0);
            sum[r][1] = add_product(sum[r][1], left[r * row_step], right1);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        Lanes* out_row = reinterpret_cast<Lanes*>(out + r * op.out_step);
        out_row[0] = op.accumulate ? out_row[0] + sum[r][0] : sum[r][0];
        out_row[1] = op.accumulate ? out_row[1] + sum[r][1] : sum[r][1];
    }
}

// The remaining rows, fewer than kTileRows.
template <int rows, bool left_transposed, class Element>
inline void last_product_in_registers(const TileProductOf<Element>& op, int row, int col) {
    if constexpr (rows > 0) {
        if (op.rows - row == rows)
            product_in_registers<rows, left_transposed>(op, row, col);
        else
            last_product_in_registers<rows - 1, left_transposed>(op, row, col);
    }
}

template <bool left_transposed, class Element> inline void run_tile_product(const TileProductOf<Element>& op) {
    for (int col = 0; col < op.cols; col += kTileCols) {
        int row = 0;
        for (; row + kTileRows <= op.rows; row += kTileRows)
            product_in_registers<kTileRows, left_transposed>(op, row, col);
        last_product_in_registers<kTileRows - 1, left_transposed>(op, row, col);
    }
}

inline void tile_product(const TileProduct& op) { run_tile_product<false>(op); }
inline void tile_product_of_transposed(const TileProduct& op) { run_tile_product<true>(op); }

// out (cols, rows) = transpose of inp (rows, cols); both sizes are multiples of 4.
template <class Element> struct TileTransposeOf {
    Element* out;
    int out_step;
    const Element* inp;
    int inp_step;
    int rows, cols;
};
using TileTranspose = TileTransposeOf<float>;

template <class Element, class Change>
inline void run_tile_transpose(const TileTransposeOf<Element>& op, Change&& change) {
    static_assert(sizeof(Element) == sizeof(float), "four of them are FourLanes");
    for (int row = 0; row < op.rows; row += 4) {
        for (int col = 0; col < op.cols; col += 4) {
            const auto inp_row = [&](int r) {
                return change(*reinterpret_cast<const FourLanes*>(op.inp + (row + r) * op.inp_step + col));
            };
            const auto out_row = [&](int r) -> FourLanes& {
                return *reinterpret_cast<FourLanes*>(op.out + (col + r) * op.out_step + row);
            };
            const FourLanes a = inp_row(0), b = inp_row(1), c = inp_row(2), d = inp_row(3);
            const FourLanes ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            const FourLanes ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            const FourLanes cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            const FourLanes cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            out_row(0) = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
            out_row(1) = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
            out_row(2) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
            out_row(3) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
        }
    }
}

// Moves elements unchanged, because arithmetic would interpret a pair of bf16 as a float.
template <class Element> inline void tile_transpose(const TileTransposeOf<Element>& op) {
    run_tile_transpose(op, [](FourLanes row) { return row; });
}
// out = `factor` times the transpose.
inline void tile_transpose(const TileTranspose& op, float factor) {
    run_tile_transpose(op, [&](FourLanes row) { return row * factor; });
}
