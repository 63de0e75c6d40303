// Filling, adding and casting flat arrays, one pack per thread. normal_fill and fill write 4 bytes per element, cast
// moves 6, add and scaled_add 6 in a 16-bit type. cast_columns assigns the packs of a row to adjacent threads.
// Numerics: normal_fill uses double and only operations with defined bits (kernels/shared/normal.h), so that initial
// weights are the same on CPU and GPU; cast rounds to nearest even.
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/normal.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kSize = kPackSize<float>;  // elements per thread
static_assert(kSize == 4, "a pack holds the four numbers of one call of philox()");

__device__ NormalQuad quad_of(const NormalFill& op, size_t number) {
    return normal_quad(philox(op.seed, (uint64_t(RandomPurpose::init) << 32) + op.subsequence, number / 4));
}

// The number at out[i].
__device__ size_t number_at(const NormalFill& op, size_t i) {
    const size_t place = op.skipped + i;
    return op.first + place / op.cols * op.stride + place % op.cols;
}

__device__ float normal_number(const NormalFill& op, size_t number) {
    const NormalQuad quad = quad_of(op, number);
    double value = 0;
#pragma unroll
    for (int k = 0; k < kSize; k++)
        if (number % kSize == size_t(k)) value = quad.value[k];
    return float(op.deviation * value);
}

// The elements that each op stores at i. A pack of numbers from several calls of philox() makes four calls.
template <bool kAligned> __device__ Floats<float, kSize> values_at(const NormalFill& op, size_t i) {
    const size_t number = number_at(op, i);
    Floats<float, kSize> values;
    if (number % kSize == 0 && number_at(op, i + kSize - 1) == number + kSize - 1) {
        const NormalQuad quad = quad_of(op, number);
#pragma unroll
        for (int k = 0; k < kSize; k++) values.value[k] = float(op.deviation * quad.value[k]);
    } else {
#pragma unroll
        for (int k = 0; k < kSize; k++) values.value[k] = normal_number(op, number_at(op, i + k));
    }
    return values;
}

template <bool kAligned> __device__ Floats<float, kSize> values_at(const Fill& op, size_t) {
    return {{op.value, op.value, op.value, op.value}};
}

template <class T> struct TypedAdd : Add {};

template <bool kAligned, class T> __device__ Floats<float, kSize> values_at(const TypedAdd<T>& op, size_t i) {
    const T* __restrict__ inp = op.inp.template as<T>();
    auto sum = unpack(load_some<kAligned, T, kSize>(op.out.template as<T>() + i, op.count - i));
    sum += unpack(load_some<kAligned, T, kSize>(inp + i, op.count - i));
    return sum.template as<float>();
}

template <class In> struct TypedCast : Cast {};

template <bool kAligned, class In> __device__ Floats<float, kSize> values_at(const TypedCast<In>& op, size_t i) {
    return unpack(load_some<kAligned, In, kSize>(op.inp.template as<In>() + i, op.count - i)).template as<float>();
}

template <class A, class B> struct TypedScaledAdd : ScaledAdd {};

template <bool kAligned, class A, class B>
__device__ Floats<float, kSize> values_at(const TypedScaledAdd<A, B>& op, size_t i) {
    const auto a = unpack(load_some<kAligned, A, kSize>(op.a.template as<A>() + i, op.count - i));
    const auto b = unpack(load_some<kAligned, B, kSize>(op.b.template as<B>() + i, op.count - i));
    Floats<float, kSize> sum;
#pragma unroll
    for (int k = 0; k < kSize; k++) sum.value[k] = std::fma(op.alpha, a.value[k], op.beta * b.value[k]);
    return sum;
}

template <class T, bool kAligned, class Op> __global__ void __launch_bounds__(kThreads) flat_kernel(Op op) {
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kSize;
    if (i >= op.count) return;
    if constexpr (requires { op.grad_norm; })
        if (op.grad_norm && op.grad_norm->non_finite_tensor >= 0) return;
    const auto values = values_at<kAligned>(op, i).template as<T>();
    store_some<kAligned>(View(op.out).as<T>() + i, pack_floats(values), op.count - i);
}

__host__ __device__ size_t packs_of_row(const CastColumns& op) { return (op.cols + kSize - 1) / kSize; }

template <class Out, class In, bool kAligned>
__global__ void __launch_bounds__(kThreads) cast_columns_kernel(CastColumns op) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const size_t row = i / packs_of_row(op), col = i % packs_of_row(op) * kSize;
    if (row >= op.rows) return;
    const In* __restrict__ inp = op.inp.as<In>() + row * op.inp_step + col;
    const auto values = unpack(load_some<kAligned, In, kSize>(inp, op.cols - col)).template as<Out>();
    store_some<kAligned>(op.out.as<Out>() + row * op.out_step + col, pack_floats(values), op.cols - col);
}

template <class T, class Op>
void launch_flat(const char* name, const Op& op, std::initializer_list<ConstView> inputs, Stream stream) {
    if (op.count == 0) return;
    bool aligned = are_aligned(kSize * sizeof(T), {op.out});
    for (const ConstView& input : inputs) aligned = aligned && are_aligned(kSize * size_of(input.dtype), {input});
    launch(aligned ? flat_kernel<T, true, Op> : flat_kernel<T, false, Op>,
           {name, blocks_for(op.count, size_t(kThreads) * kSize), kThreads}, stream, op);
}

}  // namespace

void normal_fill(const NormalFill& op, Stream stream) { launch_flat<float>("normal_fill", op, {}, stream); }

void fill(const Fill& op, Stream stream) { launch_flat<float>("fill", op, {}, stream); }

void add(const Add& op, Stream stream) {
    dispatch("add", {op.out, op.inp}, [&]<class T>() { launch_flat<T>("add", TypedAdd<T>{op}, {op.inp}, stream); });
}

void scaled_add(const ScaledAdd& op, Stream stream) {
    dispatch("scaled_add", op.out, op.a, op.b, [&]<class T, class A, class B>() {
        launch_flat<T>("scaled_add", TypedScaledAdd<A, B>{op}, {op.a, op.b}, stream);
    });
}

void cast(const Cast& op, Stream stream) {
    dispatch("cast", op.out, op.inp,
             [&]<class Out, class In>() { launch_flat<Out>("cast", TypedCast<In>{op}, {op.inp}, stream); });
}

void cast_columns(const CastColumns& op, Stream stream) {
    if (op.rows == 0 || op.cols == 0) return;
    dispatch("cast_columns", op.out, op.inp, [&]<class Out, class In>() {
        const bool aligned = op.out_step % kSize == 0 && op.inp_step % kSize == 0 &&
                             are_aligned(kSize * sizeof(Out), {op.out}) && are_aligned(kSize * sizeof(In), {op.inp});
        launch(aligned ? cast_columns_kernel<Out, In, true> : cast_columns_kernel<Out, In, false>,
               {"cast_columns", blocks_for(op.rows * packs_of_row(op), kThreads), kThreads}, stream, op);
    });
}

}  // namespace ops
