#include "runtime/config/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

// Requires at least one value. For an even number of values, the mean of the middle two.
static double median(std::vector<double> values) {
    const size_t half = values.size() / 2;
    std::ranges::nth_element(values, values.begin() + ptrdiff_t(half));
    const double upper = values[half];
    if (values.size() % 2 == 1) return upper;
    return (*std::max_element(values.begin(), values.begin() + ptrdiff_t(half)) + upper) / 2;
}

void LossWindow::add(double loss) {
    if (!std::isfinite(loss)) return;
    losses.push_back(loss);
    if (losses.size() > kMax) losses.erase(losses.begin());
}

double LossWindow::limit(double deviations) const {
    if (losses.size() < kMinLosses) return std::numeric_limits<double>::infinity();
    const double middle = median(losses);
    std::vector<double> distances = losses;
    for (double& distance : distances) distance = std::abs(distance - middle);
    return middle + deviations * std::max(median(distances), 0x1p-20 * std::abs(middle));
}

DivergenceState::Verdict DivergenceState::check(int step, double loss, bool is_applied, bool is_routine,
                                                double deviations) {
    const double limit = window.limit(deviations);
    const bool is_spike = is_applied && !(loss <= limit);
    if (is_spike || (!is_applied && !is_routine)) last_trouble = step;
    if (is_applied) window.add(loss);
    return {is_spike, limit};
}

bool DivergenceState::may_roll_back(int step) const {
    const auto is_recent = [&](const Rollback& past) { return past.from_step > step - kRollbackSteps; };
    return size_t(std::ranges::count_if(rollbacks, is_recent)) < kMaxRollbacks;
}

void DivergenceState::note(const Rollback& rollback) {
    std::erase_if(rollbacks,
                  [&](const Rollback& past) { return past.from_step <= rollback.from_step - kRollbackSteps; });
    rollbacks.push_back(rollback);
}

bool is_healthy_after(const DivergenceState& state, int step, int every_steps) {
    const int last_due = every_steps > 0 ? (step - 1) / every_steps * every_steps : 0;
    return state.last_trouble <= last_due;
}

bool is_routine_skip(const LossScaleState& state, const Config::LossScale& options) {
    return options.dynamic && state.skipped_in_a_row <= options.hysteresis;
}
