// The executable specification: every op of kernels/ops.h as plain loops over host memory.
//
// ref::x takes the same struct as ops::x. All arithmetic is double; a value is rounded only where ops.h documents that
// it is stored, to its storage type. The storage type may also be double, which does not round: then an output is
// the exact result for all practical purposes, and finite differences are accurate. `scratch` is not used. The formulas
// are in reference*.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/ops.h"

namespace ref {

inline double load(double x) { return x; }
inline double load(float x) { return x; }
inline double load(bf16 x) { return to_float(x); }
inline double load(fp16 x) { return to_float(x); }

template <class T> T store(double x) {
    if constexpr (std::is_same_v<T, double>)
        return x;
    else
        return from_float<T>(float(x));
}

// Calls body(T()), where T is the array's storage type.
template <class Body> void by_storage(ConstView array, Body body) {
    switch (array.dtype) {
        case Dtype::fp32: return body(float());
        case Dtype::bf16: return body(bf16());
        case Dtype::fp16: return body(fp16());
        case Dtype::fp64: return body(double());
        default: fail(Exit::internal, "no reference for %s", name_of(array.dtype));
    }
}

// Stores `value` as element i.
inline void put(View array, size_t i, double value) {
    by_storage(array, [&]<class T>(T) { array.as<T>()[i] = store<T>(value); });
}

// Stores `value`, or adds it to the stored value.
template <class T> void put(T& place, double value, bool accumulate) {
    place = store<T>(accumulate ? load(place) + value : value);
}

// gelu(x) = x (1 + tanh(a)) / 2 with a = sqrt(2 / pi) (x + 0.044715 x^3)
inline double gelu(double x) {
    double a = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    return 0.5 * x * (1 + std::tanh(a));
}

// gelu'(x) = (1 + tanh(a)) / 2 + x (1 - tanh(a)^2) a'(x) / 2
inline double gelu_slope(double x) {
    double a = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    double a_slope = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    double tanh_a = std::tanh(a);
    return 0.5 * (1 + tanh_a) + 0.5 * x * (1 - tanh_a * tanh_a) * a_slope;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

inline double activation(ActivationFunction function, double x) {
    switch (function) {
        case ActivationFunction::none: return x;
        case ActivationFunction::gelu_new: return gelu(x);
        case ActivationFunction::silu: return x * sigmoid(x);
        case ActivationFunction::relu2: return x > 0 ? x * x : 0;
    }
    return NAN;
}

// silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
inline double activation_slope(ActivationFunction function, double x) {
    switch (function) {
        case ActivationFunction::none: return 1;
        case ActivationFunction::gelu_new: return gelu_slope(x);
        case ActivationFunction::silu: return sigmoid(x) * (1 + x * sigmoid(-x));
        case ActivationFunction::relu2: return x > 0 ? 2 * x : 0;
    }
    return NAN;
}

// A type of 8 bits: a sign, an exponent and a fraction.
struct Fp8Format {
    int fraction_bits, bias;
    double largest;
};
Fp8Format fp8_format(Dtype type);
// The magnitude that the lower 7 bits stand for, without regard to special values.
double fp8_magnitude(const Fp8Format& format, int bits);
// The bits of the nearest number, of two the one with an even fraction; of the largest for anything above it.
int nearest_fp8(const Fp8Format& format, double x);

// The offsets of the parts of one head in qkv, in elements.
struct QkvLayout {
    int seq_len, n_head, n_kv_head, head_size;

    size_t row(int b, int t) const { return (size_t(b) * seq_len + t) * (n_head + 2 * n_kv_head) * head_size; }
    int kv_head(int h) const { return h / (n_head / n_kv_head); }
    size_t query(int b, int h, int t) const { return row(b, t) + size_t(h) * head_size; }
    size_t key(int b, int h, int t) const { return row(b, t) + size_t(n_head + kv_head(h)) * head_size; }
    size_t value(int b, int h, int t) const { return row(b, t) + size_t(n_head + n_kv_head + kv_head(h)) * head_size; }
    size_t out(int b, int h, int t) const { return ((size_t(b) * seq_len + t) * n_head + h) * head_size; }
    size_t lse(int b, int h, int t) const { return (size_t(b) * n_head + h) * seq_len + t; }
};

// The first key that query t of a sequence attends to; first_key belongs to the sequence, or is null.
int first_visible_key(int window, const int* first_key, int t);

template <class T, class U> double dot(const T* a, const U* b, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += load(a[i]) * load(b[i]);
    return sum;
}

// log(exp(x[0]) + ... + exp(x[count - 1])), computed relative to the largest x to avoid overflow.
template <class T> double log_sum_exp(const T* x, int count) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++) largest = std::max(largest, load(x[i]));
    for (int i = 0; i < count; i++) sum += std::exp(load(x[i]) - largest);
    return largest + std::log(sum);
}

void embedding_forward(const ops::EmbeddingForward& op);
void embedding_backward(const ops::EmbeddingBackward& op);
void residual_norm_forward(const ops::ResidualNormForward& op);
void norm_backward(const ops::NormBackward& op);
void abs_max(const ops::AbsMax& op);
void quantize(const ops::Quantize& op);  // of finite numbers
void activation_forward(const ops::ActivationForward& op);
void gated_activation_forward(const ops::GatedActivationForward& op);
void gated_activation_backward(const ops::GatedActivationBackward& op);
void matmul_forward(const ops::MatmulForward& op);
void matmul_backward_input(const ops::MatmulBackwardInput& op);
void matmul_backward_weight(const ops::MatmulBackwardWeight& op);
void qk_norm_rope_forward(const ops::QkNormRopeForward& op);
void qk_norm_rope_backward(const ops::QkNormRopeBackward& op);
void attention_forward(const ops::AttentionForward& op);
void attention_backward(const ops::AttentionBackward& op);
void attention_decode(const ops::AttentionDecode& op);
void dropout(const ops::Dropout& op);
void vocabulary_sums(const ops::VocabularySumsOfRows& op);
void cross_entropy(const ops::CrossEntropy& op);
void loss_sum(const ops::LossSum& op);
void squared_sums(const ops::SquaredSums& op);
void grad_norm_finish(const ops::GradNormFinish& op);
void elementwise_update(const ops::ElementwiseUpdate& op);
void trust_sums(const ops::TrustSums& op);
void trust_ratios(const ops::TrustRatios& op);
void factor_sums(const ops::FactorSums& op);
void factor_moments(const ops::FactorMoments& op);
void factored_direction(const ops::FactoredDirection& op);
void momentum_direction(const ops::MomentumDirection& op);
void apply_direction(const ops::ApplyDirection& op);
void frobenius_normalize(const ops::FrobeniusNormalize& op);
void row_normalize(const ops::RowNormalize& op);
void scaled_add(const ops::ScaledAdd& op);
void adam_direction(const ops::AdamDirection& op);
void orthonormalize_rows(const ops::OrthonormalizeRows& op);
void normal_fill(const ops::NormalFill& op);
void fill(const ops::Fill& op);
void add(const ops::Add& op);
void sum_terms(const ops::SumTerms& op);
void cast(const ops::Cast& op);
void cast_columns(const ops::CastColumns& op);

}  // namespace ref
