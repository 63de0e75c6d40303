// What a run prints after its last step.
#pragma once

#include "training/run.h"

// Prints the length, speed and losses of the whole run, and a command to try next. Only rank 0 prints.
void print_summary(const TrainingRun& run);
