// Softmax, cross-entropy and the gradient with respect to the logits, in place: one block per row.
//
// Thread t processes the packs t, t + 512, ... of the row. The first pass computes maximum and sum online (Milakov,
// Gimelshein, arXiv 1805.02867, algorithm 3), with one rescaling per pack, and stores the packs in shared memory. The
// second pass computes dlogits from shared memory. So 50304 columns of 16 bits are read once and written once: 4 bytes
// per element, two blocks per SM. A row of more than 99 KiB, the shared memory that every GPU since sm_80 offers per
// block, is read a second time through the L2 cache: 132 SMs have 264 such rows in flight, about the size of the cache.
// (hopper/cross_entropy_sm90.cu divides such a row over several blocks.)
// Numerics: float. With L = log2(e) and a row's maximum M, exp(x - M) is 2^(x L - M L) with M L rounded once per row,
// so that the rounding cancels between numerator and sum; the loss undoes it in double.
// Exponentials are ptx::exp2_approx: a probability below 2^-126 is 0.
// A soft cap has a separate instance: cap tanh(x / cap) from one exponential and one division (absolute error below
// cap 2^-21), recomputed in the second pass; the derivative uses the same exponential and does not cancel.
// If ranks divide the vocabulary, vocabulary_sums is the first pass, and cross_entropy is the second after an exchange
// of the sums. Both read the row from memory. Each warp of cross_entropy combines the sums of all parts.
#include "kernels/cuda/arch_kernels.h"
#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/hopper/cross_entropy_sm90.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

namespace ops {

namespace {

// The sums of a row over all parts of the vocabulary.
struct RowSums {
    Softmax softmax;
    float target;  // the target's logit after the soft cap
};

// All lanes of a warp get the same bits. Lane i first combines the parts i of each 32, and then keeps the sum of the
// i-th 32. Sums over lanes, the nearest first and 0 where no part is, have the order of the tree.
__device__ RowSums combine_parts(const CrossEntropy& op, int row) {
    const int lane = int(threadIdx.x) % kWarpSize;
    float max = kLowest, target = 0;
    for (int part = lane; part < op.parts; part += kWarpSize) {
        const VocabularySums& sums = op.sums[size_t(part) * op.rows + row];
        max = fmaxf(max, sums.max);
        target += sums.target;  // all but one are 0
    }
    max = warp_reduce(max, Max());
    float sum_of_32 = 0;
    for (int first = 0; first < op.parts; first += kWarpSize) {
        float sum = 0;
        if (const int part = first + lane; part < op.parts) {
            const VocabularySums& sums = op.sums[size_t(part) * op.rows + row];
            sum = sums.sum * exp_below(sums.max, max * kLog2E);
        }
        sum = lanes_reduce<kWarpSize>(sum, Sum());
        if (lane == first / kWarpSize) sum_of_32 = sum;
    }
    return {{max, lanes_reduce<kWarpSize>(sum_of_32, Sum())}, warp_sum(target)};
}
static_assert(kMaxVocabularyParts <= kWarpSize * kWarpSize);

template <class T, class Cap, bool kAligned, bool kStaged>
__global__ void __launch_bounds__(kRowThreads, 2) cross_entropy_kernel(CrossEntropy op) {
    const Cap cap(op.softcap);
    auto& s = shared_memory<CrossEntropyShared<T, kStaged>>();
    const int row = int(blockIdx.x), target = op.targets[row];
    T* logits = op.logits.as<T>() + size_t(row) * op.padded_vocab;
    if (target < 0) return skip_row<kAligned>(op, row, logits);
    // Must be read before the barriers of block_softmax; after them, another thread overwrites it.
    const float target_logit = cap(to_float(logits[target])).value;
    const Softmax softmax = block_softmax(softmax_of_packs<kAligned, kStaged>(cap, logits, op.vocab, s.staged), s);
    if (op.write_dlogits) write_gradient<kAligned, kStaged>(cap, op, logits, target, softmax, s.staged);
    if (threadIdx.x == 0) op.loss[row] = row_loss(softmax, target_logit);
}

// With the sums of all parts.
template <class T, class Cap, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 2) cross_entropy_part_kernel(CrossEntropy op) {
    const int row = int(blockIdx.x), target = op.targets[row];
    T* logits = op.logits.as<T>() + size_t(row) * op.padded_vocab;
    if (target < 0) return skip_row<kAligned>(op, row, logits);
    const RowSums sums = combine_parts(op, row);
    const int column = index_in_part(target, op.first_token, op.vocab);
    if (op.write_dlogits)
        write_gradient<kAligned, false>(Cap(op.softcap), op, logits, column, sums.softmax,
                                        static_cast<const Pack<T>*>(nullptr));
    if (threadIdx.x == 0) op.loss[row] = row_loss(sums.softmax, sums.target);
}

template <class T, class Cap, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 2) vocabulary_sums_kernel(VocabularySumsOfRows op) {
    const Cap cap(op.softcap);
    auto& s = shared_memory<CrossEntropyShared<T, false>>();
    const int row = int(blockIdx.x), column = index_in_part(op.targets[row], op.first_token, op.vocab);
    const T* logits = op.logits.as<T>() + size_t(row) * op.padded_vocab;
    if (op.vocab == 0) {
        if (threadIdx.x == 0) op.out[row] = {.max = -INFINITY, .sum = 0, .target = 0};
        return;
    }
    const Softmax softmax = block_softmax(softmax_of_packs<kAligned, false>(cap, logits, op.vocab, s.staged), s);
    if (threadIdx.x == 0)
        op.out[row] = {
            .max = softmax.max, .sum = softmax.sum, .target = column >= 0 ? cap(to_float(logits[column])).value : 0.0f};
}

template <class T, class Cap> void launch_sums(const VocabularySumsOfRows& op, Stream stream) {
    launch(has_aligned_rows<T>(op) ? vocabulary_sums_kernel<T, Cap, true> : vocabulary_sums_kernel<T, Cap, false>,
           {"vocabulary_sums", blocks_for(size_t(op.rows), 1), kRowThreads, sizeof(CrossEntropyShared<T, false>)},
           stream, op);
}

template <class T, class Cap> void launch_part(const CrossEntropy& op, Stream stream) {
    launch(has_aligned_rows<T>(op) ? cross_entropy_part_kernel<T, Cap, true> : cross_entropy_part_kernel<T, Cap, false>,
           {"cross_entropy", blocks_for(size_t(op.rows), 1), kRowThreads}, stream, op);
}

template <class T, class Cap> void launch_rows(const CrossEntropy& op, Stream stream) {
    const bool aligned = has_aligned_rows<T>(op);
    const bool staged = op.write_dlogits && packs_of<T>(op.vocab) <= kMaxStagedPacks<T>;
    auto kernel = aligned && staged ? cross_entropy_kernel<T, Cap, true, true>
                  : aligned         ? cross_entropy_kernel<T, Cap, true, false>
                  : staged          ? cross_entropy_kernel<T, Cap, false, true>
                                    : cross_entropy_kernel<T, Cap, false, false>;
    const size_t shared_bytes = staged ? sizeof(CrossEntropyShared<T, true>) : sizeof(CrossEntropyShared<T, false>);
    launch(kernel, {"cross_entropy", blocks_for(size_t(op.rows), 1), kRowThreads, shared_bytes}, stream, op);
}

// ---- the sum of the losses ------------------------------------------------------------------------------------------

constexpr int kSumThreads = 1024;
constexpr int kSumWarps = kSumThreads / kWarpSize;

using LossSumShared = double[kSumWarps];

// One block; thread t adds rows t, t + 1024, ...
__global__ void __launch_bounds__(kSumThreads) loss_sum_kernel(LossSum op) {
    LossSumShared& s_sum = shared_memory<LossSumShared>();
    const float* __restrict__ loss = op.loss;
    double sum = 0;
#pragma unroll 8
    for (int row = int(threadIdx.x); row < op.rows; row += kSumThreads) sum += term_of_losses(loss[row]);
    sum = block_sum(sum, s_sum);
    if (threadIdx.x == 0) *op.out = op.accumulate ? *op.out + sum : sum;
}

}  // namespace

void vocabulary_sums(const VocabularySumsOfRows& op, Stream stream) {
    dispatch("vocabulary_sums", {op.logits}, [&]<class T>() {
        require(op.vocab >= 0 && op.padded_vocab >= op.vocab, "vocabulary_sums: vocab %d, padded_vocab %d", op.vocab,
                op.padded_vocab);
        if (op.rows <= 0) return;
        op.softcap > 0 ? launch_sums<T, SoftCap>(op, stream) : launch_sums<T, NoCap>(op, stream);
    });
}

void cross_entropy(const CrossEntropy& op, Stream stream) {
    dispatch("cross_entropy", {op.logits}, [&]<class T>() {
        require(op.vocab >= (op.sums ? 0 : 1) && op.padded_vocab >= op.vocab,
                "cross_entropy: vocab %d, padded_vocab %d", op.vocab, op.padded_vocab);
        require(!op.sums || (op.parts > 0 && op.parts <= kMaxVocabularyParts), "cross_entropy: %d parts", op.parts);
        if (op.rows <= 0) return;
        if (op.sums) return op.softcap > 0 ? launch_part<T, SoftCap>(op, stream) : launch_part<T, NoCap>(op, stream);
        if (is_used(ArchKernel::cross_entropy_sm90) && cross_entropy_sm90(op, stream)) return;
        op.softcap > 0 ? launch_rows<T, SoftCap>(op, stream) : launch_rows<T, NoCap>(op, stream);
    });
}

void loss_sum(const LossSum& op, Stream stream) {
    launch(loss_sum_kernel, {"loss_sum", dim3(1), kSumThreads, sizeof(LossSumShared)}, stream, op);
}

}  // namespace ops
