// The checkpoints of a training run: when they are due, and how failed saves are handled.
#pragma once

#include "training/run.h"

Retention retention_of(const Config& config);

// Whether a checkpoint is due after the last step.
bool checkpoint_is_due(const TrainingRun& run);

// Collective. Commits a checkpoint or, with checkpoint.asynchronous, begins to; its result is printed at a later step.
// Older checkpoints stay intact if it fails. With `must_succeed`, the checkpoint is committed on return and every
// failure is thrown. Otherwise disk errors (disk full, an earlier save is stuck) are printed, and only the third in a
// row is thrown.
void save(TrainingRun& run, bool must_succeed);

// Waits for the save in progress, if any; fails if it is stuck.
void finish_save(TrainingRun& run);

// Call after each step, with the sums over all ranks. Advances the save in progress; prints its result or throws its
// error as save() does. Warns once about a save that takes long.
void follow_save(TrainingRun& run, const BackgroundSave::Progress& sums);
