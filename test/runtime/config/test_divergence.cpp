#include <limits>

#include "kernels/numeric.h"
#include "runtime/config/config.h"
#include "runtime/config/divergence.h"
#include "test/support/catch.h"

namespace {

// Normally distributed around 3 with a standard deviation of 0.1, by the Box-Muller transform.
double loss_of_step(int step) {
    const Philox drawn = philox(17, 3, uint64_t(step));
    const double u = (double(drawn.word[0]) + 1) / 4294967297.0, v = double(drawn.word[1]) / 4294967296.0;
    return 3 + 0.1 * std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
}

DivergenceState state_after(int steps) {
    DivergenceState state;
    for (int step = 1; step <= steps; step++) state.check(step, loss_of_step(step), true, false, 8);
    return state;
}

}  // namespace

TEST_CASE("a spike is a loss a number of median absolute deviations above the median of the last 200 losses") {
    LossWindow window;
    for (int i = 1; i <= 49; i++) window.add(i);
    CHECK(window.limit(8) == std::numeric_limits<double>::infinity());
    for (int i = 50; i <= 101; i++) window.add(i);
    // Of 1 .. 101: the median is 51; the distances are 0 and each of 1 .. 50 twice, with the median 25.
    CHECK(window.limit(8) == 51 + 8 * 25);
    CHECK(window.limit(2) == 51 + 2 * 25);
    window.add(102);
    // Of 1 .. 102: the median is 51.5; the distances are each of 0.5 .. 50.5 twice.
    CHECK(window.limit(2) == 51.5 + 2 * 25.5);
    for (int i = 0; i < 200; i++) window.add(7);
    CHECK(window.losses == std::vector<double>(200, 7.0));
    CHECK(window.limit(8) > 7);  // the same loss again is not a spike
    CHECK(window.limit(8) < 7.0001);
}

TEST_CASE("non-finite losses are not added to the window") {
    DivergenceState state = state_after(300);
    const LossWindow before = state.window;
    for (const double loss : {std::nan(""), double(INFINITY)}) state.check(301, loss, false, false, 8);
    CHECK(state.window == before);
    CHECK(state.last_trouble == 301);
    LossWindow window;
    window.add(std::nan(""));
    window.add(INFINITY);
    CHECK(window.losses.empty());
}

TEST_CASE("a spike is found at its step, and a steady run has none") {
    DivergenceState state;
    int spikes = 0;
    for (int step = 1; step <= 100'000; step++)
        spikes += state.check(step, loss_of_step(step), true, false, 8).is_spike;
    CHECK(spikes == 0);
    CHECK(state.last_trouble == 0);
    for (const double spike : {30.0, 4.2}) {
        DivergenceState copy = state;
        const auto verdict = copy.check(100'001, spike, true, false, 8);
        CHECK(verdict.is_spike);
        CHECK(verdict.limit < 3.8);
        CHECK(copy.last_trouble == 100'001);
        CHECK_FALSE(copy.check(100'002, 3.1, true, false, 8).is_spike);
    }
    // An applied step cannot have a NaN loss; if it has one, it counts as a spike.
    CHECK(state.check(100'001, std::nan(""), true, false, 8).is_spike);
}

TEST_CASE("a checkpoint is healthy if there was no trouble since the last step at which one was due") {
    DivergenceState state;
    CHECK(is_healthy_after(state, 1, 10));
    state.check(20, std::nan(""), false, false, 8);
    for (const auto& [step, healthy] : {std::pair(20, false), {21, true}, {25, true}, {30, true}})
        CHECK(is_healthy_after(state, step, 10) == healthy);
    state.check(25, std::nan(""), false, true, 8);  // normal operation of the loss scaler
    CHECK(is_healthy_after(state, 30, 10));
    state.check(26, std::nan(""), false, false, 8);
    for (const auto& [step, healthy] : {std::pair(27, false), {30, false}, {31, true}, {40, true}})
        CHECK(is_healthy_after(state, step, 10) == healthy);
    CHECK_FALSE(is_healthy_after(state, 1000, 0));

    Config::LossScale options;
    options.hysteresis = 2;
    for (const bool dynamic : {false, true}) {
        options.dynamic = dynamic;
        for (int skipped = 1; skipped <= 3; skipped++)
            CHECK(is_routine_skip({.skipped_in_a_row = skipped}, options) == (dynamic && skipped <= 2));
    }
}

TEST_CASE("a run rolls back at most three times within 1,000 steps") {
    DivergenceState state;
    for (const int step : {100, 90, 600}) {
        CHECK(state.may_roll_back(step));
        state.note({step, step - 50});
    }
    CHECK_FALSE(state.may_roll_back(601));
    CHECK_FALSE(state.may_roll_back(1089));
    CHECK(state.may_roll_back(1090));
    state.note({1100, 1050});
    CHECK(state.rollbacks == std::vector<Rollback>{{600, 550}, {1100, 1050}});
}
