// The Euclidean norm of all gradients, and whether they are finite.
//
// squared_sums: one block per chunk, packs of 4 floats, sums in double; 4 bytes per element. The square of a float
// never overflows a double, so a sum is finite if and only if its elements are. grad_norm_finish: one block over the
// chunks' sums. The order of both sums depends only on the chunks, not on their place in memory or on the GPU.
#include <cmath>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBatch = 4;  // packs in flight per thread

using SquaredSumsShared = double[kWarps];

// One thread's part of a chunk: packs t, t + 512, ...; a partial last pack is padded with 0.
template <bool kAligned> __device__ double sum_of_squares(const float* __restrict__ values, int count) {
    double sum = 0;
    constexpr int kStep = kThreads * kPackSize<float>;
    for (int first = int(threadIdx.x) * kPackSize<float>; first < count; first += kBatch * kStep) {
        Pack<float> pack[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int i = first + k * kStep;
            pack[k] = load_some<kAligned>(values + i, count - i);
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const auto x = unpack(pack[k]);
#pragma unroll
            for (float value : x.value) sum = fma(double(value), double(value), sum);
        }
    }
    return sum;
}

__global__ void __launch_bounds__(kThreads) squared_sums_kernel(SquaredSums op) {
    SquaredSumsShared& s_sum = shared_memory<SquaredSumsShared>();
    const Chunk chunk = op.chunks[blockIdx.x];
    const float* values = op.values + chunk.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(values) % sizeof(Pack<float>) == 0;
    double sum = aligned ? sum_of_squares<true>(values, chunk.count) : sum_of_squares<false>(values, chunk.count);
    sum = block_sum(sum, s_sum);
    if (threadIdx.x == 0) op.out[chunk.index] = sum;
}

struct FinishShared {
    double sum[kWarps];
    int first_non_finite[kWarps];
};

__global__ void __launch_bounds__(kThreads) grad_norm_finish_kernel(GradNormFinish op) {
    FinishShared& s = shared_memory<FinishShared>();
    const double* __restrict__ sums = op.sums;
    double sum = 0;
    int first_non_finite = op.n_chunks;
    for (int i = int(threadIdx.x); i < op.n_chunks; i += kThreads) {
        sum += sums[i];
        if (!(fabs(sums[i]) < INFINITY)) first_non_finite = min(first_non_finite, i);
    }
    sum = block_sum(sum, s.sum);
    first_non_finite = block_reduce(first_non_finite, s.first_non_finite, Min());
    if (threadIdx.x > 0) return;
    const double loss_scale = *op.loss_scale;
    const double norm = sqrt(sum) / loss_scale;
    double coefficient = 1;
    if (op.clip > 0 && op.clip / (norm + 1e-6) < 1) coefficient = op.clip / (norm + 1e-6);
    *op.out = {.norm = float(norm),
               .scale = float(coefficient / loss_scale),
               .non_finite_tensor = first_non_finite < op.n_chunks ? op.chunks[first_non_finite].tensor : -1,
               .reserved = 0};
}

}  // namespace

void squared_sums(const SquaredSums& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    launch(squared_sums_kernel,
           {"squared_sums", blocks_for(size_t(op.n_chunks), 1), kThreads, sizeof(SquaredSumsShared)}, stream, op);
}

void grad_norm_finish(const GradNormFinish& op, Stream stream) {
    launch(grad_norm_finish_kernel, {"grad_norm_finish", dim3(1), kThreads, sizeof(FinishShared)}, stream, op);
}

}  // namespace ops
