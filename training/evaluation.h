// Evaluation during training: validation loss, questions and samples of text.
#pragma once

#include "training/run.h"

// Collective. Runs the evaluations that are due after the last step (validation loss, questions, a text sample), logs
// and prints them. Returns false if the run must stop before they are complete: because of `must_stop`, a signal on any
// rank, or tokens that cannot be read (which sets run.error on all ranks). The next checkpoint then records that they
// are due, and finish_evaluation() in the resumed run repeats them; it returns false in the same cases.
bool evaluate_if_due(TrainingRun& run, bool must_stop);
bool finish_evaluation(TrainingRun& run);
