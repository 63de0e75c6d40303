#pragma once

#include <cstdint>
#include <string>

#include "runtime/config/config.h"

// Above this, the reciprocal and the scaled gradients leave the range of float.
inline constexpr float kMaxLossScale = 0x1p100f;

// The loss scale, which keeps small FP16 gradients from vanishing, and the counts of skipped steps. Part of the
// checkpoint.
//
// Dynamic scaling follows Megatron-LM's DynamicGradScaler. `growth_interval` consecutive finite steps multiply the
// scale by `growth_factor` and restore the hysteresis. Each non-finite step decrements the hysteresis; once it is 0,
// each one multiplies the scale by `backoff_factor`, down to `minimum` (Micikevicius et al., "Mixed precision
// training", arXiv 1710.03740, section 3.2). Without dynamic scaling the scale is `fixed`. In both cases the number of
// consecutive non-finite steps is limited.
struct LossScaleState {
    float scale = 1;
    int good_steps = 0;       // consecutive finite steps since the scale last changed or a step was skipped
    int hysteresis_left = 0;  // non-finite steps until the scale shrinks; 0 and 1: at the next one
    int skipped_in_a_row = 0;
    int64_t total_skipped = 0;
    int last_good_step = 0;  // 0: none yet

    // Records that the update of `step` was applied.
    void step_applied(const Config::LossScale& options, int step);

    // Records that `step` was skipped; `tensor` is the first whose gradient is not finite. Returns a diagnosis if the
    // run cannot continue: the scale is already at its minimum, or more than max_skipped_steps consecutive steps were
    // skipped. Otherwise returns an empty string.
    std::string step_skipped(const Config::LossScale& options, int step, const std::string& tensor);
};

// The state before a run's first step.
LossScaleState first_loss_scale(const Config::LossScale& options);
