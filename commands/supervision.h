// `train_gpt --supervise CONFIG.json`.
#pragma once

#include "commands/command_line.h"

// Starts the training run that these arguments of the program describe, and starts it again after failures: see
// supervise(). The first start is as the user's flags say. The later ones continue what it has begun: with --resume
// once there has been a checkpoint, or if the user said so, else with --auto; --fresh, no flag and --resume-step count
// until run.dir is the new run's. Returns the last exit code. Fails with Exit::usage in a process that a launcher has
// started as one of several ranks, and as load_config().
Exit supervise_training(const CommandLine& line, const std::vector<std::string>& arguments);
