// Adafactor's ops. factor_sums and factored_direction have one block per chunk, factor_moments one per layer. Moved per
// element: factor_sums 4 bytes (the gradient, a second time from cache), factored_direction 12 (the gradient both ways
// and the master). Numerics: sums in double. factor_sums adds with atomics, in any order, because its sums are exact.

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// A warp per row of the chunk, then a thread per column.
__global__ void __launch_bounds__(kThreads) factor_sums_kernel(FactorSums op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    const Chunk chunk = op.chunks[blockIdx.x];
    const FactorLayer layer = op.layers[chunk.layer];
    const float* grad = op.grad + chunk.begin;
    const float grad_scale = op.grad_norm->scale;
    const double unit = exact_unit(op.grad_norm->norm);
    const size_t first = chunk.begin - size_t(layer.begin);
    const size_t first_row = first / size_t(layer.cols);
    const int before = int(first % size_t(layer.cols));  // elements of the first row in earlier chunks

    const int rows = (before + chunk.count - 1) / layer.cols + 1, lane = int(threadIdx.x) % kWarpSize;
    for (int row = int(threadIdx.x) / kWarpSize; row < rows; row += kWarps) {
        const int begin = row * layer.cols - before, end = min(begin + layer.cols, chunk.count);
        double high = 0, low = 0;
        for (int i = max(begin, 0) + lane; i < end; i += kWarpSize) {
            const ExactParts parts(grad[i] * grad_scale, unit);
            high += parts.high, low += parts.low;
        }
        high = warp_sum(high), low = warp_sum(low);
        if (lane == 0) add_exactly(op.rows + 2 * (layer.first_row + first_row + size_t(row)), high, low);
    }
    for (int place = int(threadIdx.x); place < min(layer.cols, chunk.count); place += kThreads) {
        double high = 0, low = 0;
        for (int i = place; i < chunk.count; i += layer.cols) {
            const ExactParts parts(grad[i] * grad_scale, unit);
            high += parts.high, low += parts.low;
        }
        add_exactly(op.cols + 2 * (layer.first_col + size_t((before + place) % layer.cols)), high, low);
    }
}

using MomentsShared = double[kWarps];

__global__ void __launch_bounds__(kThreads) factor_moments_kernel(FactorMoments op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    MomentsShared& s_sum = shared_memory<MomentsShared>();
    const FactorLayer layer = op.layers[blockIdx.x];
    const UpdateScalars s = op.scalars[layer.group];
    double sum = 0;
    for (int i = int(threadIdx.x); i < layer.rows; i += kThreads) {
        const size_t row = layer.first_row + size_t(i);
        const float v = AdafactorRule::average(s, op.rows + 2 * row, layer.cols, op.row_v[row]);
        op.row_v[row] = v;
        sum += double(v);
    }
    for (int i = int(threadIdx.x); i < layer.cols; i += kThreads) {
        const size_t col = layer.first_col + size_t(i);
        op.col_v[col] = AdafactorRule::average(s, op.cols + 2 * col, layer.rows, op.col_v[col]);
    }
    sum = block_sum(sum, s_sum);
    if (threadIdx.x == 0) op.mean[blockIdx.x] = float(sum / layer.rows);
}

struct DirectionShared {
    double weights[kWarps], directions[kWarps];
};

template <class Master> __global__ void __launch_bounds__(kThreads) factored_direction_kernel(FactoredDirection op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    DirectionShared& shared = shared_memory<DirectionShared>();
    const Chunk chunk = op.chunks[blockIdx.x];
    const FactorLayer layer = op.layers[chunk.layer];
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale, mean = op.mean[chunk.layer];
    const Master* master = op.master.as<Master>() + chunk.begin;
    float* grad = op.grad + chunk.begin;
    const size_t first = chunk.begin - size_t(layer.begin);
    const float* row_v = op.row_v + layer.first_row + first / size_t(layer.cols);
    const float* col_v = op.col_v + layer.first_col;
    const int before = int(first % size_t(layer.cols));
    double weights = 0, directions = 0;
    for (int i = int(threadIdx.x); i < chunk.count; i += kThreads) {
        const int row = (before + i) / layer.cols, col = (before + i) % layer.cols;
        const float factor = AdafactorRule::row_factor(s, layer, row_v[row], mean);
        const float direction = AdafactorRule::direction(s, grad[i] * grad_scale, factor * col_v[col]);
        grad[i] = direction;
        const double weight = double(to_float(master[i]));
        weights = fma(weight, weight, weights);
        directions = fma(double(direction), double(direction), directions);
    }
    weights = block_sum(weights, shared.weights);
    directions = block_sum(directions, shared.directions);
    if (threadIdx.x == 0) op.sums[2 * chunk.index] = weights, op.sums[2 * chunk.index + 1] = directions;
}

}  // namespace

void factor_sums(const FactorSums& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    launch(factor_sums_kernel, {"factor_sums", blocks_for(size_t(op.n_chunks), 1), kThreads}, stream, op);
}

void factor_moments(const FactorMoments& op, Stream stream) {
    if (op.n_layers <= 0) return;
    launch(factor_moments_kernel,
           {"factor_moments", blocks_for(size_t(op.n_layers), 1), kThreads, sizeof(MomentsShared)}, stream, op);
}

void factored_direction(const FactoredDirection& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    dispatch_state("factored_direction", op.master.dtype, [&]<class Master>() {
        launch(factored_direction_kernel<Master>,
               {"factored_direction", blocks_for(size_t(op.n_chunks), 1), kThreads, sizeof(DirectionShared)}, stream,
               op);
    });
}

}  // namespace ops
