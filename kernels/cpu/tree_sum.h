// The sum of several arrays in the order of a binary tree over them: see reduce_scatter_sum() in kernels/comm.h.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/shared/dispatch.h"

inline constexpr size_t kTreeSumBlock = 2048;  // elements; stay in the L1 cache at every level of the tree

// sum (count) = sum of `n` arrays with stride `step`, in elements; count is at most kTreeSumBlock.
template <class In> void tree_sum_block(float* sum, const In* parts, size_t step, int n, size_t count) {
    if (n == 1) {
        for (size_t i = 0; i < count; i++) sum[i] = to_float(parts[i]);
        return;
    }
    const int left = int(std::bit_floor(unsigned(n - 1)));
    float right_sum[kTreeSumBlock];
    tree_sum_block(sum, parts, step, left, count);
    tree_sum_block(right_sum, parts + size_t(left) * step, step, n - left, count);
    for (size_t i = 0; i < count; i++) sum[i] += right_sum[i];
}

// out (count) = the same for any count, rounded to out's type.
inline void tree_sum(View out, ConstView parts, size_t step, int n, size_t count) {
    ops::dispatch("tree_sum", out, parts, [&]<class Out, class In>() {
        for (size_t begin = 0; begin < count; begin += kTreeSumBlock) {
            const size_t size = std::min(kTreeSumBlock, count - begin);
            const In* const from = parts.as<In>() + begin;
            Out* const to = out.as<Out>() + begin;
            if constexpr (std::is_same_v<Out, float>) {
                tree_sum_block(to, from, step, n, size);
            } else {
                float sum[kTreeSumBlock];
                tree_sum_block(sum, from, step, n, size);
                for (size_t i = 0; i < size; i++) to[i] = from_float<Out>(sum[i]);
            }
        }
    });
}
