// Loss spikes, steps whose gradients stay non-finite, and replicas that differ between ranks.
#pragma once

#include "kernels/trace.h"
#include "runtime/logging/logging.h"
#include "training/run.h"

// Why a run rolls back or ends after a step.
struct Divergence {
    bool is_spike;    // false: gradients stayed non-finite
    bool rolls_back;  // false: the run ends
    std::string sentence;
    double loss, limit;  // loss of the step; a loss above the limit is a spike
};

// Checks the loss and gradients of the last step. A non-empty `diagnosis` says why non-finite gradients can no longer
// be tolerated. After a loss spike, only warns if train.on_spike is warn.
std::optional<Divergence> check_divergence(TrainingRun& run, const TrainRecord& record, const std::string& diagnosis);

// Collective. Rolls back to the last healthy checkpoint whose step is a multiple of checkpoint.every_steps and skips
// the data up to the current step, as in PaLM's training (Chowdhery et al., arXiv 2204.02311, section 5.1). Requires
// that no save is in progress. If there is no such checkpoint, or the run has rolled back too often, adds that to the
// sentence and returns false.
bool roll_back(TrainingRun& run, Divergence& divergence);

// The error, with Exit::non_finite, of a run that ends with a divergence.
std::exception_ptr divergence_error(const TrainingRun& run, const Divergence& divergence);

// Collective. If a check is due (train.check_replicas_every), returns an error with Exit::corruption, naming ranks,
// unless the replicated tensors of all ranks have the same bits. Ranks outside the majority count as wrong.
[[nodiscard]] std::exception_ptr check_replicas_if_due(TrainingRun& run);
