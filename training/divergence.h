// What a run does when its losses or gradients say that it diverges, or when ranks that must be alike are not.
#pragma once

#include "training/run.h"

// Judges the step that was just done, of which `diagnosis` says why gradients may not stay non-finite any longer, or is
// empty. Says a spike, and sets run.divergence if train.on_spike or train.on_nonfinite asks for more than that.
void judge_step(TrainingRun& run, const TrainRecord& record, const std::string& diagnosis);

// After a step that set run.divergence, all ranks together: goes back to the last healthy checkpoint whose step is a
// multiple of checkpoint.every_steps, skipping the data up to here, as in PaLM's training (Chowdhery et al., arXiv
// 2204.02311, section 5.1). Fails with Exit::non_finite, after a spike with a checkpoint, if the configuration says
// stop, if the run went back too often, or if there is no such checkpoint.
void end_divergence(TrainingRun& run);

// If train.check_replicas_every asks for it after this step, all ranks together: fails with Exit::corruption, naming
// ranks, unless all ranks hold the same bits where they should. A majority decides which ranks are wrong.
void check_replicas_if_due(TrainingRun& run);
