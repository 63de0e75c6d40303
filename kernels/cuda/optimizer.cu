// Updates of all chunks in one launch: 2 blocks per chunk, packs of 4 elements, each array read and written once. Moved
// per element: AdamW 28 bytes (master, m and v both ways, grad once; 20 with state in bf16, 16 with masters in bf16
// too), SGD 20, plus 2 for a 16-bit parameter; momentum_direction and apply_direction 14 and 12 with 16-bit arrays.
// Numerics: float, with the same roundings as on the CPU and IEEE division and square root. If a gradient is not finite
// (grad_norm), every block returns.

#include "kernels/base/rounding.h"
#include "kernels/cuda/reduce.cuh"
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

template <class Op> __device__ const Chunk& chunk_of_block(const Op& op) {
    return op.chunks[blockIdx.x / kBlocksPerChunk];
}

// Calls body.template operator()<whole>(offset in the chunk, available) for the packs of elements [begin, end).
template <class Body> __device__ void for_packs(int begin, int end, bool aligned, Body body) {
    for (int i = begin + int(threadIdx.x) * kSize; i < end; i += kThreads * kSize) {
        if (aligned && end - i >= kSize)
            body.template operator()<true>(i, kSize);
        else
            body.template operator()<false>(i, end - i);
    }
}

// The same for this block's part of a chunk, or for none if a gradient is not finite.
template <class Body>
__device__ void for_packs(const GradNorm* grad_norm, const Chunk& chunk, bool aligned, Body body) {
    if (grad_norm->non_finite_tensor >= 0) return;
    const int begin = int(blockIdx.x) % kBlocksPerChunk * kBlockElements;
    for_packs(begin, min(chunk.count, begin + kBlockElements), aligned, body);
}

template <class... T> __device__ bool is_aligned(const T*... arrays) {
    return ((reinterpret_cast<uintptr_t>(arrays) % (kSize * sizeof(T)) == 0) && ...);
}

// Master weights or state as floats.
template <bool kWhole, class T> __device__ Four load_floats(const T* from, int available) {
    return unpack(load_pack<kWhole, T, kSize>(from, available)).template as<float>();
}

// Stores master weights or array `k` of the state, rounded with random bits. first: the first element in the tensor.
template <bool kWhole, class T>
__device__ void store_rounded(T* to, const Four& values, const RoundingBits& random, uint32_t first, int k,
                              int available) {
    Elements<T, kSize> stored;
#pragma unroll
    for (int i = 0; i < kSize; i++)
        stored.value[i] = round_stochastically<T>(values.value[i], random.of(first + uint32_t(i)) >> 16 * k & 0xffffu);
    store_pack<kWhole>(to, std::bit_cast<Pack<T, kSize>>(stored), available);
}

// One chunk's part of the arrays.
template <class Master, class T, class State, int kStates> struct ChunkArrays {
    Master* master;
    State* state[kStates];
    T* param;  // null if the masters are the compute weights
    const float* grad;

    __device__ ChunkArrays(const ElementwiseUpdate& op, const Chunk& chunk)
        : master(op.master.template as<Master>() + chunk.begin),
          param(op.param ? op.param.template as<T>() + chunk.begin : nullptr),
          grad(op.grad + chunk.begin) {
        for (int k = 0; k < kStates; k++) state[k] = op.state[k].template as<State>() + chunk.state_begin;
    }
    __device__ bool are_aligned() const {
        bool aligned = is_aligned(master, param, grad);
        for (int k = 0; k < kStates; k++) aligned = aligned && is_aligned(state[k]);
        return aligned;
    }
};

template <class Rule, class Master, class T, class State>
__global__ void __launch_bounds__(kThreads) elementwise_update_kernel(ElementwiseUpdate op) {
    constexpr int kStates = Rule::kStates;
    const Chunk chunk = chunk_of_block(op);
    const UpdateScalars s = scalars_of(op, chunk);
    const float grad_scale = op.grad_norm->scale;
    const ChunkArrays<Master, T, State, kStates> arrays(op, chunk);
    const RoundingBits random(s.rounding_key, chunk.tensor), random_master(s.rounding_key, chunk.tensor, true);
    for_packs(op.grad_norm, chunk, arrays.are_aligned(), [&]<bool kWhole>(int place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(arrays.grad + place, available));
        Four master = load_floats<kWhole>(arrays.master + place, available);
        Four states[kStates];
#pragma unroll
        for (int k = 0; k < kStates; k++) states[k] = load_floats<kWhole>(arrays.state[k] + place, available);
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
            store_rounded<kWhole>(arrays.state[k] + place, states[k], random, chunk.first + uint32_t(place), k,
                                  available);
        store_rounded<kWhole>(arrays.master + place, master, random_master, chunk.first + uint32_t(place), 0,
                              available);
        if (arrays.param) store_pack<kWhole>(arrays.param + place, pack_floats(master.template as<T>()), available);
    });
}

struct TrustShared {
    double weights[kThreads / kWarpSize], directions[kThreads / kWarpSize];
};

// One block per chunk, so that a chunk's sums do not depend on its place in memory.
template <class Rule, class State, class Master>
__global__ void __launch_bounds__(kThreads) trust_sums_kernel(TrustSums op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    TrustShared& shared = shared_memory<TrustShared>();
    constexpr int kStates = Rule::kStates;
    const Chunk chunk = op.chunks[blockIdx.x];
    const UpdateScalars s = op.scalars[chunk.group];
    const float grad_scale = op.grad_norm->scale;
    const Master* master = op.master.as<Master>() + chunk.begin;
    const float* grad = op.grad + chunk.begin;
    bool aligned = is_aligned(master, grad);
    const State* arrays[kStates];
    for (int k = 0; k < kStates; k++) {
        arrays[k] = op.state[k].template as<State>() + chunk.state_begin;
        aligned = aligned && is_aligned(arrays[k]);
    }
    double weights = 0, directions = 0;
    for_packs(0, chunk.count, aligned, [&]<bool kWhole>(int place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(grad + place, available));
        const Four weight = load_floats<kWhole>(master + place, available);
        Four states[kStates];
#pragma unroll
        for (int k = 0; k < kStates; k++) states[k] = load_floats<kWhole>(arrays[k] + place, available);
#pragma unroll
        for (int i = 0; i < kSize; i++) {
            float state[kStates];
#pragma unroll
            for (int k = 0; k < kStates; k++) state[k] = states[k].value[i];
            const double direction = Rule::direction(s, gradient.value[i] * grad_scale, weight.value[i], state);
            weights = fma(double(weight.value[i]), double(weight.value[i]), weights);
            if (i < available) directions = fma(direction, direction, directions);
        }
    });
    weights = block_sum(weights, shared.weights);
    directions = block_sum(directions, shared.directions);
    if (threadIdx.x == 0) op.out[2 * chunk.index] = weights, op.out[2 * chunk.index + 1] = directions;
}

// One block per layer.
__global__ void __launch_bounds__(kThreads) trust_ratios_kernel(TrustRatios op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    TrustShared& shared = shared_memory<TrustShared>();
    const Layer layer = op.layers[blockIdx.x];
    double weights = 0, directions = 0;
    for (int i = int(threadIdx.x); i < layer.n_sums; i += kThreads) {
        const double* sums = op.sums + 2 * size_t(layer.first + i * layer.stride);
        weights += sums[0], directions += sums[1];
    }
    weights = block_sum(weights, shared.weights);
    directions = block_sum(directions, shared.directions);
    if (threadIdx.x == 0) op.out[blockIdx.x] = layer_ratio(op, layer, weights, directions);
}

template <class T, class State>
__global__ void __launch_bounds__(kThreads) momentum_direction_kernel(MomentumDirection op) {
    const Chunk chunk = chunk_of_block(op);
    const float momentum = op.scalars[chunk.group].momentum, grad_scale = op.grad_norm->scale;
    T* direction = op.direction.template as<T>() + chunk.state_begin;
    State* m = op.m.from(chunk.state_begin).template as<State>();
    const RoundingBits random(op.scalars[chunk.group].rounding_key, chunk.tensor);
    const float* grad = op.grad + chunk.begin;
    for_packs(op.grad_norm, chunk, is_aligned(direction, m, grad), [&]<bool kWhole>(int place, int available) {
        const Four gradient = unpack(load_pack<kWhole>(grad + place, available));
        Four average{}, step;
        if (m) average = load_floats<kWhole>(m + place, available);
#pragma unroll
        for (int i = 0; i < kSize; i++)
            step.value[i] = m ? momentum_step(momentum, op.nesterov, gradient.value[i], grad_scale, average.value[i])
                              : gradient.value[i] * grad_scale;
        if (m) store_rounded<kWhole>(m + place, average, random, chunk.first + uint32_t(place), 0, available);
        store_pack<kWhole>(direction + place, pack_floats(step.template as<T>()), available);
    });
}

template <class Master, class Param, class T>
__global__ void __launch_bounds__(kThreads) apply_direction_kernel(ApplyDirection op) {
    const Chunk chunk = chunk_of_block(op);
    const float keep = op.scalars[chunk.group].keep;
    const float step = step_of(op, chunk);
    const RoundingBits random(op.scalars[chunk.group].rounding_key, chunk.tensor, true);
    Master* master = op.master.as<Master>() + chunk.begin;
    Param* param = op.param ? op.param.template as<Param>() + chunk.begin : nullptr;
    const T* direction = op.direction.template as<T>() + chunk.state_begin;
    for_packs(op.grad_norm, chunk, is_aligned(master, param, direction), [&]<bool kWhole>(int place, int available) {
        const Four toward = load_floats<kWhole>(direction + place, available);
        Four weight = load_floats<kWhole>(master + place, available);
#pragma unroll
        for (int i = 0; i < kSize; i++)
            weight.value[i] = stepped(keep, op.cautious, step, toward.value[i], weight.value[i]);
        store_rounded<kWhole>(master + place, weight, random, chunk.first + uint32_t(place), 0, available);
        if (param) store_pack<kWhole>(param + place, pack_floats(weight.template as<Param>()), available);
    });
}

template <class Op> void launch_chunks(void (*kernel)(Op), const char* name, const Op& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    launch(kernel, {name, blocks_for(size_t(op.n_chunks) * kBlocksPerChunk, 1), kThreads}, stream, op);
}

}  // namespace

void elementwise_update(const ElementwiseUpdate& op, Stream stream) {
    dispatch_weights("elementwise_update", op.master, op.param, [&]<class Master, class Param>() {
        dispatch(op.rule, op.state, [&]<class Rule, class State>() {
            launch_chunks(elementwise_update_kernel<Rule, Master, Param, State>, "elementwise_update", op, stream);
        });
    });
}

void trust_sums(const TrustSums& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    dispatch_state("trust_sums", op.master.dtype, [&]<class Master>() {
        dispatch_layerwise(op.rule, op.state, [&]<class Rule, class State>() {
            launch(trust_sums_kernel<Rule, State, Master>,
                   {"trust_sums", blocks_for(size_t(op.n_chunks), 1), kThreads, sizeof(TrustShared)}, stream, op);
        });
    });
}

void trust_ratios(const TrustRatios& op, Stream stream) {
    if (op.n_layers <= 0) return;
    launch(trust_ratios_kernel, {"trust_ratios", blocks_for(size_t(op.n_layers), 1), kThreads, sizeof(TrustShared)},
           stream, op);
}

void momentum_direction(const MomentumDirection& op, Stream stream) {
    dispatch("momentum_direction", {op.direction}, [&]<class T>() {
        dispatch_state("momentum_direction", op.m.dtype, [&]<class State>() {
            launch_chunks(momentum_direction_kernel<T, State>, "momentum_direction", op, stream);
        });
    });
}

void apply_direction(const ApplyDirection& op, Stream stream) {
    dispatch_weights("apply_direction", op.master, op.param, [&]<class Master, class Param>() {
        dispatch("apply_direction", {op.direction}, [&]<class T>() {
            launch_chunks(apply_direction_kernel<Master, Param, T>, "apply_direction", op, stream);
        });
    });
}

}  // namespace ops
