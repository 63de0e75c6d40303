// The program's commands besides training. Each add_X() adds one to the command line, with its options, and returns
// what it does; one file per command has both.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

struct Command {
    CLI::App* parser;           // which command line selects it
    std::function<void()> run;  // with the options that the parser has read; prints to stdout
};

Command add_prepare(CLI::App& app);
Command add_sample(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_eval(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_export(CLI::App& app);

// Help for an argument that open_checkpoint() takes.
inline constexpr const char* kCheckpointHelp = "run directory or RUN/checkpoints/step_N";

// --set, as load_config() takes it.
void add_overrides(CLI::App& app, std::vector<std::string>& overrides);
