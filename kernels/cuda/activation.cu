// Activation functions, standalone (out = f(inp)) and gated (out = f(gate) up). A thread processes a pack of 128 bits
// of each array. Every element is read and written once: with 16-bit types, activation_forward moves 4 count bytes,
// gated_activation_forward 6 rows hidden, gated_activation_backward 10 rows hidden. Gate and up are the halves of a
// row, so their packs are aligned if `hidden` is a multiple of a pack; otherwise elements are moved one by one.
// Numerics: as in activation.cuh, which the GEMM epilogues use too; a result is rounded once.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

// Adds the block's packs to an amax if it is wanted. All threads must call it.
template <bool kAligned, class... Packs> __device__ void add_largest(float* amax, const Pack<Packs>&... packs) {
    if (!(kGivesAmax<Packs, kAligned> && ...) || !amax) return;
    uint32_t largest = 0;
    ((largest = largest_magnitude(largest, packs)), ...);
    add_to_amax(shared_memory<AmaxShared<kThreads>>(), amax, largest);
}

template <class T, ActivationFunction function, bool kAligned>
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(ActivationForward op) {
    T* __restrict__ out = op.out.as<T>();
    const T* __restrict__ inp = op.inp.as<T>();
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kPackSize<T>;
    Pack<T> result{};
    if (i < op.count) {
        auto x = unpack(load_some<kAligned>(inp + i, op.count - i));
#pragma unroll
        for (float& value : x.value) value = activation<function>(value);
        result = pack_floats(x);
        store_some<kAligned>(out + i, result, op.count - i);
    }
    add_largest<kAligned>(op.out.amax, result);
}

// Offsets of a thread's pack in a row of `hidden` numbers and in a row of gate and up. A row's last pack may be short.
template <class T> struct GatedPlace {
    int available;  // number of elements; 0 or less for a thread without work
    size_t one, gate, up;

    __device__ GatedPlace(int rows, int hidden) {
        const unsigned packs = unsigned(hidden + kPackSize<T> - 1) / kPackSize<T>;
        const unsigned i = blockIdx.x * kThreads + threadIdx.x, row = i / packs;
        const int column = int(i % packs) * kPackSize<T>;
        available = row < unsigned(rows) ? hidden - column : 0;
        one = size_t(row) * size_t(hidden) + size_t(column);
        gate = one + size_t(row) * size_t(hidden);
        up = gate + size_t(hidden);
    }
};

// With kBackward, op is a GatedActivationBackward, otherwise a GatedActivationForward.
template <class T, ActivationFunction function, bool kAligned, bool kBackward, class Op>
__global__ void __launch_bounds__(kThreads) gated_activation_kernel(Op op) {
    const T* __restrict__ inp = op.inp.template as<T>();
    const GatedPlace<T> at(op.rows, op.hidden);
    Pack<T> of_gate{}, of_up{};  // the results
    if (at.available > 0) {
        auto gate = unpack(load_pack<kAligned>(inp + at.gate, at.available));
        auto up = unpack(load_pack<kAligned>(inp + at.up, at.available));
        if constexpr (kBackward) {
            const T* __restrict__ dout = op.dout.template as<T>();
            T* __restrict__ dinp = op.dinp.template as<T>();
            const auto gradient = unpack(load_pack<kAligned>(dout + at.one, at.available));
#pragma unroll
            for (int i = 0; i < kPackSize<T>; i++) {
                const ActivationPair f = activation_pair<function>(gate.value[i]);
                gate.value[i] = gradient.value[i] * up.value[i] * f.gradient;
                up.value[i] = gradient.value[i] * f.value;
            }
            of_gate = pack_floats(gate), of_up = pack_floats(up);
            store_pack<kAligned>(dinp + at.gate, of_gate, at.available);
            store_pack<kAligned>(dinp + at.up, of_up, at.available);
        } else {
            T* __restrict__ out = op.out.template as<T>();
#pragma unroll
            for (int i = 0; i < kPackSize<T>; i++) gate.value[i] = activation<function>(gate.value[i]) * up.value[i];
            of_gate = pack_floats(gate);
            store_pack<kAligned>(out + at.one, of_gate, at.available);
        }
    }
    if constexpr (kBackward)
        add_largest<kAligned>(op.dinp.amax, of_gate, of_up);
    else
        add_largest<kAligned>(op.out.amax, of_gate);
}

template <bool kBackward, class Op>
void launch_gated(const char* name, const Op& op, View result, std::initializer_list<ConstView> arrays, Stream stream) {
    dispatch(name, arrays, op.activation, [&]<class T, ActivationFunction function>() {
        if (op.rows <= 0 || op.hidden <= 0) return;
        const size_t packs = size_t(op.rows) * ((size_t(op.hidden) + kPackSize<T> - 1) / kPackSize<T>);
        require(packs < size_t(1) << 31, "gated activation: %d rows of %d need 2^31 packs or more", op.rows, op.hidden);
        const bool aligned = op.hidden % kPackSize<T> == 0 && are_aligned(16, arrays);
        clear_amax(name, result, aligned, stream);
        launch(aligned ? gated_activation_kernel<T, function, true, kBackward, Op>
                       : gated_activation_kernel<T, function, false, kBackward, Op>,
               {name, blocks_for(packs, kThreads), kThreads, sizeof(AmaxShared<kThreads>)}, stream, op);
    });
}

}  // namespace

void activation_forward(const ActivationForward& op, Stream stream) {
    constexpr const char* kName = "activation_forward";
    require(op.activation != ActivationFunction::relu2, "%s: relu2's output is stored, never recomputed", kName);
    dispatch(kName, {op.out, op.inp}, op.activation, [&]<class T, ActivationFunction function>() {
        if constexpr (function != ActivationFunction::relu2) {
            if (op.count == 0) return;
            const bool aligned = are_aligned(16, {op.out, op.inp});
            clear_amax(kName, op.out, aligned, stream);
            launch(
                aligned ? activation_forward_kernel<T, function, true> : activation_forward_kernel<T, function, false>,
                {kName, blocks_for(op.count, size_t(kThreads) * kPackSize<T>), kThreads, sizeof(AmaxShared<kThreads>)},
                stream, op);
        }
    });
}

void gated_activation_forward(const GatedActivationForward& op, Stream stream) {
    launch_gated<false>("gated_activation_forward", op, op.out, {op.out, op.inp}, stream);
}

void gated_activation_backward(const GatedActivationBackward& op, Stream stream) {
    launch_gated<true>("gated_activation_backward", op, op.dinp, {op.dinp, op.dout, op.inp}, stream);
}

}  // namespace ops
