// The checkpoints of a training run: when they are due, and what becomes of those that fail.
#pragma once

#include "training/run.h"

Retention retention_of(const Config& config);

// Whether the configuration asks for a checkpoint after the step that was just done.
bool checkpoint_is_due(const TrainingRun& run);

// Commits a checkpoint, all ranks together, or with checkpoint.asynchronous begins to: what becomes of it is shown with
// a later step. The older ones are intact if it fails. With `must_succeed` it is committed when this returns, and every
// failure is thrown. Without, failures of the disk are shown (it is full, say, or an earlier save is stuck), and only
// the third in a row is thrown.
void save(TrainingRun& run, bool must_succeed);

// Waits for the save under way, if there is one; fails if it is stuck.
void finish_save(TrainingRun& run);

// After each step, with the sums over the ranks: lets the save under way go on, shows how it has ended, or throws its
// error as save() does, and warns once of one that takes long.
void follow_save(TrainingRun& run, const BackgroundSave::Progress& sums);
