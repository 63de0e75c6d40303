#include "commands/command_line.h"

#include <sys/stat.h>

#include "kernels/base/check.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "runtime/io/installation.h"

// Identifies a directory regardless of its name; nullopt if it does not exist.
static std::optional<std::pair<dev_t, ino_t>> identity_of(const std::string& directory) {
    struct stat status;
    if (::stat(directory.c_str(), &status) != 0) return std::nullopt;
    return std::pair(status.st_dev, status.st_ino);
}

Exit supervise_training(const CommandLine& line, const std::vector<std::string>& arguments) {
    StopSignals signals;
    if (const RankEnvironment found = launched_ranks(); found.size > 1)
        fail(Exit::usage,
             "--supervise must start the ranks itself, but %s has started %d: use train_gpt --supervise ... -- %s ...",
             found.launcher, found.size, found.launcher == "Slurm" ? "srun" : "mpirun");
    check_node(line.node);
    const bool is_local = line.launcher.empty();
    const int count = std::max(1, line.nproc), first = count * line.node.node;
    // The user's launcher determines the number of ranks. It may start them on other machines: only its exit is
    // observed.
    const Config config = load_config(line.config, line.overrides, is_local ? count * line.node.nodes : 0);
    RankReports reports(first, is_local ? count : 0, line.node.nodes == 1, control_settings(config));

    const std::string& run_dir = config.run.dir;
    const bool continues = line.start.mode == StartMode::resume || line.start.mode == StartMode::automatic;
    const bool is_occupied = state_of_run_dir(run_dir) == RunDirState::occupied;
    const auto identity = identity_of(run_dir);
    // Whether run.dir still holds another run.
    auto is_another_run = [&] { return !continues && is_occupied && identity_of(run_dir) == identity; };
    std::vector<int64_t> steps;
    auto committed = [&] {
        try {
            steps = is_another_run() ? std::vector<int64_t>{} : committed_steps(run_dir);
        } catch (const Error&) {  // run.dir cannot be read now: keep the last known steps
        }
        return steps;
    };
    const std::vector<int64_t> steps_before = committed();
    bool is_first = true, has_saved = false;
    auto next_command = [&] {
        has_saved |= !steps.empty();
        // The user's start flags apply until the run has opened run.dir.
        const bool is_open = line.start.step ? steps != steps_before : !is_another_run();
        std::vector<std::string> command = line.launcher, own = arguments_of_run(arguments);
        if (!std::exchange(is_first, false) && is_open)
            // A run that has saved checkpoints must not start from scratch if they disappear.
            own = with_start(own, has_saved || line.start.mode == StartMode::resume ? "--resume" : "--auto");
        if (is_local) own[0] = program_path();
        command.insert(command.end(), own.begin(), own.end());
        return command;
    };
    return Exit(supervise(next_command, committed, reports, signals));
}
