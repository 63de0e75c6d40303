// The sum in comm_nccl.cu's deterministic reduce-scatter. Gives the same bits as CPU ranks.
#pragma once

#include "kernels/device.h"

inline constexpr int kMaxTreeParts = 4096;

// out (count) = sum of `parts` arrays in the order of reduce_scatter_sum() in kernels/comm.h. Part own_part is `own`,
// which may be `out`; part i of the other parts is at others + i * count.
struct TreeSum {
    float* out;           // (count)  =
    const float* own;     // (count)
    const float* others;  // (parts * count); part own_part is not read
    int own_part, parts;  // at most kMaxTreeParts
    size_t count;
};
void tree_sum(const TreeSum& op, Stream stream);
