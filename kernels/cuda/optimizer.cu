// An elementwise update of all chunks in one launch: 2 blocks per chunk, packs of 4 elements, each array read and
// written once. Moved per element: AdamW 28 bytes (master, m and v both ways, grad once), SGD 20, plus 2 for a 16-bit
// parameter. Numerics: float, with the same roundings as on the CPU and IEEE division and square root. If a gradient is
// not finite (grad_norm), every block returns.

#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerChunk = 2;  // small pieces, so that SMs are not idle for long at the end
constexpr int kBlockElements = kChunkElements / kBlocksPerChunk;
constexpr int kSize = kPackSize<float>;

using Four = Floats<float, kSize>;

// Calls body.template operator()<whole>(offset in the chunk, available) for the packs of this block's part.
template <class Body> __device__ void for_packs(const Chunk& chunk, bool aligned, Body body) {
    const int begin = int(blockIdx.x) % kBlocksPerChunk * kBlockElements;
    const int end = min(chunk.count, begin + kBlockElements);
    for (int i = begin + int(threadIdx.x) * kSize; i < end; i += kThreads * kSize) {
        if (aligned && end - i >= kSize)
            body.template operator()<true>(i, kSize);
        else
            body.template operator()<false>(i, end - i);
    }
}

template <class T> __device__ bool is_aligned(const T* values) {
    return reinterpret_cast<uintptr_t>(values) % (kSize * sizeof(T)) == 0;
}

// One chunk's part of the arrays.
template <class T, int kStates> struct ChunkArrays {
    float *master, *state[kStates];
    T* param;  // null in fp32
    const float* grad;

    __device__ ChunkArrays(const ElementwiseUpdate& op, const Chunk& chunk)
        : master(op.master + chunk.begin),
          param(op.param ? op.param.template as<T>() + chunk.begin : nullptr),
          grad(op.grad + chunk.begin) {
        for (int k = 0; k < kStates; k++) state[k] = op.state[k] + chunk.state_begin;
    }
    __device__ bool are_aligned() const {
        bool aligned = is_aligned(master) && is_aligned(param) && is_aligned(grad);
        for (int k = 0; k < kStates; k++) aligned = aligned && is_aligned(state[k]);
        return aligned;
    }
};

template <class Rule, class T>
__global__ void __launch_bounds__(kThreads) elementwise_update_kernel(ElementwiseUpdate op) {
    constexpr int kStates = Rule::kStates;
    const Chunk chunk = op.chunks[blockIdx.x / kBlocksPerChunk];
    if (op.grad_norm->non_finite_tensor >= 0) return;
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale;
    const ChunkArrays<T, kStates> arrays(op, chunk);
    for_packs(chunk, arrays.are_aligned(), [&]<bool kWhole>(int place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(arrays.grad + place, available));
        Four master = unpack(load_pack<kWhole>(arrays.master + place, available));
        Four states[kStates];
#pragma unroll
        for (int k = 0; k < kStates; k++) states[k] = unpack(load_pack<kWhole>(arrays.state[k] + place, available));
#pragma unroll
        for (int i = 0; i < kSize; i++) {
            float state[kStates];
#pragma unroll
            for (int k = 0; k < kStates; k++) state[k] = states[k].value[i];
            Rule::update(s, gradient.value[i] * grad_scale, master.value[i], state);
#pragma unroll
            for (int k = 0; k < kStates; k++) states[k].value[i] = state[k];
        }
#pragma unroll
        for (int k = 0; k < kStates; k++)
            store_pack<kWhole>(arrays.state[k] + place, pack_floats(states[k]), available);
        store_pack<kWhole>(arrays.master + place, pack_floats(master), available);
        if (arrays.param) store_pack<kWhole>(arrays.param + place, pack_floats(master.template as<T>()), available);
    });
}

}  // namespace

void elementwise_update(const ElementwiseUpdate& op, Stream stream) {
    dispatch("elementwise_update", op.param.dtype, [&]<class T>() {
        dispatch(op.rule, [&]<class Rule>() {
            if (op.n_chunks <= 0) return;
            const dim3 blocks = blocks_for(size_t(op.n_chunks) * kBlocksPerChunk, 1);
            launch(elementwise_update_kernel<Rule, T>, {"elementwise_update", blocks, kThreads}, stream, op);
        });
    });
}

}  // namespace ops
