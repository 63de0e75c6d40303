// attention_forward and attention_backward against ref::.
#include "test/device_array.h"
#include "test/random_values.h"
#include "test/tolerance.h"

namespace {

struct Shape {
    int batch, seq_len, n_head, n_kv_head, head_size;
    double sharpness;  // scale is sharpness / sqrt(head_size): 1 is GPT-2's, 16 makes a few keys dominate

    float scale() const { return float(sharpness / std::sqrt(head_size)); }
    ref::QkvLayout layout() const { return {seq_len, n_head, n_kv_head, head_size}; }
    size_t out_count() const { return size_t(batch) * seq_len * n_head * head_size; }
    size_t qkv_count() const { return size_t(batch) * seq_len * (n_head + 2 * n_kv_head) * head_size; }
    size_t lse_count() const { return size_t(batch) * n_head * seq_len; }
};
constexpr Shape kShapes[] = {{1, 1, 1, 1, 16, 1},    {2, 5, 3, 3, 64, 1},    {1, 33, 4, 2, 80, 16},
                             {2, 64, 2, 1, 128, 1},  {1, 129, 2, 2, 64, 16}, {1, 129, 6, 2, 16, 1},
                             {3, 37, 1, 1, 128, 16}, {1, 200, 4, 2, 64, 1},  {2, 161, 2, 1, 128, 16},
                             {1, 261, 1, 1, 64, 1},  {1, 40, 2, 1, 200, 1},  {1, 70, 3, 1, 9, 1}};

std::string describe(const Shape& s) {
    return format("batch %d, seq_len %d, n_head %d, n_kv_head %d, head_size %d, sharpness %g", s.batch, s.seq_len,
                  s.n_head, s.n_kv_head, s.head_size, s.sharpness);
}

// What dropout multiplies the probability of a query and a key with; 1 without it.
double dropout_factor(const ops::DropoutMask& mask, int b, int head, int query, int key) {
    if (!mask) return 1;
    return mask.is_kept(mask.keys[b], head, query, key) ? mask.factor : 0;
}

// Errors of the scores and probabilities of query t of one head, from the exact qkv.
struct RowError {
    double score;        // largest absolute error of a score
    double lse;          // absolute error of log-sum-exp
    double probability;  // largest relative error of a probability
};

// A score is a float dot product, scaled. A probability is exp(score - largest) / sum, or exp(score - lse): both of its
// terms carry the score's error, the subtraction rounds relative to its terms, exp and the sum add theirs.
RowError row_error(const Shape& s, const double* qkv, int b, int h, int t) {
    double score_error = 0, largest = 0;
    std::vector<double> scores(t + 1);
    for (int j = 0; j <= t; j++) {
        double sizes = 0;
        for (int d = 0; d < s.head_size; d++)
            sizes += std::abs(qkv[s.layout().query(b, h, t) + d] * qkv[s.layout().key(b, h, j) + d]);
        scores[j] = s.scale() * ref::dot(qkv + s.layout().query(b, h, t), qkv + s.layout().key(b, h, j), s.head_size);
        score_error = std::max(score_error, (summation_error(s.head_size) + 2 * kRoundoff) * s.scale() * sizes);
        largest = std::max(largest, std::abs(scores[j]));
    }
    double lse = std::abs(ref::log_sum_exp(scores.data(), t + 1));
    double exp_error = kFunctionError + 2 * kRoundoff * (largest + lse);
    double lse_error = score_error + exp_error + summation_error(t + 1) + kFunctionError + kRoundoff * lse;
    return {score_error, lse_error, score_error + lse_error + exp_error};
}

template <class T> struct AttentionArrays {
    Shape s;
    Stored<T> qkv{"qkv", Role::input, random_values(s.qkv_count(), 1)};
    Stored<T> out{"out", Role::output, nans(s.out_count())};
    Array<float> lse{"lse", Role::output, nans(s.lse_count())};
    double dropout = 0;
    Array<uint64_t> keys{"keys", Role::input, sample_keys(s.batch)};

    static std::vector<uint64_t> sample_keys(int batch) {
        std::vector<uint64_t> keys;
        for (int b = 0; b < batch; b++) keys.push_back(ops::dropout_key(3, uint64_t(b)));
        return keys;
    }
    template <class Side> ops::DropoutMask mask(Side side) {
        if (dropout == 0) return {};
        return {.keys = keys.on(side), .threshold = ops::dropout_threshold(dropout), .site = 4};
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
                                     .dropout = mask(side)};
    }
};

// What a tensor core does to a probability before it multiplies it: rounds it to T.
template <class T> double probability_rounding(double probability) { return stored_error<T>(probability); }

// Bounds of out (batch, seq_len, n_head, head_size) and lse, arithmetic only.
template <class T>
std::vector<double> out_bounds(const Shape& s, const double* qkv, const ops::DropoutMask& mask = {}) {
    std::vector<double> bounds(s.out_count());
    ref::QkvLayout at = s.layout();
    for (int b = 0; b < s.batch; b++)
        for (int h = 0; h < s.n_head; h++)
            for (int t = 0; t < s.seq_len; t++) {
                double relative = row_error(s, qkv, b, h, t).probability + summation_error(t + 1);
                std::vector<double> scores(t + 1);
                for (int j = 0; j <= t; j++)
                    scores[j] = s.scale() * ref::dot(qkv + at.query(b, h, t), qkv + at.key(b, h, j), s.head_size);
                double lse = ref::log_sum_exp(scores.data(), t + 1);
                for (int j = 0; j <= t; j++) {
                    double p = std::exp(scores[j] - lse);
                    double p_error = (p * relative + probability_rounding<T>(p)) * dropout_factor(mask, b, h, t, j);
                    for (int d = 0; d < s.head_size; d++)
                        bounds[at.out(b, h, t) + d] += p_error * std::abs(qkv[at.value(b, h, j) + d]);
                }
            }
    return bounds;
}

// The terms of ref::attention_backward with absolute values, each times the relative error of its factors: a
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
                for (int j = 0; j <= t; j++) {
                    const double* key = qkv + at.key(b, h, j);
                    double p = std::exp(op.scale * ref::dot(query, key, s.head_size) - op.lse[at.lse(b, h, t)]);
                    double factor = dropout_factor(op.dropout, b, h, t, j);
                    double dscore = p * (factor * absolute_dot(qkv + at.value(b, h, j)) + dout_out);
                    double p_error = (p * relative + probability_rounding<T>(p)) * factor;
                    double dscore_error = op.scale * (dscore * relative + probability_rounding<T>(dscore));
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

    explicit BackwardArrays(const Shape& shape, double dropout = 0)
        : s(shape), out("out", Role::input, forward_results(dropout)), lse("lse", Role::input, forward.lse.host) {}

    // Runs the forward op of ref::, whose lse is then in forward.lse.
    const std::vector<double>& forward_results(double dropout) {
        forward.dropout = dropout;
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

}  // namespace

TEMPLATE_TEST_CASE("attention_forward", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes) {
        INFO(describe(s));
        AttentionArrays<T> arrays{s};
        ops::attention_forward(arrays.forward_op(OnDevice<T>()), Stream());
        ref::attention_forward(arrays.forward_op(OnHost()));
        std::vector<double> bounds = out_bounds<T>(s, arrays.qkv.host.data());
        check_close(arrays.out, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.out.host[i]); });
        check_close(arrays.lse, [&](size_t i) {
            int t = int(i % s.seq_len), h = int(i / s.seq_len % s.n_head), b = int(i / s.seq_len / s.n_head);
            return row_error(s, arrays.qkv.host.data(), b, h, t).lse + stored_error_fp32(arrays.lse.host[i]);
        });
    }
}

TEMPLATE_TEST_CASE("attention_backward", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes) {
        INFO(describe(s));
        BackwardArrays<T> arrays(s);
        std::vector<double> bounds = dqkv_bounds<T>(s, arrays.op(OnHost()));
        arrays.run_on_device();
        ref::attention_backward(arrays.op(OnHost()));
        check_close(arrays.dqkv, [&](size_t i) { return bounds[i] + stored_error<T>(arrays.dqkv.host[i]); });
    }
}

// Heads of each size that has kernels of its own, and of others; shared keys; sequences that end inside a tile.
constexpr Shape kDropoutShapes[] = {{2, 5, 3, 3, 64, 1},    {1, 70, 2, 1, 16, 1},   {1, 140, 2, 1, 64, 1},
                                    {2, 40, 2, 1, 128, 16}, {1, 131, 1, 1, 128, 1}, {1, 40, 1, 1, 200, 1}};

TEMPLATE_TEST_CASE("attention with dropout", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kDropoutShapes) {
        const double rate = s.batch == 1 ? 0.2 : 0.6;
        INFO(describe(s) << ", dropout " << rate);
        BackwardArrays<T> arrays(s, rate);
        AttentionArrays<T>& forward = arrays.forward;
        ops::attention_forward(forward.forward_op(OnDevice<T>()), Stream());
        std::vector<double> bounds = out_bounds<T>(s, forward.qkv.host.data(), forward.mask(OnHost()));
        check_close(forward.out, [&](size_t i) { return bounds[i] + stored_error<T>(forward.out.host[i]); });
        check_close(forward.lse, [&](size_t i) {
            int t = int(i % s.seq_len), h = int(i / s.seq_len % s.n_head), b = int(i / s.seq_len / s.n_head);
            return row_error(s, forward.qkv.host.data(), b, h, t).lse + stored_error_fp32(forward.lse.host[i]);
        });
        std::vector<double> gradient_bounds = dqkv_bounds<T>(s, arrays.op(OnHost()));
        arrays.run_on_device();
        ref::attention_backward(arrays.op(OnHost()));
        check_close(arrays.dqkv, [&](size_t i) { return gradient_bounds[i] + stored_error<T>(arrays.dqkv.host[i]); });
    }
}

// The first op leaves other things in shared memory, scratch and outputs than the second finds there.
TEMPLATE_TEST_CASE("attention gives the same bits twice", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : {Shape{1, 150, 2, 1, 64, 1}, Shape{1, 70, 2, 1, 128, 1}}) {
        INFO(describe(s));
        AttentionArrays<T> forward{s}, forward_again{s};
        ops::attention_forward(forward.forward_op(OnDevice<T>()), Stream());
        ops::attention_forward(forward_again.forward_op(OnDevice<T>()), Stream());
        check_same_bits(forward.out, forward_again.out.fetch());
        check_same_bits(forward.lse, forward_again.lse.fetch());
        BackwardArrays<T> backward(s), backward_again(s);
        backward.run_on_device();
        backward_again.run_on_device();
        check_same_bits(backward.dqkv, backward_again.dqkv.fetch());
    }
}

// Nothing but the elements is aligned.
TEMPLATE_TEST_CASE("attention_forward of memory between 16-byte boundaries", "[ops]", bf16, fp16) {
    using T = TestType;
    const Shape s = {1, 40, 2, 1, 64, 1};
    AttentionArrays<T> arrays{s};
    std::vector<double> shifted(1, 0.0);
    shifted.insert(shifted.end(), arrays.qkv.host.begin(), arrays.qkv.host.end());
    Stored<T> qkv("qkv", Role::input, shifted), out("out", Role::output, nans(s.out_count() + 1));
    auto op = arrays.forward_op(OnDevice<T>());
    op.qkv = qkv.on(OnDevice<T>()) + 1;
    op.out = out.on(OnDevice<T>()) + 1;
    ops::attention_forward(op, Stream());
    ref::attention_forward(arrays.forward_op(OnHost()));
    std::vector<double> bounds = out_bounds<T>(s, arrays.qkv.host.data());
    std::vector<T> values = out.fetch();
    bool is_close = true;
    for (size_t i = 0; i < s.out_count(); i++) {
        double expected = arrays.out.host[i];
        is_close &= std::abs(ref::load(values[i + 1]) - expected) <= bounds[i] + stored_error<T>(expected);
    }
    CHECK(is_close);
}
