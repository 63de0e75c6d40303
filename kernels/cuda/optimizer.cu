// AdamW and SGD over all chunks in one launch: 2 blocks per chunk, packs of 4 elements, each array read and written
// once. Moved per element: AdamW 28 bytes (master, m and v both ways, grad once), SGD 20, plus 2 for a 16-bit
// parameter. Numerics: float, with the same roundings as on the CPU and IEEE division and square root. One thread per
// block computes the step's scalars in double. If a gradient is not finite (grad_norm), every block returns.

#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/adamw.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerChunk = 2;  // small pieces, so that SMs are not idle for long at the end
constexpr int kBlockElements = kChunkElements / kBlocksPerChunk;
constexpr int kSize = kPackSize<float>;

using Four = Floats<float, kSize>;

// Calls body.template operator()<whole>(offset in the flat arrays, available) for the packs of this block's part.
template <class Body> __device__ void for_packs(const Chunk& chunk, bool aligned, Body body) {
    const int begin = int(blockIdx.x) % kBlocksPerChunk * kBlockElements;
    const int end = min(chunk.count, begin + kBlockElements);
    for (int i = begin + int(threadIdx.x) * kSize; i < end; i += kThreads * kSize) {
        if (aligned && end - i >= kSize)
            body.template operator()<true>(chunk.begin + i, kSize);
        else
            body.template operator()<false>(chunk.begin + i, end - i);
    }
}

template <class... Ts> __device__ bool are_aligned(const Chunk& chunk, const Ts*... flat) {
    return ((reinterpret_cast<uintptr_t>(flat + chunk.begin) % (kSize * sizeof(Ts)) == 0) && ...);
}

// Stores the master weights and, if present, the parameters: master weights rounded to T.
template <class T, bool kWhole, class Op>
__device__ void store_masters(const Op& op, size_t place, const Four& master, int available) {
    store_pack<kWhole>(op.master + place, pack_floats(master), available);
    if (op.param)
        store_pack<kWhole>(op.param.template as<T>() + place, pack_floats(master.template as<T>()), available);
}

template <class T> __global__ void __launch_bounds__(kThreads) adamw_update_kernel(AdamwUpdate op) {
    AdamwScalars& s = shared_memory<AdamwScalars>();
    const Chunk chunk = op.chunks[blockIdx.x / kBlocksPerChunk];
    const bool has_elements = int(blockIdx.x) % kBlocksPerChunk * kBlockElements < chunk.count;
    if (op.grad_norm->non_finite_tensor >= 0 || !has_elements) return;
    if (threadIdx.x == 0) s = adamw_scalars(op, chunk.decayed);
    __syncthreads();
    const float* __restrict__ grad = op.grad;
    const bool aligned = are_aligned(chunk, op.master, op.m, op.v, grad, op.param.as<T>());
    for_packs(chunk, aligned, [&]<bool kWhole>(size_t place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(grad + place, available));
        Four master = unpack(load_pack<kWhole>(op.master + place, available));
        Four m = unpack(load_pack<kWhole>(op.m + place, available));
        Four v = unpack(load_pack<kWhole>(op.v + place, available));
#pragma unroll
        for (int k = 0; k < kSize; k++) {
            const float g = gradient.value[k] * s.grad_scale;
            m.value[k] = fmaf(m.value[k], s.beta1, g * s.one_minus_beta1);
            v.value[k] = fmaf(v.value[k], s.beta2, g * g * s.one_minus_beta2);
            const float denominator = sqrtf(v.value[k]) / s.root_bias_correction2 + s.eps;
            master.value[k] = fmaf(master.value[k], s.keep, -s.step_size * (m.value[k] / denominator));
        }
        store_pack<kWhole>(op.m + place, pack_floats(m), available);
        store_pack<kWhole>(op.v + place, pack_floats(v), available);
        store_masters<T, kWhole>(op, place, master, available);
    });
}

template <class T> __global__ void __launch_bounds__(kThreads) sgd_update_kernel(SgdUpdate op) {
    const Chunk chunk = op.chunks[blockIdx.x / kBlocksPerChunk];
    if (op.grad_norm->non_finite_tensor >= 0) return;
    const float* __restrict__ grad = op.grad;
    const float learning_rate = op.scalars->learning_rate, grad_scale = op.grad_norm->scale;
    const float decay = chunk.decayed ? op.weight_decay : 0.0f;
    const bool aligned = are_aligned(chunk, op.master, op.m, grad, op.param.as<T>());
    for_packs(chunk, aligned, [&]<bool kWhole>(size_t place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(grad + place, available));
        Four master = unpack(load_pack<kWhole>(op.master + place, available));
        Four m = unpack(load_pack<kWhole>(op.m + place, available));
#pragma unroll
        for (int k = 0; k < kSize; k++) {
            m.value[k] = fmaf(op.momentum, m.value[k], gradient.value[k] * grad_scale);
            master.value[k] = fmaf(-learning_rate, fmaf(decay, master.value[k], m.value[k]), master.value[k]);
        }
        store_pack<kWhole>(op.m + place, pack_floats(m), available);
        store_masters<T, kWhole>(op, place, master, available);
    });
}

dim3 blocks_of(int n_chunks) { return blocks_for(size_t(n_chunks) * kBlocksPerChunk, 1); }

}  // namespace

void adamw_update(const AdamwUpdate& op, Stream stream) {
    dispatch("adamw_update", op.param.dtype, [&]<class T>() {
        if (op.n_chunks <= 0) return;
        launch(adamw_update_kernel<T>, {"adamw_update", blocks_of(op.n_chunks), kThreads, sizeof(AdamwScalars)}, stream,
               op);
    });
}

void sgd_update(const SgdUpdate& op, Stream stream) {
    dispatch("sgd_update", op.param.dtype, [&]<class T>() {
        if (op.n_chunks <= 0) return;
        launch(sgd_update_kernel<T>, {"sgd_update", blocks_of(op.n_chunks), kThreads}, stream, op);
    });
}

}  // namespace ops
