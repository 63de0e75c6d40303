// This rank's current activity: written by the trainer, read by rank 0's hang detector and the supervisor's.
#pragma once

#include <mutex>

#include "runtime/cluster/rank_monitor.h"

class RankActivity {
public:
    // All of these except note_step() may be called from any thread.
    void note_phase(Phase phase, int64_t step) {
        const std::lock_guard lock(mutex_);
        status_.phase = phase;
        status_.step = step;
        ++status_.ticks;
    }
    // Notes a micro-step of this step. The first step of a process counts as Phase::start, because it loads kernels.
    void note_step(int64_t step) {
        if (first_step_ < 0) first_step_ = step;
        note_phase(step == first_step_ ? Phase::start : Phase::step, step);
    }
    // Call before the collective with this number (1, 2, ... on every rank) starts.
    void note_collective(uint64_t number, const char* name) {
        const std::lock_guard lock(mutex_);
        status_.collective_name = name;
        status_.collective = number;
        ++status_.ticks;
    }
    // Notes any other progress.
    void note_progress() {
        const std::lock_guard lock(mutex_);
        ++status_.ticks;
    }
    RankStatus now() const {
        const std::lock_guard lock(mutex_);
        return status_;
    }

private:
    mutable std::mutex mutex_;  // never held for longer than a copy
    RankStatus status_;
    int64_t first_step_ = -1;
};
