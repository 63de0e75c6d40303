// The checkpoints of a training run: when they are due, and how failed saves are handled.
#pragma once

#include "runtime/checkpoint/checkpoint.h"
#include "training/run.h"

// Whether a checkpoint is due after the last step.
bool checkpoint_is_due(const TrainingRun& run);

// These functions return the error that the run must end with, on all ranks alike; null: none.

// Collective. Commits a checkpoint or, with checkpoint.asynchronous, begins to; its result is printed at a later step.
// Older checkpoints stay intact if it fails. With `must_succeed`, the checkpoint is committed on return, and every
// failure is returned. Otherwise disk errors (disk full, an earlier save is stuck) are printed, and only the third in a
// row is returned.
[[nodiscard]] std::exception_ptr save(TrainingRun& run, bool must_succeed);

// Waits for the save in progress, if any. Returns an error if it failed or is stuck.
[[nodiscard]] std::exception_ptr finish_save(TrainingRun& run);

// Call after each step, with the sums over all ranks. Advances the save in progress; prints its result or returns its
// error as save() does. Warns once about a save that takes long.
[[nodiscard]] std::exception_ptr follow_save(TrainingRun& run, const BackgroundSave::Progress& sums);
