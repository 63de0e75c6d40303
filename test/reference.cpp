// The ops of the specification that have no storage type; the others are templates and stand in the header.
#include "test/reference.h"

namespace ref {

// *out (+)= sum of loss[i]
void loss_sum(const ops::LossSum& op) {
    double sum = 0;
    for (int i = 0; i < op.rows; i++) sum += op.loss[i];
    put(*op.out, sum, op.accumulate);
}

// out[i] = sum of values[e]^2 over the elements e of chunk i
void squared_sums(const ops::SquaredSums& op) {
    for (int i = 0; i < op.n_chunks; i++) {
        double& sum = op.out[op.chunks[i].index];
        sum = 0;
        for (int e = 0; e < op.chunks[i].count; e++) {
            double value = op.values[op.chunks[i].begin + e];
            sum += value * value;
        }
    }
}

// norm = sqrt(sum of sums) / loss_scale;  scale = min(1, clip / (norm + 1e-6)) / loss_scale, without clipping 1 /
// loss_scale
void grad_norm_finish(const ops::GradNormFinish& op) {
    double sum = 0;
    int non_finite_tensor = -1;
    for (int i = 0; i < op.n_chunks; i++) {
        sum += op.sums[i];
        if (!std::isfinite(op.sums[i]) && non_finite_tensor < 0) non_finite_tensor = op.chunks[i].tensor;
    }
    double norm = std::sqrt(sum) / *op.loss_scale;
    double clipping = op.clip > 0 ? std::min(1.0, op.clip / (norm + 1e-6)) : 1;
    *op.out = {.norm = float(norm),
               .scale = float(clipping / *op.loss_scale),
               .non_finite_tensor = non_finite_tensor,
               .reserved = 0};
}

// Element i comes from the words of philox number i / 4: of words 0 and 1 as uniform numbers u, v elements 0 and 1 are
// sqrt(-2 log u) cos(2 pi v) and sqrt(-2 log u) sin(2 pi v), of words 2 and 3 elements 2 and 3 (Box, Muller, "A note on
// the generation of random normal deviates", Annals of Mathematical Statistics 29, 1958).
void normal_fill(const ops::NormalFill& op) {
    for (size_t i = op.first; i < op.first + op.count; i++) {
        Philox random = philox(op.seed, (uint64_t(RandomPurpose::init) << 32) + op.subsequence, i / 4);
        int pair = int(i % 4) / 2;
        double u = uniform_from_bits(random.word[2 * pair]);
        double v = uniform_from_bits(random.word[2 * pair + 1]);
        double radius = std::sqrt(-2 * std::log(u));
        double normal = radius * (i % 2 == 0 ? std::cos(2 * M_PI * v) : std::sin(2 * M_PI * v));
        op.out[i - op.first] = float(normal * op.deviation);
    }
}

// out[i] += inp[i]
void add(const ops::Add& op) {
    for (size_t i = 0; i < op.count; i++) op.out[i] = float(double(op.out[i]) + double(op.inp[i]));
}

// out[i] = value
void fill(const ops::Fill& op) { std::fill(op.out, op.out + op.count, op.value); }

}  // namespace ref
