// The activation alone, for recomputation.
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"

namespace ops {

template <class T> void gelu_forward(const GeluForward<T>& op, Stream) {
    constexpr size_t kBlock = 1 << 14;  // elements
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        T* out = op.out;
        const T* inp = op.inp;
#pragma omp simd
        for (size_t i = begin; i < end; i++) out[i] = from_float<T>(gelu(to_float(inp[i])));
    });
}

template void gelu_forward(const GeluForward<float>&, Stream);
template void gelu_forward(const GeluForward<bf16>&, Stream);
template void gelu_forward(const GeluForward<fp16>&, Stream);

}  // namespace ops
