// out = gelu(inp): a thread takes a pack of 128 bits. Reads and writes each element once: 4 count bytes in 16 bits.
// Numerics: gelu.cuh's, the same that the matrix products' epilogue uses.
#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(ActivationForward op) {
    T* __restrict__ out = op.out.as<T>();
    const T* __restrict__ inp = op.inp.as<T>();
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kPackSize<T>;
    if (i >= op.count) return;
    const bool whole = op.count - i >= kPackSize<T>;
    const int available = whole ? kPackSize<T> : int(op.count - i);
    auto x = unpack(kAligned && whole ? load_pack<kAligned>(inp + i) : load_pack<false>(inp + i, available));
#pragma unroll
    for (float& value : x.value) value = gelu(value);
    if (kAligned && whole)
        store_pack<kAligned>(out + i, pack_floats(x));
    else
        store_pack<false>(out + i, pack_floats(x), available);
}

}  // namespace

void activation_forward(const ActivationForward& op, Stream stream) {
    dispatch("activation_forward", {op.out, op.inp}, [&]<class T>() {
        if (op.count == 0) return;
        auto kernel = are_aligned(16, {op.out, op.inp}) ? activation_forward_kernel<T, true>
                                                        : activation_forward_kernel<T, false>;
        launch(kernel, {"activation_forward", blocks_for(op.count, size_t(kThreads) * kPackSize<T>), kThreads}, stream,
               op);
    });
}

}  // namespace ops
