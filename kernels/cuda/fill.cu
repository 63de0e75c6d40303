// Filling, adding and casting flat arrays, one pack per thread. normal_fill and fill write 4 bytes per element, add
// moves 12, cast 6.
// Numerics: normal_fill uses double and only operations with defined bits (kernels/shared/normal.h), so that initial
// weights are the same on CPU and GPU; cast rounds to nearest even.
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/normal.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kSize = kPackSize<float>;  // elements per thread
static_assert(kSize == 4, "a pack holds the four numbers of one call of philox()");

__device__ size_t first_element() { return (size_t(blockIdx.x) * kThreads + threadIdx.x) * kSize; }

template <bool kAligned> __global__ void __launch_bounds__(kThreads) normal_fill_kernel(NormalFill op) {
    const size_t i = first_element();
    if (i >= op.count) return;
    const uint64_t counter_high = (uint64_t(RandomPurpose::init) << 32) + op.subsequence;
    const NormalQuad quad = normal_quad(philox(op.seed, counter_high, (op.first + i) / 4));
    Floats<float, kSize> values;
#pragma unroll
    for (int k = 0; k < kSize; k++) values.value[k] = float(op.deviation * quad.value[k]);
    store_some<kAligned>(op.out + i, pack_floats(values), op.count - i);
}

template <bool kAligned> __global__ void __launch_bounds__(kThreads) fill_kernel(Fill op) {
    const size_t i = first_element();
    if (i >= op.count) return;
    const Floats<float, kSize> values{{op.value, op.value, op.value, op.value}};
    store_some<kAligned>(op.out + i, pack_floats(values), op.count - i);
}

template <bool kAligned> __global__ void __launch_bounds__(kThreads) add_kernel(Add op) {
    const float* __restrict__ inp = op.inp;
    const size_t i = first_element();
    if (i >= op.count) return;
    auto sum = unpack(load_some<kAligned>(static_cast<const float*>(op.out) + i, op.count - i));
    sum += unpack(load_some<kAligned>(inp + i, op.count - i));
    store_some<kAligned>(op.out + i, pack_floats(sum), op.count - i);
}

template <class T, bool kAligned> __global__ void __launch_bounds__(kThreads) cast_kernel(Cast op) {
    T* __restrict__ out = op.out.as<T>();
    const float* __restrict__ inp = op.inp;
    const size_t i = first_element();
    if (i >= op.count) return;
    const auto values = unpack(load_some<kAligned>(inp + i, op.count - i));
    store_some<kAligned>(out + i, pack_floats(values.template as<T>()), op.count - i);
}

template <class Op> void launch_flat(const char* name, void (*kernel)(Op), const Op& op, Stream stream) {
    if (op.count == 0) return;
    launch(kernel, {name, blocks_for(op.count, size_t(kThreads) * kSize), kThreads}, stream, op);
}

}  // namespace

void normal_fill(const NormalFill& op, Stream stream) {
    launch_flat("normal_fill", are_aligned(16, {op.out}) ? normal_fill_kernel<true> : normal_fill_kernel<false>, op,
                stream);
}

void fill(const Fill& op, Stream stream) {
    launch_flat("fill", are_aligned(16, {op.out}) ? fill_kernel<true> : fill_kernel<false>, op, stream);
}

void add(const Add& op, Stream stream) {
    launch_flat("add", are_aligned(16, {op.out, op.inp}) ? add_kernel<true> : add_kernel<false>, op, stream);
}

void cast(const Cast& op, Stream stream) {
    dispatch("cast", {op.out}, [&]<class T>() {
        const bool aligned = are_aligned(16, {op.inp}) && are_aligned(kSize * sizeof(T), {op.out});
        launch_flat("cast", aligned ? cast_kernel<T, true> : cast_kernel<T, false>, op, stream);
    });
}

}  // namespace ops
