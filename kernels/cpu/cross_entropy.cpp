// Softmax, cross-entropy and gradient, one thread per row. The first pass over the row computes the maximum and the sum
// online (Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3). The second
// pass reads it from the cache and overwrites it with the gradient.
#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/tree_sum.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

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

// Calls body(cap) with the soft cap, or with none for 0.
template <class Body> void with_cap(float softcap, Body&& body) {
    if (softcap > 0)
        body(SoftCap{softcap, -2.0f / softcap});
    else
        body(NoCap{});
}

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

// A row's softmax over the whole vocabulary, and the target's logit after the soft cap.
struct RowSums {
    Softmax softmax;
    float target;
};

RowSums combine_parts(const CrossEntropy& op, size_t row) {
    auto part = [&](int i) { return op.sums[size_t(i) * op.rows + row]; };
    float max = part(0).max, target = 0, terms[kMaxVocabularyParts], sum;
    for (int i = 0; i < op.parts; i++) {
        max = std::max(max, part(i).max);
        target += part(i).target;  // all but one are 0
    }
    for (int i = 0; i < op.parts; i++) terms[i] = part(i).sum * exp_approx(part(i).max - max);
    tree_sum_block(&sum, terms, 1, op.parts, 1);
    return {{max, sum}, target};
}

// logits = scale (boost softmax - one_hot(target)) times the soft cap's derivative. A target of -1 is in another part.
template <class Cap, class T>
void write_gradient(Cap cap, T* logits, int vocab, int target, Softmax softmax, float scale, double boost) {
    const float max = softmax.max;
    const float factor = float(scale * boost / softmax.sum);
    const Capped at_target = target >= 0 ? cap(to_float(logits[target])) : Capped{};
    const double target_probability = exp_approx(at_target.value - max) / softmax.sum;
#pragma omp simd
    for (int i = 0; i < vocab; i++) {
        const Capped x = cap(to_float(logits[i]));
        logits[i] = from_float<T>(exp_approx(x.value - max) * factor * x.slope);
    }
    if (target < 0) return;
    logits[target] = from_float<T>(float(scale * (target_probability * boost - 1.0) * at_target.slope));
}

template <class T, class Cap> void cross_entropy_of_rows(const CrossEntropy& op, Cap cap) {
    const float scale = op.grad_scale * (op.loss_scale ? *op.loss_scale : 1.0f);
    parallel_for(op.rows, [&](size_t row) {
        T* logits = op.logits.as<T>() + row * op.padded_vocab;
        const int target = op.targets[row];
        int written = 0;
        op.loss[row] = 0;
        if (target >= 0) {
            const auto [softmax, target_logit] =
                op.sums ? combine_parts(op, row)
                        : RowSums{softmax_of_row(cap, logits, op.vocab), cap(to_float(logits[target])).value};
            const double log_sum = std::log(softmax.sum);
            op.loss[row] = float(log_sum - (double(target_logit) - softmax.max));
            // The z-loss multiplies the probability's part of the gradient by this factor.
            const double boost = op.z_loss != 0 ? 1.0 + 2.0 * op.z_loss * (log_sum + softmax.max) : 1.0;
            const int column = index_in_part(target, op.first_token, op.vocab);
            if (op.write_dlogits) write_gradient(cap, logits, op.vocab, column, softmax, scale, boost);
            written = op.vocab;
        }
        if (op.write_dlogits) std::fill(logits + written, logits + op.padded_vocab, from_float<T>(0.0f));
    });
}

template <class T, class Cap> void vocabulary_sums_of_rows(const VocabularySumsOfRows& op, Cap cap) {
    parallel_for(op.rows, [&](size_t row) {
        const T* logits = op.logits.as<T>() + row * op.padded_vocab;
        const Softmax softmax = softmax_of_row(cap, logits, op.vocab);
        const int column = index_in_part(op.targets[row], op.first_token, op.vocab);
        op.out[row] = {.max = op.vocab > 0 ? softmax.max : -std::numeric_limits<float>::infinity(),
                       .sum = float(softmax.sum),
                       .target = column >= 0 ? cap(to_float(logits[column])).value : 0};
    });
}

}  // namespace

void vocabulary_sums(const VocabularySumsOfRows& op, Stream) {
    dispatch("vocabulary_sums", {op.logits},
             [&]<class T>() { with_cap(op.softcap, [&](auto cap) { vocabulary_sums_of_rows<T>(op, cap); }); });
}

void cross_entropy(const CrossEntropy& op, Stream) {
    dispatch("cross_entropy", {op.logits}, [&]<class T>() {
        require(!op.sums || (op.parts > 0 && op.parts <= kMaxVocabularyParts), "cross_entropy: %d parts", op.parts);
        with_cap(op.softcap, [&](auto cap) { cross_entropy_of_rows<T>(op, cap); });
    });
}

void loss_sum(const LossSum& op, Stream) {
    double sum = 0;
    for (int row = 0; row < op.rows; row++) sum += term_of_losses(op.loss[row]);
    *op.out = op.accumulate ? *op.out + sum : sum;
}

}  // namespace ops
