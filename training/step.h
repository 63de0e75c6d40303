// The work around a step: its timer, the ranks' votes and its record.
#pragma once

#include "data/shards/loader.h"
#include "kernels/base/batch.h"
#include "kernels/trace.h"
#include "model/gpt.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"
#include "runtime/performance/performance.h"
#include "training/divergence.h"
#include "training/run.h"

// Measures where the time of a step goes.
struct StepTimer {
    double start_ms = now_ms();
    double data_ms = 0;  // time spent waiting for tokens
    Trace* trace;
    CommTotals comm_before;

    explicit StepTimer(const TrainingRun& run) : trace(run.trace), comm_before(comm_totals(run.grid_comm)) {}
    Batch next_batch(Loader& loader);
    std::exception_ptr wait_for_step(Loader& loader);  // see Loader
};

struct StepVotes {
    GpuReading gpu;  // of this rank
    std::vector<double> values;
};
// Waits for the tokens of the next step. If they cannot be read, sets run.error on this rank only.
StepVotes votes_of(TrainingRun& run, StepTimer& timer);

struct StepEnd {
    TrainRecord record;
    std::optional<Divergence> divergence;  // the run must roll back or end
};
// Call after end_step(). Writes, prints and returns the record of the step, and advances run.state. Sets run.error on
// all ranks if one cannot continue. Fails with Exit::io on all ranks if run.dir was moved or removed.
StepEnd finish_step(TrainingRun& run, const StepTimer& timer, const GpuReading& gpu, const StepResult& result);

// Whether the norms of the next step, or its gradient noise scale, are to be recorded.
bool norms_are_due(const TrainingRun& run);
bool noise_scale_is_due(const TrainingRun& run);

// Collective. Acts on a divergence: rolls the run back to a checkpoint, as roll_back() does, and runs the evaluations
// that are due there. Fails with Exit::non_finite if the configuration says stop, if the run has rolled back too often,
// or if there is no healthy checkpoint; after a spike it saves a checkpoint first.
void recover(TrainingRun& run, Divergence divergence);
