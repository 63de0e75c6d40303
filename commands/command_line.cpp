#include "commands/command_line.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "commands/command.h"
#include "kernels/check.h"
#include "kernels/comm.h"
#include "kernels/device.h"
#include "runtime/cluster/cluster.h"
#include "runtime/config/config.h"

namespace {

// --node and --master as given.
struct NodeOptions {
    std::string node, master;
};

void add_ranks(CLI::App& app, CommandLine& line, NodeOptions& options) {
    auto* nproc = app.add_option("--nproc", line.nproc, "start that many ranks on this machine");
    nproc->check(CLI::Range(1, 1024));
    auto* node =
        app.add_option("--node", options.node, "with --nproc on each of several machines: its number, like 0/2");
    auto* master = app.add_option("--master", options.master, "machine 0 and a free port there, like node0:29500");
    node->needs(nproc)->needs(master);
    master->needs(node);
}

LocalNode parse_node(const NodeOptions& options) {
    if (options.node.empty()) return {};
    const size_t slash = options.node.find('/'), colon = options.master.rfind(':');
    auto number_after = [](std::string_view text, size_t mark) {
        return mark == text.npos ? std::nullopt : whole_number(text.substr(mark + 1));
    };
    const auto node = whole_number(options.node.substr(0, slash)), nodes = number_after(options.node, slash);
    const auto port = number_after(options.master, colon);
    if (!node || !nodes || *node < 0 || *node >= *nodes || *nodes > 1 << 20)
        fail(Exit::usage, "--node is \"%s\", expected this machine's number from 0 and how many there are, like 0/2",
             options.node);
    if (colon == 0 || !port || *port < 1 || *port > 65535)
        fail(Exit::usage, "--master is \"%s\", expected machine 0 and a port there, like node0:29500", options.master);
    return {int(*node), int(*nodes), options.master.substr(0, colon), int(*port)};
}

void add_training(CLI::App& app, CommandLine& line) {
    app.add_option("CONFIG", line.config, "the run, as JSON; --help-config lists the keys");
    add_overrides(app, line.overrides);
    auto add_start = [&](const char* flag, StartMode mode, const char* help) {
        return app.add_flag_callback(
            flag, [&line, mode] { line.start = mode; }, help);
    };
    auto* resume =
        add_start("--resume", StartMode::resume, "continue the newest sound checkpoint in run.dir, or exit 66");
    auto* automatic = add_start("--auto", StartMode::automatic, "continue if there is a checkpoint, else start");
    auto* fresh = add_start("--fresh", StartMode::fresh, "move what is in run.dir aside and start anew");
    resume->excludes(automatic)->excludes(fresh);
    automatic->excludes(fresh);
    app.add_flag_callback(
        "--debug-sync", [&line] { line.overrides.push_back("device.debug_sync=true"); },
        "GPU: wait after each kernel, so that an error names the kernel that made it");
    app.add_flag("--accept-changes", line.accept_changes, "resume although configuration or data have changed");
}

std::string version(const std::string& revision) {
    const DeviceInfo device = device_info();
    return format("train_gpt %s\nbuilt for: %s\ndevice: %s\nmatrix products: %s\nbetween ranks: %s", revision.c_str(),
                  device.build.c_str(), device.name.c_str(), device.matmul_path.c_str(), comm_library().c_str());
}

std::string exit_codes() {
    std::string lines;
    for (const ExitCode& row : kExitCodes)
        lines += format("%d %s %s %s\n", int(row.code), row.name, row.policy, row.meaning);
    return lines;
}

}  // namespace

void add_overrides(CLI::App& app, std::vector<std::string>& overrides) {
    app.add_option("--set", overrides, "section.key=value: replaces a value of the configuration; may be repeated")
        ->take_all()
        ->allow_extra_args(false);
}

CommandLine parse_command_line(int argc, char** argv, const std::string& revision) {
    CommandLine line;
    NodeOptions node;
    CLI::App app("Pretrains GPT-class language models. Without a command: trains CONFIG.", "train_gpt");
    app.set_version_flag("--version", [&] { return version(revision); });
    auto add_table = [&](const char* flag, std::string (*table)(), const char* help) {
        app.add_flag_callback(
            flag, [&line, table] { line.command = [table] { std::fputs(table().c_str(), stdout); }; }, help);
    };
    add_table("--help-config", config_help, "every configuration key");
    add_table("--markdown-config", config_markdown, "the same as a Markdown table");
    add_table("--exit-codes", exit_codes, "every exit code: number, name, final|retry|restart, meaning");
    app.require_subcommand(0, 1);
    add_training(app, line);
    add_ranks(app, line, node);
    const Command commands[] = {add_prepare(app), add_sample(app), add_plan(app),  add_eval(app),
                                add_inspect(app), add_export(app), add_report(app)};
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& help_or_version) {
        std::exit(app.exit(help_or_version));
    } catch (const CLI::ParseError& error) {
        fail(Exit::usage, "%s (see --help)", error.what());
    }
    line.node = parse_node(node);
    for (const Command& command : commands)
        if (command.parser->parsed()) line.command = command.run;
    if (!line.command && line.config.empty()) fail(Exit::usage, "no configuration and no command (see --help)");
    return line;
}

std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments) {
    std::vector<std::string> others;
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string name = arguments[i].substr(0, arguments[i].find('='));
        if (name != "--nproc" && name != "--node" && name != "--master")
            others.push_back(arguments[i]);
        else if (name == arguments[i])
            i++;  // its value
    }
    return others;
}
