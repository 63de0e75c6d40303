#include <algorithm>
#include <cmath>
#include <numbers>

#include "runtime/config/config.h"

int cooldown_steps(const Config& config) {
    return std::max(1, int(std::lround(config.schedule.cooldown_fraction * config.train.max_steps)));
}

double learning_rate(const Config& config, int step) {
    const Config::Schedule& schedule = config.schedule;
    const int steps = config.train.max_steps, warmup = schedule.warmup_steps;
    const double peak = config.optim.learning_rate, final = peak * schedule.final_lr_fraction;
    if (step <= warmup) return peak * (double(step) / warmup);

    // From 0 at the final rate to 1 at the peak; std::lerp is exact at both.
    auto rate_at = [&](double height) { return std::lerp(final, peak, height); };
    const double progress = double(step - warmup) / (steps - warmup);
    switch (schedule.name) {
        case LrSchedule::cosine: return rate_at((1 + std::cos(std::numbers::pi * progress)) / 2);
        case LrSchedule::linear: return rate_at(1 - progress);
        case LrSchedule::wsd: {
            const int cooldown = cooldown_steps(config), cooled = std::max(0, step - (steps - cooldown));
            return rate_at(1 - std::sqrt(double(cooled) / cooldown));
        }
        case LrSchedule::constant: break;
        case LrSchedule::cyclic: {
            const int position = (step - warmup) % schedule.cycle_steps;
            return rate_at(std::abs(1 - 2.0 * position / schedule.cycle_steps));
        }
    }
    return peak;
}
