// --profile: a trace of some steps, as a file for Perfetto and as a table.
#pragma once

#include "model/device_rates.h"
#include "training/run.h"

// Steps to be traced, both ends included, from 1. last 0: none.
struct StepRange {
    int first = 0, last = 0;
};

// Fails with Exit::usage if the run's steps end before `steps` begin.
void check_profile(const StepRange& steps, const Config& config);

// Records the steps of a range on every rank. Each rank writes run.dir/profile/rank_R.steps_A-B.json, in Chrome's trace
// event format: A and B are the first and the last step that it has. Changes no result.
class Profiler {
public:
    // Says which steps cannot be traced because they are done. `run` must outlive the profiler. No range: does nothing.
    Profiler(const StepRange& steps, TrainingRun& run);
    ~Profiler();
    Profiler(const Profiler&) = delete;
    Profiler& operator=(const Profiler&) = delete;

    // Before each step; before the first of the range all ranks together.
    void begin_step();

    // When a step and what follows it are done. After the range's last, or the run's (`is_last`), writes the file and
    // shows the table; if that fails, says so. Then all ranks together.
    void end_step(const TrainRecord& record, bool is_last);

private:
    void write_file(const std::vector<Span>& spans) const;
    std::string table(const std::vector<Span>& spans) const;

    StepRange steps_;  // last 0: nothing is left to be traced
    TrainingRun& run_;
    Trace trace_;
    DeviceRates rates_;
    std::string rates_origin_;        // a sentence's part
    double begin_unix_s_ = 0;         // rank 0's, when it began
    double unix_minus_steady_s_ = 0;  // of this rank's clocks
    std::vector<TrainRecord> records_;
};
