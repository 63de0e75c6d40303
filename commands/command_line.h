// The command line: the options of training, or another command. Each command has its own file.
#pragma once

#include <functional>
#include <variant>

#include "kernels/base/check.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "training/models/model_io.h"
#include "training/profiler.h"

namespace CLI {
class App;
class Option;
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

// `train_gpt --supervise CONFIG.json`: starts the training run that the program's arguments describe and restarts it
// after failures, see supervise(). The first start uses the user's flags, and so do restarts until the run has opened
// run.dir. Later restarts use --resume if the run has saved a checkpoint or the user gave --resume, else --auto.
// Returns the last exit code. Fails with Exit::usage if a launcher has started this process as one of several ranks,
// and as load_config() does.
Exit supervise_training(const CommandLine& line, const std::vector<std::string>& arguments);

// ---- for the files of the commands ----------------------------------------------------------------------------------

// An argument of a command: an option, a flag or a positional argument. Wraps a CLI::Option, so that only
// command_line.cpp includes CLI11's headers, which take seconds to compile.
class Argument {
public:
    explicit Argument(CLI::Option* option) : option_(option) {}

    const Argument& required() const;
    const Argument& needs(const Argument& other) const;
    const Argument& excludes(const Argument& other) const;
    const Argument& repeatable() const;  // each occurrence takes one value

    // Checks of a value. Bounds are inclusive. `problem` returns "" if the value is allowed, else "must be ...".
    const Argument& check(const std::function<std::string(const std::string&)>& problem) const;
    const Argument& integer_in(uint64_t low, uint64_t high) const;
    const Argument& finite_in(double low, double high) const;
    const Argument& one_of(const std::vector<std::string>& names) const;

    // For --help: the kind of value, "FILE"; a text as the default; the variable's present value as the default.
    const Argument& type_name(const char* name) const;
    const Argument& default_text(const std::string& text) const;
    const Argument& show_default() const;

private:
    CLI::Option* option_;
};

// The target of an argument: a flag, a value, a list of values, or a function that takes the text.
using ArgumentTarget = std::variant<bool*, int*, uint64_t*, double*, std::optional<int>*, std::optional<double>*,
                                    std::string*, std::vector<std::string>*, std::function<void(const std::string&)>>;

// A command of the program, or the program itself. Wraps a CLI::App.
class Command {
public:
    explicit Command(CLI::App& app) : app_(&app) {}
    Command(CLI::App& program, const char* name, const char* description);

    Argument add(const char* name, const ArgumentTarget& target, const char* help) const;
    void show_defaults() const;                              // of the arguments that are added later
    void on_parsed(const std::function<void()>& run) const;  // calls `run` when all arguments have been parsed

private:
    CLI::App* app_;
};

// Each adds a command with its options. The command runs when all arguments have been parsed, and prints to stdout.
void add_prepare(CLI::App& app);
void add_sample(CLI::App& app, CommandLine& line);
void add_plan(CLI::App& app);
void add_eval(CLI::App& app, CommandLine& line);
void add_lr_range(CLI::App& app, CommandLine& line);
void add_tune(CLI::App& app, CommandLine& line);
void add_inspect(CLI::App& app);
void add_import(CLI::App& app);
void add_export(CLI::App& app);
void add_report(CLI::App& app);

// Help for an argument that ModelSource takes.
inline constexpr const char* kModelHelp =
    "run directory, RUN/checkpoints/step_N, Hugging Face directory or model file of llm.c";

// --set, as load_config() takes it.
void add_overrides(const Command& command, std::vector<std::string>& overrides);

// Adds --tokenizer and --end-of-text, and returns them.
std::vector<Argument> add_tokenizer_options(const Command& command, TokenizerChoice& choice);

// Adds --nproc, --node and --master, for commands that run on several ranks.
void add_ranks(const Command& command, CommandLine& line);

// The rank of this process if a launcher has started several to run a command. Returns a single rank if the variables
// are inconsistent, or may belong to a pod, where every process inherits them: they are meant for training.
RankEnvironment launched_ranks();

// Runs an evaluation of a model on all launched ranks. Fails with Exit::config if they opened different checkpoints.
void evaluate_on_ranks(const ModelSource& source, const std::string& revision,
                       const std::function<void(Ranks&)>& work);
