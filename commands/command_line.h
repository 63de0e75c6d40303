// The command line: what is to be done, and with what.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/local_ranks.h"
#include "runtime/config/config.h"
#include "runtime/performance/performance.h"

enum class Command { train, plan, prepare, sample, eval, inspect, export_hf, help_config, markdown_config };

struct CommandLine {
    Command command = Command::train;

    std::string config;                  // train, plan: the JSON file
    std::vector<std::string> overrides;  // train, plan: "section.key=value"
    StartMode start = StartMode::only_new;
    int nproc = 0;                // train: start that many ranks on this machine; 0: this process is one
    LocalNode node;               // train: this machine, if several start ranks for one run
    bool accept_changes = false;  // train: resume although configuration or data have changed

    struct Scaling {
        int gpus = 0;  // 0: memory and FLOPs only
        int gpus_per_node = 8;
        std::string gpu = "h100";       // a name that find_gpu() knows
        double nvlink_bytes_per_s = 0;  // per GPU and direction; filled in from the GPU's row where it was not given
        double net_bytes_per_s = 50e9;  // the same between nodes
    } scaling;                          // plan: see runtime/performance/performance.h

    std::string checkpoint;  // sample, eval, export: a run directory or a step's
    std::string path;        // inspect: a file or directory; export: the directory to write
    Config::Sample sample;   // sample
    uint64_t seed = 1;       // sample
    std::string data;        // eval: glob of shards; empty: the run's own
    int batches = 0;         // eval: micro-batches; 0: all
    int stride = -1;         // eval: replaces the run's eval.stride; -1: does not

    struct Prepare {
        std::string tokenizer = "bpe";
        int vocab_size = 0;
        std::vector<std::string> inputs;
        std::string out_dir;
        double val_fraction = 0.05;
        uint64_t shard_tokens = 100'000'000;
        int copies = 1;
        double bpe_dropout = 0;
    } prepare;
};

// Reads the arguments. --help and --version print and end the program with 0; what cannot be understood fails with
// Exit::usage and a sentence. `version` gives what --version prints, and is asked only for that.
CommandLine parse_command_line(int argc, char** argv, const std::function<std::string()>& version);

// The arguments of a rank that --nproc starts: without that option and those that belong to it.
std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments);

// The machine that `plan` was asked about, as the scaling model takes it; what it says of the run is not yet filled in.
ScalingInputs inputs_of(const CommandLine::Scaling& machine);
