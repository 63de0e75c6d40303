// The sum of comm_nccl.cu's deterministic reduce-scatter, with the same bits as on CPU ranks.
#pragma once

#include "kernels/device.h"

inline constexpr int kMostTreeParts = 4096;

// out (count) = the sum of `parts` arrays in the order of kernels/comm.h's reduce_scatter_sum(). Number `own_part` is
// `own` and may be `out`; the others stand in `others`, each at its number times count.
struct TreeSum {
    float* out;           // (count)  =
    const float* own;     // (count)
    const float* others;  // (parts * count), of which number own_part is not read
    int own_part, parts;  // at most kMostTreeParts
    size_t count;
};
void tree_sum(const TreeSum& op, Stream stream);
