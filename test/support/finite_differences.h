// Backward ops of ref:: compared with difference quotients of their forward ops.
//
// With double storage only the fp32 statistics and gradients are rounded, so central differences are accurate. The
// objective is always the sum of dout times out, whose gradient the backward op must return.
#pragma once

#include <functional>

#include "test/reference/reference.h"
#include "test/support/catch.h"
#include "test/support/random_values.h"

inline constexpr double kStep = 0x1p-13;

// A few dozen roundings to float on each side of the gradient. The difference quotient itself is off by kStep^2 / 6 =
// 2.5e-9 of the third derivative and by 2^-53 / kStep = 1e-12 of the objective, both far below the tolerance.
inline double tolerance(double gradient) { return 64 * 0x1p-24 * (1 + std::abs(gradient)); }

using Objective = std::function<double()>;

// Every element of `gradient` must be the derivative of `objective` with respect to the same element of `input`, plus
// the gradient's value before the backward op (0 if it was overwritten).
template <class Gradient>
void check_gradient(const char* name, std::vector<double>& input, const std::vector<Gradient>& gradient,
                    const std::vector<double>& before, const Objective& objective) {
    REQUIRE(input.size() == gradient.size());
    for (size_t i = 0; i < input.size(); i++) {
        double centre = input[i];
        input[i] = centre + kStep;
        double above = objective();
        input[i] = centre - kStep;
        double below = objective();
        input[i] = centre;
        double expected = (above - below) / (2 * kStep) + (before.empty() ? 0 : before[i]);
        INFO(name << "[" << i << "] is " << gradient[i] << ", the difference quotient " << expected);
        if (!(std::abs(gradient[i] - expected) <= tolerance(expected))) FAIL();
    }
    CHECK(!input.empty());
}

inline double sum_of_products(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

// A gradient's values before a backward op: numbers to add to, or NaN to overwrite.
template <class Gradient> std::vector<Gradient> held_before(const std::vector<double>& values, bool accumulate) {
    if (!accumulate) return std::vector<Gradient>(values.size(), Gradient(NAN));
    return {values.begin(), values.end()};
}

inline std::vector<double> if_added(const std::vector<double>& values, bool accumulate) {
    return accumulate ? values : std::vector<double>();
}
