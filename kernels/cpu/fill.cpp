// Filling and casting flat arrays.
#include <cmath>
#include <numbers>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace ops {

namespace {

constexpr size_t kBlock = 1 << 15;  // elements: large enough to pay for a task, small enough to spread a tensor

// Box-Muller on the four words: words 0 and 1 give the numbers 0 (cosine) and 1 (sine), words 2 and 3 the other two.
void normal_quad(double quad[4], const Philox& random) {
    for (int pair = 0; pair < 4; pair += 2) {
        double radius = std::sqrt(-2.0 * std::log(double(uniform_from_bits(random.word[pair]))));
        double angle = 2.0 * std::numbers::pi * double(uniform_from_bits(random.word[pair + 1]));
        quad[pair] = radius * std::cos(angle);
        quad[pair + 1] = radius * std::sin(angle);
    }
}

}  // namespace

void normal_fill(const NormalFill& op, Stream) {
    const uint64_t counter_high = (uint64_t(RandomPurpose::init) << 32) + op.subsequence;
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        static_assert(kBlock % 4 == 0, "a block starts with the first number of a quad");
        for (size_t i = begin; i < end; i += 4) {
            double quad[4];
            normal_quad(quad, philox(op.seed, counter_high, i / 4));
            for (size_t j = i; j < std::min(i + 4, end); j++) op.out[j] = float(op.deviation * quad[j - i]);
        }
    });
}

void fill(const Fill& op, Stream) {
    parallel_blocks(op.count, kBlock,
                    [&](size_t begin, size_t end) { std::fill(op.out + begin, op.out + end, op.value); });
}

template <class T> void cast(const Cast<T>& op, Stream) {
    parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
        T* out = op.out;
        const float* inp = op.inp;
#pragma omp simd
        for (size_t i = begin; i < end; i++) out[i] = from_float<T>(inp[i]);
    });
}

template void cast(const Cast<float>&, Stream);
template void cast(const Cast<bf16>&, Stream);
template void cast(const Cast<fp16>&, Stream);

}  // namespace ops
