// The FLOPs and bytes of each op, from its arguments. Benchmarks and traces compare them with the device's rates.
//
// FLOPs count only GEMMs, two per multiply-add; elementwise arithmetic is memory-bound and not counted. Bytes count
// every operand once, even if a cache would hold it; arrays with one number per row or column are omitted.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/exact_squares.h"
#include "kernels/ops.h"  // IWYU pragma: export

namespace ops {

struct Work {
    const char* op;
    double flops, bytes;
    std::string shape;
};

inline double bytes_of(ConstView array, double count) { return array ? count * double(size_of(array.dtype)) : 0; }

// An op that reads or writes each of the arrays, of `count` elements, once. It reads and writes those that are listed
// twice.
inline Work pass_over(std::initializer_list<ConstView> arrays, size_t count, const char* op,
                      const std::string& unit = "count") {
    Work work{op, 0, 0, format("%s %zu", unit.c_str(), count)};
    for (const ConstView& array : arrays) work.bytes += bytes_of(array, double(count));
    return work;
}

// Counts one row of wte per token.
inline Work work_of(const EmbeddingForward& op) {
    const double tokens = double(op.batch) * op.seq_len;
    return {"embedding_forward", 0, bytes_of(op.out, (2 * tokens + (op.wpe ? op.seq_len : 0)) * op.channels),
            format("batch %d, seq_len %d, channels %d", op.batch, op.seq_len, op.channels)};
}

// Assumes that no token repeats. If dwte is overwritten, counts each of its rows once.
inline Work work_of(const EmbeddingBackward& op) {
    const double tokens = double(op.batch) * op.seq_len, touched = std::min<double>(tokens, op.vocab);
    const double positions = op.dwpe ? double(op.accumulate ? 2 : 1) * op.n_positions : 0;
    const double rows = op.accumulate_dwte ? 2 * touched : op.vocab;
    return {"embedding_backward", 0,
            bytes_of(op.dout, tokens * op.channels) + (rows + positions) * op.channels * sizeof(float),
            format("batch %d, seq_len %d, channels %d, vocab %d", op.batch, op.seq_len, op.channels, op.vocab)};
}

inline std::string rows_and_cols(int rows, int cols) { return format("rows %d, cols %d", rows, cols); }

inline Work work_of(const ResidualNormForward& op) {
    return {"residual_norm_forward", 0, bytes_of(op.out, (op.branch ? 4.0 : 2.0) * op.rows * op.cols),
            rows_and_cols(op.rows, op.cols)};
}

inline Work work_of(const NormBackward& op) {
    return {"norm_backward", 0, bytes_of(op.dinp, (op.accumulate_dinp ? 4.0 : 3.0) * op.rows * op.cols),
            rows_and_cols(op.rows, op.cols)};
}

// The GEMM of out (rows, n), inp (rows, k) and weight (n, k). `bytes`: of all arrays but out and inp.
template <class Op> Work product(const char* name, ConstView out_or_inp, double bytes, const Op& op) {
    return {name, 2.0 * op.rows * op.n * op.k, bytes_of(out_or_inp, double(op.rows) * (double(op.n) + op.k)) + bytes,
            format("rows %d, n %d, k %d", op.rows, op.n, op.k)};
}

inline Work work_of(const MatmulForward& op) {
    const double weight = bytes_of(op.weight, double(op.n) * op.k);
    return product("matmul_forward", op.inp, weight + bytes_of(op.pre_activation, double(op.rows) * op.n), op);
}

inline Work work_of(const MatmulBackwardInput& op) {
    const double weight = bytes_of(op.weight, double(op.n) * op.k);
    return product("matmul_backward_input", op.dout, weight + bytes_of(op.kept, double(op.rows) * op.k), op);
}

inline Work work_of(const MatmulBackwardWeight& op) {
    const double gradient = (op.accumulate ? 2.0 : 1.0) * op.n * op.k * sizeof(float);
    return product("matmul_backward_weight", op.inp, gradient, op);
}

inline Work work_of(const AbsMax& op) { return pass_over({op.inp}, op.count, "abs_max"); }

inline Work work_of(const Quantize& op) {
    const double count = double(op.rows) * op.cols;
    return {"quantize", 0, bytes_of(op.inp, count) + bytes_of(op.out, count) + bytes_of(op.transposed, count),
            rows_and_cols(op.rows, op.cols)};
}

inline Work work_of(const ActivationForward& op) { return pass_over({op.out, op.inp}, op.count, "activation_forward"); }

inline Work work_of(const GatedActivationForward& op) {
    return {"gated_activation_forward", 0, bytes_of(op.out, 3.0 * op.rows * op.hidden),
            format("rows %d, hidden %d", op.rows, op.hidden)};
}

inline Work work_of(const GatedActivationBackward& op) {
    return {"gated_activation_backward", 0, bytes_of(op.dinp, 5.0 * op.rows * op.hidden),
            format("rows %d, hidden %d", op.rows, op.hidden)};
}

// Counts `passes` passes over the query and key heads.
template <class Op> Work qk_norm_rope(const char* name, View qkv, int passes, const Op& op) {
    const double heads = op.n_head + op.n_kv_head, tokens = double(op.batch) * op.seq_len;
    return {name, 0, bytes_of(qkv, passes * tokens * heads * op.head_size),
            format("batch %d, seq_len %d, heads %d and %d of %d", op.batch, op.seq_len, op.n_head, op.n_kv_head,
                   op.head_size)};
}
inline Work work_of(const QkNormRopeForward& op) {
    return qk_norm_rope("qk_norm_rope_forward", op.qkv, op.raw ? 3 : 2, op);
}
inline Work work_of(const QkNormRopeBackward& op) {
    return qk_norm_rope("qk_norm_rope_backward", op.dqkv, op.rstd ? 3 : 2, op);
}

inline Work work_of(const Dropout& op) {
    return {"dropout", 0, bytes_of(op.out, 2.0 * double(op.elements)),
            format("elements %zu of samples of %zu", op.elements, op.count)};
}

// The number of pairs of a query and a visible key, over all heads. Ignores first_key, which is in device memory.
// Approximates the causal half by seq_len^2 / 2, and counts the smaller windows of the first queries.
template <class Op> double attention_pairs(const Op& op) {
    const double length = op.seq_len, distance = op.chunk.distance;
    // The keys below the rows [row, row + length), of `length` keys.
    const auto keys_below = [&](double row) {
        const auto sum = [&](double end) {
            const double inside = std::clamp(end, 0.0, length);
            return inside * inside / 2 + length * std::max(0.0, end - length);
        };
        return sum(row + length) - sum(row);
    };
    const double hidden = op.window > 0 ? keys_below(distance - op.window) : 0;
    return double(op.batch) * op.n_head * (keys_below(distance) - hidden);
}

template <class Op> std::string attention_shape(const Op& op) {
    return format("batch %d, seq_len %d, heads %d of %d", op.batch, op.seq_len, op.n_head, op.head_size) +
           (op.n_kv_head < op.n_head ? format(", %d of keys", op.n_kv_head) : std::string()) +
           (op.window > 0 ? format(", window %d", op.window) : std::string()) +
           (op.chunk ? format(", keys %d earlier", op.chunk.distance) : std::string());
}

// Two GEMMs; the backward pass has five by convention, not counting recomputation. Every chunk but the first reads FP32
// sums for the queries, and every one but the last writes them instead of the result.
template <class Op> Work attention_work(const char* name, int gemms, View result, int reads_of_queries, const Op& op) {
    const double tokens = double(op.batch) * op.seq_len * op.head_size, queries = tokens * op.n_head;
    const int sums = !op.chunk.is_first + !op.chunk.is_last;
    return {name, 2 * gemms * attention_pairs(op) * op.head_size,
            bytes_of(result, reads_of_queries * queries + op.chunk.is_last * queries + 2 * tokens * op.n_kv_head) +
                sums * queries * sizeof(float),
            attention_shape(op)};
}
inline Work work_of(const AttentionForward& op) { return attention_work("attention_forward", 2, op.out, 1, op); }
inline Work work_of(const AttentionBackward& op) {
    Work work = attention_work("attention_backward", 5, op.dqkv, 3, op);
    const double keys = 2.0 * op.batch * op.seq_len * op.n_kv_head * op.head_size;
    work.bytes += op.chunk ? (op.accumulate_dkv ? 2 : 1) * keys * sizeof(float) : bytes_of(op.dqkv, keys);
    return work;
}

// Counts full sequences, because their lengths are in device memory.
inline Work work_of(const AttentionDecode& op) {
    const double keys = double(op.rows) * (op.window > 0 ? std::min(op.window, op.capacity) : op.capacity);
    return {"attention_decode", 4 * keys * op.n_head * op.head_size,
            bytes_of(op.out, op.head_size * (2 * keys * op.n_kv_head + op.rows * (2.0 * op.n_head + 4 * op.n_kv_head))),
            format("rows %d, capacity %d, heads %d of %d, %d of keys", op.rows, op.capacity, op.n_head, op.head_size,
                   op.n_kv_head)};
}

inline Work work_of(const VocabularySumsOfRows& op) {
    return {"vocabulary_sums", 0, bytes_of(op.logits, double(op.rows) * op.padded_vocab),
            format("rows %d, vocab %d", op.rows, op.vocab)};
}

// With sums, reads the logits only for their gradients.
inline Work work_of(const CrossEntropy& op) {
    const double passes = op.write_dlogits ? 2 : op.sums ? 0 : 1;
    return {"cross_entropy", 0, bytes_of(op.logits, passes * op.rows * op.padded_vocab),
            format("rows %d, vocab %d", op.rows, op.vocab)};
}

inline Work work_of(const LossSum& op) {
    return {"loss_sum", 0, double(op.rows) * sizeof(float), format("rows %d", op.rows)};
}

inline Work work_of(const Add& op) { return pass_over({op.out, op.out, op.inp}, op.count, "add"); }

inline Work work_of(const Fill& op) { return pass_over({op.out}, op.count, "fill"); }

inline Work work_of(const SumTerms& op) {
    const double count = double(op.count);
    return {"sum_terms", 0, bytes_of(op.out, count) + bytes_of(op.terms, count * op.n),
            format("n %d, count %zu", op.n, op.count)};
}

inline Work work_of(const GradNormFinish& op) {
    return {"grad_norm_finish", 0, double(op.n_tensors) * kSquareEntries * sizeof(double),
            format("tensors %d", op.n_tensors)};
}

// The arguments of ops on chunks do not contain the number of elements, so the caller passes it.
inline Work work_of(const SquaredSums& op, size_t elements) {
    return pass_over({op.values}, elements, "squared_sums", "elements");
}

inline Work work_of(const ElementwiseUpdate& op, size_t elements) {
    return pass_over({op.master, op.master, op.state[0], op.state[0], op.state[1], op.state[1], op.grad, op.param},
                     elements, "elementwise_update", format("rule %s, elements", name_of(op.rule)));
}

inline Work work_of(const TrustSums& op, size_t elements) {
    return pass_over({op.master, op.state[0], op.state[1], op.grad}, elements, "trust_sums",
                     format("rule %s, elements", name_of(op.rule)));
}

inline Work work_of(const TrustRatios& op) { return {"trust_ratios", 0, 0, format("layers %d", op.n_layers)}; }

inline Work work_of(const FactorSums& op, size_t elements) {
    return pass_over({op.grad}, elements, "factor_sums", "elements");
}

inline Work work_of(const FactorMoments& op) { return {"factor_moments", 0, 0, format("layers %d", op.n_layers)}; }

inline Work work_of(const FactoredDirection& op, size_t elements) {
    return pass_over({op.grad, op.grad, op.master}, elements, "factored_direction", "elements");
}

inline Work work_of(const MomentumDirection& op, size_t elements) {
    return pass_over({op.grad, op.m, op.m, op.direction}, elements, "momentum_direction", "elements");
}

inline Work work_of(const ApplyDirection& op, size_t elements) {
    return pass_over({op.master, op.master, op.direction, op.param}, elements, "apply_direction", "elements");
}

// inp is read twice, but counted once like every operand.
inline Work work_of(const FrobeniusNormalize& op) {
    return pass_over({op.out, op.inp}, op.count, "frobenius_normalize");
}

inline Work work_of(const RowNormalize& op) {
    const double count = double(op.rows) * double(op.cols);
    return {"row_normalize", 0, bytes_of(op.out, count) + bytes_of(op.inp, count) + 2 * double(op.rows) * sizeof(float),
            format("rows %d, cols %d", op.rows, op.cols)};
}

inline Work work_of(const OrthonormalizeRows& op) {
    return {"orthonormalize_rows", 0, 2 * double(op.rows) * op.cols * sizeof(float), rows_and_cols(op.rows, op.cols)};
}

inline Work work_of(const AdamDirection& op) {
    return pass_over({op.out, op.v, op.v, op.m, op.grad}, op.count, "adam_direction");
}

inline Work work_of(const Cast& op) { return pass_over({op.out, op.inp}, op.count, "cast"); }

inline Work work_of(const CastColumns& op) {
    const double count = double(op.rows) * double(op.cols);
    return {"cast_columns", 0, bytes_of(op.out, count) + bytes_of(op.inp, count),
            format("rows %zu, cols %zu", op.rows, op.cols)};
}

inline Work work_of(const ScaledAdd& op) { return pass_over({op.out, op.a, op.b}, op.count, "scaled_add"); }

// The work of any op. `elements`: the elements of all chunks, for ops on chunks.
template <class Op> Work work_of_any(const Op& op, size_t elements) {
    if constexpr (requires { work_of(op, elements); })
        return work_of(op, elements);
    else
        return work_of(op);
}

}  // namespace ops
