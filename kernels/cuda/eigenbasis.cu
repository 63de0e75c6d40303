// Ops of SOAP: Adam's direction in an eigenbasis, and Gram-Schmidt orthonormalization.
//
// adam_direction: one element per thread, 20 bytes per element. orthonormalize_rows: one block, because each row needs
// all rows before it. A warp computes a component; then each thread subtracts all components from its columns. The rows
// stay in L1 or L2. Sums are in double, in an order that depends only on `cols`.
#include <cmath>

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

constexpr int kFlatThreads = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;

__global__ void __launch_bounds__(kFlatThreads) adam_direction_kernel(AdamDirection op) {
    const size_t i = size_t(blockIdx.x) * kFlatThreads + threadIdx.x;
    if (i >= op.count || op.grad_norm->non_finite_tensor >= 0) return;
    op.out[i] = adam_step(op.scalars, op.m[i], op.grad[i], op.v[i]);
}

struct OrthonormalizeShared {
    double component[kMaxOrthonormalized];
    double sum[kWarps];
};

__global__ void __launch_bounds__(kThreads) orthonormalize_rows_kernel(OrthonormalizeRows op) {
    OrthonormalizeShared& s = shared_memory<OrthonormalizeShared>();
    const int thread = int(threadIdx.x), warp = thread / kWarpSize, lane = thread % kWarpSize;
    const size_t cols = size_t(op.cols);
    for (int row = 0; row < op.rows; row++) {
        float* x = op.out + size_t(row) * cols;
        double norm = 0;
        for (int attempt = 0; attempt < 2 && !(norm > op.tolerance); attempt++) {
            const float* source = (attempt == 0 ? op.inp : op.fallback) + size_t(row) * cols;
            for (int c = thread; c < op.cols; c += kThreads) x[c] = source[c];
            for (int pass = 0; pass < 2; pass++) {
                __syncthreads();
                for (int r = warp; r < row; r += kWarps) {
                    const float* q = op.out + size_t(r) * cols;
                    double sum = 0;
                    for (int c = lane; c < op.cols; c += kWarpSize) sum = fma(double(q[c]), double(x[c]), sum);
                    sum = warp_sum(sum);
                    if (lane == 0) s.component[r] = sum;
                }
                __syncthreads();
                for (int c = thread; c < op.cols; c += kThreads) {
                    double rest = x[c];
                    for (int r = 0; r < row; r++)
                        rest = fma(-s.component[r], double(op.out[size_t(r) * cols + c]), rest);
                    x[c] = float(rest);
                }
            }
            double sum = 0;
            for (int c = thread; c < op.cols; c += kThreads) sum = fma(double(x[c]), double(x[c]), sum);
            norm = sqrt(block_sum(sum, s.sum));
        }
        const double factor = norm > 0 ? 1 / norm : 0;
        for (int c = thread; c < op.cols; c += kThreads) x[c] = float(x[c] * factor);
    }
}

}  // namespace

void adam_direction(const AdamDirection& op, Stream stream) {
    if (op.count == 0) return;
    launch(adam_direction_kernel, {"adam_direction", blocks_for(op.count, kFlatThreads), kFlatThreads}, stream, op);
}

void orthonormalize_rows(const OrthonormalizeRows& op, Stream stream) {
    launch(orthonormalize_rows_kernel, {"orthonormalize_rows", dim3(1), kThreads, sizeof(OrthonormalizeShared)}, stream,
           op);
}

}  // namespace ops
