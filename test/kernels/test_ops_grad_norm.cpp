// squared_sums and grad_norm_finish against ref::, whose sums are long doubles in order. Sums of squares are exact: the
// same bits for any order and any chunks.
#include <cstddef>

#include "kernels/base/exact_squares.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"
#include "test/support/update_chunks.h"

namespace {

using Chunks = std::vector<ops::Chunk>;

Chunks reversed(Chunks chunks) {
    std::reverse(chunks.begin(), chunks.end());
    return chunks;
}

std::vector<double> no_sums(int tensors) { return std::vector<double>(size_t(tensors * ops::kSquareEntries)); }

std::vector<double> values_of(const std::vector<double>& sums) {
    std::vector<double> values;
    for (size_t i = 0; i < sums.size(); i += ops::kSquareEntries) values.push_back(ops::sum_of_bins(&sums[i]));
    return values;
}

// Of each tensor. A sum loses at most 2^-44 of its largest square per element, and two additions round.
void check_sums(const Array<double>& sums, const std::vector<double>& expected, const std::vector<size_t>& counts) {
    check_close("sum", values_of(sums.fetch()), expected,
                [&](size_t i) { return double(counts[i] + 1) * 0x1p-44 * expected[i]; });
}

// The sums of the squares of gradients, and the norms that follow from them.
struct SquaredSums {
    Array<double> sums{"sums", Role::output, no_sums(kTensors)};
    std::vector<double> expected = std::vector<double>(kTensors);

    explicit SquaredSums(const std::vector<float>& gradients) {
        Array<float> values("values", Role::input, gradients);
        Array<ops::Chunk> chunks("chunks", Role::input, reversed(chunks_of_all_tensors()));
        const OnDevice<float> device;
        const int n_chunks = int(chunks.host.size());
        ops::squared_sums({sums.on(device), values.on(device), chunks.on(device), n_chunks}, Stream());
        ref::squared_sums({expected.data(), values.host.data(), chunks.host.data(), n_chunks});
    }

    ops::GradNorm norm(float loss_scale, float clip) {
        Array<float> scale("loss_scale", Role::input, std::vector<float>{loss_scale});
        Array<ops::GradNorm> out("out", Role::output, std::vector<ops::GradNorm>(1));
        const OnDevice<float> device;
        ops::grad_norm_finish({out.on(device), sums.on(device), scale.on(device), kTensors, clip}, Stream());
        ref::grad_norm_finish({out.host.data(), expected.data(), scale.host.data(), kTensors, clip});
        ops::GradNorm got = out.fetch()[0];
        CHECK(got.non_finite_tensor == out.host[0].non_finite_tensor);
        if (out.host[0].non_finite_tensor < 0) {
            // Sums in double have negligible errors; a root, two divisions and a minimum in float or wider.
            CHECK(std::abs(got.norm - out.host[0].norm) <= 4 * kRoundoff * out.host[0].norm);
            CHECK(std::abs(got.scale - out.host[0].scale) <= 8 * kRoundoff * out.host[0].scale);
            check_sums(sums, expected, {std::begin(kTensorSizes), std::end(kTensorSizes)});
        } else {
            CHECK(!std::isfinite(got.norm));
        }
        return got;
    }
};

std::vector<float> random_gradients(double width) {
    std::vector<double> values = random_values(element_count(), 1, width);
    return {values.begin(), values.end()};
}

}  // namespace

// Squares of 1e30 and of 1e-30 are beyond float's range on either side; for a norm of 3e-6 the 1e-6 that torch adds
// to it matters.
TEST_CASE("squared_sums and grad_norm_finish", "[ops]") {
    for (double width : {1.0, 1e30, 1e-30, 1e-8}) {
        SquaredSums sums(random_gradients(width));
        for (float clip : {0.0f, 1.0f, 1e6f, 1e-6f})
            for (float loss_scale : {1.0f, 65536.0f}) {
                INFO("width " << width << ", clip " << clip << ", loss_scale " << loss_scale);
                ops::GradNorm norm = sums.norm(loss_scale, clip);
                double expected = width * std::sqrt(double(element_count()) / 3) / loss_scale;  // of uniform numbers
                CHECK(std::abs(norm.norm / expected - 1) < 0.01);
                bool is_clipped = clip > 0 && norm.norm > clip;
                CHECK((norm.scale * loss_scale < 0.9999f) == is_clipped);
                CHECK(norm.non_finite_tensor == -1);
            }
    }
}

TEST_CASE("grad_norm_finish: gradients that are all zero", "[ops]") {
    ops::GradNorm norm = SquaredSums(std::vector<float>(element_count(), 0.0f)).norm(8, 1);
    CHECK(norm.norm == 0);
    CHECK(norm.scale == 0.125f);
    CHECK(norm.non_finite_tensor == -1);
}

TEST_CASE("grad_norm_finish: reports the first tensor that is not finite", "[ops]") {
    constexpr float kBad[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (int tensor = 0; tensor < kTensors; tensor++) {
        const float bad = kBad[tensor % 4];
        INFO("a gradient of " << bad << " in tensor " << tensor);
        std::vector<float> gradients = random_gradients(1);
        gradients[begin_of(tensor) + kTensorSizes[tensor] - 1] = bad;
        CHECK(SquaredSums(gradients).norm(1, 1).non_finite_tensor == tensor);
        gradients[begin_of(kTensors - 1)] = -bad;
        CHECK(SquaredSums(gradients).norm(1, 1).non_finite_tensor == tensor);
    }
}

namespace {

using Floats = std::vector<float>;

// Numbers of both signs whose magnitudes are powers of 2 from 2^low to 2^high times 1 to 2.
Floats spread(size_t count, uint64_t seed, double low, double high) {
    const std::vector<double> numbers = random_values(count, seed), exponents = random_values(count, seed + 1);
    Floats values(count);
    for (size_t i = 0; i < count; i++) {
        const double exponent = std::floor(low + (high - low) * (exponents[i] + 1) / 2);
        values[i] = float(std::ldexp(std::copysign(1 + std::abs(numbers[i]), numbers[i]), int(exponent)));
    }
    return values;
}

// Elements in a random order.
Floats shuffled(Floats values, uint64_t seed) {
    const std::vector<int> numbers = random_integers(values.size(), seed, 1 << 30);
    for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[size_t(numbers[i - 1]) % i]);
    return values;
}

// A tensor in chunks of at most `most` elements, of that size or of random sizes.
Chunks cut(size_t count, int most, uint64_t seed = 0) {
    Chunks chunks;
    const std::vector<int> sizes = random_integers(count, seed, most);
    for (size_t begin = 0; begin < count; begin += size_t(chunks.back().count)) {
        const int size = seed ? 1 + sizes[chunks.size()] : most;
        chunks.push_back({.begin = begin,
                          .count = std::min(int(count - begin), size),
                          .tensor = 1,
                          .index = int(chunks.size()),
                          .group = 0,
                          .state_begin = 0});
    }
    return chunks;
}

// The sum of squares of tensor 1 of 3, by several calls of the op. Shift: of the address.
double sum_of(const Floats& values, const Chunks& chunks, int calls = 1, int shift = 0) {
    Array<float> gradients("values", Role::input, values, shift);
    Array<ops::Chunk> list("chunks", Role::input, chunks);
    Array<double> sums("sums", Role::output, no_sums(3));
    const OnDevice<float> device;
    int done = 0;
    for (int call = 1; call <= calls; call++) {
        const int end = int(chunks.size()) * call / calls;
        ops::squared_sums({sums.on(device), gradients.on(device), list.on(device) + done, end - done}, Stream());
        done = end;
    }
    Array<double> expected("expected", Role::output, std::vector<double>(3));
    ref::squared_sums({expected.host.data(), values.data(), chunks.data(), int(chunks.size())});
    check_sums(sums, expected.host, {0, values.size(), 0});
    return values_of(sums.fetch())[1];
}

}  // namespace

// Among the values are squares that are half a unit of a bin, 2^(234 - 22 k), and small ones that only a chunk without
// larger ones counts in its last bin.
TEST_CASE("squared_sums: the same bits for any order and any chunks", "[ops]") {
    constexpr size_t kCount = 3 * ops::kChunkElements + 57;
    struct Case {
        const char* name;
        Floats values;
    };
    std::vector<Case> cases = {
        {"of one size", spread(kCount, 1, 0, 1)},        {"1e-30 to 1e30", spread(kCount, 2, -100, 100)},
        {"denormal", spread(kCount, 3, -149, -126)},     {"largest", spread(kCount, 4, 120, 127.9)},
        {"halves of units", spread(kCount, 5, -14, -4)}, {"one is large", spread(kCount, 6, -30, 0)}};
    for (size_t i = 0; i < kCount; i += 5000) cases[4].values[i] = std::ldexp(1.0f, int(i / 5000) % 2 ? 7 : -4);
    cases.back().values[kCount / 2] = 3e9f;
    for (const auto& [name, values] : cases) {
        INFO(name);
        const double expected = sum_of(values, cut(kCount, ops::kChunkElements));
        CHECK(expected > 0);
        CHECK(sum_of(values, reversed(cut(kCount, ops::kChunkElements)), 1, 1) == expected);
        for (const uint64_t seed : {1, 2}) {
            CHECK(sum_of(values, cut(kCount, 2000, seed), 3) == expected);
            CHECK(sum_of(shuffled(values, seed), cut(kCount, 5000, seed), 2) == expected);
        }
    }
}

// The sum begins with the bin of its largest square. A larger bin does not count that square, even if it is exactly
// half a unit there, and so rounded to even.
TEST_CASE("squared_sums: half a unit of a bin", "[ops]") {
    for (int k = 0; k <= 24; k++) {
        Floats values = {std::ldexp(1.0f, 117 - 11 * k)};
        for (const float value : spread(20, uint64_t(k), -30, -14)) values.push_back(value * values[0]);
        INFO("bin " << k);
        const double expected = sum_of(values, cut(values.size(), 1));
        CHECK(sum_of(values, cut(values.size(), 1000)) == expected);
        CHECK(sum_of(values, cut(values.size(), 6, 1)) == expected);
        values[0] = std::nextafter(values[0], INFINITY);
        CHECK(sum_of(values, cut(values.size(), 1000)) == sum_of(values, cut(values.size(), 1)));
    }
}

// From the smallest float to the largest.
TEST_CASE("squared_sums: one element", "[ops]") {
    Floats values = spread(100, 9, -149, 127.9);
    for (const float value : {0x1p-149f, 0x3p-149f, 0x1.fffffep-127f, -1.0f, -3.4028234e38f}) values.push_back(value);
    for (const float value : values) sum_of({value}, cut(1, 1));
}

// A chunk that is not finite counts itself, and nothing else changes.
TEST_CASE("squared_sums: counts chunks that are not finite", "[ops]") {
    for (const float bad : {NAN, -INFINITY}) {
        Floats values = spread(300, 1, -3, 3);
        values[120] = values[130] = values[299] = bad;
        const Chunks chunks = cut(300, 100);
        Array<float> gradients("values", Role::input, values);
        Array<ops::Chunk> list("chunks", Role::input, chunks);
        Array<double> sums("sums", Role::output, no_sums(3)), first("first", Role::output, no_sums(3));
        const OnDevice<float> device;
        ops::squared_sums({sums.on(device), gradients.on(device), list.on(device), 3}, Stream());
        ops::squared_sums({first.on(device), gradients.on(device), list.on(device), 1}, Stream());
        std::vector<double> expected = first.fetch();
        expected[2 * ops::kSquareEntries - 1] = 2;
        check_same_bits(sums, expected);
    }
}

TEST_CASE("squared_sums beyond 2^32 elements", "[ops]") {
    Array<float> values("values", Role::input, random_gradients(1));
    Array<ops::Chunk> near_chunks("chunks", Role::input, chunks_of_all_tensors());
    Array<ops::Chunk> far_chunks("far chunks", Role::input, far(chunks_of_all_tensors()));
    const int n_chunks = int(near_chunks.host.size());
    Array<double> out("out", Role::output, no_sums(kTensors)), expected("expected", Role::output, no_sums(kTensors));
    OnDevice<float> device;
    ops::squared_sums({expected.on(device), values.on(device), near_chunks.on(device), n_chunks}, Stream());
    ops::squared_sums({out.on(device), values.on(device) - kFar, far_chunks.on(device), n_chunks}, Stream());
    check_same_bits(out, expected.fetch());
}
