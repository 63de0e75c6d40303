// Activation functions, standalone (out = f(inp)) and gated (out = f(gate) up). A thread processes a pack of 128 bits
// of each array. Every element is read and written once: with 16-bit types, activation_forward moves 4 count bytes,
// gated_activation_forward 6 rows hidden, gated_activation_backward 10 rows hidden. Gate and up are the halves of a
// row, so their packs are aligned if `hidden` is a multiple of a pack; otherwise elements are moved one by one.
// Numerics: as in activation.cuh, which the GEMM epilogues use too; a result is rounded once.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

template <class T, ActivationFunction function, bool kAligned>
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(ActivationForward op) {
    T* __restrict__ out = op.out.as<T>();
    const T* __restrict__ inp = op.inp.as<T>();
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kPackSize<T>;
    if (i >= op.count) return;
    auto x = unpack(load_some<kAligned>(inp + i, op.count - i));
#pragma unroll
    for (float& value : x.value) value = activation<function>(value);
    store_some<kAligned>(out + i, pack_floats(x), op.count - i);
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
    if (at.available <= 0) return;
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
        store_pack<kAligned>(dinp + at.gate, pack_floats(gate), at.available);
        store_pack<kAligned>(dinp + at.up, pack_floats(up), at.available);
    } else {
        T* __restrict__ out = op.out.template as<T>();
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) gate.value[i] = activation<function>(gate.value[i]) * up.value[i];
        store_pack<kAligned>(out + at.one, pack_floats(gate), at.available);
    }
}

template <bool kBackward, class Op>
void launch_gated(const char* name, const Op& op, std::initializer_list<ConstView> arrays, Stream stream) {
    dispatch(name, arrays, op.activation, [&]<class T, ActivationFunction function>() {
        if (op.rows <= 0 || op.hidden <= 0) return;
        const size_t packs = size_t(op.rows) * ((size_t(op.hidden) + kPackSize<T> - 1) / kPackSize<T>);
        require(packs < size_t(1) << 31, "gated activation: %d rows of %d need 2^31 packs or more", op.rows, op.hidden);
        const bool aligned = op.hidden % kPackSize<T> == 0 && are_aligned(16, arrays);
        launch(aligned ? gated_activation_kernel<T, function, true, kBackward, Op>
                       : gated_activation_kernel<T, function, false, kBackward, Op>,
               {name, blocks_for(packs, kThreads), kThreads}, stream, op);
    });
}

}  // namespace

void activation_forward(const ActivationForward& op, Stream stream) {
    constexpr const char* kName = "activation_forward";
    require(op.activation != ActivationFunction::relu2, "%s: relu2's output is stored, never recomputed", kName);
    dispatch(kName, {op.out, op.inp}, op.activation, [&]<class T, ActivationFunction function>() {
        if constexpr (function != ActivationFunction::relu2) {
            if (op.count == 0) return;
            auto kernel = are_aligned(16, {op.out, op.inp}) ? activation_forward_kernel<T, function, true>
                                                            : activation_forward_kernel<T, function, false>;
            launch(kernel, {kName, blocks_for(op.count, size_t(kThreads) * kPackSize<T>), kThreads}, stream, op);
        }
    });
}

void gated_activation_forward(const GatedActivationForward& op, Stream stream) {
    launch_gated<false>("gated_activation_forward", op, {op.out, op.inp}, stream);
}

void gated_activation_backward(const GatedActivationBackward& op, Stream stream) {
    launch_gated<true>("gated_activation_backward", op, {op.dinp, op.dout, op.inp}, stream);
}

}  // namespace ops
