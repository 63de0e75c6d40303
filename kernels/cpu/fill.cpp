// Filling, adding and casting flat arrays.
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/tree_sum.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/normal.h"

namespace ops {

namespace {

constexpr size_t kBlock = 1 << 15;  // elements: large enough to pay for a task, small enough to spread a tensor

// out[i] is number first + i. Not inlined: inside the loop over rows the compiler keeps fewer constants in registers.
[[gnu::noinline]] void store_normal_numbers(const NormalFill& op, float* out, size_t first, size_t count) {
    const uint64_t counter_high = (uint64_t(RandomPurpose::init) << 32) + op.subsequence;
    for (size_t i = 0; i < count;) {
        const NormalQuad quad = normal_quad(philox(op.seed, counter_high, (first + i) / 4));
        for (size_t k = (first + i) % 4; k < 4 && i < count; k++) out[i++] = float(op.deviation * quad.value[k]);
    }
}

}  // namespace

void normal_fill(const NormalFill& op, Stream) {
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end;) {  // the part of a row in the block
            const size_t row = (op.skipped + i) / op.cols, col = (op.skipped + i) % op.cols;
            const size_t count = std::min(end - i, op.cols - col);
            store_normal_numbers(op, op.out + i, op.first + row * op.stride + col, count);
            i += count;
        }
    });
}

void fill(const Fill& op, Stream) {
    parallel_blocks(op.count, kBlock,
                    [&](size_t begin, size_t end) { std::fill(op.out + begin, op.out + end, op.value); });
}

void add(const Add& op, Stream) {
    dispatch("add", {op.out, op.inp}, [&]<class T>() {
        parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
            T* out = op.out.template as<T>();
            const T* inp = op.inp.template as<T>();
#pragma omp simd
            for (size_t i = begin; i < end; i++) out[i] = from_float<T>(to_float(out[i]) + to_float(inp[i]));
        });
    });
}

void sum_terms(const SumTerms& op, Stream) {
    parallel_blocks(op.count, kTreeSumBlock, [&](size_t begin, size_t end) {
        tree_sum(op.out.from(begin), op.terms.from(begin), op.count, op.n, end - begin);
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
            convert(op.out.as<Out>() + begin, op.inp.as<In>() + begin, end - begin);
        });
    });
}

void cast_columns(const CastColumns& op, Stream) {
    dispatch("cast_columns", op.out, op.inp, [&]<class Out, class In>() {
        const size_t block_rows = std::max<size_t>(1, kBlock / std::max<size_t>(1, op.cols));
        parallel_blocks(op.rows, block_rows, [&](size_t begin, size_t end) {
            for (size_t row = begin; row < end; row++)
                convert(op.out.as<Out>() + row * op.out_step, op.inp.as<In>() + row * op.inp_step, op.cols);
        });
    });
}

}  // namespace ops
