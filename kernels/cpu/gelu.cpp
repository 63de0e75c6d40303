// The activation alone, for recomputation, and for the products that end in it.
#include "kernels/cpu/gelu.h"

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

template <class T> void gelu_block(T* out, const T* inp, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) out[i] = from_float<T>(gelu(to_float(inp[i])));
}

template void gelu_block(float*, const float*, size_t);
template void gelu_block(bf16*, const bf16*, size_t);
template void gelu_block(fp16*, const fp16*, size_t);

namespace ops {

void activation_forward(const ActivationForward& op, Stream) {
    dispatch("activation_forward", {op.out, op.inp}, [&]<class T>() {
        constexpr size_t kBlock = 1 << 14;  // elements
        parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
            gelu_block(op.out.as<T>() + begin, op.inp.as<T>() + begin, end - begin);
        });
    });
}

}  // namespace ops
