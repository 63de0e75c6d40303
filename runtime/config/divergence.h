// Loss spikes, rollbacks, and which checkpoints are healthy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/config/loss_scale.h"

// The losses of the last applied steps, to which the next loss is compared. All of them are finite.
struct LossWindow {
    static constexpr size_t kMax = 200;
    static constexpr size_t kMinLosses = 50;  // with fewer, no loss is a spike: the loss still falls fast at the start

    std::vector<double> losses;  // the oldest first
    bool operator==(const LossWindow&) const = default;

    void add(double loss);  // drops the oldest loss of a full window; ignores a non-finite loss

    // A loss above this limit is a spike: the median plus `deviations` times the median absolute deviation (MAD).
    // Infinite with too few losses. The MAD of a normal distribution is 0.6745 sigma, so 8 of them are 5.4 sigma. It is
    // taken as at least 2^-20 of the median, so that rounding of equal losses is not a spike.
    double limit(double deviations) const;
};

// A return to an earlier checkpoint.
struct Rollback {
    int from_step = 0, to_step = 0;  // from the state after one step to the state after another
    uint64_t skipped_samples = 0;    // the samples of those steps, which the run does not see again
    bool is_spike = true;            // false: non-finite gradients
    double loss = 0, limit = 0;      // the loss of the spike, and the limit that it exceeded
    bool operator==(const Rollback&) const = default;
};

struct DivergenceState {
    static constexpr size_t kMaxRollbacks = 3;  // within kRollbackSteps
    static constexpr int kRollbackSteps = 1000;

    LossWindow window = {};
    int last_trouble = 0;                  // the last step with a spike or a skipped update; 0: none
    std::vector<Rollback> rollbacks = {};  // in the last kRollbackSteps, the oldest first
    bool operator==(const DivergenceState&) const = default;

    // Decides whether the step's loss is a spike, and adds the loss to the window if the step was applied. A skipped
    // step with `is_routine` (see is_routine_skip()) does not count as trouble.
    struct Verdict {
        bool is_spike = false;
        double limit = 0;  // a loss above it is a spike
    };
    Verdict check(int step, double loss, bool is_applied, bool is_routine, double deviations);

    // Whether the limit of rollbacks permits another one from this step.
    bool may_roll_back(int step) const;
    void note(const Rollback& rollback);
};

// Whether a checkpoint after `step` is healthy: no trouble since the last multiple of `every_steps` before it, or, if
// `every_steps` is 0, since the start of the run. Does not depend on when the run was stopped and resumed.
bool is_healthy_after(const DivergenceState& state, int step, int every_steps);

// Whether a skipped step is part of normal dynamic loss scaling, which finds the largest scale by trial: at most
// loss_scale.hysteresis consecutive steps.
bool is_routine_skip(const LossScaleState& state, const Config::LossScale& options);
