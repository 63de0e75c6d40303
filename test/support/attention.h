// Attention with exact error bounds: shapes, arrays and ops on the device and on the host.
#pragma once

#include <numeric>

#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace attention {

struct Shape {
    int batch, seq_len, n_head, n_kv_head, head_size;
    double sharpness;  // scale is sharpness / sqrt(head_size): 1 is GPT-2's, 16 lets a few keys dominate
    int window = 0;
    float softcap = 0;
    int document = 0;  // length of the documents, which are masked from each other; 0: first_key is null
    double dropout = 0;

    int queries() const { return n_head * head_size; }
    int keys() const { return n_kv_head * head_size; }
    float scale() const { return float(sharpness / std::sqrt(head_size)); }
    ref::QkvLayout layout() const { return {seq_len, n_head, n_kv_head, head_size}; }
    size_t out_count() const { return size_t(batch) * seq_len * n_head * head_size; }
    size_t qkv_count() const { return size_t(batch) * seq_len * (n_head + 2 * n_kv_head) * head_size; }
    size_t lse_count() const { return size_t(batch) * n_head * seq_len; }
    // Every sequence begins in the middle of a different document.
    int first_of_document(int b, int t) const {
        const int skipped = 3 * b % std::max(document, 1);
        return document ? std::max(0, (t + skipped) / document * document - skipped) : 0;
    }
    int first_visible(int b, int t) const { return std::max(first_of_document(b, t), window ? t + 1 - window : 0); }
};

inline std::string describe(const Shape& s) {
    return format(
        "batch %d, seq_len %d, n_head %d, n_kv_head %d, head_size %d, sharpness %g, window %d, softcap %g, "
        "document %d, dropout %g",
        s.batch, s.seq_len, s.n_head, s.n_kv_head, s.head_size, s.sharpness, s.window, double(s.softcap), s.document,
        s.dropout);
}

// The factor that dropout applies to the probability of a query and a key; 1 without dropout.
inline double dropout_factor(const ops::DropoutMask& mask, int b, int head, int query, int key) {
    if (!mask) return 1;
    return mask.is_kept(mask.keys[b], head, query, key) ? mask.factor : 0;
}

// Errors of the scores and probabilities of query t of one head, from the exact qkv.
struct RowError {
    double score;        // largest absolute error of a score
    double lse;          // absolute error of log-sum-exp
    double probability;  // largest relative error of a probability
};

// One score, exact, with its error bounds. The derivative is the soft cap's, at the score before the cap.
struct Score {
    double value, error, derivative = 1, derivative_error = 0;
};

// A score is a scaled float dot product. The tanh of a soft cap does not increase its argument's error, and the
// derivative 1 - tanh^2 changes by twice the tanh's error.
inline Score score_of(const Shape& s, const double* qkv, int b, int h, int t, int j) {
    const double *query = qkv + s.layout().query(b, h, t), *key = qkv + s.layout().key(b, h, j);
    double sizes = 0;
    for (int d = 0; d < s.head_size; d++) sizes += std::abs(query[d] * key[d]);
    const double product = s.scale() * ref::dot(query, key, s.head_size);
    const double error = (summation_error(s.head_size) + 2 * kRoundoff) * s.scale() * sizes;
    if (s.softcap == 0) return {product, error};
    const double tanh = std::tanh(product / s.softcap), derivative = 1 - tanh * tanh;
    const double tanh_error = error / s.softcap + (kFunctionError + 4 * kRoundoff) * std::abs(tanh);
    return {s.softcap * tanh, s.softcap * tanh_error, derivative, 2 * std::abs(tanh) * tanh_error + 2 * kRoundoff};
}

// A probability is exp(score - largest) / sum, or exp(score - lse): both terms of the difference carry the score's
// error, the subtraction rounds relative to its terms, and exp and the sum add their own errors.
inline RowError row_error(const Shape& s, const double* qkv, int b, int h, int t) {
    double score_error = 0, largest = 0;
    std::vector<double> scores;
    for (int j = s.first_visible(b, t); j <= t; j++) {
        const Score score = score_of(s, qkv, b, h, t, j);
        scores.push_back(score.value);
        score_error = std::max(score_error, score.error);
        largest = std::max(largest, std::abs(score.value));
    }
    const double n_keys = double(scores.size());
    double lse = std::abs(ref::log_sum_exp(scores.data(), int(scores.size())));
    double exp_error = kFunctionError + 2 * kRoundoff * (largest + lse);
    double lse_error = score_error + exp_error + summation_error(n_keys) + kFunctionError + kRoundoff * lse;
    return {score_error, lse_error, score_error + lse_error + exp_error};
}

template <class T> struct AttentionArrays {
    Shape s;
    Stored<T> qkv{"qkv", Role::input, random_values(s.qkv_count(), 1)};
    Stored<T> out{"out", Role::output, nans(s.out_count())};
    Array<float> lse{"lse", Role::output, nans(s.lse_count())};
    Array<uint64_t> keys{"keys", Role::input, sample_keys(s.batch)};
    Array<int> first_keys{"first_key", Role::input, first_keys_of(s)};

    static std::vector<int> first_keys_of(const Shape& s) {
        std::vector<int> first;
        for (int b = 0; b < s.batch; b++)
            for (int t = 0; t < s.seq_len; t++) first.push_back(s.first_of_document(b, t));
        return first;
    }
    template <class Side> const int* first_key(Side side) { return s.document ? first_keys.on(side) : nullptr; }
    static std::vector<uint64_t> sample_keys(int batch) {
        std::vector<uint64_t> keys;
        for (int b = 0; b < batch; b++) keys.push_back(ops::dropout_key(3, uint64_t(b)));
        return keys;
    }
    template <class Side> ops::DropoutMask mask(Side side) {
        if (s.dropout == 0) return {};
        return {.keys = keys.on(side), .threshold = ops::dropout_threshold(s.dropout), .place = 4 << 16};
    }
    template <class Side> auto forward_op(Side side) {
        return ops::AttentionForward{.out = out.on(side),
                                     .lse = lse.on(side),
                                     .qkv = qkv.on(side),
                                     .batch = s.batch,
                                     .seq_len = s.seq_len,
                                     .n_head = s.n_head,
                                     .n_kv_head = s.n_kv_head,
                                     .head_size = s.head_size,
                                     .scale = s.scale(),
                                     .window = s.window,
                                     .softcap = s.softcap,
                                     .first_key = first_key(side),
                                     .dropout = mask(side)};
    }
};

// The rounding of a probability to T before a tensor core multiplies it.
template <class T> double probability_rounding(double probability) { return stored_error<T>(probability); }

// Bounds of out (batch, seq_len, n_head, head_size) and lse, arithmetic errors only.
template <class T>
std::vector<double> out_bounds(const Shape& s, const double* qkv, const ops::DropoutMask& mask = {}) {
    std::vector<double> bounds(s.out_count());
    ref::QkvLayout at = s.layout();
    for (int b = 0; b < s.batch; b++)
        for (int h = 0; h < s.n_head; h++)
            for (int t = 0; t < s.seq_len; t++) {
                const int first = s.first_visible(b, t);
                double relative = row_error(s, qkv, b, h, t).probability + summation_error(t + 1 - first);
                std::vector<double> scores;
                for (int j = first; j <= t; j++) scores.push_back(score_of(s, qkv, b, h, t, j).value);
                double lse = ref::log_sum_exp(scores.data(), int(scores.size()));
                for (int j = first; j <= t; j++) {
                    double p = std::exp(scores[size_t(j - first)] - lse);
                    double p_error = (p * relative + probability_rounding<T>(p)) * dropout_factor(mask, b, h, t, j);
                    for (int d = 0; d < s.head_size; d++)
                        bounds[at.out(b, h, t) + d] += p_error * std::abs(qkv[at.value(b, h, j) + d]);
                }
            }
    return bounds;
}

// The terms of ref::attention_backward with absolute values, each times the relative error of its factors. A
// probability and dscore have p's error and may be rounded to T before a product; dp and dout . out are sums over
// head_size.
template <class T> std::vector<double> dqkv_bounds(const Shape& s, const ops::AttentionBackward& op) {
    const double *qkv = op.qkv.as<double>(), *douts = op.dout.as<double>(), *outs = op.out.as<double>();
    std::vector<double> bounds(s.qkv_count());
    ref::QkvLayout at = s.layout();
    double sums = summation_error(s.seq_len * (s.n_head / s.n_kv_head)) + summation_error(s.head_size) + 6 * kRoundoff;
    for (int b = 0; b < s.batch; b++)
        for (int h = 0; h < s.n_head; h++)
            for (int t = 0; t < s.seq_len; t++) {
                const double *query = qkv + at.query(b, h, t), *dout = douts + at.out(b, h, t);
                double relative = row_error(s, qkv, b, h, t).probability + sums;
                auto absolute_dot = [&](const double* x) {
                    double sum = 0;
                    for (int d = 0; d < s.head_size; d++) sum += std::abs(dout[d] * x[d]);
                    return sum;
                };
                double dout_out = absolute_dot(outs + at.out(b, h, t));
                for (int j = s.first_visible(b, t); j <= t; j++) {
                    const double* key = qkv + at.key(b, h, j);
                    const Score score = score_of(s, qkv, b, h, t, j);
                    double p = std::exp(score.value - op.lse[at.lse(b, h, t)]);
                    double factor = dropout_factor(op.dropout, b, h, t, j);
                    double dcapped = p * (factor * absolute_dot(qkv + at.value(b, h, j)) + dout_out);
                    double dscore = dcapped * score.derivative;
                    double p_error = (p * relative + probability_rounding<T>(p)) * factor;
                    double dscore_error = op.scale * (dscore * relative + dcapped * score.derivative_error +
                                                      probability_rounding<T>(dscore));
                    for (int d = 0; d < s.head_size; d++) {
                        bounds[at.value(b, h, j) + d] += p_error * std::abs(dout[d]);
                        bounds[at.query(b, h, t) + d] += dscore_error * std::abs(key[d]);
                        bounds[at.key(b, h, j) + d] += dscore_error * std::abs(query[d]);
                    }
                }
            }
    return bounds;
}

template <class T> struct BackwardArrays {
    Shape s;
    AttentionArrays<T> forward{s};
    Stored<T> dqkv{"dqkv", Role::output, nans(s.qkv_count())};
    Stored<T> dout{"dout", Role::input, random_values(s.out_count(), 2)};
    Stored<T> out;
    Array<float> lse;

    explicit BackwardArrays(const Shape& shape)
        : s(shape), out("out", Role::input, forward_results()), lse("lse", Role::input, forward.lse.host) {}

    // Runs ref::'s forward op, which stores lse in forward.lse.
    const std::vector<double>& forward_results() {
        ref::attention_forward(forward.forward_op(OnHost()));
        return forward.out.host;
    }

    template <class Side> auto op(Side side) {
        return ops::AttentionBackward{.dqkv = dqkv.on(side),
                                      .scratch = nullptr,
                                      .dout = dout.on(side),
                                      .qkv = forward.qkv.on(side),
                                      .out = out.on(side),
                                      .lse = lse.on(side),
                                      .batch = s.batch,
                                      .seq_len = s.seq_len,
                                      .n_head = s.n_head,
                                      .n_kv_head = s.n_kv_head,
                                      .head_size = s.head_size,
                                      .scale = s.scale(),
                                      .window = s.window,
                                      .softcap = s.softcap,
                                      .first_key = forward.first_key(side),
                                      .dropout = forward.mask(side)};
    }

    void run_on_device() {
        auto device_op = op(OnDevice<T>());
        auto scratch = scratch_of(ops::attention_backward_scratch_bytes(device_op));
        device_op.scratch = scratch.on(OnDevice<T>());
        ops::attention_backward(device_op, Stream());
        scratch.fetch();
    }
};

// Part `part` of each of the sections of each row. A section has the given width.
template <class V>
std::vector<V> part_of(const std::vector<V>& rows, std::initializer_list<int> widths, int part, int parts) {
    const int row_width = std::accumulate(widths.begin(), widths.end(), 0);
    std::vector<V> chosen;
    for (auto row = rows.begin(); row != rows.end(); row += row_width) {
        auto section = row;
        for (int width : widths) {
            chosen.insert(chosen.end(), section + width / parts * part, section + width / parts * (part + 1));
            section += width;
        }
    }
    return chosen;
}

// The same of one sample, for a kv head and its queries. `widths`: of the sections of the sample's rows, for example
// {queries, keys, values} of qkv, or the whole sample of lse.
template <class V>
std::vector<V> of_head(const std::vector<V>& samples, const Shape& s, std::initializer_list<int> widths, int b,
                       int kv_head) {
    const auto each = ptrdiff_t(samples.size()) / s.batch;
    const std::vector<V> sample(samples.begin() + b * each, samples.begin() + (b + 1) * each);
    return part_of(sample, widths, kv_head, s.n_kv_head);
}

}  // namespace attention
