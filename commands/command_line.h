// The command line: the options of training, or another command. Each command has its own file.
#pragma once

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "training/profiler.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

// The options of training.
struct CommandLine {
    std::string config;                  // the JSON file
    std::vector<std::string> overrides;  // "section.key=value"
    StartRequest start;
    StepRange profile;                  // steps to trace
    int nproc = 0;                      // ranks to start on this machine; 0: this process is a rank itself
    LocalNode node;                     // this machine, if the run uses several
    bool supervise = false;             // run training as a child process and restart it after failures
    std::vector<std::string> launcher;  // with supervise: the command after "--" that starts the ranks
    std::string revision;               // of the program
};

// Parses the arguments. Runs any command other than training and returns nullopt; a command that needs several ranks is
// not run but returned, with a positive `nproc`. --help and --version print and return nullopt. `revision` is the
// program's. Fails with Exit::usage if the arguments are invalid, and with the error of the command.
std::optional<CommandLine> run_command_line(int argc, char** argv, const std::string& revision);

// The arguments of a rank that --nproc starts: without --nproc, --node and --master.
std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments);

// The arguments of the run that --supervise starts: without --supervise and the command after "--".
std::vector<std::string> arguments_of_run(const std::vector<std::string>& arguments);

// Replaces all start flags (--resume, --auto, --fresh, --resume-step) by `flag`.
std::vector<std::string> with_start(const std::vector<std::string>& arguments, const std::string& flag);

// ---- for the files of the commands ----------------------------------------------------------------------------------

// Each adds a command with its options. The command runs when all arguments have been parsed, and prints to stdout.
void add_prepare(CLI::App& app);
void add_sample(CLI::App& app);
void add_plan(CLI::App& app);
void add_eval(CLI::App& app, CommandLine& line);
void add_lr_range(CLI::App& app, CommandLine& line);
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

// Validators of numbers for CLI::Option::check(). Bounds are inclusive.
CLI::Validator integer_in(uint64_t low, uint64_t high);
CLI::Validator finite_in(double low, double high);

// Adds --nproc, --node and --master, for commands that run on several ranks.
void add_ranks(CLI::App& app, CommandLine& line);

// The rank of this process if a launcher has started several to run a command. Returns a single rank if the variables
// are inconsistent, or may belong to a pod, where every process inherits them: they are meant for training.
RankEnvironment launched_ranks();
