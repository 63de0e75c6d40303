#include <algorithm>

#include "kernels/check.h"
#include "runtime/config/config.h"

LossScaler::LossScaler(const Config::LossScale& options, const std::optional<LossScaleState>& state)
    : options_(options),
      state_(state.value_or(LossScaleState{.scale = float(options.initial), .hysteresis_left = options.hysteresis})) {
    if (!options_.dynamic) state_.scale = float(options_.fixed);
}

void LossScaler::step_applied(int step) {
    state_.last_good_step = step;
    state_.skipped_in_a_row = 0;
    state_.good_steps++;
    if (!options_.dynamic || state_.good_steps < options_.growth_interval) return;
    state_.good_steps = 0;
    state_.hysteresis_left = options_.hysteresis;
    state_.scale = std::min(state_.scale * float(options_.growth_factor), kLargestLossScale);
}

void LossScaler::step_skipped(int step, const std::string& tensor) {
    state_.good_steps = 0;
    state_.total_skipped++;
    state_.skipped_in_a_row++;
    if (state_.skipped_in_a_row > options_.max_skipped_steps)
        fail(
            Exit::non_finite,
            "step %d: the gradient was not finite %d steps in a row, loss_scale.max_skipped_steps is %d (first tensor: "
            "%s, loss scale %g, last good step %d). Continue from an earlier checkpoint with a lower "
            "optim.learning_rate, a longer schedule.warmup_steps or a smaller optim.grad_clip",
            step, state_.skipped_in_a_row, options_.max_skipped_steps, tensor, double(state_.scale),
            state_.last_good_step);
    if (!options_.dynamic) return;
    state_.hysteresis_left = std::max(0, state_.hysteresis_left - 1);
    if (state_.hysteresis_left > 0) return;
    const float minimum = float(options_.minimum);
    if (state_.scale <= minimum)
        fail(Exit::non_finite,
             "step %d: the gradient of %s is not finite although the loss scale %g is at loss_scale.minimum (%g); the "
             "last good step was %d. It is not the scale, then: continue from an earlier checkpoint with a lower "
             "optim.learning_rate or a smaller optim.grad_clip, with train.precision \"bf16\" or \"fp32\", or lower "
             "loss_scale.minimum",
             step, tensor, double(state_.scale), options_.minimum, state_.last_good_step);
    state_.scale = std::max(state_.scale * float(options_.backoff_factor), minimum);
}
