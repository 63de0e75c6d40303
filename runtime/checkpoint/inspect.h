// What is this path? The part of the inspect command that knows checkpoints, runs and safetensors, and how a checkpoint
// is named on the command line.
#pragma once

#include <functional>
#include <string>

#include "runtime/checkpoint/checkpoint.h"

// `path` is a step directory or a run directory, whose newest sound checkpoint is then meant. Changes nothing.
// Exit::no_input if there is none; Exit::data if the named step is damaged.
Checkpoint open_checkpoint(const std::string& path);

// The run that a step directory belongs to: RUN of RUN/checkpoints/step_N.
std::string run_directory_of(const std::string& step_directory);

// Describes a checkpoint, a run or a safetensors file by calling print(line) for each line without newline, after
// having verified all of it. False, and nothing printed, if the path is none of them. Exit::data, with what is wrong,
// if it is one and damaged.
bool inspect_runtime_path(const std::string& path, const std::function<void(const std::string&)>& print);
