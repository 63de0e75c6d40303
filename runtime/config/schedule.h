// The length of a run and its learning rate.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/config/config.h"

// The length of a run. train.max_steps and train.max_epochs determine it before the first step. train.max_minutes
// determines it when the cooldown must start, from the measured step time.
struct RunLength {
    int end_step = 0;        // the last step; 0: not known yet, train.max_minutes will determine it
    int cooldown_begin = 0;  // wsd: the last step before the cooldown; 0 as long as end_step is 0
    bool operator==(const RunLength&) const = default;
};

// Returns the length for the smaller of train.max_steps and train.max_epochs, with `epoch_samples` sequences per epoch;
// the last step completes the last epoch. Fails with Exit::config if the epochs have too few steps for the warm-up and
// the cooldown, or for the ramps.
RunLength planned_length(const Config& config, uint64_t epoch_samples);

// Returns the length that train.max_minutes imposes after `step` (>= 1) steps that took `elapsed_s` seconds; nothing if
// `planned` ends earlier or nothing must change yet. wsd: the cooldown starts after this step and fills the remaining
// time at the mean speed (tokens per second) so far, with at least one step. constant, cyclic: this step is the last.
std::optional<RunLength> course_by_time(const Config& config, const RunLength& planned, int step, double elapsed_s);

// An estimate, for display, of the last step at the mean speed of the first `step` steps. 0 if not known yet.
int expected_end(const Config& config, const RunLength& length, int step, double elapsed_s);

// The learning rate of a step in 1 .. length.end_step. With lr = optim.learning_rate and final = lr *
// schedule.final_lr_fraction: in the warm-up (step <= warmup_steps) lr step / warmup_steps; afterwards, with p = (step
// - warmup) / (end_step - warmup),
//   cosine    final + (lr - final) (1 + cos(pi p)) / 2             (Loshchilov, Hutter, arXiv 1608.03983, eq. 5)
//   linear    final + (lr - final) (1 - p)
//   wsd       lr until cooldown_begin, then, with q rising from 0 to 1 at end_step,
//             final + (lr - final) (1 - q^cooldown_power)          (Haegele et al., arXiv 2405.18392, section 3:
//             1 - sqrt(q));
//             if train.max_minutes ends the warm-up early, the rate reached by then replaces lr
//   constant  lr
//   cyclic    a triangle: from lr to final and back to lr every cycle_steps (Smith, arXiv 1506.01186, section 3)
// With cosine, linear and wsd the last step has exactly the rate `final`, if any step follows the warm-up. A group's
// own warmup_steps, final_lr_fraction and cooldown_power replace the schedule's; lr_scale is not applied.
double learning_rate(const Config& config, const RunLength& length, int step, const TensorGroup& group = {});
// The rates of all groups, for StepSettings::group_rates.
std::vector<double> group_rates(const Config& config, const RunLength& length, int step);

// The steps of wsd's cooldown in a run of `steps` steps: cooldown_fraction of them, rounded, at least 1.
int cooldown_steps(const Config& config, int steps);

// The weight of the masters after `step` (from 1) in the average of weights; the average before has the rest.
//   exponential  1 in the first step, then 1 - average.decay
//   tail         1 / (number of the step in the tail), the last average.tail_fraction of all steps
// Before the tail, and while end_step is 0, the weight is 1.
double average_weight(const Config& config, const RunLength& length, int step);
