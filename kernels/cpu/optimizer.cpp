// Gradient norm and elementwise updates over chunks of flat arrays. Reads and writes each element once.

#include "kernels/cpu/parallel.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

// Rounds a chunk of the master weights to the compute weights, while it is in the cache.
template <class T> void store_param(T* param, const float* master, const Chunk& chunk) {
    if (!param) return;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) param[chunk.begin + i] = from_float<T>(master[chunk.begin + i]);
}

double squared_sum(const float* values, int count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += double(values[i]) * double(values[i]);
    return sum;
}

template <class Rule> void update_chunk(const ElementwiseUpdate& op, const Chunk& chunk) {
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale;
    float* master = op.master + chunk.begin;
    float* states[Rule::kStates];
    for (int k = 0; k < Rule::kStates; k++) states[k] = op.state[k] + chunk.state_begin;
    const float* grad = op.grad + chunk.begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        float state[Rule::kStates];
        for (int k = 0; k < Rule::kStates; k++) state[k] = states[k][i];
        Rule::update(s, grad[i] * grad_scale, master[i], state);
        for (int k = 0; k < Rule::kStates; k++) states[k][i] = state[k];
    }
}

}  // namespace

void squared_sums(const SquaredSums& op, Stream) {
    parallel_blocks(op.n_chunks, 1, [&](size_t i, size_t) {
        const Chunk& chunk = op.chunks[i];
        op.out[chunk.index] = squared_sum(op.values + chunk.begin, chunk.count);
    });
}

void grad_norm_finish(const GradNormFinish& op, Stream) {
    double sum = 0;
    int non_finite_tensor = -1;
    for (int i = 0; i < op.n_chunks; i++) {
        sum += op.sums[i];
        if (non_finite_tensor < 0 && !std::isfinite(op.sums[i])) non_finite_tensor = op.chunks[i].tensor;
    }
    const double norm = std::sqrt(sum) / *op.loss_scale;
    const double coefficient = op.clip > 0 ? std::min(1.0, op.clip / (norm + 1e-6)) : 1.0;
    *op.out = {.norm = float(norm),
               .scale = float(coefficient / *op.loss_scale),
               .non_finite_tensor = non_finite_tensor,
               .reserved = 0};
}

void elementwise_update(const ElementwiseUpdate& op, Stream) {
    dispatch("elementwise_update", op.param.dtype, [&]<class T>() {
        dispatch(op.rule, [&]<class Rule>() {
            if (op.grad_norm->non_finite_tensor >= 0) return;
            parallel_blocks(op.n_chunks, 1, [&](size_t i, size_t) {
                update_chunk<Rule>(op, op.chunks[i]);
                store_param(op.param.template as<T>(), op.master, op.chunks[i]);
            });
        });
    });
}

}  // namespace ops
