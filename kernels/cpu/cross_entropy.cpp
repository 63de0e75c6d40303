// Softmax, cross-entropy and gradient, one thread per row. The first pass over the row computes the maximum and the sum
// online (Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3). The second
// pass reads it from the cache and overwrites it with the gradient.
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kBlock = 1024;  // columns; their floats stay in the L1 cache between maximum and sum

struct Softmax {
    float max;
    double sum;  // of exp(x - max)
};

// Updates the running maximum and sum with `count` more numbers.
void add_block(Softmax& softmax, const float* x, int count) {
    float max = softmax.max;
#pragma omp simd reduction(max : max)
    for (int i = 0; i < count; i++) max = x[i] > max ? x[i] : max;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += exp_approx(x[i] - max);
    softmax = {max, softmax.sum * exp_approx(softmax.max - max) + sum};
}

// A logit after the soft cap, and its derivative.
struct Capped {
    float value, slope;
};

// cap tanh(x / cap). Error of the value: below cap 2^-21; of the derivative: below 2^-21, even if tanh is near 1.
struct SoftCap {
    float cap, scale;  // scale = -2 / cap

    Capped operator()(float x) const {
        const float e = exp_approx(scale * __builtin_fabsf(x)), s = 1.0f / (1.0f + e);
        return {__builtin_copysignf(cap * ((1.0f - e) * s), x), 4.0f * (e * s) * s};
    }
};

// No soft cap.
struct NoCap {
    Capped operator()(float x) const { return {x, 1.0f}; }
};

template <class Cap, class T> Softmax softmax_of_row(Cap cap, const T* logits, int vocab) {
    Softmax softmax{std::numeric_limits<float>::lowest(), 0.0};
    for (int begin = 0; begin < vocab; begin += kBlock) {
        const int count = std::min(kBlock, vocab - begin);
        float x[kBlock];
#pragma omp simd
        for (int i = 0; i < count; i++) x[i] = cap(to_float(logits[begin + i])).value;
        add_block(softmax, x, count);
    }
    return softmax;
}

// logits = scale (boost softmax - one_hot(target)) times the soft cap's derivative.
template <class Cap, class T>
void write_gradient(Cap cap, T* logits, int vocab, int target, Softmax softmax, float scale, double boost) {
    const float max = softmax.max;
    const float factor = float(scale * boost / softmax.sum);
    const Capped at_target = cap(to_float(logits[target]));
    const double target_probability = exp_approx(at_target.value - max) / softmax.sum;
#pragma omp simd
    for (int i = 0; i < vocab; i++) {
        const Capped x = cap(to_float(logits[i]));
        logits[i] = from_float<T>(exp_approx(x.value - max) * factor * x.slope);
    }
    logits[target] = from_float<T>(float(scale * (target_probability * boost - 1.0) * at_target.slope));
}

template <class Cap, class T> void cross_entropy_of_rows(const CrossEntropy& op, Cap cap) {
    const float scale = op.grad_scale * (op.loss_scale ? *op.loss_scale : 1.0f);
    parallel_for(op.rows, [&](size_t row) {
        T* logits = op.logits.as<T>() + row * op.padded_vocab;
        const int target = op.targets[row];
        int written = 0;
        op.loss[row] = 0;
        if (target >= 0) {
            const Softmax softmax = softmax_of_row(cap, logits, op.vocab);
            const double log_sum = std::log(softmax.sum);
            op.loss[row] = float(log_sum - (double(cap(to_float(logits[target])).value) - softmax.max));
            // The z-loss multiplies the probability's part of the gradient by this factor.
            const double boost = op.z_loss != 0 ? 1.0 + 2.0 * op.z_loss * (log_sum + softmax.max) : 1.0;
            if (op.write_dlogits) write_gradient(cap, logits, op.vocab, target, softmax, scale, boost);
            written = op.vocab;
        }
        if (op.write_dlogits) std::fill(logits + written, logits + op.padded_vocab, from_float<T>(0.0f));
    });
}

}  // namespace

void cross_entropy(const CrossEntropy& op, Stream) {
    dispatch("cross_entropy", {op.logits}, [&]<class T>() {
        if (op.softcap > 0)
            cross_entropy_of_rows<SoftCap, T>(op, {op.softcap, -2.0f / op.softcap});
        else
            cross_entropy_of_rows<NoCap, T>(op, {});
    });
}

void loss_sum(const LossSum& op, Stream) {
    double sum = 0;
    for (int row = 0; row < op.rows; row++) sum += op.loss[row];
    *op.out = op.accumulate ? *op.out + sum : sum;
}

}  // namespace ops
