// Signs that training diverges, and the count of returns to an earlier checkpoint; part of the checkpoint.
#pragma once

#include "runtime/config/config.h"

// The losses of the last applied steps, against which the next one is judged. They are all finite: NaN cannot enter.
struct LossWindow {
    static constexpr size_t kMost = 200;
    static constexpr size_t kFewest = 50;  // with fewer no loss is a spike: at the beginning of a run it still falls

    std::vector<double> losses;  // the oldest first
    bool operator==(const LossWindow&) const = default;

    void add(double loss);  // drops the oldest if there are too many; ignores what is not finite

    // Above this a loss is a spike: the median plus `deviations` times the median absolute deviation from it. Infinite
    // with too few losses. Of a normal distribution the deviation is 0.6745 sigma, so that 8 of them are 5.4 sigma. It
    // counts as at least 2^-20 of the median, so that the rounding of equal losses is no spike.
    double limit(double deviations) const;
};

// A return to an earlier checkpoint.
struct Rollback {
    int from_step = 0, to_step = 0;  // from after one step to after another
    uint64_t skipped_samples = 0;    // of those steps, which are not seen again
    bool is_spike = true;            // else gradients stayed non-finite
    double loss = 0, limit = 0;      // of the spike; above which it is one
    bool operator==(const Rollback&) const = default;
};

struct DivergenceState {
    static constexpr size_t kMostRollbacks = 3;  // within
    static constexpr int kRollbackSteps = 1000;

    LossWindow window = {};
    int last_trouble = 0;                  // the last step that was skipped or whose loss was a spike; 0: none
    std::vector<Rollback> rollbacks = {};  // of the last kRollbackSteps, the oldest first
    bool operator==(const DivergenceState&) const = default;

    // Whether the step's loss is a spike; what is not applied enters no window. `is_routine`: the loss scaler skips
    // such steps in its normal work, so they are no trouble.
    struct Judgement {
        bool is_spike = false;
        double limit = 0;  // above which it is one
    };
    Judgement judge(int step, double loss, bool is_applied, bool is_routine, double deviations);

    // Whether the run may go back from this step once more.
    bool may_roll_back(int step) const;
    void note(const Rollback& rollback);
};

// Whether a checkpoint after `step` is healthy: no trouble since the last step before it that is a multiple of
// `every_steps`, or with 0 since the run began. A function of the course of the run alone, not of when it was stopped.
bool is_healthy_after(const DivergenceState& state, int step, int every_steps);

// Whether a skipped step is in the normal work of the loss scaler, which finds the largest scale by trying: with
// dynamic scaling, not more than loss_scale.hysteresis in a row.
bool is_routine_skip(const LossScaleState& state, const Config::LossScale& options);
