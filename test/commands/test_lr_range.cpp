// The learning rate range test: its rates, its end, and the steps that it finds on a known curve.
#include <cmath>

#include "commands/lr_range.h"
#include "test/support/catch.h"

namespace {

RangeTest test_of(int steps, double from = 1e-5, double to = 1e-1) { return {.from = from, .to = to, .steps = steps}; }

// A smooth fall from 4 to 2, fastest at `middle`, then a steep rise from `end`.
double curve(int step, int middle, int end) {
    const double fall = 3 - std::tanh((step - middle) / 8.0);
    return step <= end ? fall : fall + 0.05 * (step - end) * (step - end);
}

}  // namespace

TEST_CASE("a range test's rates grow by a constant factor", "[lr-range]") {
    const RangeTest test = test_of(41);
    CHECK(test.rate(1) == 1e-5);
    CHECK(std::abs(test.rate(41) - 1e-1) <= 1e-15);
    for (int step = 2; step <= 41; step++)
        CHECK(std::abs(test.rate(step) / test.rate(step - 1) - std::pow(10, 0.1)) < 1e-12);
    for (int step = 1; step <= 41; step++) CHECK(test_of(41, 0.003, 0.003).rate(step) == 0.003);
}

TEST_CASE("a range test smooths over a tenth of the steps", "[lr-range]") {
    RangeTest test = test_of(40);
    for (double loss : {1.0, 2.0, 4.0, 8.0, 16.0, 32.0}) test.losses.push_back(loss);
    const std::vector<double> expected = {7 / 3.0, 15 / 4.0, 31 / 5.0, 62 / 5.0, 60 / 4.0, 56 / 3.0};
    REQUIRE(test.smoothed().size() == expected.size());
    for (size_t i = 0; i < expected.size(); i++) CHECK(std::abs(test.smoothed()[i] - expected[i]) < 1e-12);
}

TEST_CASE("a range test finds the steepest descent and the lowest loss, and stops after it", "[lr-range]") {
    for (int steps : {100, 300}) {
        const int middle = 3 * steps / 10, end = 6 * steps / 10;
        RangeTest test = test_of(steps);
        int step = 1;
        while (test.add(curve(step, middle, end))) step++;
        CHECK(step < steps);
        CHECK(test.smoothed().back() > 1.5 * 2);
        CHECK(test.steepest_step() == middle);
        // The window reaches steps / 20 steps into the rise.
        CHECK(test.lowest_step() <= end);
        CHECK(test.lowest_step() >= end - steps / 20);
    }
}

TEST_CASE("a range test ends at a loss that is not finite and after its last step", "[lr-range]") {
    RangeTest test = test_of(10);
    CHECK(test.add(3));
    CHECK_FALSE(test.add(NAN));
    CHECK_FALSE(test.add(INFINITY));
    CHECK(test.losses == std::vector<double>{3});
    for (int step = 2; step < 10; step++) CHECK(test.add(3 - 0.1 * step));
    CHECK_FALSE(test.add(2));
    CHECK(test.lowest_step() == 10);
}

TEST_CASE("a range test without a descent has no steepest step", "[lr-range]") {
    RangeTest test = test_of(100);
    CHECK(test.lowest_step() == 0);
    CHECK(test.steepest_step() == 0);
    for (int step = 1; step <= 50; step++) test.add(2 + 0.01 * step);
    CHECK(test.lowest_step() == 1);
    CHECK(test.steepest_step() == 0);
}
