// The beginning of a run on all ranks: which directory, which checkpoint.
#pragma once

#include <optional>

#include "kernels/comm.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/run_directory.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/config/config.h"

struct Start {
    OpenedRun opened;                      // rank 0's, which holds the lock
    std::optional<Checkpoint> checkpoint;  // the one to resume from
    TrainState state;                      // that it left, or a new run's
    std::string dataset_digest;            // of data.train
};

// What data.train holds, and whether a resumed run may differ: see resumed_state().
struct StartData {
    std::string digest;
    bool accept_changes;
};

// Rank 0 opens run.dir and finds the checkpoint, which the others then open too. Where it fails, all do.
Start open_start(const Config& config, StartMode mode, const StartData& data, const Comm& comm);
