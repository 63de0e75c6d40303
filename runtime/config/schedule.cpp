#include "runtime/config/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/base/check.h"

namespace {

bool has_cooldown(const Config& config) { return config.schedule.name == LrSchedule::wsd; }

// The number of steps, not rounded, that have `tokens` tokens together.
double steps_of_tokens(const Config& config, double tokens) {
    int counted = 0;
    for (const auto& [until_step, each] : config.train.batch_ramp) {
        const double part = double(until_step - counted) * double(each);
        if (tokens < part) return counted + tokens / double(each);
        tokens -= part;
        counted = until_step;
    }
    return counted + tokens / double(config.train.total_batch_tokens);
}

// The number of steps that fit into train.max_minutes at the mean speed, in tokens, of the first `step` steps.
double steps_in_time(const Config& config, int step, double elapsed_s) {
    return steps_of_tokens(config, double(tokens_of_steps(config, step)) * (config.train.max_minutes * 60 / elapsed_s));
}

}  // namespace

int cooldown_steps(const Config& config, int steps) {
    return std::max(1, int(std::lround(config.schedule.cooldown_fraction * steps)));
}

RunLength planned_length(const Config& config, uint64_t epoch_samples) {
    const Config::Train& train = config.train;
    int end = train.max_steps;
    if (train.max_epochs > 0) {
        const double exact = steps_of_tokens(config, train.max_epochs * double(epoch_samples) * train.seq_len);
        const double steps = std::ceil(exact);
        if (end == 0 || steps < end) end = int(std::min<double>(steps, kMaxSteps));
        const int needed = config.schedule.warmup_steps + (has_cooldown(config) ? cooldown_steps(config, end) : 0);
        if (needed > end)
            fail(Exit::config,
                 "train.max_epochs %g, at %.1f steps per epoch, ends the run after %d steps, but schedule.warmup_steps "
                 "(%d)%s need %d",
                 train.max_epochs, exact / train.max_epochs, end, config.schedule.warmup_steps,
                 has_cooldown(config) ? " and the cooldown" : "", needed);
        for (const auto& [key, ramp] : {std::pair("batch_ramp", &train.batch_ramp), {"seq_ramp", &train.seq_ramp}})
            if (!ramp->empty() && ramp->back().until_step >= end)
                fail(Exit::config, "train.max_epochs %g ends the run after %d steps, but train.%s lasts until step %d",
                     train.max_epochs, end, key, ramp->back().until_step);
    }
    return {end, end > 0 && has_cooldown(config) ? end - cooldown_steps(config, end) : end};
}

std::optional<RunLength> course_by_time(const Config& config, const RunLength& planned, int step, double elapsed_s) {
    if (config.train.max_minutes == 0) return std::nullopt;
    const double end = steps_in_time(config, step, elapsed_s);
    if (planned.end_step != 0 && (end >= planned.end_step || step >= planned.cooldown_begin)) return std::nullopt;
    if (!has_cooldown(config)) return end < step + 1 ? std::optional(RunLength{step, step}) : std::nullopt;
    if (step + 1 <= (1 - config.schedule.cooldown_fraction) * end && step + 2 <= end) return std::nullopt;
    return RunLength{int(std::clamp<double>(end, step + 1, kMaxSteps)), step};
}

int expected_end(const Config& config, const RunLength& length, int step, double elapsed_s) {
    const bool is_decided = length.end_step > 0 && step >= length.cooldown_begin;
    if (config.train.max_minutes == 0 || step == 0 || is_decided) return length.end_step;
    const double in_time = std::clamp<double>(steps_in_time(config, step, elapsed_s), step, kMaxSteps);
    return length.end_step == 0 ? int(in_time) : std::min(length.end_step, int(in_time));
}

double learning_rate(const Config& config, const RunLength& length, int step, const TensorGroup& group) {
    Config::Schedule schedule = config.schedule;
    if (group.warmup_steps >= 0) schedule.warmup_steps = int(group.warmup_steps);
    if (group.final_lr_fraction >= 0) schedule.final_lr_fraction = group.final_lr_fraction;
    if (group.cooldown_power >= 0) schedule.cooldown_power = group.cooldown_power;
    const int warmup = schedule.warmup_steps;
    const double lr = config.optim.learning_rate, final = lr * schedule.final_lr_fraction;
    auto warm = [&](int at) { return at < warmup ? lr * (double(at) / warmup) : lr; };
    const bool is_cooling = has_cooldown(config) && length.end_step > 0 && step > length.cooldown_begin;
    if (step <= warmup && !is_cooling) return warm(step);

    // `height` is 0 at the final rate and 1 at the highest; std::lerp is exact at both.
    auto rate_at = [&](double height, double highest) { return std::lerp(std::min(final, highest), highest, height); };
    const double progress = double(step - warmup) / (length.end_step - warmup);
    switch (schedule.name) {
        case LrSchedule::cosine: return rate_at((1 + std::cos(std::numbers::pi * progress)) / 2, lr);
        case LrSchedule::linear: return rate_at(1 - progress, lr);
        case LrSchedule::wsd: {
            const int cooled = is_cooling ? step - length.cooldown_begin : 0;
            const int cooldown = length.end_step - length.cooldown_begin;
            if (cooled == 0) return lr;
            const double q = double(cooled) / cooldown, power = schedule.cooldown_power;
            return rate_at(1 - (power == 0.5 ? std::sqrt(q) : std::pow(q, power)), warm(length.cooldown_begin));
        }
        case LrSchedule::constant: break;
        case LrSchedule::cyclic: {
            const int position = (step - warmup) % schedule.cycle_steps;
            return rate_at(std::abs(1 - 2.0 * position / schedule.cycle_steps), lr);
        }
    }
    return lr;
}

std::vector<double> group_rates(const Config& config, const RunLength& length, int step) {
    std::vector<double> rates;
    for (const TensorGroup& group : config.optim.groups) rates.push_back(learning_rate(config, length, step, group));
    return rates;
}

double average_weight(const Config& config, const RunLength& length, int step) {
    const Config::Average& average = config.average;
    if (average.kind == AverageKind::exponential) return step == 1 ? 1 : 1 - average.decay;
    const int tail = std::max(1, int(std::lround(average.tail_fraction * length.end_step)));
    return length.end_step == 0 ? 1 : 1.0 / std::max(1, step - (length.end_step - tail));
}
