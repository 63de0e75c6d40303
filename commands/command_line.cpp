#include "commands/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/number_of.h"

namespace {

constexpr const char* kRankOptions[] = {"--nproc", "--node", "--master"};

bool is_rank_option(const std::string& name) { return std::ranges::find(kRankOptions, name) != std::end(kRankOptions); }

// Returns the two numbers around the separator if `text` has this form and both have at most the digits of `most`.
std::optional<std::pair<int, int>> number_pair(const std::string& text, char separator, unsigned most) {
    const size_t middle = text.find(separator);
    const size_t digits = std::to_string(most).size();
    if (middle > digits || text.size() - middle - 1 > digits) return std::nullopt;
    const auto first = number_of<unsigned>(text.substr(0, middle));
    const auto second = number_of<unsigned>(text.substr(middle + 1));
    if (!first || !second) return std::nullopt;
    return std::pair(int(*first), int(*second));
}

void read_node(const std::string& text, LocalNode& node) {
    const auto pair = number_pair(text, '/', 999'999);
    if (!pair || pair->first >= pair->second)
        fail(Exit::usage,
             "--node is \"%s\", expected NUMBER/COUNT: this machine's number, from 0, and the number of "
             "machines, e.g. 0/2",
             text);
    node.node = pair->first, node.nodes = pair->second;
}

void read_master(const std::string& text, LocalNode& node) {
    const size_t colon = std::min(text.rfind(':'), text.size());
    const unsigned port = colon == text.size() ? 0 : number_of<unsigned>(text.substr(colon + 1)).value_or(0);
    if (colon == 0 || text.size() > colon + 6 || port < 1 || port > 65535)
        fail(Exit::usage, "--master is \"%s\", expected HOST:PORT of machine 0, e.g. node0:29500", text);
    node.master_host = text.substr(0, colon), node.master_port = int(port);
}

void read_profile(const std::string& text, StepRange& steps) {
    if (const auto pair = number_pair(text, ':', 999'999'999)) steps = {pair->first, pair->second};
    if (steps.first < 1 || steps.last < steps.first)
        fail(Exit::usage,
             "--profile is %s, expected START:STOP, the first and last step to trace, from 1, e.g. 100:104",
             printed(text));
}

// Bounds are inclusive.
template <class Number> CLI::Validator number_in(const std::string& range, Number low, Number high) {
    auto check = [=](const std::string& text) {
        const std::optional<Number> value = number_of<Number>(text);
        const bool is_accepted = value && *value >= low && *value <= high;  // false if NaN
        return is_accepted ? "" : format("must be %s, is %s", range.c_str(), printed(text).c_str());
    };
    return CLI::Validator(check, "");
}

void add_training(CLI::App& app, CommandLine& line) {
    app.add_option("CONFIG", line.config, "JSON configuration of the run; --help-config lists the keys");
    add_overrides(Command(app), line.overrides);
    auto add_start = [&](const char* flag, StartMode mode, const char* help) {
        return app.add_flag_callback(
            flag, [&line, mode] { line.start.mode = mode; }, help);
    };
    auto* resume =
        add_start("--resume", StartMode::resume, "continue from the newest valid checkpoint; exit 66 if none");
    auto* automatic = add_start("--auto", StartMode::automatic, "resume if run.dir has a checkpoint, else start");
    auto* fresh = add_start("--fresh", StartMode::fresh, "move the contents of run.dir aside and start over");
    auto resume_step = [&line](int64_t step) { line.start.mode = StartMode::resume, line.start.step = step; };
    auto* at_step = app.add_option_function<int64_t>("--resume-step", resume_step,
                                                     "continue from the checkpoint of this step; later ones are moved "
                                                     "aside");
    Argument(at_step).integer_in(0, kMaxSteps);
    resume->excludes(automatic)->excludes(fresh);
    automatic->excludes(fresh);
    at_step->excludes(automatic)->excludes(fresh);
    app.add_flag_callback(
        "--debug-sync", [&line] { line.overrides.push_back("device.debug_sync=true"); },
        "GPU: synchronize after each kernel, so that an error names the kernel that caused it");
    app.add_option_function<std::string>(
        "--profile", [&line](const std::string& text) { read_profile(text, line.profile); },
        "START:STOP: trace these steps and print a table of where their time goes");
    app.add_flag("--supervise", line.supervise,
                 "restart the run after failures; add \"-- mpirun ...\" if a launcher starts its ranks");
    app.add_flag("--accept-changes", line.start.accept_changes, "resume even if configuration or data have changed");
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

// ", did you mean X?" or nothing.
std::string suggestion(const std::string& name, const std::vector<std::string>& known) {
    const std::string nearest = nearest_name(name, known);
    return nearest.empty() ? "" : "; did you mean " + nearest + "?";
}

// "; use --set train.batch_size=4" for "batch_size=4" or "train.batch_size=4"; empty if no key has this name.
std::string setting_hint(const std::string& setting) {
    const size_t equals = std::min(setting.find('='), setting.size());
    const std::string value = equals < setting.size() ? setting.substr(equals) : "=VALUE";
    std::string hint;
    for (const std::string& key : keys_with_name(setting.substr(0, equals)))
        hint += (hint.empty() ? "; use --set " : " or --set ") + key + value;
    return hint;
}

// With --supervise, the words after "--" are the command that starts the ranks. Returns the number of words before it.
int take_launcher(int argc, char** argv, CommandLine& line) {
    const std::vector<std::string> words(argv, argv + argc);
    const auto end = std::ranges::find(words, "--");
    if (end == words.end() || std::find(words.begin(), end, "--supervise") == end) return argc;
    line.launcher.assign(end + 1, words.end());
    if (line.launcher.empty())
        fail(Exit::usage, "-- must be followed by the command that starts the ranks, e.g. mpirun -np 8");
    return int(end - words.begin());
}

// Fails unless `config` is a file, a directory or looks like a path: otherwise it is a misspelled command.
void check_is_file(const CLI::App& app, const std::string& config) {
    const bool is_path = config.find_first_of("./") != std::string::npos;
    if (config.empty() || is_path || file_exists(config) || directory_exists(config)) return;
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
    fail(
        Exit::usage, "\"%s\" is neither a command nor a file%s (see --help)", config,
        config == "resume" ? "; to continue a run, use train_gpt RUN/config.json --resume" : suggestion(config, names));
}

[[noreturn]] void fail_misplaced(const std::string& option, const CLI::App& command) {
    const std::string name = command.get_name();
    if (command.get_option_no_throw(option))
        fail(Exit::usage, "%s must come after the command: %s ... %s", option, name, option);
    if (is_rank_option(option))
        fail(Exit::usage, "%s starts the ranks of training, eval, lr-range or tune, but %s runs as a single process",
             option, name);
    fail(Exit::usage, "%s is an option of training, not of the command %s (see %s --help)", option, name, name);
}

// Fails for an unexpected argument, with a suggestion if there is a similar one.
[[noreturn]] void fail_unexpected(const CLI::App& app, const CommandLine& line, const std::string& said) {
    const std::vector<CLI::App*> commands = app.get_subcommands();
    if (commands.empty()) check_is_file(app, line.config);
    const CLI::App& reader = commands.empty() ? app : *commands.front();
    for (const std::string& argument : reader.remaining()) {
        const std::string name = argument.substr(0, argument.find('='));
        if (!name.starts_with("--")) continue;
        if (!commands.empty() && app.get_option_no_throw(name)) fail_misplaced(name, reader);
        std::vector<std::string> known;
        for (const CLI::Option* option : reader.get_options()) known.push_back(option->get_name());
        const std::string hint = reader.get_option_no_throw("--set") ? setting_hint(argument.substr(2)) : "";
        fail(Exit::usage, "%s is not an option of %s%s (see --help)", name, reader.get_name(),
             hint.empty() ? suggestion(name, known) : hint);
    }
    fail(Exit::usage, "%s (see --help)", said);
}

// Runs before the command: rejects training arguments before it, and several ranks of a single-process command.
void check_command(const CLI::App& app) {
    for (const CLI::App* command : app.get_subcommands()) {
        for (const CLI::Option* option : app.get_options()) {
            const std::string name = option->get_name();
            if (option->count() == 0 || (is_rank_option(name) && command->get_option_no_throw(name))) continue;
            if (!option->get_positional()) fail_misplaced(name, *command);
            fail(Exit::usage, "unexpected \"%s\" before the command %s", option->results().front(),
                 command->get_name());
        }
        // Each rank of a run starts check-kernels.
        if (command->get_option_no_throw("--nproc") || command->get_name() == kCheckKernels) continue;
        const RankEnvironment ranks = launched_ranks();
        if (ranks.size > 1)
            fail(Exit::usage, "%s runs as a single process, but %s has started %d: run it without %s",
                 command->get_name(), ranks.launcher, ranks.size, ranks.launcher);
    }
}

}  // namespace

const Argument& Argument::required() const { return option_->required(), *this; }

const Argument& Argument::needs(const Argument& other) const { return option_->needs(other.option_), *this; }

const Argument& Argument::excludes(const Argument& other) const { return option_->excludes(other.option_), *this; }

const Argument& Argument::repeatable() const { return option_->take_all()->allow_extra_args(false), *this; }

const Argument& Argument::check(const std::function<std::string(const std::string&)>& problem) const {
    return option_->check(CLI::Validator(problem, "")), *this;
}

const Argument& Argument::integer_in(uint64_t low, uint64_t high) const {
    return option_->check(number_in(format("an integer in [%zu, %zu]", low, high), low, high)), *this;
}

const Argument& Argument::finite_in(double low, double high) const {
    return option_->check(number_in(format("a finite number in [%g, %g]", low, high), low, high)), *this;
}

const Argument& Argument::one_of(const std::vector<std::string>& names) const {
    return option_->check(CLI::IsMember(names)), *this;
}

const Argument& Argument::type_name(const char* name) const { return option_->type_name(name), *this; }

const Argument& Argument::default_text(const std::string& text) const { return option_->default_str(text), *this; }

const Argument& Argument::show_default() const { return option_->capture_default_str(), *this; }

Command::Command(CLI::App& program, const char* name, const char* description)
    : app_(program.add_subcommand(name, description)) {}

Argument Command::add(const char* name, const ArgumentTarget& target, const char* help) const {
    auto add = [&]<class T>(const T& value) {
        if constexpr (std::is_same_v<T, bool*>)
            return app_->add_flag(name, *value, help);
        else if constexpr (std::is_pointer_v<T>)
            return app_->add_option(name, *value, help);
        else
            return app_->add_option_function<std::string>(name, value, help);
    };
    return Argument(std::visit(add, target));
}

void Command::show_defaults() const { app_->option_defaults()->always_capture_default(); }

void Command::on_parsed(const std::function<void()>& run) const { app_->callback(run); }

void add_overrides(const Command& command, std::vector<std::string>& overrides) {
    auto check = [](const std::string& setting) {
        check_assignment(setting);
        return std::string();
    };
    command.add("--set", &overrides, "section.key=value: override a configuration key; may be repeated")
        .check(check)
        .repeatable();
}

std::vector<Argument> add_tokenizer_options(const Command& command, TokenizerChoice& choice) {
    constexpr const char* kHelp =
        "gpt2, or a file (default: tokenizer.json, vocab.json or gpt2_tokenizer.bin next to the weights)";
    return {command.add("--tokenizer", &choice.file, kHelp).type_name("gpt2|FILE"),
            command.add("--end-of-text", &choice.end_of_text, kEndOfTextHelp).type_name("TOKEN")};
}

static void add_check_kernels(CLI::App& app) {
    struct Options {
        int gpu = 0;
        std::vector<std::string> names;
    };
    auto options = std::make_shared<Options>();
    const Command command(app, kCheckKernels,
                          "compare the kernels for this GPU's compute capability with the portable ones");
    command.add("NAME", &options->names, "kernels to compare; default: all");
    command.add("--gpu", &options->gpu, "number of the GPU").show_default();
    command.on_parsed([options] { check_kernels(options->names, options->gpu); });
}

void add_ranks(const Command& command, CommandLine& line) {
    const Argument nproc =
        command.add("--nproc", &line.nproc, "number of ranks to start on this machine").integer_in(1, 1024);
    const Argument node = command.add(
        "--node", [&line](const std::string& text) { read_node(text, line.node); },
        "NUMBER/COUNT of this machine if --nproc runs on several, e.g. 0/2");
    const Argument master = command.add(
        "--master", [&line](const std::string& text) { read_master(text, line.node); },
        "HOST:PORT: machine 0 and a free port on it, e.g. node0:29500");
    node.needs(nproc).needs(master);
    master.needs(node);
}

RankEnvironment launched_ranks() {
    try {
        const RankEnvironment found = find_rank_environment();
        const bool is_of_pod = found.launcher == "torchrun" && found.run_id.empty() && found.token.empty();
        return is_of_pod ? RankEnvironment() : found;
    } catch (const Error&) {
        return {};
    }
}

void evaluate_on_ranks(const ModelSource& source, const std::string& revision,
                       const std::function<void(Ranks&)>& work) {
    const RankEnvironment environment = launched_ranks();
    Ranks ranks(environment, source.config, revision);
    ranks.run([&] {
        int64_t step = 0;
        if (source.checkpoint) {
            const TrainState& state = source.checkpoint->manifest().info;
            step = state.step;
            ranks.control().require_same(format("step %d of run %s", state.step, state.run_id.c_str()),
                                         "the checkpoint");
        }
        ranks.control().note_phase(Phase::evaluation, step);
        configure_device({.local_rank = environment.local_rank, .kernels = ranks.kernels().used});
        work(ranks);
        return Exit::ok;
    });
}

std::optional<CommandLine> run_command_line(int argc, char** argv, const std::string& revision) {
    CommandLine line;
    line.revision = revision;
    CLI::App app("Pretrains GPT-class language models. Without a command: trains CONFIG.", "train_gpt");
    app.set_version_flag("--version", [&] { return version(revision); });
    std::string (*table)() = nullptr;
    auto add_table = [&](const char* flag, std::string (*rows)(), const char* help) {
        app.add_flag_callback(
            flag, [&table, rows] { table = rows; }, help);
    };
    add_table("--help-config", config_help, "list all configuration keys");
    add_table("--markdown-config", config_markdown, "list all configuration keys as a Markdown table");
    add_table("--exit-codes", exit_codes, "list all exit codes: number, name, final|restart, meaning");
    app.require_subcommand(0, 1);
    app.parse_complete_callback([&] { check_command(app); });
    CLI::App* const train = app.add_subcommand("train", "train CONFIG, as without a command");
    for (CLI::App* trainer : {&app, train}) {
        add_training(*trainer, line);
        add_ranks(Command(*trainer), line);
    }
    add_prepare(app);
    add_sample(app, line);
    for (auto* add : {add_plan, add_inspect, add_import, add_export, add_report}) add(app);
    add_eval(app, line);
    add_lr_range(app, line);
    add_tune(app, line);
    add_check_kernels(app);
    argc = take_launcher(argc, argv, line);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& help_or_version) {
        app.exit(help_or_version);
        return std::nullopt;
    } catch (const CLI::ExtrasError& error) {
        fail_unexpected(app, line, error.what());
    } catch (const CLI::ParseError& error) {
        constexpr size_t kLongest = 150;  // it may repeat an argument
        const std::string said = error.what();
        fail(Exit::usage, "%s (see --help)", said.size() > kLongest ? said.substr(0, kLongest) + "..." : said);
    }
    if (table) std::fputs(table().c_str(), stdout);
    const bool trains = app.get_subcommands().empty() || train->parsed();
    if (table || (!trains && line.nproc == 0)) return std::nullopt;
    if (trains && line.config.empty()) fail(Exit::usage, "no configuration and no command (see --help)");
    if (trains) check_is_file(app, line.config);
    if (!line.launcher.empty() && line.nproc > 0)
        fail(Exit::usage, "use either --nproc or %s, not both: each starts the ranks", line.launcher.front());
    return line;
}

// The arguments without the options that match `is_meant` and, if `has_value`, without the values of these options.
template <class Predicate>
static std::vector<std::string> without(const std::vector<std::string>& arguments, bool has_value,
                                        const Predicate& is_meant) {
    std::vector<std::string> others;
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string name = arguments[i].substr(0, arguments[i].find('='));
        if (!is_meant(name))
            others.push_back(arguments[i]);
        else if (has_value && name == arguments[i])
            i++;
    }
    return others;
}

std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments) {
    return without(arguments, true, is_rank_option);
}

std::vector<std::string> arguments_of_run(const std::vector<std::string>& arguments) {
    return without({arguments.begin(), std::ranges::find(arguments, "--")}, false,
                   [](const std::string& name) { return name == "--supervise"; });
}

std::vector<std::string> with_start(const std::vector<std::string>& arguments, const std::string& flag) {
    const auto is_start = [](const std::string& name) {
        return name == "--resume" || name == "--auto" || name == "--fresh";
    };
    const auto is_step = [](const std::string& name) { return name == "--resume-step"; };
    std::vector<std::string> changed = without(without(arguments, false, is_start), true, is_step);
    changed.push_back(flag);
    return changed;
}
