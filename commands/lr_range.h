// The learning rate range test of Smith, arXiv 1506.01186, section 3.3: train briefly while the rate grows.
#pragma once

#include <vector>

struct RangeTest {
    double from, to;  // the rates of the first and the last step
    int steps;
    std::vector<double> losses = {};  // of the steps so far, all finite

    // Returns from (to / from)^((step - 1) / (steps - 1)), the rate of a step in 1 .. steps.
    double rate(int step) const;

    // Adds the loss of the next step, unless it is not finite. Returns whether the test continues: the loss is finite,
    // the last smoothed loss is at most kDiverged times the lowest one, and steps are left.
    bool add(double loss);
    static constexpr double kDiverged = 1.5;

    // Returns for each step the mean loss of up to steps / 20 steps before it, itself, and as many after it.
    std::vector<double> smoothed() const;

    // Returns the first step with the lowest smoothed loss; 0 if there are no steps.
    int lowest_step() const;
    // Returns the step up to lowest_step() at which the smoothed loss falls fastest per factor of the rate; 0 if it
    // never falls.
    int steepest_step() const;
};
