// The command line: training's options, or another command.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/checkpoint/run_directory.h"
#include "runtime/cluster/local_ranks.h"

struct CommandLine {
    std::function<void()> command;  // another command, to be called instead of training; empty: train

    // Training's.
    std::string config;                  // the JSON file
    std::vector<std::string> overrides;  // "section.key=value"
    StartMode start = StartMode::only_new;
    bool accept_changes = false;  // resume although configuration or data have changed
    int nproc = 0;                // start that many ranks on this machine; 0: this process is one
    LocalNode node;               // this machine, if several start ranks for one run
};

// Reads the arguments. --help and --version print and exit with 0; `revision` is the program's, for --version. Fails
// with Exit::usage if the arguments are wrong.
CommandLine parse_command_line(int argc, char** argv, const std::string& revision);

// The arguments of a rank that --nproc starts: without that option and those that belong to it.
std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments);
