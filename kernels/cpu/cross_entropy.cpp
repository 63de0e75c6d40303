// Softmax, cross-entropy and gradient, one thread per row: the row is read once for the maximum and the sum, which are
// kept online (Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3), and a
// second time, out of the cache, when the gradient overwrites it.
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr int kBlock = 1024;  // columns whose floats stay in the innermost cache between maximum and sum

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

template <class T> Softmax softmax_of_row(const T* logits, int vocab) {
    Softmax softmax{std::numeric_limits<float>::lowest(), 0.0};
    for (int begin = 0; begin < vocab; begin += kBlock) {
        const int count = std::min(kBlock, vocab - begin);
        float x[kBlock];
#pragma omp simd
        for (int i = 0; i < count; i++) x[i] = to_float(logits[begin + i]);
        add_block(softmax, x, count);
    }
    return softmax;
}

// logits = scale (softmax - one_hot(target)).
template <class T> void write_gradient(T* logits, int vocab, int target, Softmax softmax, float scale) {
    const float max = softmax.max;
    const float factor = float(scale / softmax.sum);
    const double target_probability = exp_approx(to_float(logits[target]) - max) / softmax.sum;
#pragma omp simd
    for (int i = 0; i < vocab; i++) logits[i] = from_float<T>(exp_approx(to_float(logits[i]) - max) * factor);
    logits[target] = from_float<T>(float(scale * (target_probability - 1.0)));
}

}  // namespace

void cross_entropy(const CrossEntropy& op, Stream) {
    dispatch("cross_entropy", {op.logits}, [&]<class T>() {
        const float scale = op.grad_scale * (op.loss_scale ? *op.loss_scale : 1.0f);
        parallel_for(op.rows, [&](size_t row) {
            T* logits = op.logits.as<T>() + row * op.padded_vocab;
            const int target = op.targets[row];
            int written = 0;
            op.loss[row] = 0;
            if (target >= 0) {
                const Softmax softmax = softmax_of_row(logits, op.vocab);
                op.loss[row] = float(std::log(softmax.sum) - (double(to_float(logits[target])) - softmax.max));
                if (op.write_dlogits) write_gradient(logits, op.vocab, target, softmax, scale);
                written = op.vocab;
            }
            if (op.write_dlogits) std::fill(logits + written, logits + op.padded_vocab, from_float<T>(0.0f));
        });
    });
}

void loss_sum(const LossSum& op, Stream) {
    double sum = 0;
    for (int row = 0; row < op.rows; row++) sum += op.loss[row];
    *op.out = op.accumulate ? *op.out + sum : sum;
}

}  // namespace ops
