// The gradient noise scale of a distribution whose moments are known.
#include <cmath>

#include "runtime/checkpoint/manifest.h"
#include "test/support/catch.h"

namespace {

struct Gradient {
    double x, y;
    double squared() const { return x * x + y * y; }
};
const Gradient kSamples[] = {{1, 2}, {3, -1}, {0.5, 4}};  // equally likely

// The expected squared norm of the mean gradient of `size` independent samples, over all their combinations.
double expected_squared(int size, Gradient sum = {0, 0}, int chosen = 0) {
    if (chosen == size) return sum.squared() / (size * size);
    double mean = 0;
    for (const Gradient& sample : kSamples)
        mean += expected_squared(size, {sum.x + sample.x, sum.y + sample.y}, chosen + 1) / 3;
    return mean;
}

}  // namespace

TEST_CASE("the noise scale is the trace of the covariance over the squared mean gradient", "[noise]") {
    const Gradient mean = {4.5 / 3, 5.0 / 3};
    double trace = 0;
    for (const Gradient& sample : kSamples) trace += Gradient{sample.x - mean.x, sample.y - mean.y}.squared() / 3;
    for (const auto& [small, large] : {std::pair(1, 2), {2, 4}, {1, 6}}) {
        NoiseScale scale;
        CHECK_FALSE(scale.tokens());
        for (int repeat = 0; repeat < 3; repeat++) {
            scale.add(expected_squared(small), 10 * small, expected_squared(large), 10 * large);
            REQUIRE(scale.tokens());
            CHECK(std::abs(*scale.tokens() / (10 * trace / mean.squared()) - 1) < 1e-12);
        }
    }
}

TEST_CASE("the noise scale averages noise and signal before it divides them", "[noise]") {
    NoiseScale scale;
    scale.add(5, 1, 3, 2);  // noise 4, signal 1
    CHECK(std::abs(*scale.tokens() - 4) < 1e-12);
    scale.add(3, 1, 2.5, 2);  // noise 1, signal 2
    CHECK(std::abs(*scale.tokens() - (0.95 * 4 + 1) / (0.95 * 1 + 2)) < 1e-12);
    scale.add(1000, 1, 3, 2);  // a signal below 0
    CHECK_FALSE(scale.tokens());
}
