// The command `train_gpt --supervise CONFIG.json`.
#pragma once

#include "commands/command_line.h"
#include "kernels/base/check.h"

// Starts the training run that the program's arguments describe and restarts it after failures, see supervise(). The
// first start uses the user's flags, and so do restarts until the run has opened run.dir. Later restarts use --resume
// if the run has saved a checkpoint or the user gave --resume, else --auto. Returns the last exit code. Fails with
// Exit::usage if a launcher has started this process as one of several ranks, and as load_config() does.
Exit supervise_training(const CommandLine& line, const std::vector<std::string>& arguments);
