// Stragglers: ranks and pipeline stages that compute longer than the others. All ranks of a synchronous run take the
// same time per step, because a fast rank waits for the slow ones. So the ranks are compared by the time in which they
// compute, without waiting for each other.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/base/grid.h"

// The time of a rank or stage compared with the others, which compute the same.
struct Slowness {
    // The median over a window of its time, as a multiple of the others' median time. In each step their time is
    // their median; with two ranks it is the other rank's time.
    double multiple = 1;
    // The 5 % quantile of its time as a multiple of the upper quartile of the others'. So noise makes it smaller, and
    // it is above 1 only if 95 % of its steps are slower than most of the others': shorter bursts do not change it.
    double at_least = 1;
};

// A window of steps.
struct StragglerWindow {
    int first_step = 0, last_step = 0;
    std::vector<Slowness> ranks;   // compared with the other ranks of the stage
    std::vector<Slowness> stages;  // by the lower median of their ranks: one slow rank of two makes no stage slow
    std::vector<double> stage_ms;  // the median over the window, per step
};

// Rank 0's monitor of the steps of a run.
class StragglerMonitor {
public:
    // A window has this many entries. An entry is a step or, if steps are short, as many as take kEntry_ms together:
    // the scheduler of a busy machine disturbs some ranks more than others for seconds.
    static constexpr size_t kWindow = 20;
    static constexpr double kEntry_ms = 250;
    // A rank or stage is slow if its multiple reaches kSlow and at_least reaches kCertain, until its multiple falls
    // below kRecovered. In simulations a multiple of 1.3 is noticed within 20 steps with a spread of 5 % from step to
    // step, and nobody is named in 10,000 steps with a spread of 8 % or with bursts of up to 8 slow steps.
    static constexpr double kSlow = 1.2, kCertain = 1.05, kRecovered = 1.1;

    // names: the text of each rank, for messages.
    StragglerMonitor(const Grid& grid, std::vector<std::string> names);

    // Adds the ms in which each rank computed in a step. Ignores the step if a rank's time is not positive. Returns a
    // sentence for each rank or stage that has become slow or has recovered.
    std::vector<std::string> add_step(int step, std::span<const double> compute_ms);

    // Whether the last step completed a window that has no step in common with the previous such window.
    bool has_new_window() const { return has_new_window_; }
    // The last kWindow entries. Requires as many.
    StragglerWindow window() const;

private:
    struct Entry {
        int first_step = 0, last_step = 0;
        std::vector<double> ms;  // per step, of each rank
    };

    void note(const StragglerWindow& window, const Slowness& slowness, size_t index, bool is_stage,
              std::vector<std::string>& news);

    const Grid grid_;
    const std::vector<std::string> names_;
    std::vector<Entry> ring_;
    size_t entries_ = 0;              // added so far
    std::vector<double> sums_;        // of the steps since the last entry
    int steps_ = 0, first_step_ = 0;  // of sums_
    bool has_new_window_ = false;
    std::vector<char> slow_ranks_, slow_stages_;
};
