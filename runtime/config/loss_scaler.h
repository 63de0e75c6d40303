// The loss scale: a factor on the loss that keeps small FP16 gradients from vanishing, and the count of skipped steps.
//
// Dynamic scaling follows Megatron-LM's DynamicGradScaler: `growth_interval` finite steps in a row multiply the scale
// by `growth_factor` and restore the hysteresis; a non-finite step uses up one of `hysteresis`, and from the last one
// on each multiplies the scale by `backoff_factor`, never below `minimum` (Micikevicius et al., "Mixed precision
// training", arXiv 1710.03740, section 3.2). Without it the scale is `fixed`. In both cases non-finite steps are
// counted and limited.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "runtime/config/config.h"

// Part of the checkpoint.
struct LossScaleState {
    float scale = 1;
    int good_steps = 0;       // finite in a row since the scale last changed or a step was skipped
    int hysteresis_left = 0;  // non-finite steps until the scale backs off; 0 and 1: the next one does
    int skipped_in_a_row = 0;
    int64_t total_skipped = 0;
    int last_good_step = 0;  // 0: none yet
};

class LossScaler {
public:
    explicit LossScaler(const Config::LossScale& options);
    // Continues from a checkpoint's state. Where scaling is not dynamic the scale stays `fixed`.
    LossScaler(const Config::LossScale& options, const LossScaleState& state);

    float scale() const { return state_.scale; }
    const LossScaleState& state() const { return state_; }

    // The update of `step` was applied.
    void step_applied(int step);

    // Step `step` was skipped since `tensor` is the first whose gradient is not finite. Fails with Exit::non_finite and
    // a diagnosis where the scale is at its minimum already, or after more than max_skipped_steps in a row.
    void step_skipped(int step, const std::string& tensor);

private:
    void back_off(int step, const std::string& tensor);

    Config::LossScale options_;
    LossScaleState state_;
};

nlohmann::ordered_json to_json(const LossScaleState& state);

// `origin` names the file in errors: Exit::data where a field is missing, of another type or out of range.
LossScaleState loss_scale_state_from_json(const nlohmann::ordered_json& json, const std::string& origin);
