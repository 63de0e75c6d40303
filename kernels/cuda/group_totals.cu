// A block computes 32 sums, one per lane. Warp w adds groups w, w + 32, ..., then warp 0 adds the warps.
#include "kernels/cuda/group_totals.h"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace {

constexpr int kWarps = 32;

using GroupTotalsShared = float[kWarps][kWarpSize];

__global__ void __launch_bounds__(kWarps* kWarpSize) group_totals_kernel(GroupTotals op) {
    GroupTotalsShared& s_part = shared_memory<GroupTotalsShared>();
    const float* __restrict__ groups = static_cast<const float*>(op.groups);
    const int lane = int(threadIdx.x) % kWarpSize, warp = int(threadIdx.x) / kWarpSize;
    const int column = (op.first ? 0 : op.columns) + int(blockIdx.x) * kWarpSize + lane;
    const int end = op.second ? 2 * op.columns : op.columns;
    float sum = 0;
    if (column < end)
        for (int group = warp; group < op.n_groups; group += kWarps)
            sum += groups[size_t(group) * 2 * op.columns + column];
    s_part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= end) return;
    float total = 0;
    for (int w = 0; w < kWarps; w++) total += s_part[w][lane];
    float& out = column < op.columns ? op.first[column] : op.second[column - op.columns];
    out = op.accumulate ? out + total : total;
}

}  // namespace

void group_totals(const char* name, const GroupTotals& op, Stream stream) {
    const size_t sums = (size_t(bool(op.first)) + size_t(bool(op.second))) * size_t(op.columns);
    if (sums == 0) return;
    launch(group_totals_kernel, {name, blocks_for(sums, kWarpSize), kWarps * kWarpSize, sizeof(GroupTotalsShared)},
           stream, op);
}
