// Gradient norm, AdamW and SGD over chunks of flat arrays. Reads and writes each element once.

#include "kernels/cpu/parallel.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/shared/adamw.h"
#include "kernels/shared/dispatch.h"

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

void adamw_chunk(const AdamwUpdate& op, const Chunk& chunk) {
    const AdamwScalars s = adamw_scalars(op, chunk.decayed);
    float* master = op.master + chunk.begin;
    float* m = op.m + chunk.begin;
    float* v = op.v + chunk.begin;
    const float* grad = op.grad + chunk.begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        float g = grad[i] * s.grad_scale;
        m[i] = m[i] * s.beta1 + g * s.one_minus_beta1;
        v[i] = v[i] * s.beta2 + g * g * s.one_minus_beta2;
        float denominator = std::sqrt(v[i]) / s.root_bias_correction2 + s.eps;
        master[i] = master[i] * s.keep - s.step_size * (m[i] / denominator);
    }
}

void sgd_chunk(const SgdUpdate& op, const Chunk& chunk) {
    const float learning_rate = op.scalars->learning_rate;
    const float decay = chunk.decayed ? op.weight_decay : 0.0f;
    const float grad_scale = op.grad_norm->scale;
    float* master = op.master + chunk.begin;
    float* m = op.m + chunk.begin;
    const float* grad = op.grad + chunk.begin;
#pragma omp simd
    for (int i = 0; i < chunk.count; i++) {
        m[i] = op.momentum * m[i] + grad[i] * grad_scale;
        master[i] -= learning_rate * (m[i] + decay * master[i]);
    }
}

template <class Update>
void update_chunks(const char* name, const Update& op, void (*update)(const Update&, const Chunk&)) {
    dispatch(name, op.param.dtype, [&]<class T>() {
        if (op.grad_norm->non_finite_tensor >= 0) return;
        parallel_blocks(op.n_chunks, 1, [&](size_t i, size_t) {
            update(op, op.chunks[i]);
            store_param(op.param.template as<T>(), op.master, op.chunks[i]);
        });
    });
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

void adamw_update(const AdamwUpdate& op, Stream) { update_chunks("adamw_update", op, adamw_chunk); }

void sgd_update(const SgdUpdate& op, Stream) { update_chunks("sgd_update", op, sgd_chunk); }

}  // namespace ops
