// Sums over rows that do not depend on the number of threads: one per fixed block of rows, then the blocks in order.
#pragma once

#include <algorithm>
#include <cstddef>

// Few enough blocks that adding their sums is cheap, enough for many threads.
inline size_t rows_per_block(size_t rows) {
    constexpr size_t kMaxBlocks = 128, kMinBlockRows = 16;
    return std::max(kMinBlockRows, (rows + kMaxBlocks - 1) / kMaxBlocks);
}
inline size_t n_blocks(size_t rows) { return (rows + rows_per_block(rows) - 1) / rows_per_block(rows); }

// out (+)= the sums over the blocks of one half of partials (blocks, 2, cols), in the columns [begin, end).
// Does nothing if `out` is null.
inline void sum_blocks(float* out, const float* partials, size_t blocks, int cols, int begin, int end,
                       bool accumulate) {
    if (!out) return;
    if (!accumulate) std::fill(out + begin, out + end, 0.0f);
    for (size_t b = 0; b < blocks; b++) {
        const float* partial = partials + b * 2 * cols;
#pragma omp simd
        for (int c = begin; c < end; c++) out[c] += partial[c];
    }
}
