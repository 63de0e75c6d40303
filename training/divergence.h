// Handles loss spikes, steps whose gradients stay non-finite, and replicas that differ between ranks.
#pragma once

#include "training/run.h"

// Checks the loss and gradients of the last step. A non-empty `diagnosis` says why non-finite gradients can no longer
// be tolerated. Sets run.divergence if there is one. After a loss spike it warns, or sets run.divergence unless
// train.on_spike is warn.
void judge_step(TrainingRun& run, const TrainRecord& record, const std::string& diagnosis);

// Collective, called after a step that set run.divergence. Rolls back to the last healthy checkpoint whose step is a
// multiple of checkpoint.every_steps and skips the data up to the current step, as in PaLM's training (Chowdhery et
// al., arXiv 2204.02311, section 5.1). Fails with Exit::non_finite if the configuration says stop, if the run has
// rolled back too often, or if there is no such checkpoint; after a spike it saves a checkpoint first.
void end_divergence(TrainingRun& run);

// Collective. If a check is due (train.check_replicas_every), fails with Exit::corruption, naming ranks, unless the
// replicated tensors of all ranks have the same bits. Ranks outside the majority count as wrong.
void check_replicas_if_due(TrainingRun& run);
