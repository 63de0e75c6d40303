// What a run prints and writes to run.dir before its first step.
#pragma once

#include "training/run.h"

// Collective. Rank 0 prints a summary of the run and writes the effective configuration, the program's revision and the
// tokenizer to run.dir. All ranks fail if that fails.
void write_run_files(TrainingRun& run, const char* revision);
