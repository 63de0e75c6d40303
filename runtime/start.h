// The beginning of a run on all ranks: which directory, which checkpoint.
#pragma once

#include <optional>

#include "kernels/comm.h"
#include "runtime/checkpoint.h"
#include "runtime/config.h"
#include "runtime/place.h"
#include "runtime/run_directory.h"

// The ranks that were started together, once they have found each other.
Comm join_ranks(const Place& place, const Config& config);

struct Start {
    OpenedRun opened;                      // rank 0's, which holds the lock
    std::optional<Checkpoint> checkpoint;  // the one to resume from
};

// Rank 0 opens run.dir and finds the checkpoint, which the others then open too. Where it fails, all do.
Start open_start(const Config& config, StartMode mode, const Comm& comm);
