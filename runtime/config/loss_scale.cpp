#include "runtime/config/loss_scale.h"

#include <algorithm>

#include "kernels/base/check.h"

LossScaleState first_loss_scale(const Config::LossScale& options) {
    return {.scale = float(options.dynamic ? options.initial : options.fixed), .hysteresis_left = options.hysteresis};
}

void LossScaleState::step_applied(const Config::LossScale& options, int step) {
    last_good_step = step;
    skipped_in_a_row = 0;
    good_steps++;
    if (!options.dynamic || good_steps < options.growth_interval) return;
    good_steps = 0;
    hysteresis_left = options.hysteresis;
    scale = std::min(scale * float(options.growth_factor), kMaxLossScale);
}

std::string LossScaleState::step_skipped(const Config::LossScale& options, int step, const std::string& tensor) {
    good_steps = 0;
    total_skipped++;
    skipped_in_a_row++;
    if (skipped_in_a_row > options.max_skipped_steps)
        return format(
            "step %d: the gradient was not finite in %d consecutive steps, loss_scale.max_skipped_steps is %d (first "
            "tensor: %s, loss scale %g, last good step %d). Continue from an earlier checkpoint with a lower "
            "optim.learning_rate, a longer schedule.warmup_steps or a smaller optim.grad_clip",
            step, skipped_in_a_row, options.max_skipped_steps, tensor.c_str(), double(scale), last_good_step);
    if (!options.dynamic) return "";
    hysteresis_left = std::max(0, hysteresis_left - 1);
    if (hysteresis_left > 0) return "";
    const float minimum = float(options.minimum);
    if (scale <= minimum)
        return format(
            "step %d: the gradient of %s is not finite although the loss scale %g is at loss_scale.minimum (%g); the "
            "last good step was %d. The loss scale is probably not the cause: continue from an earlier checkpoint with "
            "a lower optim.learning_rate, a smaller optim.grad_clip, train.precision \"bf16\" or \"fp32\", or a lower "
            "loss_scale.minimum",
            step, tensor.c_str(), double(scale), options.minimum, last_good_step);
    scale = std::max(scale * float(options.backoff_factor), minimum);
    return "";
}
