// dropout: a thread processes the 8 elements of one call of philox(), in packs of 128 bits if samples are aligned.
// Reads and writes each element once: with 16-bit types, 4 bytes and 1/8 of philox()'s about 70 instructions each.
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

template <class T, bool kAligned> __global__ void __launch_bounds__(kThreads) dropout_kernel(Dropout op) {
    const size_t call = size_t(blockIdx.x) * kThreads + threadIdx.x, begin = call * kDropoutGroup;
    if (begin >= op.count) return;
    const T* inp = op.inp.as<T>() + blockIdx.y * op.count;  // may alias `out`
    T* out = op.out.as<T>() + blockIdx.y * op.count;
    const Philox random = op.mask.words(op.mask.keys[blockIdx.y], call);
    const float factor = op.mask.factor;
#pragma unroll
    for (int first = 0; first < kDropoutGroup; first += kPackSize<T>) {
        const size_t at = begin + first, available = op.count - min(op.count, at);
        auto x = unpack(load_some<kAligned>(inp + at, available));
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            const bool kept = op.mask.keeps(random.word[(first + i) / 2], (first + i) % 2);
            x.value[i] = kept ? x.value[i] * factor : 0.0f;
        }
        store_some<kAligned>(out + at, pack_floats(x), available);
    }
}

}  // namespace

void dropout(const Dropout& op, Stream stream) {
    dispatch("dropout", {op.out, op.inp}, [&]<class T>() {
        constexpr int kMax = 65535;
        require(op.batch <= kMax, "dropout: batch is %d, but must be at most %d", op.batch, kMax);
        if (op.count == 0 || op.batch == 0) return;
        const bool aligned = are_aligned(16, {op.out, op.inp}) && op.count % kPackSize<T> == 0;
        dim3 blocks = blocks_for(op.count, size_t(kThreads) * kDropoutGroup);
        blocks.y = unsigned(op.batch);
        launch(aligned ? dropout_kernel<T, true> : dropout_kernel<T, false>, {"dropout", blocks, kThreads}, stream, op);
    });
}

}  // namespace ops
