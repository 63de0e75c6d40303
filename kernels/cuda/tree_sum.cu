// Sums one array per rank in the order of a binary tree. A thread adds four elements of each part. It reads an element
// of every part once and writes the sum once. Partial sums stay in registers like the digits of a binary counter: after
// i parts, there is a sum of 2^k parts for each binary digit k of i that is 1.
#include "kernels/cuda/tree_sum.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace {

constexpr int kThreads = 256;
constexpr int kSize = kPackSize<float>;  // elements per thread
constexpr int kDigits = 13;
static_assert(kMaxTreeParts < 1 << kDigits);

using Values = Floats<float, kSize>;

// Unrolled over the digits, so that all indices of `waiting` are constants and it stays in registers.
template <class Out, class In, bool kAligned> __global__ void __launch_bounds__(kThreads) tree_sum_kernel(TreeSum op) {
    const In *own = op.own.as<In>(), *others = op.others.as<In>();
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kSize;
    if (i >= op.count) return;
    const int available = int(min(op.count - i, size_t(kSize)));
    Values waiting[kDigits];
    for (int part = 0; part < op.parts; part++) {
        const In* from = part == op.own_part ? own : others + size_t(part) * op.count;
        Values sum = unpack(load_pack<kAligned, In, kSize>(from + i, available)).template as<float>();
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
    store_pack<kAligned>(op.out.as<Out>() + i, pack_floats(sum.as<Out>()), available);
}

}  // namespace

void tree_sum(const TreeSum& op, Stream stream) {
    require(op.parts >= 1 && op.parts <= kMaxTreeParts, "tree_sum: %d parts; at most %d", op.parts, kMaxTreeParts);
    if (op.count == 0) return;
    ops::storage_type("tree_sum", {op.own, op.others});
    ops::dispatch("tree_sum", op.out, op.own, [&]<class Out, class In>() {
        // Aligned access would move a partial pack at the end of the array as a whole pack.
        const bool aligned = are_aligned(kSize * sizeof(Out), {op.out}) &&
                             are_aligned(kSize * sizeof(In), {op.own, op.others}) && op.count % kSize == 0;
        launch(aligned ? tree_sum_kernel<Out, In, true> : tree_sum_kernel<Out, In, false>,
               {"tree_sum", blocks_for(op.count, size_t(kThreads) * kSize), kThreads}, stream, op);
    });
}

void ops::sum_terms(const SumTerms& op, Stream stream) {
    tree_sum({.out = op.out, .own = op.terms, .others = op.terms, .own_part = 0, .parts = op.n, .count = op.count},
             stream);
}
