// Filling, adding and casting flat arrays.
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/normal.h"

namespace ops {

namespace {

constexpr size_t kBlock = 1 << 15;  // elements: large enough to pay for a task, small enough to spread a tensor

}  // namespace

void normal_fill(const NormalFill& op, Stream) {
    const uint64_t counter_high = (uint64_t(RandomPurpose::init) << 32) + op.subsequence;
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        static_assert(kBlock % 4 == 0, "a block starts with the first number of a quad");
        for (size_t i = begin; i < end; i += 4) {
            const NormalQuad quad = normal_quad(philox(op.seed, counter_high, (op.first + i) / 4));
            for (size_t j = i; j < std::min(i + 4, end); j++) op.out[j] = float(op.deviation * quad.value[j - i]);
        }
    });
}

void fill(const Fill& op, Stream) {
    parallel_blocks(op.count, kBlock,
                    [&](size_t begin, size_t end) { std::fill(op.out + begin, op.out + end, op.value); });
}

void add(const Add& op, Stream) {
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        float* out = op.out;
        const float* inp = op.inp;
#pragma omp simd
        for (size_t i = begin; i < end; i++) out[i] += inp[i];
    });
}

void scaled_add(const ScaledAdd& op, Stream) {
    if (op.grad_norm && op.grad_norm->non_finite_tensor >= 0) return;
    dispatch("scaled_add", op.out, op.a, op.b, [&]<class Out, class A, class B>() {
        parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
            Out* out = op.out.template as<Out>();
            const A* a = op.a.template as<A>();
            const B* b = op.b.template as<B>();
#pragma omp simd
            for (size_t i = begin; i < end; i++)
                out[i] = from_float<Out>(std::fma(op.alpha, to_float(a[i]), op.beta * to_float(b[i])));
        });
    });
}

void cast(const Cast& op, Stream) {
    dispatch("cast", op.out, op.inp, [&]<class Out, class In>() {
        parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
            Out* out = op.out.template as<Out>();
            const In* inp = op.inp.template as<In>();
#pragma omp simd
            for (size_t i = begin; i < end; i++) out[i] = from_float<Out>(to_float(inp[i]));
        });
    });
}

}  // namespace ops
