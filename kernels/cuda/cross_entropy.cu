// Softmax, cross-entropy and the gradient with respect to the logits, in place: one block per row.
//
// Thread t processes the packs t, t + 512, ... of the row. The first pass computes maximum and sum online (Milakov,
// Gimelshein, arXiv 1805.02867, algorithm 3), with one rescaling per pack, and stores the packs in shared memory. The
// second pass computes dlogits from shared memory. So 50304 columns of 16 bits are read once and written once: 4 bytes
// per element, two blocks per SM. A row of more than 99 KiB, the shared memory that every GPU since sm_80 offers per
// block, is read a second time through the L2 cache: 132 SMs have 264 such rows in flight, about the size of the cache.
// Numerics: float. With L = log2(e) and a row's maximum M, exp(x - M) is 2^(x L - M L) with M L rounded once per row,
// so that the rounding cancels between numerator and sum; the loss undoes it in double.
// Exponentials are ptx::exp2_approx: a probability below 2^-126 is 0.
// A soft cap has a separate instance: cap tanh(x / cap) from one exponential and one division (absolute error below
// cap 2^-21), recomputed in the second pass; the derivative uses the same exponential and does not cancel.
// If ranks divide the vocabulary, vocabulary_sums is the first pass, and cross_entropy is the second after an exchange
// of the sums. Both read the row from memory. Each warp of cross_entropy combines the sums of all parts.
#include <cmath>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

namespace ops {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBatch = 4;  // packs in flight per thread
constexpr double kLn2 = 0.69314718055994531;
constexpr float kLowest = -3.40282347e38f;  // initial maximum: with an infinity, inf - inf would be NaN

// The packs that fit into a block's shared memory on every GPU since sm_80, in addition to the partial results.
template <class T> inline constexpr int kMaxStagedPacks = (99 * 1024 - 2 * kWarps * 4) / int(sizeof(Pack<T>));

template <class T, bool kStaged> struct CrossEntropyShared {
    float max[kWarps], sum[kWarps];
    Pack<T> staged[kStaged ? kMaxStagedPacks<T> : 1];
};

// The number of packs for `columns` columns.
template <class T> __host__ __device__ constexpr int packs_of(int columns) {
    return (columns + kPackSize<T> - 1) / kPackSize<T>;
}

// A logit after the soft cap, and its derivative.
struct Capped {
    float value, slope;
};

// cap tanh(x / cap), from e^(-2 |x| / cap).
struct SoftCap {
    float cap, scale;  // scale = -2 log2(e) / cap

    __device__ explicit SoftCap(float softcap) : cap(softcap), scale(-2.0f * kLog2E / softcap) {}
    __device__ Capped operator()(float x) const {
        const float e = ptx::exp2_approx(scale * fabsf(x)), s = __fdividef(1.0f, 1.0f + e);
        return {copysignf(cap * ((1.0f - e) * s), x), 4.0f * (e * s) * s};
    }
};

// No soft cap.
struct NoCap {
    __device__ explicit NoCap(float) {}
    __device__ Capped operator()(float x) const { return {x, 1.0f}; }
};

// exp(x - max), where scaled_max is max * kLog2E.
__device__ float exp_below(float x, float scaled_max) { return ptx::exp2_approx(fmaf(x, kLog2E, -scaled_max)); }

struct Softmax {
    float max, sum;  // sum of exp(x - max)
};

// Updates the maximum and sum with a pack, or without kWhole with its first `available` numbers.
template <bool kWhole, class Cap, class T>
__device__ void add_pack(Cap cap, Softmax& softmax, const Pack<T>& pack, int available = kPackSize<T>) {
    auto x = unpack(pack);
    float max = softmax.max;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) {
        x.value[i] = kWhole || i < available ? cap(x.value[i]).value : -INFINITY;
        max = fmaxf(max, x.value[i]);
    }
    const float scaled_max = max * kLog2E;
    float sum = softmax.sum * exp_below(softmax.max, scaled_max);
#pragma unroll
    for (float value : x.value) sum += exp_below(value, scaled_max);
    softmax = {max, sum};
}

// Whether this thread processes the pack.
__device__ bool owns_pack(int pack) { return pack % kThreads == int(threadIdx.x); }

// Computes one thread's part of a row. With kStaged, also stores its packs in `staged`. The last pack, if it has fewer
// than kPackSize columns, is loaded first and added last, so that the loop needs no bounds.
template <bool kAligned, bool kStaged, class Cap, class T>
__device__ Softmax softmax_of_packs(Cap cap, const T* logits, int vocab, Pack<T>* staged) {
    Softmax softmax{kLowest, 0};
    const int whole = vocab / kPackSize<T>, rest = vocab % kPackSize<T>;
    const bool has_rest = rest > 0 && owns_pack(whole);
    Pack<T> last{};
    if (has_rest) last = load_pack<kAligned>(logits + whole * kPackSize<T>, rest);
    for (int first = int(threadIdx.x); first < whole; first += kBatch * kThreads) {
        Pack<T> pack[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++)
            if (const int p = first + k * kThreads; p < whole) pack[k] = load_pack<kAligned>(logits + p * kPackSize<T>);
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int p = first + k * kThreads;
            if (p >= whole) break;
            if (kStaged) staged[p] = pack[k];
            add_pack<true>(cap, softmax, pack[k]);
        }
    }
    if (has_rest) {
        if (kStaged) staged[whole] = last;
        add_pack<false>(cap, softmax, last, rest);
    }
    return softmax;
}

// Combines the threads' parts into the softmax of the row.
template <class Shared> __device__ Softmax block_softmax(Softmax part, Shared& s) {
    const float max = block_reduce(part.max, s.max, Max());
    return {max, block_sum(part.sum * exp_below(part.max, max * kLog2E), s.sum)};
}

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

template <bool kAligned, class T> __device__ void zero_packs(T* logits, int first_pack, int columns) {
    const Pack<T> zeros{};
    for (int p = first_pack; p < packs_of<T>(columns); p += kThreads)
        store_pack<kAligned>(logits + p * kPackSize<T>, zeros, columns - p * kPackSize<T>);
}

// The natural logarithm of the sum of exp(x). Undoes the rounding of scaled_max.
__device__ double log_sum_exp(Softmax softmax) {
    return log(double(softmax.sum)) + double(softmax.max * kLog2E) * kLn2;
}

__device__ float row_loss(Softmax softmax, float target_logit) {
    return float(log(double(softmax.sum)) + (double(softmax.max * kLog2E) * kLn2 - double(target_logit)));
}

// The factors of a row's gradient.
struct RowGradient {
    float scaled_max, factor;
};

// The gradient of a pack's columns without the target's part; without kWhole, 0 from column `available` on.
template <bool kWhole, class Cap, class T>
__device__ Pack<T> gradient_of_pack(Cap cap, RowGradient row, const Pack<T>& logits, int available = kPackSize<T>) {
    auto x = unpack(logits);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) {
        const auto [value, slope] = cap(x.value[i]);
        const float gradient = exp_below(value, row.scaled_max) * row.factor * slope;
        x.value[i] = kWhole || i < available ? gradient : 0.0f;
    }
    return pack_floats(x);
}

// logits = scale (boost softmax - one_hot(target)) times the soft cap's derivative; 0 in the padding. The boost is 1,
// or 1 + 2 z_loss lse with a z-loss. A target of -1 is in another part. A thread reads only elements that it overwrites
// afterwards. The thread that has the target's pack corrects the target's element at the end.
template <bool kAligned, bool kStaged, class Cap, class T>
__device__ void write_gradient(Cap cap, const CrossEntropy& op, T* logits, int target, Softmax softmax,
                               const Pack<T>* staged) {
    const float scale = op.grad_scale * (op.loss_scale ? *op.loss_scale : 1.0f);
    const double boost = op.z_loss != 0 ? 1.0 + 2.0 * double(op.z_loss) * log_sum_exp(softmax) : 1.0;
    const RowGradient row{softmax.max * kLog2E, scale * float(boost) / softmax.sum};
    const bool has_target = target >= 0 && owns_pack(target / kPackSize<T>);
    const Capped at_target = cap(has_target ? to_float(logits[target]) : 0.0f);
    const int whole = op.vocab / kPackSize<T>, rest = op.vocab % kPackSize<T>;
    int p = int(threadIdx.x);
    for (; p < whole; p += kThreads) {
        T* const at = logits + p * kPackSize<T>;
        store_pack<kAligned>(at, gradient_of_pack<true>(cap, row, kStaged ? staged[p] : load_pack<kAligned>(at)));
    }
    if (rest > 0 && p == whole) {
        T* const at = logits + p * kPackSize<T>;
        const Pack<T> last = kStaged ? staged[p] : load_pack<kAligned>(at, rest);
        store_pack<kAligned>(at, gradient_of_pack<false>(cap, row, last, rest), op.padded_vocab - p * kPackSize<T>);
        p += kThreads;
    }
    zero_packs<kAligned>(logits, p, op.padded_vocab);
    if (has_target) {  // in double: probability - 1 cancels if the probability is near 1
        const double e = exp_below(at_target.value, row.scaled_max), probability = e / double(softmax.sum);
        logits[target] = from_float<T>(float(double(scale) * (probability * boost - 1.0) * double(at_target.slope)));
    }
}

// The results of a row without a target.
template <bool kAligned, class T> __device__ void skip_row(const CrossEntropy& op, int row, T* logits) {
    if (threadIdx.x == 0) op.loss[row] = 0;
    if (op.write_dlogits) zero_packs<kAligned>(logits, int(threadIdx.x), op.padded_vocab);
}

template <class T, class Cap, bool kAligned, bool kStaged>
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_kernel(CrossEntropy op) {
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
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_part_kernel(CrossEntropy op) {
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
__global__ void __launch_bounds__(kThreads, 2) vocabulary_sums_kernel(VocabularySumsOfRows op) {
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

template <class T, class Op> bool has_aligned_rows(const Op& op) {
    return op.padded_vocab % kPackSize<T> == 0 && are_aligned(16, {op.logits});
}

template <class T, class Cap> void launch_sums(const VocabularySumsOfRows& op, Stream stream) {
    launch(has_aligned_rows<T>(op) ? vocabulary_sums_kernel<T, Cap, true> : vocabulary_sums_kernel<T, Cap, false>,
           {"vocabulary_sums", blocks_for(size_t(op.rows), 1), kThreads, sizeof(CrossEntropyShared<T, false>)}, stream,
           op);
}

template <class T, class Cap> void launch_part(const CrossEntropy& op, Stream stream) {
    launch(has_aligned_rows<T>(op) ? cross_entropy_part_kernel<T, Cap, true> : cross_entropy_part_kernel<T, Cap, false>,
           {"cross_entropy", blocks_for(size_t(op.rows), 1), kThreads}, stream, op);
}

template <class T, class Cap> void launch_rows(const CrossEntropy& op, Stream stream) {
    const bool aligned = has_aligned_rows<T>(op);
    const bool staged = op.write_dlogits && packs_of<T>(op.vocab) <= kMaxStagedPacks<T>;
    auto kernel = aligned && staged ? cross_entropy_kernel<T, Cap, true, true>
                  : aligned         ? cross_entropy_kernel<T, Cap, true, false>
                  : staged          ? cross_entropy_kernel<T, Cap, false, true>
                                    : cross_entropy_kernel<T, Cap, false, false>;
    const size_t shared_bytes = staged ? sizeof(CrossEntropyShared<T, true>) : sizeof(CrossEntropyShared<T, false>);
    launch(kernel, {"cross_entropy", blocks_for(size_t(op.rows), 1), kThreads, shared_bytes}, stream, op);
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
        op.softcap > 0 ? launch_rows<T, SoftCap>(op, stream) : launch_rows<T, NoCap>(op, stream);
    });
}

void loss_sum(const LossSum& op, Stream stream) {
    launch(loss_sum_kernel, {"loss_sum", dim3(1), kSumThreads, sizeof(LossSumShared)}, stream, op);
}

}  // namespace ops
