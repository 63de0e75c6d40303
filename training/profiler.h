// --profile: traces a range of steps; writes files for Perfetto and prints a table.
#pragma once

#include "kernels/trace.h"
#include "model/device_rates.h"
#include "runtime/logging/logging.h"
#include "training/run.h"

// Steps to be traced, both ends included, from 1. last 0: none.
struct StepRange {
    int first = 0, last = 0;
};

// Fails with Exit::usage if `steps` begin after the last step of the run.
void check_profile(const StepRange& steps, const Config& config);

// Records a range of steps on every rank. Each rank writes run.dir/profile/rank_R.steps_A-B.json in Chrome's trace
// event format, where A and B are the first and last recorded step. Does not change the run's results.
class Profiler {
public:
    // Prints a message if some of the steps are already done. Does nothing without a range. `run` must outlive the
    // profiler.
    Profiler(const StepRange& steps, TrainingRun& run);
    ~Profiler();
    Profiler(const Profiler&) = delete;
    Profiler& operator=(const Profiler&) = delete;

    // Call before each step. Collective before the first step of the range.
    void begin_step();

    // Call after each step and its evaluation and checkpoint. After the last step of the range, or of the run
    // (`is_last`), it is collective: writes the file, or a message if that fails, and prints the table.
    void end_step(const TrainRecord& record, bool is_last);

private:
    void write_file(const std::vector<Span>& spans) const;
    std::string table(const std::vector<Span>& spans) const;

    StepRange steps_;  // last 0: no steps left to trace
    TrainingRun& run_;
    Trace trace_;
    DeviceRates rates_;
    std::string rates_origin_;        // where the rates come from, for messages
    double begin_unix_s_ = 0;         // start of the trace by rank 0's clock
    double unix_minus_steady_s_ = 0;  // offset between this rank's clocks
    std::vector<TrainRecord> records_;
};
