// The command line: training's options, or another command. One file per command has its options and what it does.
#pragma once

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "training/profiler.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

// Training's options.
struct CommandLine {
    std::string config;                  // the JSON file
    std::vector<std::string> overrides;  // "section.key=value"
    StartRequest start;
    StepRange profile;                  // steps to be traced
    int nproc = 0;                      // start that many ranks on this machine; 0: this process is one
    LocalNode node;                     // this machine, if several start ranks for one run
    bool supervise = false;             // start the run as a child, and again after failures
    std::vector<std::string> launcher;  // with that: the command that starts the ranks, behind "--"
    std::string revision;               // of the program
};

// Reads the arguments. If they ask for something else than training, does that and returns nullopt, unless several
// ranks are to do it: then `nproc` is positive. --help and --version print and exit with 0; `revision` is the
// program's. Fails with Exit::usage if the arguments are wrong, and as the command does.
std::optional<CommandLine> run_command_line(int argc, char** argv, const std::string& revision);

// The arguments of a rank that --nproc starts: without that option and those that belong to it.
std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments);

// The arguments of the run that --supervise starts: without that option and what stands behind "--".
std::vector<std::string> arguments_of_run(const std::vector<std::string>& arguments);

// The same with the flag of this mode (--auto, say) as the only one that says how the run begins.
std::vector<std::string> with_start(const std::vector<std::string>& arguments, StartMode mode);

// ---- for the files of the commands ----------------------------------------------------------------------------------

// Each adds a command with its options, which runs when all arguments have been read and prints to stdout.
void add_prepare(CLI::App& app);
void add_sample(CLI::App& app);
void add_plan(CLI::App& app);
void add_eval(CLI::App& app, CommandLine& line);
void add_inspect(CLI::App& app);
void add_import(CLI::App& app);
void add_export(CLI::App& app);
void add_report(CLI::App& app);

// Help for an argument that open_checkpoint() takes.
inline constexpr const char* kCheckpointHelp = "run directory or RUN/checkpoints/step_N";

// Help for an argument that ModelSource takes.
inline constexpr const char* kModelHelp =
    "run directory, RUN/checkpoints/step_N, Hugging Face directory or model file of llm.c";

// --set, as load_config() takes it.
void add_overrides(CLI::App& app, std::vector<std::string>& overrides);

// For check(): what a number on the command line must be. Bounds are inclusive.
CLI::Validator integer_in(uint64_t low, uint64_t high);
CLI::Validator finite_in(double low, double high);

// --nproc and what belongs to it, for a command that several ranks share.
void add_ranks(CLI::App& app, CommandLine& line);

// This process among the ranks that a launcher has started together to run a command. Alone where the variables may be
// a pod's, which every process in it has, or contradict each other: those concern training.
RankEnvironment launched_ranks();
