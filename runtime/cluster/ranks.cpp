#include "runtime/cluster/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/check.h"
#include "runtime/io/io.h"

namespace {

// Longer than any phase may take: it is the control channel that tells who is late.
constexpr double kCollectiveDeadline = 3600;

ControlSettings control_settings(const Config& config) {
    ControlSettings settings;
    settings.watch.silence_s = config.parallel.silence_s;
    settings.watch.step_s = settings.watch.evaluation_s = config.parallel.step_timeout_s;
    settings.watch.start_s = std::max(settings.watch.start_s, settings.watch.step_s);
    return settings;
}

}  // namespace

Ranks::Ranks(const Place& place, const Config& config, const std::string& program) {
    if (place.size > 1 && !place.has_pmi && !comm_launcher().empty())
        fail(Exit::config,
             "srun has started rank %d without PMI, by which ranks that talk by %s find each other: use srun "
             "--mpi=pmix, or mpirun",
             place.rank, comm_library().c_str());
    const CommSettings settings{
        .rank = place.rank,
        .size = place.size,
        .local_rank = place.local_rank,
        .deterministic = config.parallel.deterministic_reduce,
        .deadline_s = kCollectiveDeadline,
        .gather = [this](const std::string& mine) { return control_->all_gather(mine, "the GPUs of the ranks"); },
        .note =
            [this](uint64_t number, const char* name) {
                if (control_) control_->note_collective(number, name);
            }};
    // mpirun does not say where rank 0 is, but what it started can talk already.
    auto meet = [&](const Share& share) {
        const bool has_address = place.size == 1 || !place.master_host.empty();
        control_ = std::make_unique<ControlChannel>(place, control_settings(config), has_address ? Share() : share);
    };
    if (comm_needs_gather()) {
        meet(launcher_share());
        or_tell_others([&] { comm_ = open_comm(settings); });
    } else {
        comm_ = open_comm(settings);
        meet([this](const std::string& mine) { return broadcast_text(mine, comm_); });
    }
    control_->require_same(program, "the program's revision");
    control_->require_same(config_digest(config), "the configuration's digest");
}

Exit Ranks::run(const std::function<Exit()>& body) {
    Exit result = Exit::ok;
    or_tell_others([&] {
        result = body();
        control_->leave();
        close_comm(comm_);
    });
    return result;
}

void Ranks::or_tell_others(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        control_->leave_with_error(error.code, error.what());
        throw;
    } catch (const std::exception& error) {
        control_->leave_with_error(Exit::internal, error.what());
        throw;
    }
}

Exit start_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments) {
    const std::string launcher = comm_launcher();
    if (launcher.empty()) return Exit(start_local_ranks(count, arguments, {.place = node}));
    if (node.nodes > 1)
        fail(Exit::usage, "--node %d/%d: this program's ranks talk by %s: start those of several machines by %s",
             node.node, node.nodes, comm_library().c_str(), launcher.c_str());

    // mpirun refuses root and more ranks than cores, and binds ranks to cores, unless told otherwise; this is one
    // machine, and its user has said how many.
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    setenv("OMP_NUM_THREADS", std::to_string(std::max(1u, cores / unsigned(count))).c_str(), 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    std::vector<std::string> command{launcher,    "-np",  std::to_string(count), "--oversubscribe",
                                     "--bind-to", "none", program_path()};
    command.insert(command.end(), arguments.begin() + 1, arguments.end());
    std::vector<char*> argv;
    for (std::string& argument : command) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    fail(Exit::os, "--nproc: %s, which this program's library (%s) needs, could not be started: %s", launcher.c_str(),
         comm_library().c_str(), std::strerror(errno));
}
