// dropout: a thread processes the 8 elements of one call of philox(), in packs of 128 bits if samples are aligned.
// Reads and writes each element once: with 16-bit types, 4 bytes and 1/8 of philox()'s about 70 instructions each.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;

template <class T, bool kAligned> __global__ void __launch_bounds__(kThreads) dropout_kernel(Dropout op) {
    const size_t sample = op.first / op.count + blockIdx.y, origin = sample * op.count;
    const size_t skipped = op.first - min(op.first, origin);  // elements of the sample before `first`
    const size_t call = skipped / kDropoutGroup + size_t(blockIdx.x) * kThreads + threadIdx.x;
    const size_t begin = call * kDropoutGroup, end = min(op.count, op.first + op.elements - origin);
    uint32_t largest = 0;
    const ptrdiff_t offset = ptrdiff_t(origin) - ptrdiff_t(op.first);
    const T* inp = op.inp.as<T>() + offset;  // may alias `out`
    T* out = op.out.as<T>() + offset;
    const Philox random = op.mask.words(op.mask.keys[sample], op.start / kDropoutGroup + call);
    const float factor = op.mask.factor;
#pragma unroll
    for (int first = 0; first < kDropoutGroup && begin < end; first += kPackSize<T>) {
        const size_t at = begin + first, available = end - min(end, at);
        auto x = unpack(load_some<kAligned>(inp + at, available));
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            const bool kept = op.mask.keeps(random.word[(first + i) / 2], (first + i) % 2);
            x.value[i] = kept ? x.value[i] * factor : 0.0f;
        }
        const Pack<T> result = pack_floats(x);
        store_some<kAligned>(out + at, result, available);
        if (kGivesAmax<T, kAligned> && op.out.amax) largest = largest_magnitude(largest, result);
    }
    if (kGivesAmax<T, kAligned> && op.out.amax)
        add_to_amax(shared_memory<AmaxShared<kThreads>>(), op.out.amax, largest);
}

}  // namespace

void dropout(const Dropout& op, Stream stream) {
    dispatch("dropout", {op.out, op.inp}, [&]<class T>() {
        constexpr int kMax = 65535;
        if (op.elements == 0) return;
        const size_t samples = (op.first + op.elements - 1) / op.count - op.first / op.count + 1;
        require(samples <= kMax, "dropout: %zu samples, but must be at most %d", samples, kMax);
        require(op.first % op.count % kDropoutGroup == 0 && op.start % kDropoutGroup == 0,
                "dropout: first is element %zu of a sample and start is %zu, but both must be multiples of %d",
                op.first % op.count, op.start, kDropoutGroup);
        const bool aligned =
            are_aligned(16, {op.out, op.inp}) && op.count % kPackSize<T> == 0 && op.elements % kPackSize<T> == 0;
        dim3 blocks = blocks_for(std::min(op.count, op.elements), size_t(kThreads) * kDropoutGroup);
        blocks.y = unsigned(samples);
        clear_amax("dropout", op.out, aligned, stream);
        launch(aligned ? dropout_kernel<T, true> : dropout_kernel<T, false>,
               {"dropout", blocks, kThreads, sizeof(AmaxShared<kThreads>)}, stream, op);
    });
}

}  // namespace ops
