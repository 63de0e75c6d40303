// Sums one array per rank in the order of a binary tree. A thread adds one pack and reads 4 bytes per element and part.
// Partial sums stay in registers like the digits of a binary counter: after i parts, there is a sum of 2^k parts for
// each binary digit k of i that is 1.
#include "kernels/cuda/tree_sum.h"
#include "kernels/cuda/vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kSize = kPackSize<float>;  // elements per thread
constexpr int kDigits = 13;
static_assert(kMaxTreeParts < 1 << kDigits);

using Values = Floats<float, kSize>;

// Unrolled over the digits, so that all indices of `waiting` are constants and it stays in registers.
template <bool kAligned> __global__ void __launch_bounds__(kThreads) tree_sum_kernel(TreeSum op) {
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kSize;
    if (i >= op.count) return;
    const int available = int(min(op.count - i, size_t(kSize)));
    Values waiting[kDigits];
    for (int part = 0; part < op.parts; part++) {
        const float* from = part == op.own_part ? op.own : op.others + size_t(part) * op.count;
        Values sum = unpack(load_pack<kAligned, float, kSize>(from + i, available));
#pragma unroll
        for (int digit = 0; digit < kDigits; digit++) {
            if (!(part >> digit & 1)) {
                waiting[digit] = sum;
                break;
            }
            sum += waiting[digit];
        }
    }
    Values sum{};
    bool is_first = true;
#pragma unroll
    for (int digit = 0; digit < kDigits; digit++) {
        if (!(op.parts >> digit & 1)) continue;
        if (is_first)
            sum = waiting[digit];
        else
            sum += waiting[digit];
        is_first = false;
    }
    store_pack<kAligned>(op.out + i, pack_floats(sum), available);
}

}  // namespace

void tree_sum(const TreeSum& op, Stream stream) {
    require(op.parts >= 1 && op.parts <= kMaxTreeParts, "tree_sum: %d parts; at most %d", op.parts, kMaxTreeParts);
    if (op.count == 0) return;
    // Aligned access would move a partial pack at the end of the array as a whole pack.
    const bool aligned = are_aligned(16, {op.out, op.own, op.others}) && op.count % kSize == 0;
    launch(aligned ? tree_sum_kernel<true> : tree_sum_kernel<false>,
           {"tree_sum", blocks_for(op.count, size_t(kThreads) * kSize), kThreads}, stream, op);
}
