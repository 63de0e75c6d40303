#include "commands/command_line.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <regex>

#include "commands/app_description.h"
#include "kernels/check.h"
#include "kernels/comm.h"

namespace {

void add_ranks(CLI::App& app, int& count, std::string& this_node, std::string& master_address) {
    auto* nproc = app.add_option("--nproc", count, "start that many ranks on this machine");
    nproc->check(CLI::Range(1, 1024));
    auto* node = app.add_option("--node", this_node, "with --nproc on each of several machines: its number, like 0/2");
    auto* master = app.add_option("--master", master_address, "machine 0 and a free port there, like node0:29500");
    node->needs(nproc)->needs(master);
    master->needs(node);
}

LocalNode parse_node(const std::string& this_node, const std::string& master) {
    if (this_node.empty()) return {};
    std::smatch node, address;
    if (!std::regex_match(this_node, node, std::regex("(\\d{1,6})/(\\d{1,6})")) ||
        std::stoi(node[1]) >= std::stoi(node[2]))
        fail(Exit::usage, "--node is \"%s\", expected this machine's number from 0 and how many there are, like 0/2",
             this_node);
    if (!std::regex_match(master, address, std::regex("(.+):(\\d{1,5})")) || std::stoi(address[2]) < 1 ||
        std::stoi(address[2]) > 65535)
        fail(Exit::usage, "--master is \"%s\", expected machine 0 and a port there, like node0:29500", master);
    return {std::stoi(node[1]), std::stoi(node[2]), address[1], std::stoi(address[2])};
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

std::optional<CommandLine> run_command_line(int argc, char** argv, const std::string& revision) {
    CommandLine line;
    std::string node, master;
    CLI::App app("Pretrains GPT-class language models. Without a command: trains CONFIG.", "train_gpt");
    app.set_version_flag("--version", [&] { return version(revision); });
    std::function<std::string()> table;
    auto add_table = [&](const char* flag, std::function<std::string()> rows, const char* help) {
        app.add_flag_callback(
            flag, [&table, rows] { table = rows; }, help);
    };
    add_table("--help-config", config_help, "every configuration key");
    add_table("--markdown-config", config_markdown, "the same as a Markdown table");
    add_table("--exit-codes", exit_codes, "every exit code: number, name, final|retry|restart, meaning");
    add_table("--config-schema", config_schema, "the configuration as a JSON schema, for editors");
    add_table(
        "--man-page", [&] { return man_page(app, revision); }, "the manual page, for man");
    auto complete = [&](const std::string& shell) { table = [shell] { return completion_script(shell); }; };
    app.add_option_function<std::string>("--completion", complete, "a script that completes arguments in this shell")
        ->check(CLI::IsMember(kCompletionShells));
    app.require_subcommand(0, 1);
    add_training(app, line);
    add_ranks(app, line.nproc, node, master);
    for (auto* add : {add_prepare, add_sample, add_plan, add_eval, add_inspect, add_import, add_export, add_report})
        add(app);
    if (argc > 1 && std::string(argv[1]) == "--complete") {
        std::fputs(completions(app, {argv + 2, argv + argc}).c_str(), stdout);
        return std::nullopt;
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& help_or_version) {
        std::exit(app.exit(help_or_version));
    } catch (const CLI::ParseError& error) {
        fail(Exit::usage, "%s (see --help)", error.what());
    }
    if (table) std::fputs(table().c_str(), stdout);
    if (table || !app.get_subcommands().empty()) return std::nullopt;
    if (line.config.empty()) fail(Exit::usage, "no configuration and no command (see --help)");
    line.node = parse_node(node, master);
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
