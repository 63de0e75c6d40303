// Parts of the cross-entropy kernels: softmax and gradient of a row, or of a range of its columns, by one block.
#pragma once

#include <cmath>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"

namespace ops {

inline constexpr int kRowThreads = 512;
inline constexpr int kRowWarps = kRowThreads / kWarpSize;
inline constexpr int kPacksInFlight = 4;  // packs in flight per thread
inline constexpr double kLn2 = 0.69314718055994531;
inline constexpr float kLowest = -3.40282347e38f;  // initial maximum: with an infinity, inf - inf would be NaN

// The packs of a row that fit into a block's shared memory on every GPU since sm_80, in addition to the partial
// results.
template <class T> inline constexpr int kMaxStagedPacks = (99 * 1024 - 2 * kRowWarps * 4) / int(sizeof(Pack<T>));

template <class T, bool kStaged> struct CrossEntropyShared {
    float max[kRowWarps], sum[kRowWarps];
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
__device__ inline float exp_below(float x, float scaled_max) { return ptx::exp2_approx(fmaf(x, kLog2E, -scaled_max)); }

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
__device__ inline bool owns_pack(int pack) { return pack % kRowThreads == int(threadIdx.x); }

// Computes one thread's part of a row. With kStaged, also stores its packs in `staged`. The last pack, if it has fewer
// than kPackSize columns, is loaded first and added last, so that the loop needs no bounds.
template <bool kAligned, bool kStaged, class Cap, class T>
__device__ Softmax softmax_of_packs(Cap cap, const T* logits, int vocab, Pack<T>* staged) {
    Softmax softmax{kLowest, 0};
    const int whole = vocab / kPackSize<T>, rest = vocab % kPackSize<T>;
    const bool has_rest = rest > 0 && owns_pack(whole);
    Pack<T> last{};
    if (has_rest) last = load_pack<kAligned>(logits + whole * kPackSize<T>, rest);
    for (int first = int(threadIdx.x); first < whole; first += kPacksInFlight * kRowThreads) {
        Pack<T> pack[kPacksInFlight];
#pragma unroll
        for (int k = 0; k < kPacksInFlight; k++)
            if (const int p = first + k * kRowThreads; p < whole)
                pack[k] = load_pack<kAligned>(logits + p * kPackSize<T>);
#pragma unroll
        for (int k = 0; k < kPacksInFlight; k++) {
            const int p = first + k * kRowThreads;
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

template <bool kAligned, class T> __device__ void zero_packs(T* logits, int first_pack, int columns) {
    const Pack<T> zeros{};
    for (int p = first_pack; p < packs_of<T>(columns); p += kRowThreads)
        store_pack<kAligned>(logits + p * kPackSize<T>, zeros, columns - p * kPackSize<T>);
}

// The natural logarithm of the sum of exp(x). Undoes the rounding of scaled_max.
__device__ inline double log_sum_exp(Softmax softmax) {
    return log(double(softmax.sum)) + double(softmax.max * kLog2E) * kLn2;
}

__device__ inline float row_loss(Softmax softmax, float target_logit) {
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
    for (; p < whole; p += kRowThreads) {
        T* const at = logits + p * kPackSize<T>;
        store_pack<kAligned>(at, gradient_of_pack<true>(cap, row, kStaged ? staged[p] : load_pack<kAligned>(at)));
    }
    if (rest > 0 && p == whole) {
        T* const at = logits + p * kPackSize<T>;
        const Pack<T> last = kStaged ? staged[p] : load_pack<kAligned>(at, rest);
        store_pack<kAligned>(at, gradient_of_pack<false>(cap, row, last, rest), op.padded_vocab - p * kPackSize<T>);
        p += kRowThreads;
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

template <class T, class Op> bool has_aligned_rows(const Op& op) {
    return op.padded_vocab % kPackSize<T> == 0 && are_aligned(16, {op.logits});
}

}  // namespace ops
