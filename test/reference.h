// The specification in code: every op of kernels/ops.h as a textbook loop over host memory.
//
// ref::x takes the struct that ops::x takes. All arithmetic is double; a value is rounded only where ops.h says that it
// is stored, to the type in which it is stored. The storage type may also be double, which rounds nothing: then an
// output is the exact result as far as anybody else is concerned, and finite differences are clean. `scratch` is not
// used.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

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

// Stores `value`, or adds it to what stands there.
template <class T> void put(T& place, double value, bool accumulate) {
    place = store<T>(accumulate ? load(place) + value : value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding.

// out[b, t, c] = wte[tokens[b, t], c] + wpe[t, c]
template <class T> void embedding_forward(const ops::EmbeddingForward<T>& op) {
    for (int b = 0; b < op.batch; b++)
        for (int t = 0; t < op.seq_len; t++)
            for (int c = 0; c < op.channels; c++) {
                size_t position = size_t(b) * op.seq_len + t;
                double token_value = load(op.wte[size_t(op.tokens[position]) * op.channels + c]);
                double position_value = load(op.wpe[size_t(t) * op.channels + c]);
                op.out[position * op.channels + c] = store<T>(token_value + position_value);
            }
}

// dwte[v, c] += the sum of dout[b, t, c] over all (b, t) with tokens[b, t] = v;  dwpe[t, c] (+)= sum over b of dout[b,
// t, c]
template <class T> void embedding_backward(const ops::EmbeddingBackward<T>& op) {
    std::vector<double> dwte(size_t(op.vocab) * op.channels), dwpe(size_t(op.n_positions) * op.channels);
    for (int b = 0; b < op.batch; b++)
        for (int t = 0; t < op.seq_len; t++)
            for (int c = 0; c < op.channels; c++) {
                size_t position = size_t(b) * op.seq_len + t;
                double gradient = load(op.dout[position * op.channels + c]);
                dwte[size_t(op.tokens[position]) * op.channels + c] += gradient;
                dwpe[size_t(t) * op.channels + c] += gradient;
            }
    for (size_t i = 0; i < dwte.size(); i++) put(op.dwte[i], dwte[i], true);
    for (size_t i = 0; i < dwpe.size(); i++) put(op.dwpe[i], dwpe[i], op.accumulate);
}

// ---------------------------------------------------------------------------------------------------------------------
// Layer normalisation.

// mean = sum(inp) / cols;  rstd = 1 / sqrt(sum((inp - mean)^2) / cols + eps);  out = (inp - mean) rstd weight + bias
template <class T> void norm_forward(const ops::NormForward<T>& op) {
    for (int row = 0; row < op.rows; row++) {
        const T* inp = op.inp + size_t(row) * op.cols;
        T* out = op.out + size_t(row) * op.cols;
        double sum = 0, squares = 0;
        for (int c = 0; c < op.cols; c++) sum += load(inp[c]);
        double mean = sum / op.cols;
        for (int c = 0; c < op.cols; c++) squares += (load(inp[c]) - mean) * (load(inp[c]) - mean);
        double rstd = 1 / std::sqrt(squares / op.cols + op.eps);
        for (int c = 0; c < op.cols; c++)
            out[c] = store<T>((load(inp[c]) - mean) * rstd * load(op.weight[c]) + load(op.bias[c]));
        op.mean[row] = float(mean);
        op.rstd[row] = float(rstd);
    }
}

// residual = inp + branch;  out = norm(residual as stored)
template <class T> void residual_norm_forward(const ops::ResidualNormForward<T>& op) {
    for (size_t i = 0; i < size_t(op.rows) * op.cols; i++)
        op.residual[i] = store<T>(load(op.inp[i]) + load(op.branch[i]));
    norm_forward(ops::NormForward<T>{.out = op.out,
                                     .mean = op.mean,
                                     .rstd = op.rstd,
                                     .inp = op.residual,
                                     .weight = op.weight,
                                     .bias = op.bias,
                                     .rows = op.rows,
                                     .cols = op.cols,
                                     .eps = op.eps});
}

// With normed = (inp - mean) rstd and dnormed = dout weight, row by row:
//   dinp (+)= rstd (dnormed - average(dnormed) - normed average(dnormed normed))
//   dweight (+)= sum over rows of dout normed;  dbias (+)= sum over rows of dout
template <class T> void norm_backward(const ops::NormBackward<T>& op) {
    std::vector<double> dweight(op.cols), dbias(op.cols);
    for (int row = 0; row < op.rows; row++) {
        const T* inp = op.inp + size_t(row) * op.cols;
        const T* dout = op.dout + size_t(row) * op.cols;
        T* dinp = op.dinp + size_t(row) * op.cols;
        double mean = op.mean[row], rstd = op.rstd[row];
        double average = 0, average_with_normed = 0;
        for (int c = 0; c < op.cols; c++) {
            double normed = (load(inp[c]) - mean) * rstd;
            double dnormed = load(dout[c]) * load(op.weight[c]);
            average += dnormed / op.cols;
            average_with_normed += dnormed * normed / op.cols;
            dweight[c] += load(dout[c]) * normed;
            dbias[c] += load(dout[c]);
        }
        for (int c = 0; c < op.cols; c++) {
            double normed = (load(inp[c]) - mean) * rstd;
            double dnormed = load(dout[c]) * load(op.weight[c]);
            put(dinp[c], rstd * (dnormed - average - normed * average_with_normed), op.accumulate_dinp);
        }
    }
    for (int c = 0; c < op.cols; c++) {
        put(op.dweight[c], dweight[c], op.accumulate);
        put(op.dbias[c], dbias[c], op.accumulate);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products and GELU.

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

// out[i] = gelu(inp[i])
template <class T> void gelu_forward(const ops::GeluForward<T>& op) {
    for (size_t i = 0; i < op.count; i++) op.out[i] = store<T>(gelu(load(op.inp[i])));
}

// out[r, j] = sum over i of inp[r, i] weight[j, i], plus bias[j]; with pre_gelu, that is pre_gelu and out =
// gelu(pre_gelu)
template <class T> void matmul_forward(const ops::MatmulForward<T>& op) {
    for (int row = 0; row < op.rows; row++)
        for (int j = 0; j < op.n; j++) {
            double sum = op.bias ? load(op.bias[j]) : 0;
            for (int i = 0; i < op.k; i++)
                sum += load(op.inp[size_t(row) * op.k + i]) * load(op.weight[size_t(j) * op.k + i]);
            size_t place = size_t(row) * op.n + j;
            op.out[place] = store<T>(sum);
            if (op.pre_gelu) {
                op.pre_gelu[place] = store<T>(sum);
                op.out[place] = store<T>(gelu(load(op.pre_gelu[place])));
            }
        }
}

// dinp[r, i] = sum over j of dout[r, j] weight[j, i]; with pre_gelu, times gelu'(pre_gelu[r, i])
template <class T> void matmul_backward_input(const ops::MatmulBackwardInput<T>& op) {
    std::vector<double> sums(op.k);
    for (int row = 0; row < op.rows; row++) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int j = 0; j < op.n; j++)
            for (int i = 0; i < op.k; i++)
                sums[i] += load(op.dout[size_t(row) * op.n + j]) * load(op.weight[size_t(j) * op.k + i]);
        for (int i = 0; i < op.k; i++) {
            size_t place = size_t(row) * op.k + i;
            double slope = op.pre_gelu ? gelu_slope(load(op.pre_gelu[place])) : 1;
            op.dinp[place] = store<T>(sums[i] * slope);
        }
    }
}

// dweight[j, i] (+)= sum over r of dout[r, j] inp[r, i];  dbias[j] (+)= sum over r of dout[r, j]
template <class T> void matmul_backward_weight(const ops::MatmulBackwardWeight<T>& op) {
    std::vector<double> sums(op.k);
    for (int j = 0; j < op.n; j++) {
        std::fill(sums.begin(), sums.end(), 0.0);
        double bias_sum = 0;
        for (int row = 0; row < op.rows; row++) {
            double gradient = load(op.dout[size_t(row) * op.n + j]);
            bias_sum += gradient;
            for (int i = 0; i < op.k; i++) sums[i] += gradient * load(op.inp[size_t(row) * op.k + i]);
        }
        for (int i = 0; i < op.k; i++) put(op.dweight[size_t(j) * op.k + i], sums[i], op.accumulate);
        if (op.dbias) put(op.dbias[j], bias_sum, op.accumulate);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Causal self-attention. Position t sees the positions j <= t.

// Where the parts of one head lie in qkv, counted in elements.
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

template <class T, class U> double dot(const T* a, const U* b, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += load(a[i]) * load(b[i]);
    return sum;
}

// log(exp(x[0]) + ... + exp(x[count - 1])), with the largest taken out so that nothing overflows.
template <class T> double log_sum_exp(const T* x, int count) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++) largest = std::max(largest, load(x[i]));
    for (int i = 0; i < count; i++) sum += std::exp(load(x[i]) - largest);
    return largest + std::log(sum);
}

// score[j] = scale query[t] . key[j];  lse = log(sum of exp(score));  out[t] = sum over j of exp(score[j] - lse)
// value[j]
template <class T> void attention_forward(const ops::AttentionForward<T>& op) {
    QkvLayout at{op.seq_len, op.n_head, op.n_kv_head, op.head_size};
    std::vector<double> score(op.seq_len), out(op.head_size);
    for (int b = 0; b < op.batch; b++)
        for (int h = 0; h < op.n_head; h++)
            for (int t = 0; t < op.seq_len; t++) {
                for (int j = 0; j <= t; j++)
                    score[j] = op.scale * dot(op.qkv + at.query(b, h, t), op.qkv + at.key(b, h, j), op.head_size);
                double lse = log_sum_exp(score.data(), t + 1);
                std::fill(out.begin(), out.end(), 0.0);
                for (int j = 0; j <= t; j++)
                    for (int d = 0; d < op.head_size; d++)
                        out[d] += std::exp(score[j] - lse) * load(op.qkv[at.value(b, h, j) + d]);
                for (int d = 0; d < op.head_size; d++) op.out[at.out(b, h, t) + d] = store<T>(out[d]);
                op.lse[at.lse(b, h, t)] = float(lse);
            }
}

// With p = exp(score - lse), for every query t and key j <= t of a head:
//   dvalue[j] += p dout[t];  dp = dout[t] . value[j];  dscore = p (dp - dout[t] . out[t])
//   dquery[t] += scale dscore key[j];  dkey[j] += scale dscore query[t]
template <class T> void attention_backward(const ops::AttentionBackward<T>& op) {
    QkvLayout at{op.seq_len, op.n_head, op.n_kv_head, op.head_size};
    std::vector<double> dqkv(at.row(op.batch, 0));
    for (int b = 0; b < op.batch; b++)
        for (int h = 0; h < op.n_head; h++)
            for (int t = 0; t < op.seq_len; t++) {
                const T* query = op.qkv + at.query(b, h, t);
                const T* dout = op.dout + at.out(b, h, t);
                double dout_out = dot(dout, op.out + at.out(b, h, t), op.head_size);
                for (int j = 0; j <= t; j++) {
                    const T* key = op.qkv + at.key(b, h, j);
                    double score = op.scale * dot(query, key, op.head_size);
                    double p = std::exp(score - op.lse[at.lse(b, h, t)]);
                    double dp = dot(dout, op.qkv + at.value(b, h, j), op.head_size);
                    double dscore = p * (dp - dout_out);
                    for (int d = 0; d < op.head_size; d++) {
                        dqkv[at.value(b, h, j) + d] += p * load(dout[d]);
                        dqkv[at.query(b, h, t) + d] += op.scale * dscore * load(key[d]);
                        dqkv[at.key(b, h, j) + d] += op.scale * dscore * load(query[d]);
                    }
                }
            }
    for (size_t i = 0; i < dqkv.size(); i++) op.dqkv[i] = store<T>(dqkv[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Loss.

// The cross-entropy of one row, in nats: log_sum_exp(logits) - logits[target]
template <class T> double token_loss(const T* logits, int vocab, int target) {
    return log_sum_exp(logits, vocab) - load(logits[target]);
}

// loss = token_loss(logits, target);  dlogits[v] = (exp(logits[v] - log_sum_exp(logits)) - (v is target)) grad_scale
// loss_scale
template <class T> void cross_entropy(const ops::CrossEntropy<T>& op) {
    double gradient_scale = double(op.grad_scale) * (op.loss_scale ? *op.loss_scale : 1);
    for (int row = 0; row < op.rows; row++) {
        T* logits = op.logits + size_t(row) * op.padded_vocab;
        int target = op.targets[row];
        op.loss[row] = target < 0 ? 0 : float(token_loss(logits, op.vocab, target));
        if (!op.write_dlogits) continue;
        double lse = log_sum_exp(logits, op.vocab);
        for (int v = 0; v < op.vocab; v++) {
            double gradient = (std::exp(load(logits[v]) - lse) - (v == target)) * gradient_scale;
            logits[v] = store<T>(target < 0 ? 0 : gradient);
        }
        for (int v = op.vocab; v < op.padded_vocab; v++) logits[v] = store<T>(0);
    }
}

void loss_sum(const ops::LossSum& op);

// ---------------------------------------------------------------------------------------------------------------------
// The update.

void squared_sums(const ops::SquaredSums& op);
void grad_norm_finish(const ops::GradNormFinish& op);

// g = grad scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
// master = master - lr weight_decay master - lr (m / correction1) / (sqrt(v / correction2) + eps)
template <class T> void adamw_update(const ops::AdamwUpdate<T>& op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    double lr = op.scalars->learning_rate;
    for (int i = 0; i < op.n_chunks; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        double decay = chunk.decayed ? op.weight_decay : 0;
        for (size_t e = chunk.begin; e < chunk.begin + chunk.count; e++) {
            double g = double(op.grad[e]) * op.grad_norm->scale;
            double m = double(op.beta1) * op.m[e] + (1 - double(op.beta1)) * g;
            double v = double(op.beta2) * op.v[e] + (1 - double(op.beta2)) * g * g;
            double step = m / op.scalars->bias_correction1 / (std::sqrt(v / op.scalars->bias_correction2) + op.eps);
            op.master[e] = float(op.master[e] - lr * decay * op.master[e] - lr * step);
            op.m[e] = float(m);
            op.v[e] = float(v);
            if (op.param) op.param[e] = store<T>(op.master[e]);
        }
    }
}

// m = momentum m + grad scale;  master = master - lr (m + weight_decay master)
template <class T> void sgd_update(const ops::SgdUpdate<T>& op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    for (int i = 0; i < op.n_chunks; i++) {
        const ops::Chunk& chunk = op.chunks[i];
        double decay = chunk.decayed ? op.weight_decay : 0;
        for (size_t e = chunk.begin; e < chunk.begin + chunk.count; e++) {
            double m = double(op.momentum) * op.m[e] + double(op.grad[e]) * op.grad_norm->scale;
            op.master[e] = float(op.master[e] - op.scalars->learning_rate * (m + decay * op.master[e]));
            op.m[e] = float(m);
            if (op.param) op.param[e] = store<T>(op.master[e]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Filling and casting.

void normal_fill(const ops::NormalFill& op);
void fill(const ops::Fill& op);
void add(const ops::Add& op);

// out[i] = inp[i], rounded to nearest even
template <class T> void cast(const ops::Cast<T>& op) {
    for (size_t i = 0; i < op.count; i++) op.out[i] = store<T>(op.inp[i]);
}

}  // namespace ref
