// The sum of several arrays in the order of a binary tree over them: see reduce_scatter_sum() in kernels/comm.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

inline constexpr size_t kTreeSumBlock = 2048;  // elements; stay in the L1 cache at every level of the tree

// out (count) = sum of `n` arrays with stride `step`, in elements; count is at most kTreeSumBlock.
inline void tree_sum_block(float* out, const float* parts, size_t step, int n, size_t count) {
    if (n == 1) {
        std::copy_n(parts, count, out);
        return;
    }
    const int left = int(std::bit_floor(unsigned(n - 1)));
    float right_sum[kTreeSumBlock];
    tree_sum_block(out, parts, step, left, count);
    tree_sum_block(right_sum, parts + size_t(left) * step, step, n - left, count);
    for (size_t i = 0; i < count; i++) out[i] += right_sum[i];
}

// The same for any count.
inline void tree_sum(float* out, const float* parts, size_t step, int n, size_t count) {
    for (size_t i = 0; i < count; i += kTreeSumBlock)
        tree_sum_block(out + i, parts + i, step, n, std::min(kTreeSumBlock, count - i));
}
