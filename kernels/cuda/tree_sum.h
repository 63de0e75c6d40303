// The sum in comm_nccl.cu's reduce-scatter, unless NCCL adds. Gives the same bits as CPU ranks.
#pragma once

#include "kernels/device.h"
#include "kernels/tensor.h"

inline constexpr int kMaxTreeParts = 4096;

// out (count) = sum of `parts` arrays in the order of reduce_scatter_sum() in kernels/comm.h. Part own_part is `own`,
// which may be `out` if their types are equal; part i of the other parts is at others + i * count. Each array may be
// fp32, bf16 or fp16; `own` and `others` have the same type. Adds in FP32 and rounds once to out's type.
struct TreeSum {
    View out;             // (count)  =
    ConstView own;        // (count)
    ConstView others;     // (parts * count); part own_part is not read
    int own_part, parts;  // at most kMaxTreeParts
    size_t count;
};
void tree_sum(const TreeSum& op, Stream stream);
